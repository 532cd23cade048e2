"""What happens to an op without a kernel: the device's NotImplementedError, or the CPU when that was allowed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.utils._pytree import tree_map

from emutpu.backend.runtime import runtime

__all__ = ["fallback", "sparse_fallback"]


def fallback(op: torch._ops.OpOverload[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The boxed fallback of PrivateUse1. The first op ever lands here, before the lowerings are loaded."""
    from emutpu.backend import errors, registration

    if not registration.loaded():
        registration.load()
        return op(*args, **kwargs)
    name = op.name()
    if "to_sparse" in name:
        return sparse_fallback(op)
    if not runtime().allow_fallback:
        raise errors.not_implemented(name)
    where = runtime().count_fallback(str(op))
    warnings.warn(f"operator '{name}' is not implemented for TPU. Falling back to CPU (at {where})", stacklevel=2)
    return _on_cpu(op, args, kwargs)


def sparse_fallback(op: torch._ops.OpOverload[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Every op on a sparse layout: the device has none."""
    from emutpu.backend.errors import op_label, user_line

    raise NotImplementedError(
        f"{op_label(str(op))}(): sparse operators are not supported on TPU yet\n  issued at {user_line()}\n"
        "  keep the tensor dense, or on the CPU"
    )


def _on_cpu(op: torch._ops.OpOverload[..., Any], args: Any, kwargs: Any) -> Any:
    """Run on CPU copies; written arguments are copied back, results moved to the device."""
    from emutpu.backend.errors import not_implemented

    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def to_cpu(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return copies.setdefault(id(value), (value, value.cpu()))[1]
        return torch.device("cpu") if isinstance(value, torch.device) else value

    cpu_args, cpu_kwargs = tree_map(to_cpu, (args, kwargs))
    result = op(*cpu_args, **cpu_kwargs)
    for argument in op._schema.arguments:
        if argument.alias_info is not None and not argument.alias_info.is_write:
            raise not_implemented(op.name())
    for original, copy in copies.values():
        if original.shape != copy.shape:
            original.resize_(copy.shape)
        if any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments):
            original.copy_(copy)
    originals = {id(copy): original for original, copy in copies.values()}

    def to_device(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return originals.get(id(value)) if id(value) in originals else value.to("tpu")

    return tree_map(to_device, result)
