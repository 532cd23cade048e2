"""Between tensors of their true size and padded ones: copies in the host's memory, which compile nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import sympy
import torch

from emutpu.backend.cell import layout_of
from emutpu.backend.deferred.values import ready
from emutpu.backend.dtypes import numpy_dtype
from emutpu.backend.dynamism.extents import Dim, true_of
from emutpu.backend.errors import device_mismatch, read_failure
from emutpu.backend.location import Origin
from emutpu.backend.pjrt import PjrtError
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of, contiguous_strides, physical_dims, span, tensor_over, wrap

__all__ = ["At", "cut", "kept", "padded", "read", "scalar", "strided", "write"]

_ORIGIN: Origin = ("bounded dynamism", None, 0)
_REASON = "compile_mode_execution"

Array = np.ndarray[Any, Any]
At = Callable[[sympy.Expr], Any]


# Offset, size and strides of tensors whose padding was taken from sight, and their padded extents: hangs on the storage.
_Kept = dict[tuple[int, tuple[int, ...], tuple[int, ...]], tuple[int, ...]]


def read(tensor: torch.Tensor) -> Array:
    """A device tensor's values, whatever its strides, read-only. Zeros where the client computes nothing."""
    size = tuple(tensor.shape)
    dtype = numpy_dtype(tensor.dtype)
    if not runtime().client.computes or not tensor.numel():
        return np.broadcast_to(np.zeros((), dtype), size)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    cell = cell_of(tensor)
    if cell is None:
        raise device_mismatch("compiled graph", "inputs", tensor)
    value = ready(cell, _REASON)
    try:
        flat = runtime().client.to_host(value).reshape(-1)
    except PjrtError as error:
        raise read_failure(error, "compiled graph", cell.origin, value) from error
    if flat.dtype != dtype:
        flat = flat.view(dtype)
    steps = [step * dtype.itemsize for step in tensor.stride()]
    begin = int(tensor.storage_offset())
    return np.lib.stride_tricks.as_strided(flat[begin:], size, steps, writeable=False)


def padded(tensor: torch.Tensor, extents: tuple[int, ...]) -> torch.Tensor:
    """A tensor with padding behind each dimension, contiguous; without a copy where it lies so already."""
    storage, size = tensor.untyped_storage(), tuple(tensor.shape)
    own: _Kept | None = getattr(storage, "kept", None)
    if own is not None:
        offset = int(tensor.storage_offset())
        if own.get((offset, size, tensor.stride())) == extents:
            return tensor_over(storage, tensor.dtype, offset, extents, tensor.stride())
    array = _blank(extents, numpy_dtype(tensor.dtype))
    array[tuple(slice(0, extent) for extent in size)] = read(tensor)
    return _wrapped(array, tensor.dtype, extents, contiguous_strides(extents))


def _blank(extents: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """What padding holds at first. Nothing may depend on it; the tests put other values there."""
    return np.zeros(extents, dtype)


def scalar(value: float, dtype: torch.dtype) -> torch.Tensor:
    """A 0-d device tensor."""
    array = np.array(value, numpy_dtype(dtype))
    return wrap(runtime().client.from_host(array), layout_of((), dtype), array.nbytes, dtype, (), (), _ORIGIN)


def _wrapped(array: Array, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    dims = physical_dims(size, stride)
    layout = layout_of(dims if dims is not None else (array.size,), dtype)
    value = runtime().client.from_host(array.reshape(layout.dims), zero_copy=True)
    return wrap(value, layout, array.nbytes, dtype, size, stride, _ORIGIN)


def cut(array: Array, dims: Sequence[Dim], at: At) -> Array:
    """What counts of a padded array. ``at`` gives the values of expressions."""
    factors = [factor for dim in dims for factor in dim]
    apart = array.reshape([factor.extent for factor in factors])
    counts = apart[tuple(slice(0, at(factor.true)) for factor in factors)]
    return counts.reshape([at(true_of(dim)) for dim in dims])


def strided(
    array: Array, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
) -> torch.Tensor:
    """A new device tensor with these values, size, strides and offset."""
    if stride == contiguous_strides(size) and not offset:
        return _wrapped(np.array(array, order="C"), dtype, size, stride)
    flat = np.zeros(offset + span(size, stride), array.dtype)
    steps = [step * array.itemsize for step in stride]
    np.lib.stride_tricks.as_strided(flat[offset:], size, steps)[...] = array
    if not offset:
        return _wrapped(flat, dtype, size, stride)
    whole = _wrapped(flat, dtype, (flat.size,), (1,))
    return tensor_over(whole.untyped_storage(), dtype, offset, size, stride)


def kept(result: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """The part that counts of a padded tensor, as a view that :func:`padded` knows again."""
    storage, offset = result.untyped_storage(), int(result.storage_offset())
    own: _Kept = storage.__dict__.setdefault("kept", {})
    own[offset, size, result.stride()] = tuple(result.shape)
    return tensor_over(storage, result.dtype, offset, size, result.stride())


def write(tensor: torch.Tensor, array: Array) -> None:
    """Give an input its new values."""
    size = tuple(tensor.shape)
    made = strided(array, tensor.dtype, size, contiguous_strides(size))
    target, source = cell_of(tensor), cell_of(made)
    assert target is not None
    assert source is not None
    if tensor.is_contiguous() and target.nbytes == source.nbytes and source.value is not None:
        target.write(source.value, source.layout, _ORIGIN)
        return
    with torch.no_grad():
        tensor.detach().copy_(made)
