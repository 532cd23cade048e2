"""Tells Dynamo and ``flex_attention`` of the device, when they are first imported: ``import torch`` must not import them."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from emutpu.backend.location import OWN_ROOTS

__all__ = ["install_when_imported"]

_DYNAMO = "torch._dynamo"
_FLEX = "torch.nn.attention.flex_attention"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules of PyTorch as Python would, and does our part after their own."""

    def __init__(self, parts: dict[str, Callable[[types.ModuleType], None]]) -> None:
        self.parts = parts

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        part = self.parts.pop(fullname, None)
        if part is None:
            return None
        if not self.parts:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            part(module)

        loader.exec_module = exec_module
        return spec


def install_when_imported() -> None:
    """Do each part now if its module is there already, else as soon as that is imported."""
    parts: dict[str, Callable[[types.ModuleType], None]] = {_DYNAMO: lambda _: register(), _FLEX: _flex}
    for name in [name for name in parts if name in sys.modules]:
        parts.pop(name)(sys.modules[name])
    if parts:
        sys.meta_path.insert(0, _Finder(parts))


def _flex(module: types.ModuleType) -> None:
    from emutpu.backend.compile.flex import install

    install(module)


def _compile(module: Any, inputs: Any, **kwargs: Any) -> Any:
    from emutpu.backend.compile.dynamo import compile_for_device

    return compile_for_device(module, inputs, **kwargs)


def register() -> None:
    """The backend ``"tpu"``, the device's interface, and the switches that TorchTPU 0.2.0 sets when it is loaded."""
    from torch._dynamo import config, trace_rules
    from torch._dynamo.backends.registry import register_backend
    from torch._dynamo.device_interface import get_interface_for_device, register_interface_for_device
    from torch._dynamo.variables.builder import VariableBuilder

    from emutpu.backend.compile.interface import interface
    from emutpu.backend.rng import TpuGenerator

    _compile.__name__ = "tpu"
    register_backend(_compile, name="tpu")
    base = get_interface_for_device("tpu")  # PyTorch's own, which the first call of this function would put in place
    register_interface_for_device("tpu", interface(base))
    trace_rules.SKIP_DIRS.extend(OWN_ROOTS)
    trace_rules._recompile_re()
    # As PyTorch's own generators: an op that takes one is a break in the graph, and draws eagerly.
    for numpy in (True, False):
        VariableBuilder._type_dispatch_impl(numpy)[TpuGenerator] = VariableBuilder.wrap_user_defined
    config.allow_rnn = True
    config.trace_autograd_ops = True
