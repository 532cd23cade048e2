"""The ``torch.tpu`` namespace, made from the table in :mod:`emutpu._tpu._names`."""

from __future__ import annotations

import sys
import types
from typing import Any

from emutpu._tpu._modes import FallbackMode, fallback_mode
from emutpu._tpu._names import COMPILER, LATER, PRIVATE, PUBLIC
from emutpu._tpu._stages import Kind, announce, caller_module, staged
from emutpu.backend.runtime import runtime

__all__ = ["FallbackMode", "fallback_mode", "make"]

_COMPILER = "compiler"


class _TpuModule(types.ModuleType):
    """Functions stand in its dict; attributes and properties are read through the table, which warns of them."""

    @property
    def _initialized(self) -> bool:
        """Activation checkpointing saves the random state of devices that say they are initialised, and of no others."""
        return runtime().initialized

    def __getattr__(self, name: str) -> Any:
        api = PUBLIC.get(name)
        if api is not None:
            announce(api, caller_module())
            return api.target() if api.kind is Kind.PROPERTY else api.target
        if name in PRIVATE:
            return PRIVATE[name]
        raise AttributeError(_absent(name))

    def __setattr__(self, name: str, value: Any) -> None:
        api = PUBLIC.get(name)
        if api is None or api.setter is None:
            super().__setattr__(name, value)
            return
        announce(api, caller_module())
        api.setter(value)

    def __dir__(self) -> list[str]:
        return sorted((*PUBLIC, _COMPILER))


def _absent(name: str) -> str:
    text = f"module 'torch.tpu' has no attribute '{name}'"
    if name in LATER:
        text += f": this version of emutpu does not emulate torch.tpu.{name}"
    return text


def make() -> types.ModuleType:
    """The module that PyTorch installs as ``torch.tpu``, with ``torch.tpu.compiler`` below it."""
    module = _TpuModule("torch.tpu", "The emulated TPU device.")
    names: dict[str, Any] = {api.name: staged(api) for api in PUBLIC.values() if api.kind is Kind.FUNCTION}
    compiler = types.ModuleType("torch.tpu.compiler", "Compiler options.")
    compiler.__dict__.update({name: staged(api) for name, api in COMPILER.items()}, __all__=sorted(COMPILER))
    names |= {_COMPILER: compiler, "__all__": sorted((*PUBLIC, _COMPILER))}
    names["__tt_api_stages__"] = {name: api.stage.value for name, api in PUBLIC.items()}
    module.__dict__.update(names)
    sys.modules[compiler.__name__] = compiler
    return module
