"""Conjugate and negative views where PyTorch leaves them to the backend.

For most ops PyTorch materialises lazy conjugation itself. The ops below reach a backend's kernel with the bit still set,
because CPU and CUDA libraries take a "conjugate" flag; our kernels read values only. So these kernels stand on the keys
that only tensors with the bit have: nothing else pays for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["COPIES", "kernels"]

_C = torch._C
_CONJUGATE = (
    "addmm",
    "addmm.out",
    "addmm_",
    "baddbmm",
    "baddbmm.out",
    "baddbmm_",
    "bmm",
    "bmm.out",
    "clone",
    "dot",
    "dot.out",
    "linalg_solve_triangular",
    "linalg_solve_triangular.out",
    "mm",
    "mm.out",
    "vdot",
    "vdot.out",
)
_NEGATIVE = ("clone", "linalg_solve_triangular", "linalg_solve_triangular.out")
_PLAIN = {"Conjugate": _CONJUGATE, "Negative": _NEGATIVE}
# Copies recurse until the stack ends when the bit is resolved before them; they read it themselves.
COPIES = ("_copy_from", "_copy_from_and_resize")


def _resolved(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_conj():
        value = torch.ops.aten.conj_physical(torch._conj(value))
    if value.is_neg():
        value = torch.ops.aten.neg(torch._neg_view(value))
    return value


@functools.cache
def _signature(name: str) -> tuple[torch._ops.OpOverload[..., Any], list[str], list[str]]:
    """The overload, its arguments and those it writes; looked up at the first call, as ``import torch`` must be quick."""
    base, _, variant = name.partition(".")
    op: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops.aten, base), variant or "default")
    arguments = op._schema.arguments
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return op, [a.name for a in arguments], written


def _kernel(name: str, key: str) -> Callable[..., Any]:
    this_key = getattr(_C.DispatchKey, key)

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        op, names, written = _signature(name)
        if not keys.has(_C.DispatchKey.PrivateUse1):
            return op.redispatch(keys.remove(this_key), *args, **kwargs)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        plain = {argument: _resolved(value) for argument, value in given.items()}
        result = op(*[plain[n] for n in names[: len(args)]], **{n: plain[n] for n in kwargs})
        for argument in written:
            target = given[argument]
            if plain[argument] is not target:
                target.copy_(plain[argument])
            result = target
        return result

    return kernel


def kernels(key: str) -> dict[str, Callable[..., Any]]:
    """Overload → kernel for dispatch key ``Conjugate`` or ``Negative``; each takes the key set first."""
    return {name: _kernel(name, key) for name in _PLAIN[key]}
