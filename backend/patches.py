"""Every patch of PyTorch, in one place, each with its reason. Nothing else in emutpu replaces a foreign attribute."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch

from emutpu.backend.cell import layout_of
from emutpu.backend.options import LOCAL, adopt
from emutpu.backend.rng import TpuGenerator
from emutpu.backend.storage import DEVICE, new_storage

__all__ = ["PATCHES", "apply"]


def _untyped_storage_new() -> None:
    """``UntypedStorage(n, device="tpu")``, deepcopy and ``storage.clone`` ask C++ for an allocator that is not there: SEGV."""
    storage_type = torch.UntypedStorage
    original = storage_type.__new__

    def construct(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "tpu":
            return original(cls, *args, **kwargs)
        size = args[0] if args else kwargs.get("size", 0)
        if not isinstance(size, int):
            data = torch.tensor(list(size), dtype=torch.uint8)
            return data.to("tpu").untyped_storage()
        return new_storage(None, layout_of((size,), torch.uint8), size)

    storage_type.__new__ = construct  # type: ignore[method-assign]


def _generator() -> None:
    """``torch.Generator(device="tpu")``: C++ cannot make one for a backend without C++ hooks."""
    metaclass = type(torch.Generator)
    original = metaclass.__call__

    def call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls is torch.Generator:
            device = kwargs.get("device", args[0] if args else None)
            if device is not None and torch.device(device).type == DEVICE.type:
                return original(TpuGenerator, device)
        return original(cls, *args, **kwargs)

    metaclass.__call__ = call  # type: ignore[method-assign]


def _backward_on_this_thread() -> None:
    """The engine's device thread aborts the interpreter at exit, and kernels must see the caller's options.

    Backward deeper than 60 re-entrant levels still runs on a thread of the engine's: the caller's options are carried over.
    """
    import torch.autograd.graph

    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        caller = LOCAL.state
        if threading.current_thread() is not threading.main_thread() and not caller.stack and _Callers.stack:
            adopt(_Callers.stack[-1])
        multithreaded = torch._C._is_multithreading_enabled()
        torch._C._set_multithreading_enabled(False)
        _Callers.stack.append(caller)
        try:
            return original(*args, **kwargs)
        finally:
            _Callers.stack.pop()
            torch._C._set_multithreading_enabled(multithreaded)

    torch.autograd.graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]  # bound by import


class _Callers:
    """Options of the threads that are inside a backward pass, innermost last."""

    stack: list[Any] = []


PATCHES = (_untyped_storage_new, _generator, _backward_on_this_thread)


def apply() -> None:
    """Apply every patch, once, at activation."""
    for patch in PATCHES:
        patch()
