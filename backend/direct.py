"""Kernels written by hand: copies, scalars, and what cannot be one launch of one module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend import attention, composed, data_dependent, recurrent
from emutpu.backend.copies import copy_from, large_to_host, local_scalar
from emutpu.backend.storage import DEVICE, empty_tensor

__all__ = ["COMPOSITES", "KERNELS"]

_C = torch._C
_composite_to_copy = torch.library.get_kernel("aten::_to_copy", "PrivateUse1").call_boxed  # before ours is registered
_PRIVATE_KEYS = _C.DispatchKeySet(_C.DispatchKey.PrivateUse1)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """On the device one conversion is one launch. Otherwise PyTorch's own composition.

    It must not see ``non_blocking``: C++ would allocate pinned memory from an allocator that is not there.
    """
    here = device is None or (device.type == self.device.type == DEVICE.type and device.index in (None, 0))
    if here and layout in (None, torch.strided):
        from emutpu.backend.registration import kernel

        converted: torch.Tensor = kernel("_to_copy").function(self, dtype=dtype, memory_format=memory_format)
        return converted
    if device is not None and device.type == "cpu" and memory_format in (None, torch.preserve_format):
        large = large_to_host(self, dtype or self.dtype) if layout in (None, torch.strided) else None
        if large is not None:
            return large
    copied: torch.Tensor = _composite_to_copy(
        _PRIVATE_KEYS,
        self,
        dtype=dtype,
        layout=layout,
        device=device,
        pin_memory=None,
        non_blocking=False,
        memory_format=memory_format,
    )
    return copied


def _efficientzerotensor(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """Zeros that cost nothing: an unwritten tensor reads as zeros."""
    return empty_tensor(size, None, dtype or torch.get_default_dtype(), "_efficientzerotensor")


KERNELS: dict[str, Callable[..., Any]] = {
    "_copy_from": copy_from,
    "_efficientzerotensor": _efficientzerotensor,
    "_local_scalar_dense": local_scalar,
    "_to_copy": _to_copy,
    **attention.KERNELS,
    **composed.KERNELS,
    **data_dependent.KERNELS,
    **data_dependent.OTHER_KERNELS,
}
COMPOSITES = attention.COMPOSITES | recurrent.COMPOSITES
"""Kernels made of ops that have autograd formulas: they stand above autograd as well as below."""
