"""Tells Dynamo of the device, when it is first imported: ``import torch`` must not import it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from emutpu.backend.location import OWN_ROOTS

__all__ = ["install_when_imported"]

_DYNAMO = "torch._dynamo"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds ``torch._dynamo`` as Python would, and does our part after its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            register()

        loader.exec_module = exec_module
        return spec


def install_when_imported() -> None:
    """Register now if Dynamo is there already, else as soon as it is imported."""
    if _DYNAMO in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _Finder())


def _compile(module: Any, inputs: Any, **kwargs: Any) -> Any:
    from emutpu.backend.compile.dynamo import compile_for_device

    return compile_for_device(module, inputs, **kwargs)


def register() -> None:
    """The backend ``"tpu"``, the device's interface, and the switches that TorchTPU 0.2.0 sets when it is loaded."""
    from torch._dynamo import config, trace_rules
    from torch._dynamo.backends.registry import register_backend
    from torch._dynamo.device_interface import get_interface_for_device, register_interface_for_device

    from emutpu.backend.compile.interface import interface

    _compile.__name__ = "tpu"
    register_backend(_compile, name="tpu")
    base = get_interface_for_device("tpu")  # PyTorch's own, which the first call of this function would put in place
    register_interface_for_device("tpu", interface(base))
    trace_rules.SKIP_DIRS.extend(OWN_ROOTS)
    trace_rules._recompile_re()
    config.allow_rnn = True
    config.trace_autograd_ops = True
