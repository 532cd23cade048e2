"""The storage cell: what a PrivateUse1 storage holds in place of bytes. Frozen together with :mod:`emutpu.backend.pjrt`.

A cell hangs on the Python ``UntypedStorage`` object as ``storage.cell``; all aliases of a storage share that object, and
it lives exactly as long as the last tensor that uses it, those saved for backward included. The cell holds the current
functional value of the whole storage in storage order; views are read and written by chains of primitives
(:mod:`emutpu.backend.views`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import ref

import torch

from emutpu.backend.location import Origin
from emutpu.backend.pjrt import ErrorBuffer

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Buffer

__all__ = ["ADDRESSES", "MEMORY", "Cell", "Layout", "layout_of"]


def _dense(shape: tuple[int, ...], itemsize: int) -> int:
    return math.prod(shape) * itemsize


class _Memory:
    """Device memory by live cells, in bytes.

    ``tiled`` tells what an array of a shape and element size takes (dense until the device is configured). ``limit`` is
    the device's memory, None where it is unlimited. A launch that would pass ``ceiling`` is looked at closely: it
    makes a new peak, does not fit, or is traced.
    """

    __slots__ = ("buffers", "ceiling", "limit", "live", "peak", "tiled")

    def __init__(self) -> None:
        self.buffers = 0
        self.live = 0
        self.peak = 0
        self.ceiling = 0
        self.limit: int | None = None
        self.tiled: Callable[[tuple[int, ...], int], int] = _dense


MEMORY = _Memory()


class Layout:
    """Dense dimensions (major first) and dtype of a cell's value. Interned: compare and hash by identity.

    A storage's bytes are always covered exactly: ``prod(dims) * dtype.itemsize == nbytes``. ``held`` is what such a value
    takes of the device's memory, tiles filled up.
    """

    __slots__ = ("dims", "dtype", "held", "numel")

    def __init__(self, dims: tuple[int, ...], dtype: torch.dtype) -> None:
        self.dims = dims
        self.dtype = dtype
        self.numel = math.prod(dims)
        self.held = MEMORY.tiled(dims, dtype.itemsize)

    def __repr__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.dims)}"


_layouts: dict[tuple[tuple[int, ...], torch.dtype], Layout] = {}


def layout_of(dims: tuple[int, ...], dtype: torch.dtype) -> Layout:
    """The one Layout with these dims and dtype."""
    key = (dims, dtype)
    layout = _layouts.get(key)
    if layout is None:
        layout = _layouts.setdefault(key, Layout(dims, dtype))
    return layout


# Fake device address -> cell, for the C++ paths that rebuild a storage from a data pointer (legacy pickle).
ADDRESSES: dict[int, ref[Cell]] = {}


class Cell:
    """The current value of one storage.

    ``value``   the buffer, shaped and typed as ``layout`` says; None while nothing was written (reads give zeros).
    ``layout``  dense dims and dtype of the last full writer.
    ``nbytes``  size of the storage.
    ``held``    bytes of device memory it is counted with: those of its layout, none for a failed value.
    ``origin``  which op, at which line of the user's, wrote ``value`` last.
    ``address`` fake device address, unique among live cells.
    """

    __slots__ = ("__weakref__", "address", "held", "layout", "nbytes", "origin", "value")

    def __init__(
        self, value: Buffer | None, layout: Layout, nbytes: int, address: int, origin: Origin | None = None
    ) -> None:
        self.value = value
        self.layout = layout
        self.nbytes = nbytes
        self.address = address
        self.origin = origin
        ADDRESSES[address] = ref(self)
        held = self.held = layout.held if value.__class__ is not ErrorBuffer else 0
        MEMORY.buffers += 1
        live = MEMORY.live = MEMORY.live + held
        if live > MEMORY.peak:
            MEMORY.peak = live

    def write(self, value: Buffer, layout: Layout, origin: Origin) -> None:
        """Replace the whole value. The old buffer dies here unless something else holds it."""
        self.value = value
        self.layout = layout
        self.origin = origin
        if layout.held != self.held or value.__class__ is ErrorBuffer:
            self.recount()

    def recount(self) -> None:
        """Count the memory of the present value: after a write that changed the layout, or that failed."""
        held = self.layout.held if self.value.__class__ is not ErrorBuffer else 0
        live = MEMORY.live = MEMORY.live + held - self.held
        self.held = held
        if live > MEMORY.peak:
            MEMORY.peak = live

    def resize(self, nbytes: int, value: Buffer | None, layout: Layout) -> None:
        """Change the size of the memory itself, with the value it holds from then on (None: zeros)."""
        self.nbytes = nbytes
        self.value = value
        self.layout = layout
        self.recount()

    # Bound as defaults: module globals may already be gone when the last cells die at interpreter exit.
    def __del__(self, memory: _Memory = MEMORY, addresses: dict[int, ref[Cell]] = ADDRESSES) -> None:
        memory.buffers -= 1
        memory.live -= self.held
        addresses.pop(self.address, None)
