"""A compiled piece: takes real tensors, launches the region, writes mutations back, wraps results.

This is what a compiled call spends its time in. Everything that is known when the graph is compiled was decided there:
where all inputs lie as they were recorded, the values are read with list comprehensions, and nothing is keyed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from sys import getrefcount
from typing import Any

import numpy as np
import torch
from torch import fx

from emutpu.backend.cache import Acquired
from emutpu.backend.cell import Layout
from emutpu.backend.compile.graph import Piece
from emutpu.backend.compile.replay import (
    Alias,
    Drawn,
    Fresh,
    Given,
    Held,
    Hosted,
    Output,
    Replayed,
    Restored,
    State,
    Taken,
    Write,
    replay,
)
from emutpu.backend.copies import host_array
from emutpu.backend.deferred.log import LOG, Execution
from emutpu.backend.deferred.plan import Step
from emutpu.backend.deferred.queue import TRACES
from emutpu.backend.deferred.values import Pending, Placeholder, ready
from emutpu.backend.errors import device_mismatch, launch_failure, region_failure
from emutpu.backend.location import Origin
from emutpu.backend.options import LOCAL, EagerMode, Options, override
from emutpu.backend.pjrt import Buffer, ErrorBuffer, PjrtError
from emutpu.backend.rng import DEFAULT_GENERATOR, TpuGenerator
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import (
    Wrapper,
    cell_of,
    contiguous_strides,
    new_storage,
    storage_cell,
    tensor_over,
    wrap,
    wrapper,
)

__all__ = ["DeviceProgram", "Launch"]

_storage = torch.Tensor.untyped_storage
_UNREADY = frozenset({type(None), Pending, Placeholder})
_REASON = "compile_mode_execution"
_STEP = 4  # 32-bit draws in one step of a generator


class DeviceProgram:
    """A device piece of a graph: compiled for the options of its first call, and again where they differ later."""

    def __init__(self, piece: Piece, module: fx.GraphModule, name: str) -> None:
        self.piece = piece
        self.module = module
        self.name = name
        self._options: Options | None = None
        self._epoch = -1
        self._run: Any = None
        self._launches: dict[Options, Launch] = {}

    def replay(self) -> Replayed:
        """The piece as a region. Raises NeedsContents, and what lowerings raise."""
        return replay(self.piece, self.module, self.name)

    def prepare(self) -> Launch:
        """Compile for the calling thread's options. Raises NeedsContents, and what lowerings and the compiler raise."""
        return self._choose(LOCAL.state.options)

    def submit(self) -> tuple[str, Future[Acquired]] | None:
        """Queue the compilation for the calling thread's options; gives its key. None where it is done, or queued already.

        Raises NeedsContents, and what lowerings raise.
        """
        replayed = self.replay()
        if replayed.region is None:
            return None
        return replayed.region.submit(replayed.options, replayed.origins)

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The piece's outputs for values of its inputs, both in the piece's order."""
        options = LOCAL.state.options
        if options is not self._options or self._epoch != TRACES.epoch:
            self._choose(options)
        made: list[Any] = self._run(values)
        return made

    def _choose(self, options: Options) -> Launch:
        if self._epoch != TRACES.epoch:  # the cache was cleared, or the client replaced
            self._launches.clear()
            self._epoch = TRACES.epoch
        launch = self._launches.get(options)
        if launch is None:
            launch = self._launches[options] = Launch(self.replay(), self.name)
        self._options, self._run = options, launch.run
        return launch


class Launch:
    """A piece with its executable, for one set of options."""

    def __init__(self, replayed: Replayed, name: str) -> None:
        self.replayed = replayed
        self.name = name
        self.writes = replayed.writes
        self.outputs = replayed.outputs
        taken = [argument for argument in replayed.arguments if isinstance(argument, Taken)]
        self.positions = [argument.position for argument in taken]
        self.layouts = [argument.layout for argument in taken]
        self.others = [(n, a) for n, a in enumerate(replayed.arguments) if not isinstance(a, Taken)]
        self.complex = [n for n, a in enumerate(taken) if a.layout.dtype.is_complex]
        self.saves = any(isinstance(output, State) for output in replayed.outputs)
        self.origins = _result_origins(replayed)
        # The usual outputs: the result's number, what makes its tensor, and its origin.
        self.plain: list[tuple[int, Wrapper, Origin] | None] = [
            (output.result, wrapper(*output.wraps), self.origins[output.result])
            if isinstance(output, Fresh) and output.plain and isinstance(output.result, int)
            else None
            for output in replayed.outputs
        ]
        self.donated: list[int] = []
        self.launch: Any = None
        self.step: Step | None = None
        if replayed.region is not None:
            self._compile()

    def _compile(self) -> None:
        replayed = self.replayed
        region = replayed.region
        assert region is not None
        try:
            self.key, self.executable, self.hit = region.executable(replayed.options, replayed.origins)
        except PjrtError as error:
            origin = replayed.origins[-1] if replayed.origins else (self.name, None, 0)
            raise region_failure(error, origin, (_REASON, *origin[1:])) from error
        self.launch = self.executable.launch
        donated = {n for n in region.key.donated if n not in {c.number for c in region.key.constants}}
        numbers = [n for n in range(region.key.inputs) if n not in {c.number for c in region.key.constants}]
        taken = [n for n, a in zip(numbers, replayed.arguments, strict=True) if isinstance(a, Taken)]
        self.donated = [taken.index(n) for n in sorted(donated)]
        count = len(region.key.outputs)
        self.step = Step(region, tuple(range(len(region.key.nodes))), (), tuple(range(count)), tuple(range(count)))

    # ------------------------------------------------------------------------------------------ the hot path

    def run(self, values: Sequence[Any]) -> list[Any]:
        """Launch, write back, wrap."""
        state = (DEFAULT_GENERATOR.initial_seed(), DEFAULT_GENERATOR.get_offset()) if self.saves else None
        results = self._results(values) if self.launch is not None else ()
        for write in self.writes:
            self._write(values[write.position], write, results)
        made: list[Any] = []
        add = made.append
        for plain, output in zip(self.plain, self.outputs, strict=True):
            if plain is not None:
                number, make, origin = plain
                add(make(results[number], origin))
            else:
                add(self._output(output, values, results, made, state))
        return made

    def _results(self, values: Sequence[Any]) -> Sequence[Buffer]:
        tensors = [values[position] for position in self.positions]
        try:
            cells = [_storage(tensor).cell for tensor in tensors]  # type: ignore[attr-defined]  # our attribute
            arguments = [cell.value for cell in cells]
            laid = [cell.layout for cell in cells] == self.layouts and _UNREADY.isdisjoint(map(type, arguments))
        except AttributeError:
            laid = False
        if not laid or self.complex:
            arguments = [_read(tensor, layout) for tensor, layout in zip(tensors, self.layouts, strict=True)]
        for number in self.donated:
            # References: the cell, the list, the argument of getrefcount itself.
            if getrefcount(arguments[number]) > 3:
                arguments[number] = _copied(arguments[number], self.layouts[number])
        for slot, argument in self.others:
            arguments.insert(slot, _other(argument, values))
        try:
            results: Sequence[Buffer] = self.launch(arguments)
        except PjrtError as error:
            origin = self.origins[-1] if self.origins else (self.name, None, 0)
            raise launch_failure(error, origin, "the launch was refused") from error
        runtime().region_launches += 1
        self._note(results)
        return results

    def _note(self, results: Sequence[Buffer]) -> None:
        for number, result in enumerate(results):
            if result.__class__ is ErrorBuffer:
                assert isinstance(result, ErrorBuffer)
                if result.error.origin is None:
                    result.error.origin = self.origins[number]
        if LOCAL.state.options.mode is EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING:
            for result in results:
                result.block_until_ready()
        assert self.step is not None
        origin = self.origins[-1] if self.origins else (self.name, None, 0)
        hit, self.hit = self.hit, True
        LOG.add(Execution(self.replayed.origins, self.step, _REASON, (_REASON, *origin[1:]), self.key, hit, 0.0))

    def _write(self, tensor: torch.Tensor, write: Write, results: Sequence[Buffer]) -> None:
        """Replace the value of an input's storage; an input that is a part of its storage is copied into."""
        number = write.result
        value: Any = results[number] if isinstance(number, int) else number
        origin = self.origins[number] if isinstance(number, int) else (self.name, None, 0)
        cell = storage_cell(_storage(tensor))
        if cell.nbytes == write.nbytes:
            cell.value, cell.layout, cell.origin = value, write.layout, origin
            return
        whole = wrap(value, write.layout, write.nbytes, write.dtype, write.size, write.stride, origin)
        with torch.no_grad():
            torch.ops.aten.copy_(tensor.detach(), whole)

    def _output(
        self,
        output: Output,
        values: Sequence[Any],
        results: Sequence[Buffer],
        made: list[Any],
        state: tuple[int, int] | None,
    ) -> Any:
        if isinstance(output, Alias):
            return _alias(output, values[output.position])
        if isinstance(output, Fresh):
            return self._fresh(output, results, made)
        if isinstance(output, State):
            assert state is not None
            seed, offset = state
            offset += sum(-(-numbers // _STEP) for numbers in output.before)
            return torch.from_numpy(np.array([seed, offset], np.uint64).view(np.uint8))
        assert isinstance(output, Given)
        return output.value

    def _fresh(self, output: Fresh, results: Sequence[Buffer], made: list[Any]) -> torch.Tensor:
        if output.shared is not None:
            storage = made[output.shared].untyped_storage()
        else:
            number = output.result
            value: Any = results[number] if isinstance(number, int) else number
            origin = self.origins[number] if isinstance(number, int) else None
            storage = new_storage(value, output.layout, output.nbytes, origin)
        return tensor_over(storage, output.dtype, output.offset, output.size, output.stride)


def _result_origins(replayed: Replayed) -> list[Origin]:
    """Who issued the op that gives each result."""
    region = replayed.region
    if region is None:
        return []
    producers = [n for n, node in enumerate(region.key.nodes) for _ in node.op.layouts]
    return [replayed.origins[producers[number]] for number in region.key.outputs]


def _alias(output: Alias, given: torch.Tensor) -> torch.Tensor:
    if output.itself:
        return given
    offset = int(given.storage_offset()) * given.dtype.itemsize // output.dtype.itemsize + output.offset
    return tensor_over(_storage(given), output.dtype, offset, output.size, output.stride)


def _read(tensor: torch.Tensor, layout: Layout) -> Buffer:
    """An input's value as ``layout``: its cell's where it lies so, else a copy."""
    cell = cell_of(tensor)
    if cell is None:
        raise device_mismatch("compiled graph", "inputs", tensor)
    if cell.layout is layout and not (layout.dtype.is_complex and tensor.is_conj()):
        return ready(cell, _REASON)
    with torch.no_grad(), override(mode=EagerMode.DEFER_NEVER):
        tensor = tensor.detach().resolve_conj().resolve_neg()
        dense = torch.as_strided(tensor, layout.dims, contiguous_strides(layout.dims), tensor.storage_offset())
        copied = cell_of(torch.ops.aten.clone(dense, memory_format=torch.contiguous_format))
        assert copied is not None
        return ready(copied, _REASON)


def _copied(value: Buffer, layout: Layout) -> Buffer:
    """A copy of a buffer that is to be given up although somebody else holds it."""
    strides = contiguous_strides(layout.dims)
    nbytes = layout.numel * layout.dtype.itemsize
    with torch.no_grad(), override(mode=EagerMode.DEFER_NEVER):
        held = wrap(value, layout, nbytes, layout.dtype, layout.dims, strides, ("aten.clone", None, 0))
        copied = cell_of(torch.ops.aten.clone(held))
        assert copied is not None
        return ready(copied, _REASON)


def _other(argument: Hosted | Held | Drawn | Restored | Taken, values: Sequence[Any]) -> Buffer:
    """An argument that is no device tensor."""
    if isinstance(argument, Held):
        return argument.buffer
    if isinstance(argument, Drawn):
        return _generator(argument, values).take(argument.numbers)
    if isinstance(argument, Restored):
        seed, offset = values[argument.position].numpy().view(np.uint64)
        return runtime().client.from_host(np.array([seed, offset, 0], np.uint64))
    assert isinstance(argument, Hosted)
    given: torch.Tensor = values[argument.position]
    dims = argument.layout.dims
    dense = torch.as_strided(given.detach(), dims, contiguous_strides(dims), given.storage_offset())
    return runtime().client.from_host(host_array(dense))


def _generator(argument: Drawn, values: Sequence[Any]) -> TpuGenerator:
    if argument.position is None:
        return DEFAULT_GENERATOR
    generator = values[argument.position]
    if not isinstance(generator, TpuGenerator):
        raise TypeError(f"Expected a 'tpu' device type for generator but found '{generator.device.type}'")
    return generator
