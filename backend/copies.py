"""Between host and device, and between tensors: exactly one copy each way.

Memory is shared only where nobody else can reach it: a host temporary made here may become a device buffer as it is.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from emutpu.backend.cell import MEMORY, Cell, layout_of
from emutpu.backend.deferred.values import ready
from emutpu.backend.dtypes import DTYPES, check_supported, dtype_name, numpy_dtype
from emutpu.backend.errors import device_mismatch, op_label, read_failure
from emutpu.backend.location import capture
from emutpu.backend.pjrt import Aval, Buffer, ErrorBuffer, PjrtError
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of, contiguous_strides, storage_order, wrap
from emutpu.backend.views import View, covering_layout

__all__ = ["host_array", "host_tensor", "large_to_host", "local_scalar", "to_device", "write_out"]

_BYTES = {1: torch.uint8, 2: torch.int16}


def host_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """A CPU tensor as numpy sees it (sharing memory when it is contiguous), bf16 and fp8 included."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if tensor.dtype == torch.complex128:
        tensor = tensor.to(torch.complex64)
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_BYTES[tensor.dtype.itemsize]).numpy().view(numpy_dtype(tensor.dtype))


def _host_tensor(array: np.ndarray[Any, Any], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor over a read-only array, which it keeps alive; to be copied from at once."""
    plain = array if array.dtype.isbuiltin == 1 else array.view(f"i{dtype.itemsize}")
    if not plain.flags.writeable:
        # torch.from_numpy warns of read-only arrays, and nothing writes this one.
        memory: Any = (ctypes.c_char * plain.nbytes).from_address(plain.__array_interface__["data"][0])
        memory.owner = plain  # from_address keeps nothing alive by itself
        plain = np.frombuffer(memory, plain.dtype).reshape(plain.shape)
    tensor = torch.from_numpy(plain)
    return tensor if array.dtype.isbuiltin == 1 else tensor.view(dtype)


def _dense(tensor: torch.Tensor, reason: str) -> tuple[Buffer, Cell]:
    """The tensor's own value as a buffer of its elements; a view that is not the whole cell is launched as a read."""
    cell = cell_of(tensor)
    if cell is None:
        raise device_mismatch("aten._copy_from", "self", tensor)
    layout = cell.layout
    plain = (
        tensor.storage_offset() == 0
        and tensor.dtype == layout.dtype
        and tensor.numel() == layout.numel
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    if not plain:
        dense = torch.ops.aten.clone(tensor.resolve_conj().resolve_neg(), memory_format=torch.contiguous_format)
        cell = cell_of(dense)
        assert cell is not None
    return ready(cell, reason), cell


def _read(tensor: torch.Tensor, trigger: str, reason: str = ".cpu()") -> np.ndarray[Any, Any]:
    """The tensor's value on the host, read-only, without a copy of its own. Raises the failure of earlier work."""
    if tensor.numel() == 0:
        return np.empty(tuple(tensor.shape), numpy_dtype(tensor.dtype))
    value, cell = _dense(tensor, reason)
    try:
        return runtime().client.to_host(value).reshape(tuple(tensor.shape))
    except PjrtError as error:
        raise read_failure(error, trigger, cell.origin, value) from error


def local_scalar(tensor: torch.Tensor, reason: str = ".cpu()") -> Any:
    """``item()``; ``reason`` is what DeferAndFuse notes of it."""
    if tensor.numel() != 1:
        raise RuntimeError(f"a Tensor with {tensor.numel()} elements cannot be converted to Scalar")
    array = _read(tensor, "local_scalar_dense", reason)
    if array.dtype.isbuiltin != 1:
        return float(array.reshape(()))
    return array.item()


def host_tensor(tensor: torch.Tensor, trigger: str) -> torch.Tensor:
    """A CPU tensor over the device's own memory: read-only by convention, to be copied from at once."""
    array = _read(tensor, trigger)
    if array.size == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return _host_tensor(array, tensor.dtype)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``_copy_from``: every copy in which the device takes part ends here."""
    if source.device.type == "cpu":
        _host_to_device(source, target)
    elif target.device.type == "cpu":
        target.copy_(host_tensor(source, "to_copy"))
    else:
        _device_to_device(source, target)
    return target


def _device_to_device(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.is_conj():
        source = torch.ops.aten.conj_physical(torch._conj(source))
    if source.is_neg():
        source = torch.ops.aten.neg(torch._neg_view(source))
    if target.is_conj():
        target, source = torch._conj(target), torch.ops.aten.conj_physical(source)
    if target.is_neg():
        target, source = torch._neg_view(target), torch.ops.aten.neg(source)
    from emutpu.backend.registration import kernel

    kernel("copy_").function(target, source)


# From this size on numpy's memory asks for huge pages; XLA's and PyTorch's own copies fault page after small page, and
# take three times as long.
_LARGE = 4 << 20
_XLA_ALIGNMENT = 64


def _to_buffer(array: np.ndarray[Any, Any], *, temporary: bool, reserved: int = 0) -> Buffer:
    """One copy to the device; none for memory that nobody else can reach. ``reserved`` bytes of HBM are there already."""
    client, meter = runtime().client, runtime().meter
    full = meter.admit(MEMORY.tiled(array.shape, array.itemsize), "aten._copy_from.default", reserved)
    if full is not None:
        full.origin = ("aten._copy_from.default", *capture())
        return ErrorBuffer(Aval(array.shape, array.dtype), full)
    meter.transfer(array.nbytes, to_device=True)
    if not temporary and array.nbytes >= _LARGE and client.computes:
        memory = np.empty(array.nbytes + _XLA_ALIGNMENT, np.uint8)
        start = -memory.__array_interface__["data"][0] % _XLA_ALIGNMENT
        staged = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        np.copyto(staged, array)
        array, temporary = staged, True
    return client.from_host(array, zero_copy=temporary)


def large_to_host(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A contiguous tensor on the CPU in ``dtype``, by one copy into numpy's memory; None where that gains nothing."""
    if tensor.numel() * dtype.itemsize < _LARGE or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    memory = np.empty(tensor.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).reshape(tensor.shape).copy_(host_tensor(tensor, "to_copy"))


def _host_to_device(source: torch.Tensor, target: torch.Tensor) -> None:
    if target.numel() == 0:
        torch.broadcast_to(source, target.shape)
        return
    cell = cell_of(target)
    assert cell is not None
    view = View(tuple(target.shape), target.stride(), int(target.storage_offset()), target.dtype)
    covering = covering_layout(view, cell.nbytes)
    if covering is None or target.is_conj() or target.is_neg():
        _device_to_device(to_device(torch.broadcast_to(source, target.shape).to(target.dtype)), target)
        return
    host = torch.broadcast_to(source.detach(), target.shape).to(target.dtype)
    host = host.permute(storage_order(view.size, view.stride)).resolve_conj().resolve_neg()
    if not host.is_contiguous():
        host = host.contiguous()
    temporary = host.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
    reserved = cell.held if cell.value is None else 0
    value = _to_buffer(host_array(host).reshape(covering.dims), temporary=temporary, reserved=reserved)
    cell.write(value, covering, ("aten._copy_from.default", *capture()))


def to_device(source: torch.Tensor, *, temporary: bool = False) -> torch.Tensor:
    """A CPU tensor as a fresh contiguous device tensor; ``temporary`` promises that nobody else can reach its memory."""
    check_supported(source.dtype, "to_copy")
    array = host_array(source)
    size = tuple(source.shape)
    value = _to_buffer(array, temporary=temporary)
    origin = ("aten._copy_from.default", *capture())
    return wrap(
        value, layout_of(size, source.dtype), array.nbytes, source.dtype, size, contiguous_strides(size), origin
    )


def write_out(op: str, name: str, target: torch.Tensor, value: torch.Tensor) -> None:
    """Give an out= argument its value: resize it if its shape differs, move the value in where the layouts agree."""
    cell = cell_of(target)
    if cell is None:
        raise RuntimeError(
            f"{op_label(op)}(): expected {name} to be on tpu, got {target.device.type}\n  create it with device='tpu'"
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(
            f"result type {_type_name(value.dtype)} can't be cast to the desired output type {_type_name(target.dtype)}"
        )
    if target.shape != value.shape:
        torch._prims_common.wrappers._maybe_resize_out(target, value.shape)
    given = cell_of(value)
    assert given is not None
    if target.dtype == value.dtype and target.stride() == value.stride() and not target.storage_offset():
        cell = cell_of(target)
        if cell is not None and cell.nbytes == given.nbytes and given.value is not None:
            cell.write(given.value, given.layout, given.origin or ("aten.copy_.default", *capture()))
            return
    target.copy_(value)


def _type_name(dtype: torch.dtype) -> str:
    names = {torch.float32: "Float", torch.float64: "Double", torch.float16: "Half", torch.bfloat16: "BFloat16"}
    names |= {torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte"}
    names |= {torch.bool: "Bool", torch.complex64: "ComplexFloat"}
    return names.get(dtype, dtype_name(dtype))


SUPPORTED = frozenset(DTYPES)
