"""Runs a piece of a graph through the dispatcher on placeholder tensors: every op is recorded, and becomes one region."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from emutpu.backend.cell import Cell, Layout
from emutpu.backend.compile.graph import Piece, is_collective, is_random_state, output_arguments
from emutpu.backend.compile.locations import node_origin
from emutpu.backend.compile.structured import Body, CannotLoop, scan
from emutpu.backend.deferred.capture import Capture, Program, capture
from emutpu.backend.deferred.region import Constant, Region, region
from emutpu.backend.deferred.values import NO_CONTENTS, Pending
from emutpu.backend.dtypes import torch_dtype
from emutpu.backend.errors import describe
from emutpu.backend.location import Origin
from emutpu.backend.options import LOCAL, Options
from emutpu.backend.pjrt import Buffer
from emutpu.backend.rng import DEFAULT_GENERATOR, TpuGenerator
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE, cell_of, empty_tensor

__all__ = [
    "Alias",
    "Argument",
    "Drawn",
    "Fresh",
    "Given",
    "Held",
    "Hosted",
    "NeedsContents",
    "Output",
    "Replayed",
    "Restored",
    "State",
    "Taken",
    "Write",
    "replay",
]


class NeedsContents(RuntimeError):
    """A kernel read a value while the piece was replayed; ``node`` must run eagerly."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__(f"{node.target} reads values of its operands on the host")
        self.node = node


# What an executable takes. ``position`` counts the piece's inputs.


@dataclasses.dataclass(frozen=True, slots=True)
class Taken:
    """The value of a device tensor, as ``layout``."""

    position: int
    layout: Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Hosted:
    """A CPU tensor, copied to the device on every call."""

    position: int
    layout: Layout


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """A buffer that the graph holds."""

    buffer: Buffer


@dataclasses.dataclass(frozen=True, slots=True)
class Drawn:
    """The state of a generator (the default one if ``position`` is None), which gives ``numbers`` draws one after the other."""

    position: int | None
    numbers: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """A random state that an earlier call saved: 16 bytes on the CPU."""

    position: int


Argument = Taken | Hosted | Held | Drawn | Restored


# What a piece gives.


@dataclasses.dataclass(frozen=True, slots=True)
class Fresh:
    """A new tensor over a result, or over the storage of the output ``shared`` before it. ``result`` is None for zeros.

    ``plain`` ones begin at their own storage's first element: ``wraps`` are then the arguments of ``storage.wrap``.
    """

    result: int | Buffer | None
    layout: Layout
    nbytes: int
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    shared: int | None
    plain: bool = False
    wraps: Any = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Alias:
    """A view of an input; ``itself`` if nothing distinguishes it. ``offset`` counts elements from the input's first."""

    position: int
    itself: bool
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A value that is known when the graph is compiled."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """The default generator's state after these draws of the call: 16 bytes on the CPU."""

    before: tuple[int, ...]


Output = Fresh | Alias | Given | State


