"""Kernels that move no data: factories, views, ``set_``, ``resize_``.

They are registered when the backend is activated, before jax or the lowerings are loaded: none of them launches anything
(factories of constants, which load them, and ``resize_`` of a written tensor excepted).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend.cell import layout_of
from emutpu.backend.dtypes import check_supported
from emutpu.backend.storage import (
    CPU_KEYS,
    cell_of,
    contiguous_strides,
    empty_tensor,
    new_storage,
    set_storage,
    span,
    storage_cell,
    storage_over,
    tensor_over,
)

__all__ = ["KERNELS", "resize_storage"]

_C: Any = torch._C


def _empty_memory_format(
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    _check_factory("empty", layout, device, pin_memory)
    if memory_format in (None, torch.contiguous_format):
        stride = None
    else:
        stride = torch.empty(list(size), device="meta", memory_format=memory_format).stride()
    return empty_tensor(size, stride, dtype or torch.get_default_dtype(), "empty")


def _empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    _check_factory("empty_strided", layout, device, pin_memory)
    return empty_tensor(size, stride, dtype or torch.get_default_dtype(), "empty_strided")


def _check_factory(op: str, layout: torch.layout | None, device: torch.device | None, pin_memory: bool | None) -> None:
    if layout not in (None, torch.strided):
        raise NotImplementedError(f"{op}(): expected layout to be torch.strided, got {layout}")
    if pin_memory:
        raise RuntimeError(f"{op}(): only dense CPU tensors can be pinned")
    if device is not None and device.index not in (None, 0):
        raise RuntimeError(
            f"{op}(): expected device index 0, got {device.index}: one process owns one TPU device "
            "(use device='tpu'; several devices take one process each)"
        )


def _constant(name: str) -> Callable[..., Any]:
    """A factory with a lowering. PyTorch would compose it, and the first op of a program would be another than the second."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        from emutpu.backend.registration import kernel as generated

        _check_factory(name, kwargs.get("layout"), kwargs.get("device"), kwargs.get("pin_memory"))
        return generated(name).function(*args, **kwargs)

    return kernel


def _metadata_kernel(name: str) -> Callable[..., Any]:
    """PyTorch's own CPU kernel, run for its metadata: sizes, strides and bounds checks."""
    boxed = torch.library.get_kernel(f"aten::{name}", "CPU").call_boxed

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return boxed(CPU_KEYS, *args, **kwargs)

    return kernel


def _unfold(self: torch.Tensor, dimension: int, size: int, step: int) -> torch.Tensor:
    meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
    windows = meta.unfold(dimension, size, step)
    return self.as_strided(windows.shape, windows.stride(), self.storage_offset())


