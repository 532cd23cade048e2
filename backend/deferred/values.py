"""Pending values: what a cell holds while the op that makes its value is only recorded.

A cell, and nothing else that lives long, holds a :class:`Pending`; recorded ops name values by number. So a pending value
is live exactly while some storage holds it, and Python's reference count tells when the last one is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from emutpu.backend.dtypes import numpy_dtype
from emutpu.backend.options import LOCAL
from emutpu.backend.pjrt import Buffer
from emutpu.backend.runtime import runtime

if TYPE_CHECKING:
    from emutpu.backend.cell import Cell, Layout
    from emutpu.backend.deferred.queue import Queue
    from emutpu.backend.deferred.trace import State
    from emutpu.backend.location import Origin

__all__ = ["BEING_COMPUTED", "NO_CONTENTS", "Batch", "Pending", "Placeholder", "operand", "ready"]

NO_CONTENTS = (
    "cannot Materialize() a placeholder tensor or a tensor that depends on a placeholder. Placeholder tensors should only "
    "appear in compiled mode, which should never try to materialize tensors."
)

BEING_COMPUTED = (
    "the tensor's value is being computed by this thread, or by one that waits for it: a finalizer or a signal's handler "
    "that interrupts it cannot read the value. Let it set a flag, and read the value later"
)


class Batch:
    """The ops recorded since the last materialisation of a queue.

    ``state``   the sequence of recorded ops (:mod:`.trace`); ``origins`` who issued each.
    ``inputs``  buffers that the ops read, by number; ``index`` their numbers, negative, by identity.
    ``marks``   one byte a value: 1 while it is live; ``references`` the values themselves, weakly.
    """

    __slots__ = ("index", "inputs", "marks", "origins", "queue", "references", "state")

    def __init__(self, queue: Queue, state: State) -> None:
        self.queue = queue
        self.state = state
        self.origins: list[Origin] = []
        self.inputs: list[Buffer] = []
        self.index: dict[int, int] = {}
        self.marks = bytearray()
        self.references: list[ref[Pending]] = []

    def add_input(self, value: Buffer) -> int:
        """Number a buffer that no op of this batch has read yet."""
        inputs = self.inputs
        while True:
            slot = ~len(inputs)
            inputs.append(value)
            if inputs[~slot] is value:  # else a finalizer or a signal's handler came between
                break
        self.index[id(value)] = slot
        return slot

    def fail(self, error: BaseException) -> None:
        """Let every value that was not computed raise ``error`` when it is read."""
        for reference in self.references:
            pending = reference()
            if pending is not None and pending.buffer is None and pending.failure is None:
                pending.failure = error


class Pending:
    """A value in place of a buffer. ``slot`` is its number in ``batch``, -1 until its op is on the list;
    ``buffer`` is set once it is computed.

    ``failure`` holds the exception of the materialisation that should have computed it: every read raises it.
    """

    __slots__ = ("__weakref__", "batch", "buffer", "failure", "layout", "slot")

    def __init__(self, batch: Batch, layout: Layout) -> None:
        self.batch = batch
        self.slot = -1
        self.layout = layout
        self.buffer: Buffer | None = None
        self.failure: BaseException | None = None

    def __del__(self) -> None:
        if self.slot >= 0:
            self.batch.marks[self.slot] = 0

    def settled(self) -> Buffer:
        """The computed buffer. Raises what kept it from being computed."""
        if self.buffer is not None:
            return self.buffer
        failure = self.failure
        if failure is None:
            raise RuntimeError(BEING_COMPUTED)
        raise failure

    def materialize(self, reason: str) -> Buffer:
        """The buffer, after everything that is pending on the value's stream is done."""
        if self.buffer is None and self.failure is None:
            self.batch.queue.materialize(reason)
        return self.settled()

    # What else a buffer can be asked.

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.dims

    @property
    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.layout.dtype)

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.layout.dtype.itemsize

    def is_deleted(self) -> bool:
        return self.buffer is not None and self.buffer.is_deleted()

    def delete(self) -> None:
        if self.buffer is not None:
            self.buffer.delete()

    def is_ready(self) -> bool:
        return self.failure is not None or (self.buffer is not None and self.buffer.is_ready())

    def block_until_ready(self) -> Buffer:
        return self.materialize("synchronize()").block_until_ready()


class Placeholder:
    """The value of a tensor that stands for an argument while a program is captured. It has no contents."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.dims

    @property
    def dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.layout.dtype)

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.layout.dtype.itemsize

    def is_deleted(self) -> bool:
        return False

    def delete(self) -> None:
        """There is nothing to delete."""

    def is_ready(self) -> bool:
        return False

    def block_until_ready(self) -> Buffer:
        raise RuntimeError(NO_CONTENTS)


def operand(cell: Cell) -> Buffer:
    """A cell's value as the operand of an op: pending where this thread records onto the stream that it is pending on."""
    value = cell.value
    if value.__class__ is Pending:
        pending: Any = value
        state = LOCAL.state
        if pending.buffer is None and state.defers and pending.batch.queue is state.queue:
            return value
    elif value.__class__ is Placeholder and LOCAL.state.defers:
        return value
    return ready(cell, "debug_mode")


def ready(cell: Cell, reason: str) -> Buffer:
    """A cell's value as a buffer, whatever has to be done for it; an unwritten cell holds zeros from now on."""
    value = cell.value
    if value is None:
        layout = cell.layout
        dtype, client = numpy_dtype(layout.dtype), runtime().client
        # What computes nothing needs no memory either.
        zeros = np.zeros(layout.dims, dtype) if client.computes else np.broadcast_to(np.zeros((), dtype), layout.dims)
        value = cell.value = client.from_host(zeros)
    elif value.__class__ is Pending:
        pending: Any = value
        made: Buffer = pending.materialize(reason)
        if cell.value is pending:  # another thread may have written it meanwhile
            cell.value = made
        return made
    elif value.__class__ is Placeholder:
        raise RuntimeError(NO_CONTENTS)
    return value
