"""Real PrivateUse1 storages and tensors, made from Python.

A tensor is a plain ``torch.Tensor`` with its own ``StorageImpl``, the right ``nbytes`` and a unique fake data pointer
inside a range that the process has reserved without access rights: foreign native code that follows it faults rather
than corrupts.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import torch

from emutpu.backend.cell import ADDRESSES, Cell, Layout, layout_of
from emutpu.backend.dtypes import check_supported
from emutpu.backend.location import Origin

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Buffer

__all__ = [
    "DEVICE",
    "Wrapper",
    "Wraps",
    "cell_of",
    "contiguous_strides",
    "empty_tensor",
    "new_storage",
    "span",
    "storage_cell",
    "storage_over",
    "tensor_over",
    "wrap",
    "wrapper",
]

_C: Any = torch._C
_construct_storage: Any = _C._construct_storage_from_data_pointer
_create_empty = _C._acc.create_empty_tensor
_swap_memory: Any = _C.StorageBase._swap_data_ptr_
CPU_KEYS = _C.DispatchKeySet(_C.DispatchKey.CPU)
# The boxed C++ metadata kernel is run on our tensor: it touches sizes and strides, never data.
set_storage = torch.library.get_kernel("aten::set_.source_Storage_storage_offset", "CPU").call_boxed

Wraps: TypeAlias = tuple[Layout, int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""What :func:`wrap` needs to know of a tensor: layout, bytes of the storage, dtype, size and stride."""
Wrapper: TypeAlias = Callable[["Buffer", "Origin"], torch.Tensor]
"""What makes a fresh tensor of a launch's result, from the value and who issued it."""

# By its unregistered name this is the same device; it can be made before the backend is renamed to "tpu".
DEVICE = torch.device("privateuseone", 0)
_ALIGNMENT = 512


