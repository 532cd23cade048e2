"""Capturing a program on placeholder tensors, through the dispatcher: what torch.compile replays its graphs with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from emutpu.backend.cell import layout_of
from emutpu.backend.deferred.plan import Region, recorded_region
from emutpu.backend.deferred.queue import Queue, Repeats
from emutpu.backend.deferred.values import NO_CONTENTS, Pending, Placeholder
from emutpu.backend.location import Origin
from emutpu.backend.options import LOCAL, EagerMode, override
from emutpu.backend.storage import cell_of, contiguous_strides, new_storage, physical_dims, span, tensor_over

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Buffer
    from emutpu.backend.rng import TpuGenerator

__all__ = ["Capture", "Draws", "Program", "capture"]


@dataclasses.dataclass(frozen=True, slots=True)
class Draws:
    """Random state that a program takes: the generator, its placeholder among the inputs, and the 32-bit draws of one run."""

    generator: TpuGenerator
    placeholder: Placeholder
    numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A captured program as one region.

    ``inputs``   what the region takes, in order: placeholders, and buffers that were constants of the program;
    ``outputs``  what was asked for, in order: the number of the region's result, or a value that passes through;
    ``origins``  who issued each op of the region; ``draws`` the random states among the inputs.
    """

    region: Region
    inputs: tuple[Buffer, ...]
    outputs: tuple[int | Buffer, ...]
    origins: tuple[Origin, ...]
    draws: tuple[Draws, ...]


class Capture(Queue):
    """Records every op and does none. Reading a value raises RuntimeError."""

    def __init__(self) -> None:
        super().__init__(Repeats.OFF)
        self._states: dict[int, tuple[TpuGenerator, Placeholder, Buffer, list[int]]] = {}

    def placeholder(self, size: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> torch.Tensor:
        """A tensor that stands for an argument. Its cell holds a :class:`Placeholder` until it is written."""
        strides = contiguous_strides(size) if stride is None else tuple(stride)
        numel = span(size, strides)
        dims = physical_dims(size, strides)
        layout = layout_of(dims if dims is not None else (numel,), dtype)
        storage = new_storage(Placeholder(layout), layout, numel * dtype.itemsize)
        return tensor_over(storage, dtype, 0, size, strides)

    def program(self, results: Sequence[torch.Tensor]) -> Program:
        """What computes the values of the results' storages (each cell's whole value, in storage order)."""
        batch = self.batch
        values = [_value(tensor) for tensor in results]
        wanted = [v.slot for v in values if isinstance(v, Pending) and v.batch is batch]
        region, nodes, inputs, given = recorded_region(batch.state, wanted)
        outputs: list[int | Buffer] = []
        for value in values:
            mine = isinstance(value, Pending) and value.batch is batch
            outputs.append(given[value.slot] if mine else value)  # type: ignore[attr-defined]  # a Pending
        return Program(
            region,
            tuple(batch.inputs[~i] for i in inputs),
            tuple(outputs),
            tuple(batch.origins[k] for k in nodes),
            tuple(Draws(owner, state, tuple(numbers)) for owner, state, _, numbers in self._states.values()),
        )

    def state_of(self, generator: TpuGenerator, numbers: int) -> Buffer:
        found = self._states.get(id(generator))
        if found is None:
            state = Placeholder(layout_of((3,), torch.uint64))
            found = self._states[id(generator)] = (generator, state, state, [])
        found[3].append(numbers)
        return found[2]

    def drawn(self, generator: TpuGenerator, numbers: int, state: Buffer) -> None:  # counted before
        owner, placeholder, _, counted = self._states[id(generator)]
        self._states[id(generator)] = (owner, placeholder, state, counted)

    def materialize(self, reason: str) -> None:  # it is never done
        raise RuntimeError(NO_CONTENTS)


def _value(tensor: torch.Tensor) -> Buffer:
    cell = cell_of(tensor)
    if cell is None:
        raise TypeError(f"a captured program gives tensors of the device, got one on {tensor.device}")
    if cell.value is None:
        raise ValueError("a captured program gave a tensor that it did not write")
    return cell.value


@contextmanager
def capture(recording: Capture | None = None) -> Iterator[Capture]:
    """Inside, in this thread, every op is recorded into the given Capture."""
    state = LOCAL.state
    outer = state.queue
    recording = recording or Capture()
    with override(mode=EagerMode._INTERNAL_COMPILE_FX_GRAPH):
        state.queue = recording
        try:
            yield recording
        finally:
            state.queue = outer