def _retyped(name: str) -> Callable[..., Any]:
    """A view that changes dtype, with the geometry that PyTorch's meta kernel gives."""

    def kernel(self: torch.Tensor, *args: Any) -> torch.Tensor:
        bits = self.storage_offset() * self.dtype.itemsize
        meta = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        view = getattr(torch.ops.aten, name)(meta, *args)
        check_supported(view.dtype, name)
        storage = self.untyped_storage()
        return tensor_over(storage, view.dtype, bits // view.dtype.itemsize, view.shape, view.stride())

    return kernel


def _set_source_storage_offset(
    self: torch.Tensor, source: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    strides = contiguous_strides(size) if not len(stride) else stride
    if source.device.type != self.device.type:
        raise RuntimeError(
            f'Attempted to set the storage of a tensor on device "{self.device}" to a storage on different device '
            f'"{source.device}".  This is no longer allowed; the devices must match.'
        )
    cell = storage_cell(source)
    needed = (offset + span(size, strides)) * self.dtype.itemsize
    if needed > cell.nbytes:
        resize_storage(source, needed)
    if needed > _C.StorageBase.nbytes(source):
        source = storage_over(cell)  # C++ cannot resize the old one: both name the same memory
    set_storage(CPU_KEYS, self, source, offset, size, strides)
    return self


def _set_source_storage(self: torch.Tensor, source: torch.UntypedStorage) -> torch.Tensor:
    count = storage_cell(source).nbytes // self.dtype.itemsize
    return _set_source_storage_offset(self, source, 0, [count], [1])


def _set_source_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return _set_source_storage_offset(
        self, source.untyped_storage(), int(source.storage_offset()), source.shape, source.stride()
    )


def _set_empty(self: torch.Tensor) -> torch.Tensor:
    storage = new_storage(None, layout_of((0,), self.dtype), 0)
    set_storage(CPU_KEYS, self, storage, 0, [0], [1])
    return self


def _resize_(self: torch.Tensor, size: Sequence[int], memory_format: torch.memory_format | None = None) -> torch.Tensor:
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        raise NotImplementedError(f"resize_(): memory format {memory_format} is not supported")
    size = list(size)
    if tuple(size) == tuple(self.shape):
        return self
    strides = contiguous_strides(size)
    needed = (int(self.storage_offset()) + span(size, strides)) * self.dtype.itemsize
    storage = self.untyped_storage()
    cell = storage_cell(storage)
    if needed > cell.nbytes:
        resize_storage(storage, needed)
    if needed > _C.StorageBase.nbytes(storage):
        storage = storage_over(cell)  # C++ cannot resize the old one: both name the same memory
    set_storage(CPU_KEYS, self, storage, self.storage_offset(), size, strides)
    return self


def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> None:
    """``storage.resize_``: the memory itself changes size, for every alias; what is new holds zeros.

    Raises RuntimeError for a negative size.
    """
    if nbytes < 0:
        raise RuntimeError(f"resize_(): expected a size of at least 0 bytes, got {nbytes}")
    cell = storage_cell(storage)
    if nbytes == cell.nbytes:
        return
    old = cell.layout.dtype
    dtype = old if nbytes % old.itemsize == 0 else torch.uint8
    layout = layout_of((nbytes // dtype.itemsize,), dtype)
    kept = min(nbytes, cell.nbytes) // dtype.itemsize
    if cell.value is None or not kept:
        cell.resize(nbytes, None, layout)
        return
    resized = empty_tensor(layout.dims, None, dtype, "resize_")
    source = tensor_over(storage_over(cell), dtype, 0, [kept], [1])
    resized.narrow(0, 0, kept).copy_(source)
    made = cell_of(resized)
    assert made is not None
    cell.resize(nbytes, made.value, made.layout)


def _copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    dst.resize_(self.shape)
    copied: torch.Tensor = torch.ops.aten._copy_from(self, dst)
    return copied


def _has_compatible_shallow_copy_type(self: torch.Tensor, from_: torch.Tensor) -> bool:
    """``Module.to`` asks whether ``param.data = moved`` may be used. It may: else it makes new Parameters and unties tied weights."""
    return self.layout == from_.layout


KERNELS: dict[str, Callable[..., Any]] = {
    "empty.memory_format": _empty_memory_format,
    "empty_strided": _empty_strided,
    **{name: _constant(name) for name in ("full", "ones", "ones_like", "zeros", "zeros_like")},
    "view": _metadata_kernel("view"),
    "as_strided": _metadata_kernel("as_strided"),
    "_reshape_alias": _metadata_kernel("_reshape_alias"),
    "unfold": _unfold,
    "view_as_real": _retyped("view_as_real"),
    "view_as_complex": _retyped("view_as_complex"),
    "view.dtype": _retyped("view"),
    "set_.source_Storage_storage_offset": _set_source_storage_offset,
    "set_.source_Storage": _set_source_storage,
    "set_.source_Tensor": _set_source_tensor,
    "set_": _set_empty,
    "resize_": _resize_,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_has_compatible_shallow_copy_type": _has_compatible_shallow_copy_type,
}