class _AddressSpace:
    """Hands out fake device addresses, 512-byte aligned, each unique among live storages."""

    def __init__(self) -> None:
        self._base, self._size = _reserve()
        self.end = self._base + self._size
        self.next = self._base

    def take(self, nbytes: int) -> int:
        address = self.next
        self.next = following = address + (nbytes + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
        if following > self.end:
            return self.wrap_around(nbytes)
        return address

    def wrap_around(self, nbytes: int) -> int:
        """An address where the end was reached: the first gap that is large enough. Raises MemoryError."""
        live = sorted((a, c.nbytes) for a, r in ADDRESSES.items() if (c := r()) is not None)
        needed = (nbytes + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
        start = self._base
        for address, size in [*live, (self._base + self._size, 0)]:
            if address - start >= needed:
                # Continue behind a gap; every later storage that does not fit comes back here.
                self.next = address if address < self._base + self._size else start + needed
                return start
            start = max(start, address + (size + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT)
        raise MemoryError(f"emutpu: no gap of {nbytes} bytes left in the {self._size >> 40} TiB of emulated addresses")


def _reserve() -> tuple[int, int]:
    """Reserve address space without access rights; smaller where the process's limits ask for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    for bits in range(45, 31, -1):
        address = libc.mmap(None, 1 << bits, 0, flags, -1, 0)
        if address not in (None, ctypes.c_void_p(-1).value):
            return address, 1 << bits
    raise MemoryError(f"emutpu: cannot reserve emulated device addresses (errno {ctypes.get_errno()}); raise RLIMIT_AS")


_space = _AddressSpace()
_take = _space.take


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as PyTorch gives them (an extent of 0 counts as 1)."""
    strides = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a strided tensor touches (0 for an empty one)."""
    if 0 in size:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))


def new_storage(
    value: Buffer | None, layout: Layout, nbytes: int, origin: Origin | None = None
) -> torch.UntypedStorage:
    """A storage of ``nbytes`` holding ``value`` (None: zeros)."""
    address = _take(nbytes)
    storage: torch.UntypedStorage = _construct_storage(address, DEVICE, nbytes)
    storage.cell = Cell(value, layout, nbytes, address, origin)  # type: ignore[attr-defined]  # our attribute
    return storage


def tensor_over(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A new tensor on an existing storage."""
    tensor: torch.Tensor = _create_empty((0,), dtype)
    set_storage(CPU_KEYS, tensor, storage, offset, size, stride)
    return tensor


def wrap(
    value: Buffer | None,
    layout: Layout,
    nbytes: int,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    origin: Origin | None,
) -> torch.Tensor:
    """A fresh tensor that owns ``value`` (None: zeros).

    PyTorch makes the tensor with a storage of no bytes at no address. It is given those of another: ``set_`` would take
    longer than all the rest (1.8 us of 3.7).
    """
    address = _take(nbytes)
    tensor: torch.Tensor = _create_empty(size, dtype)
    storage: Any = tensor.untyped_storage()
    _swap_memory(storage, _construct_storage(address, DEVICE, nbytes))
    storage.cell = Cell(value, layout, nbytes, address, origin)
    if tensor.stride() != stride:
        set_storage(CPU_KEYS, tensor, storage, 0, size, stride)
    return tensor


def wrapper(layout: Layout, nbytes: int, dtype: torch.dtype, size: tuple[int, ...], stride: tuple[int, ...]) -> Wrapper:
    """:func:`wrap` for results that are all alike: the end of every launch, so nothing is called that can be in line."""
    space, length = _space, (nbytes + _ALIGNMENT) // _ALIGNMENT * _ALIGNMENT
    end = space.end
    create, construct, swap = _create_empty, _construct_storage, _swap_memory
    made = create(size, dtype).stride() == stride  # not always contiguous_strides: those count an extent of 0 as 1

    def wrapped(value: Buffer, origin: Origin) -> torch.Tensor:
        address = space.next
        space.next = following = address + length
        if following > end:
            address = space.wrap_around(nbytes)
        tensor: torch.Tensor = create(size, dtype)
        storage: Any = tensor.untyped_storage()
        swap(storage, construct(address, DEVICE, nbytes))
        storage.cell = Cell(value, layout, nbytes, address, origin)
        if not made:
            set_storage(CPU_KEYS, tensor, storage, 0, size, stride)
        return tensor

    return wrapped


def empty_tensor(size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, op: str) -> torch.Tensor:
    """An unwritten tensor. Launches nothing; reads of it give zeros.

    Raises NotImplementedError for a dtype the device lacks, RuntimeError for a negative extent.
    """
    check_supported(dtype, op)
    size = tuple(size)
    if any(extent < 0 for extent in size):
        raise RuntimeError(f"{op}(): trying to create tensor with negative dimension {min(size)}: {list(size)}")
    strides = contiguous_strides(size) if stride is None else tuple(stride)
    numel = span(size, strides)
    dims = physical_dims(size, strides)
    layout = layout_of(dims if dims is not None else (numel,), dtype)
    return wrap(None, layout, numel * dtype.itemsize, dtype, size, strides, None)


def physical_dims(size: Sequence[int], stride: Sequence[int]) -> tuple[int, ...] | None:
    """The dims of a dense tensor in storage order, or None when it has gaps or overlaps."""
    order = storage_order(size, stride)
    expected = 1
    for axis in reversed(order):
        if size[axis] != 1 and stride[axis] != expected:
            return None
        expected *= size[axis]
    return tuple(size[axis] for axis in order)


def storage_order(size: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Axes by falling stride (stable): the order in which a dense tensor lies in its storage."""
    if 0 in size:
        return list(range(len(size)))
    significant = sorted((a for a in range(len(size)) if size[a] != 1), key=lambda a: -stride[a])
    if significant == sorted(significant):
        return list(range(len(size)))
    return [a for a in range(len(size)) if size[a] == 1] + significant


def cell_of(tensor: torch.Tensor) -> Cell | None:
    """The cell of a tensor on our device, or None for any other tensor.

    A storage that C++ rebuilt from a data pointer finds its cell by address.
    """
    storage = tensor.untyped_storage()
    cell: Cell | None = getattr(storage, "cell", None)
    if cell is None and storage.device.type == DEVICE.type:
        cell = _adopt(storage, tensor.dtype)
    return cell


def storage_cell(storage: torch.UntypedStorage) -> Cell:
    """The cell of a storage on our device."""
    cell: Cell | None = getattr(storage, "cell", None)
    return cell if cell is not None else _adopt(storage, torch.uint8)


def storage_over(cell: Cell) -> torch.UntypedStorage:
    """A further C++ storage on the memory of ``cell``, with the size that the cell has now."""
    address = _take(cell.nbytes)
    storage: torch.UntypedStorage = _construct_storage(address, DEVICE, cell.nbytes)
    storage.cell = cell  # type: ignore[attr-defined]  # our attribute
    ADDRESSES[address] = ref(cell)
    return storage


def _adopt(storage: torch.UntypedStorage, dtype: torch.dtype) -> Cell:
    """Give a storage that was made inside C++ (without our attribute) its cell."""
    nbytes = _C.StorageBase.nbytes(storage)
    reference = ADDRESSES.get(storage.data_ptr()) if nbytes else None
    cell = reference() if reference is not None else None
    if cell is None:
        layout = layout_of((nbytes // dtype.itemsize,), dtype)
        cell = Cell(None, layout, nbytes, storage.data_ptr() or _take(0))
    storage.cell = cell  # type: ignore[attr-defined]  # our attribute
    return cell