@dataclasses.dataclass(frozen=True, slots=True)
class Write:
    """The new value of an input's storage: a result of the region, or a buffer."""

    position: int
    result: int | Buffer
    layout: Layout
    nbytes: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Replayed:
    """A piece as a region (None if it launches nothing), with all that a call has to do around it."""

    region: Region | None
    origins: tuple[Origin, ...]
    options: Options
    arguments: tuple[Argument, ...]
    results: tuple[Layout, ...]
    writes: tuple[Write, ...]
    outputs: tuple[Output, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Saved:
    """Stands for a random state among the values of a replay."""

    before: tuple[int, ...]


class _Recording(Capture):
    """A capture in which the default generator may stand for another state."""

    def __init__(self) -> None:
        super().__init__()
        self.instead: TpuGenerator | None = None

    def _owner(self, generator: TpuGenerator) -> TpuGenerator:
        return self.instead if self.instead is not None and generator is DEFAULT_GENERATOR else generator

    def state_of(self, generator: TpuGenerator, numbers: int) -> Buffer:
        return super().state_of(self._owner(generator), numbers)

    def drawn(self, generator: TpuGenerator, numbers: int, state: Buffer) -> None:
        super().drawn(self._owner(generator), numbers, state)

    def drawn_before(self) -> tuple[int, ...]:
        """The draws from the default generator so far."""
        found = self._states.get(id(DEFAULT_GENERATOR))
        return () if found is None else tuple(found[3])

    @contextmanager
    def drawing_from(self, generator: TpuGenerator) -> Iterator[None]:
        """Inside, ops that draw from the default generator draw from this one."""
        outer, self.instead = self.instead, generator
        try:
            yield
        finally:
            self.instead = outer


@contextmanager
def _plain_dispatch() -> Iterator[None]:
    """No fake, functional or proxy mode, no gradients, no autocast: what is recorded is what the graph says."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        yield


def replay(piece: Piece, module: fx.GraphModule, name: str) -> Replayed:
    """The region of a device piece. Raises what a kernel or lowering raises, with the node's line; NeedsContents."""
    with _plain_dispatch(), capture(_Recording()) as recording:
        assert isinstance(recording, _Recording)
        return _Replay(recording, piece, module, name).run()


class _Replay:
    def __init__(self, recording: _Recording, piece: Piece, module: fx.GraphModule, name: str) -> None:
        self.recording = recording
        self.piece = piece
        self.module = module
        self.name = name
        self.values: dict[fx.Node, Any] = {}
        self.inputs: dict[int, torch.Tensor] = {}  # placeholder tensors by position
        self.before: dict[int, Buffer | None] = {}  # what their cells held
        self.places: dict[int, int] = {}  # cell id -> position
        self.hosted: set[int] = set()
        self.generators: dict[int, int] = {}  # stand-ins: id -> position
        self.restored: dict[int, int] = {}
        self.kept: list[object] = []

    def run(self) -> Replayed:
        for position, node in enumerate(self.piece.inputs):
            self.values[node] = self._input(position, node)
        for node in self.piece.nodes:
            self._record(node)
        return self._finish()

    # Inputs ----------------------------------------------------------------------------------------------

    def _input(self, position: int, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return _attribute(self.module, str(node.target))
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            if is_random_state(node):  # the partitioner gives it the size of the CPU's state, which may be symbolic
                return self._stand_in(self.restored, position)
            for extent in (*value.shape, *value.stride()):
                if isinstance(extent, torch.SymInt):
                    raise NotImplementedError(_symbolic(extent, node))
            return self._placeholder(position, value)
        if isinstance(value, torch.Generator):
            return self._stand_in(self.generators, position)
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            raise NotImplementedError(_symbolic(value, node))
        return value

    def _placeholder(self, position: int, value: torch.Tensor) -> torch.Tensor:
        made = self.recording.placeholder(tuple(value.shape), value.stride(), value.dtype)
        self.inputs[position] = made
        cell = _cell(made)
        self.before[position] = cell.value
        self.places.setdefault(id(cell), position)
        self.kept.append(cell)
        if value.device.type != DEVICE.type:
            self.hosted.add(position)
        return made

    def _stand_in(self, register: dict[int, int], position: int) -> TpuGenerator:
        made = TpuGenerator()
        register[id(made)] = position
        self.kept.append(made)
        return made

    # Ops -------------------------------------------------------------------------------------------------

    def _record(self, node: fx.Node) -> None:
        origins = self.recording.batch.origins
        first = len(origins)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: self.values[given])
        try:
            self.values[node] = _as_promised(node, self._call(node, args, kwargs))
        except Exception as error:  # any: it is told of its line and raised again
            # One inside of a body is raised anew: it is the op with the body that runs eagerly.
            if isinstance(error, NeedsContents) or (isinstance(error, RuntimeError) and NO_CONTENTS in str(error)):
                raise NeedsContents(node) from error
            origin = node_origin(node)
            if origin is not None:
                error.add_note(f"  {node.target} issued at {describe(*origin[1:])}")
            raise
        origin = node_origin(node)
        if origin is not None:
            for index in range(first, len(origins)):
                origins[index] = (origins[index][0], *origin[1:])

    def _call(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if is_collective(node):  # of one rank, else the graph were cut here
            return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, args[0])
        name = target._name if isinstance(target, torch._ops.HigherOrderOperator) else None
        if name in _SPECIAL:
            return _SPECIAL[name](self.recording, *args, **kwargs)
        if name == "scan":
            with contextlib.suppress(CannotLoop):
                return scan(self._body, *args, **kwargs)
        return target(*args, **kwargs)

    def _body(self, module: fx.GraphModule, arguments: Sequence[torch.Tensor]) -> Body:
        """A subgraph, recorded apart. Raises CannotLoop if it draws random numbers."""
        with capture(_Recording()) as recording:
            assert isinstance(recording, _Recording)
            inner = _Replay(recording, self.piece, module, self.name)
            tensors = [recording.placeholder(tuple(a.shape), None, a.dtype) for a in arguments]
            stand_ins = tuple(_cell(tensor).value for tensor in tensors)
            results = inner._run_subgraph(tensors)
            made = [
                r.clone(memory_format=torch.contiguous_format) if isinstance(r, torch.Tensor) else None for r in results
            ]
            program = recording.program([tensor for tensor in made if tensor is not None])
        if program.draws:
            raise CannotLoop
        specs = tuple(None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in made)
        return Body(program, stand_ins, specs)  # type: ignore[arg-type]  # nothing has written the placeholders

    def _run_subgraph(self, arguments: Sequence[torch.Tensor]) -> list[Any]:
        given = iter(arguments)
        for node in self.module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(given)
            elif node.op == "get_attr":
                self.values[node] = _attribute(self.module, str(node.target))
            elif node.op != "output":
                self._record(node)
        return [self.values[r] if isinstance(r, fx.Node) else r for r in output_arguments(self.module.graph)]

    # Results ---------------------------------------------------------------------------------------------

    def _finish(self) -> Replayed:
        given = [self._strided(node) for node in self.piece.outputs]
        tensors = [t for t in given if isinstance(t, torch.Tensor) and t.device.type == DEVICE.type]
        written = [position for position, tensor in self.inputs.items() if self._was_written(position, tensor)]
        wanted: dict[int, torch.Tensor] = {}
        for tensor in (*tensors, *(self.inputs[position] for position in written)):
            if isinstance(_cell(tensor).value, Pending):
                wanted.setdefault(id(_cell(tensor)), tensor)
        program = self.recording.program(list(wanted.values()))
        found, numbers, results = _trimmed(program)
        by_cell = dict(zip(wanted, numbers, strict=True))
        writes = tuple(self._write(position, by_cell) for position in written)
        outputs = self._outputs(given, by_cell)
        arguments, found = self._arguments(program, found, writes)
        return Replayed(found, program.origins, LOCAL.state.plain, arguments, results, writes, outputs)

    def _strided(self, node: fx.Node) -> Any:
        """A node's value with the strides that the graph promises."""
        value = self.values[node]
        promised = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(promised, torch.Tensor):
            return value
        if value.device.type != DEVICE.type:
            return value
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        position = self._position(value)
        if position in self.hosted:
            value = value.clone()  # an alias of the copy that is made on every call, and given up with it
        elif value.stride() == promised.stride() or not value.numel() or position is not None:
            return value
        return _restrided(value, promised.stride())

    def _was_written(self, position: int, tensor: torch.Tensor) -> bool:
        return _cell(tensor).value is not self.before[position]

    def _position(self, tensor: torch.Tensor) -> int | None:
        """The input whose storage the tensor is over."""
        return self.places.get(id(_cell(tensor)))

    def _write(self, position: int, by_cell: dict[int, int]) -> Write:
        tensor = self.inputs[position]
        cell = _cell(tensor)
        result: int | Buffer | None = by_cell.get(id(cell), cell.value)
        assert result is not None
        return Write(position, result, cell.layout, cell.nbytes, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def _outputs(self, given: Sequence[Any], by_cell: dict[int, int]) -> tuple[Output, ...]:
        outputs: list[Output] = []
        first: dict[int, int] = {}
        for index, value in enumerate(given):
            outputs.append(self._output(index, value, by_cell, first))
        return tuple(outputs)

    def _output(self, index: int, value: Any, by_cell: dict[int, int], first: dict[int, int]) -> Output:
        if isinstance(value, _Saved):
            return State(value.before)
        if not isinstance(value, torch.Tensor) or value.device.type != DEVICE.type:
            return Given(value)
        size, stride, offset = tuple(value.shape), value.stride(), int(value.storage_offset())
        position = self._position(value)
        if position is not None:
            itself = value is self.inputs[position]
            return Alias(position, itself, value.dtype, offset, size, stride)
        cell = _cell(value)
        result: int | Buffer | None = by_cell.get(id(cell), cell.value)
        shared = first.setdefault(id(cell), index)
        alone = shared == index
        return Fresh(
            result,
            cell.layout,
            cell.nbytes,
            value.dtype,
            offset,
            size,
            stride,
            None if alone else shared,
            alone and not offset and isinstance(result, int),
            (cell.layout, cell.nbytes, value.dtype, size, stride),
        )

    # The executable's arguments --------------------------------------------------------------------------

    def _arguments(
        self, program: Program, found: Region | None, writes: Sequence[Write]
    ) -> tuple[tuple[Argument, ...], Region | None]:
        if found is None:
            return (), None
        places = {id(self.before[position]): position for position in self.inputs}
        draws = {id(d.placeholder): d for d in program.draws}
        written = {write.position for write in writes if isinstance(write.result, int)}
        constants: list[Constant] = []
        donated: set[int] = set()
        arguments: list[Argument] = []
        for number, value in enumerate(program.inputs):
            position = places.get(id(value))
            if position is not None:
                layout = _cell_layout(value)
                if position in self.hosted:
                    arguments.append(Hosted(position, layout))
                    continue
                if position in written and runtime().donating:
                    donated.add(number)
                arguments.append(Taken(position, layout))
            elif id(value) in draws:
                arguments.append(self._drawn(draws[id(value)]))
            elif value.shape == () and runtime().client.computes:
                array = runtime().client.to_host(value)
                constants.append(Constant(number, torch_dtype(array.dtype), (), array.tobytes()))
            else:
                arguments.append(Held(value))
        key = found.key._replace(constants=tuple(constants), donated=frozenset(donated), name=self.name)
        return tuple(arguments), region(key)

    def _drawn(self, draws: Any) -> Argument:
        identity = id(draws.generator)
        if identity in self.restored:
            return Restored(self.restored[identity])
        if identity in self.generators:
            return Drawn(self.generators[identity], draws.numbers)
        return Drawn(None, draws.numbers)


def _as_promised(node: fx.Node, value: Any) -> Any:
    """What an op makes, with the strides that PyTorch gave it when it traced: views that follow were chosen by them.

    They are other ones where our kernel keeps a format that PyTorch expects of no device with kernels of its own (a
    convolution's ``channels_last``).
    """
    promised, target = node.meta.get("val"), node.target
    if not isinstance(target, torch._ops.OpOverload) or any(made.alias_info for made in target._schema.returns):
        return value
    if isinstance(value, tuple) and isinstance(promised, tuple):
        return tuple(_laid_as(one, other) for one, other in zip(value, promised, strict=True))
    return _laid_as(value, promised)


def _laid_as(value: Any, promised: Any) -> Any:
    if not isinstance(promised, torch.Tensor) or not isinstance(value, torch.Tensor) or _lies_alike(value, promised):
        return value
    return _restrided(value, promised.stride())


def _lies_alike(value: torch.Tensor, promised: torch.Tensor) -> bool:
    """Whether both have the same strides, in all dimensions that are stepped along; also where a stride is a symbol."""
    if value.device.type != DEVICE.type or not value.numel() or not all(isinstance(s, int) for s in promised.stride()):
        return True
    steps = zip(value.shape, value.stride(), promised.stride(), strict=True)
    return all(extent == 1 or mine == theirs for extent, mine, theirs in steps)


def _restrided(value: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    made = empty_tensor(tuple(value.shape), stride, value.dtype, "empty_strided")
    made.copy_(value)
    return made


def _symbolic(value: object, node: fx.Node) -> str:
    return (
        f"the graph takes the symbolic value {value} with {node.name}: dynamic shapes are not supported. "
        "Please set torch.compile(..., dynamic=False, ...) and try again."
    )


def _cell(tensor: torch.Tensor) -> Cell:
    cell = cell_of(tensor)
    assert cell is not None
    return cell


def _cell_layout(value: Any) -> Layout:
    layout: Layout = value.layout
    return layout


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _trimmed(program: Program) -> tuple[Region | None, list[int], tuple[Layout, ...]]:
    """The region without results that nobody wants, each wanted value's number among the rest, and the layouts."""
    key = program.region.key
    if not key.nodes:
        return None, [], ()
    wanted = [number for number in program.outputs if isinstance(number, int)]
    kept = sorted(set(wanted))
    layouts = [layout for node in key.nodes for layout in node.op.layouts]
    trimmed = key._replace(outputs=tuple(key.outputs[number] for number in kept))
    return region(trimmed), [kept.index(n) for n in wanted], tuple(layouts[number] for number in trimmed.outputs)


# Random states -------------------------------------------------------------------------------------------


def _run_and_save(recording: _Recording, op: Any, *args: Any, **kwargs: Any) -> tuple[_Saved, Any]:
    saved = _Saved(recording.drawn_before())
    return saved, op(*args, **kwargs)


def _run_with(recording: _Recording, state: TpuGenerator, op: Any, *args: Any, **kwargs: Any) -> Any:
    with recording.drawing_from(state):
        return op(*args, **kwargs)


def _run_graphsafe(recording: _Recording, op: Any, *args: Any, rng_state: TpuGenerator, **kwargs: Any) -> Any:
    with recording.drawing_from(rng_state):
        return op(*args, **kwargs)


_SPECIAL: dict[str, Callable[..., Any]] = {
    "run_and_save_rng_state": _run_and_save,
    "run_with_rng_state": _run_with,
    "graphsafe_run_with_rng_state": _run_graphsafe,
}
