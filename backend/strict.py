"""What a launch needs and how it is made on a miss: signature → specs → canonical module → executable → entry."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from emutpu.backend import views
from emutpu.backend.cell import Layout, layout_of
from emutpu.backend.deferred.names import READ, WRITE, display
from emutpu.backend.dtypes import check_supported, dtype_name, scalar_type, torch_dtype
from emutpu.backend.errors import describe, launch_failure, op_label
from emutpu.backend.hlo import Builder, Value
from emutpu.backend.keys import Key
from emutpu.backend.location import Origin, capture
from emutpu.backend.lowering._registry import Context, Lowering, OutputSpec
from emutpu.backend.options import EagerMode, Options
from emutpu.backend.pjrt import Buffer, Executable, PjrtError
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import Wrapper, Wraps, contiguous_strides, physical_dims, span, storage_order, wrapper
from emutpu.backend.views import View

__all__ = ["Entry", "OpModule", "Signature", "argument_kind", "miss"]

Launch = Callable[[Sequence[Buffer]], Sequence[Buffer]]
Record = Callable[[Sequence[Buffer], Origin], Sequence[Buffer]]
Take = Callable[..., Value]

_KINDS = {
    "Tensor": "tensor",
    "Optional[Tensor]": "tensor?",
    "List[Tensor]": "tensors",
    "List[Optional[Tensor]]": "tensors?",
    "number": "scalar",
    "Optional[number]": "scalar?",
    "List[number]": "scalars",
    "Optional[Generator]": "generator",
    "Generator": "generator",
}


_COPIES = frozenset({"aten.copy_.default", "aten.clone.default", "aten._to_copy.default"})
# Typed Tensor, but autograd passes what the forward pass did not have.
_MAY_BE_UNDEFINED = frozenset({"attn_bias", "cum_seq_q", "cum_seq_k"})


def argument_kind(argument: Any, row: Lowering | None = None) -> str:
    """How a kernel treats a schema argument; the row tells which Scalars are static, and which floats are not."""
    kind = _KINDS.get(str(argument.type), "static")
    if kind == "tensor" and argument.name in _MAY_BE_UNDEFINED:
        return "tensor?"
    if row is not None and argument.name in row.shapes:
        return "shape"
    if row is not None and argument.name in row.dynamic:
        return "scalar"
    return "static" if row is not None and argument.name in row.static and kind.startswith("scalar") else kind


@dataclasses.dataclass(frozen=True, slots=True)
class Signature:
    """An overload with its lowering.

    ``targets`` are the written arguments; ``fresh`` the indices of returns that are new tensors (one list return if
    ``fresh_list``); ``numbers`` the indices of returns that are integers; ``returned_targets`` the written arguments
    that are also returned.
    """

    op: torch._ops.OpOverload[..., Any]
    row: Lowering
    inplace: bool
    targets: tuple[str, ...]
    fresh: tuple[int, ...]
    fresh_list: bool
    returned_targets: tuple[str, ...]
    numbers: tuple[int, ...] = ()

    @property
    def schema(self) -> torch._C.FunctionSchema:
        return self.op._schema

    @property
    def name(self) -> str:
        return str(self.op)

    @property
    def elementwise(self) -> bool:
        """One written argument, each element of it from those in the same place of the others."""
        if len(self.targets) != 1 or not self.inplace:
            return False
        return torch.Tag.pointwise in {*self.op.tags, *self.functional.tags} or self.row.name == "copy_"

    @property
    def functional(self) -> torch._ops.OpOverload[..., Any]:
        """The overload that the row was written for."""
        base, _, variant = self.row.name.partition(".")
        found: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops.aten, base), variant or "default")
        return found

    @staticmethod
    def of(op: torch._ops.OpOverload[..., Any], row: Lowering) -> Signature:
        schema = op._schema
        written = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        # A written list has no alias set of its own, and is never returned.
        by_alias = {alias: a.name for a in written if a.alias_info for alias in a.alias_info.before_set}
        fresh, returned, numbers = [], [], []
        for index, result in enumerate(schema.returns):
            if str(result.type) == "int":
                numbers.append(index)
            elif result.alias_info is None:
                fresh.append(index)
            else:
                returned.append(by_alias[next(iter(result.alias_info.before_set))])
        fresh_list = len(fresh) == 1 and str(schema.returns[fresh[0]].type) == "List[Tensor]"
        targets = (*(a.name for a in written), *row.mutates)
        return Signature(op, row, bool(written), targets, tuple(fresh), fresh_list, tuple(returned), tuple(numbers))


@dataclasses.dataclass(slots=True, eq=False)
class Entry:
    """A loaded executable, or a way to record the op for later, and how its results become tensors.

    ``wrappers`` make tensors of the fresh results, None for undefined ones, from their ``outputs``; ``layouts`` gives the
    new layouts of the written cells, in the order of the targets; ``base`` tells that targets' old values are passed
    last; ``draws`` how many random numbers a launch takes; ``numbers`` the integer results. With ``record`` nothing is
    launched: it takes the values and the origin, and gives pending values.
    """

    launch: Launch
    executable: Executable | None
    key: Key
    outputs: dataclasses.InitVar[Sequence[Wraps | None]]
    layouts: list[Layout]
    base: bool
    draws: int
    numbers: tuple[int, ...] = ()
    calls: int = 0
    record: Record | None = None
    wrappers: tuple[Wrapper | None, ...] = dataclasses.field(init=False)

    def __post_init__(self, outputs: Sequence[Wraps | None]) -> None:
        self.wrappers = tuple(None if output is None else wrapper(*output) for output in outputs)


# --------------------------------------------------------------------------------------------------- the miss


def miss(signature: Signature, options: Options, values: tuple[Any, ...], donate: bool) -> Entry:
    """Lower, compile and load one launch. Raises what PyTorch's meta kernel raises for wrong arguments."""
    arguments_by_name = dict(zip((a.name for a in signature.schema.arguments), values, strict=True))
    module = OpModule(signature, options, arguments_by_name, donate)
    logical = module.key()
    origin = (signature.name, *capture())
    try:
        compile_options = options.compile_options
        executable = runtime().cache.get(logical, runtime().compiler(compile_options), compile_options, module.build)
    except PjrtError as error:
        raise launch_failure(error, origin) from error
    return Entry(
        launch=_launcher(executable, options),
        executable=executable,
        key=logical,
        outputs=module.wraps(),
        layouts=module.written_layouts(),
        base=module.needs_base,
        draws=module.draws,
        numbers=module.numbers,
    )


def _launcher(executable: Executable, options: Options) -> Launch:
    if options.mode is not EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING:
        return executable.launch
    # Debug waits, so that a failure of the device arises at the op.
    execute = executable.execute

    def blocking(arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        results = execute(arguments)
        for result in results:
            result.block_until_ready()
        runtime().meter.wait()
        return results

    return blocking


@dataclasses.dataclass(slots=True)
class _Tensor:
    """A tensor argument: its view over its cell's value; ``cell`` is the cell's identity, None for a 0-d CPU operand."""

    view: View
    layout: Layout
    nbytes: int
    cell: int | None = None

    @property
    def foreign(self) -> bool:
        return self.cell is None

    @property
    def whole(self) -> bool:
        """Contiguous over its whole storage: the device reuses the memory of such a target, and of no other."""
        view = self.view
        return (
            view.offset == 0
            and view.dtype == self.layout.dtype
            and view.numel == self.layout.numel
            and view.stride == contiguous_strides(view.size)
        )


class OpModule:
    """One op with everything that its arguments decide: specs, key, and its StableHLO. Holds no tensor of the device."""

    def __init__(self, signature: Signature, options: Options, values: dict[str, Any], donate: bool) -> None:
        self.signature = signature
        self.options = options
        self.donate = donate
        self.tensors: dict[str, Any] = {}
        for argument in signature.schema.arguments:
            if argument_kind(argument, signature.row).startswith("tensor"):
                self.tensors[argument.name] = _describe(signature.name, values[argument.name])
        self.meta = {name: _to_meta(value) for name, value in values.items()}
        self.values: dict[str, Any] = {
            name: None if name in self.tensors or isinstance(value, torch.Tensor) else value
            for name, value in values.items()
        }
        self.numbers: tuple[int, ...] = ()
        self.outputs = self._output_specs()
        self._check_targets()
        self.draws = signature.row.draws(self._draw_specs(), self.meta) if signature.row.draws else 0
        self.needs_base = not signature.row.reads and any(
            views.covering_layout(t.view, t.nbytes) is None for t in self._target_tensors()
        )

    # Specs -----------------------------------------------------------------------------------------------

    def _output_specs(self) -> tuple[OutputSpec | None, ...]:
        signature = self.signature
        if signature.row.meta is not None:
            result = signature.row.meta(**self.meta)
        elif signature.fresh or signature.inplace:
            result = self._run_meta()
        else:
            return ()
        if not signature.fresh:
            return ()
        results = list(result) if isinstance(result, tuple | list) else [result]
        self.numbers = tuple(int(results[i]) for i in signature.numbers)
        if not signature.fresh_list:
            results = [results[i] for i in signature.fresh]
        room = signature.row.room(self.meta) if signature.row.room else 0
        return tuple(None if t is None else OutputSpec(tuple(t.shape), t.stride(), t.dtype, room) for t in results)

    def _run_meta(self) -> Any:
        """PyTorch's own meta kernel: sizes, strides, dtypes, and the error for wrong arguments."""
        arguments = self.signature.schema.arguments
        positional = [_on_meta(a, self.meta[a.name]) for a in arguments if not a.kwarg_only]
        keywords = {a.name: _on_meta(a, self.meta[a.name]) for a in arguments if a.kwarg_only}
        try:
            if self.signature.inplace:
                self._check_cast(positional, keywords)
            result = self.signature.op(*positional, **keywords)
        except Exception as error:  # any: it is told of its line and raised again
            error.add_note(f"  {self.signature.name} issued at {describe(*capture())}")
            raise
        fresh = self.signature.fresh and isinstance(result, torch.Tensor)
        if fresh and not result.numel() and torch.Tag.pointwise in self.signature.op.tags:
            return _as_on_the_cpu(self.signature.op, positional, keywords, result)
        return result

    def _check_cast(self, positional: list[Any], keywords: dict[str, Any]) -> None:
        """Raise RuntimeError, in PyTorch's words, for a result that the target's dtype cannot hold.

        Python meta kernels of in-place ops leave this out (``bools.mul_(2)``).
        """
        functional = self.signature.functional
        if functional is self.signature.op or not self.signature.elementwise:
            return
        result = functional(*positional, **keywords)
        target = self.meta[self.signature.targets[0]]
        if not torch.can_cast(result.dtype, target.dtype):
            raise RuntimeError(
                f"result type {scalar_type(result.dtype)} can't be cast to the desired output type "
                f"{scalar_type(target.dtype)}"
            )

    def _target_tensors(self) -> list[_Tensor]:
        found: list[_Tensor] = []
        for name in self.signature.targets:
            described = self.tensors[name]
            found += described if isinstance(described, list) else [described] if described is not None else []
        return found

    def _check_targets(self) -> None:
        for tensor in self._target_tensors():
            if views.overlaps(tensor.view):
                raise RuntimeError(
                    f"{op_label(self.signature.name)}(): in-place operations on overlapping views are undefined "
                    f"behavior and are not supported\n  issued at {describe(*capture())}\n"
                    "  clone() or contiguous() the tensor first"
                )
        for spec in self.outputs:
            if spec is not None:
                check_supported(spec.dtype, op_label(self.signature.name))

    def _draw_specs(self) -> tuple[OutputSpec | None, ...]:
        targets = tuple(OutputSpec(t.view.size, t.view.stride, t.view.dtype) for t in self._target_tensors())
        return self.outputs or targets

    def wraps(self) -> list[tuple[Layout, int, torch.dtype, tuple[int, ...], tuple[int, ...]] | None]:
        made: list[tuple[Layout, int, torch.dtype, tuple[int, ...], tuple[int, ...]] | None] = []
        for spec in self.outputs:
            if spec is None:
                made.append(None)
                continue
            nbytes = max(span(spec.size, spec.stride), spec.room) * spec.dtype.itemsize
            made.append((layout_of(_dense_dims(spec), spec.dtype), nbytes, spec.dtype, spec.size, spec.stride))
        return made

    def written_layouts(self) -> list[Layout]:
        layouts: dict[int | None, Layout] = {}
        written = []
        for tensor in self._target_tensors():
            layout = views.covering_layout(tensor.view, tensor.nbytes) or layouts.get(tensor.cell, tensor.layout)
            layouts[tensor.cell] = layout
            written.append(layout)
        return written

    def _shared_cells(self) -> tuple[int, ...]:
        """Which targets are views of one storage: for each the first target with its cell."""
        first: dict[int | None, int] = {}
        return tuple(first.setdefault(t.cell, index) for index, t in enumerate(self._target_tensors()))

    # Key -------------------------------------------------------------------------------------------------

    def key(self) -> Key:
        shapeless, dimensions = self.key_texts()
        return runtime().key(shapeless, dimensions, self.options.canonical())

    def key_texts(self) -> tuple[str, str]:
        """What the shapeless and the dimensions key are made of."""
        shapeless, dimensions = [self.signature.name, f"donate={self.donate:d}"], []
        for argument in self.signature.schema.arguments:
            value = self.values[argument.name]
            kind = argument_kind(argument, self.signature.row)
            if kind.startswith("tensor"):
                described = self.tensors[argument.name]
                for tensor in described if isinstance(described, list) else [described]:
                    shapeless.append(_shapeless(argument.name, tensor))
                    dimensions.append(
                        str(tensor and (tensor.view.size, tensor.view.stride, tensor.view.offset, tensor.layout.dims))
                    )
            elif kind == "scalars":
                shapeless.append(f"{argument.name}:{[type(v).__name__ for v in value]}")
            elif kind.startswith("scalar"):
                default = argument.has_default_value() and value == argument.default_value
                shapeless.append(f"{argument.name}:{'default' if default else type(value).__name__}")
            elif kind == "shape":
                like = self.meta[argument.name]
                shapeless.append(f"{argument.name}:{dtype_name(like.dtype)}")
                dimensions.append(str((tuple(like.shape), like.stride())))
            elif kind == "static":
                shapeless.append(f"{argument.name}={value}")
        shared = self._shared_cells()
        if len(set(shared)) != len(shared):
            shapeless.append(f"shared={shared}")
        return ";".join(shapeless), ";".join(dimensions)

    def parts(self) -> tuple[str, ...]:
        """The op as the device's graphs show it: reads of views, the op, writes into views."""
        signature = self.signature
        reads = [
            READ
            for name, described in self.tensors.items()
            if name not in signature.targets or signature.row.reads
            for tensor in _as_list(described)
            if tensor is not None and not tensor.foreign and not self._plain(name, tensor)
        ]
        writes = [WRITE for t in self._target_tensors() if views.covering_layout(t.view, t.nbytes) is None]
        main = [display(signature.name)]
        if signature.name in _COPIES and (reads or writes) and len({t.view.dtype for t in self._flat()}) == 1:
            main = []  # the value itself, seen through views
        partly = any(spec is not None and (spec.room or _gapped(spec)) for spec in self.outputs)
        room = ["empty", WRITE] if partly else []
        return (*reads, *main, *room, *writes)

    def _plain(self, name: str, tensor: _Tensor) -> bool:
        view = tensor.view
        if name == "indices" and view.offset == 0 and view.numel == tensor.layout.numel:
            return _contiguous(view)  # a mask's positions, which the device's kernel finds itself
        spread = self.signature.name == "aten.copy_.default" and view.size != self._target_tensors()[0].view.size
        whole = view.offset == 0 and view.size == tensor.layout.dims and view.dtype == tensor.layout.dtype
        return whole and not spread and _contiguous(view)

    def _flat(self) -> list[_Tensor]:
        found = [t for described in self.tensors.values() for t in _as_list(described) if t is not None]
        fresh = [spec.dtype for spec in self.outputs if spec is not None]
        return found + [_Tensor(View((), (), 0, dtype), layout_of((), dtype), dtype.itemsize) for dtype in fresh]

    def repeat_text(self) -> str:
        """The sizes of operands and results: with the shapeless key, what the repeated-op rule takes for the same op."""
        flat = [t for described in self.tensors.values() for t in _as_list(described)]
        return str([t and t.view.size for t in flat] + self.result_shapes())

    @staticmethod
    def _absent(argument: Any, value: Any) -> bool:
        """Whether a scalar is no argument of the launch: not given, or the schema's default."""
        return value is None or (argument.has_default_value() and bool(value == argument.default_value))

    def result_shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and dtypes of the results: fresh ones as they are, written ones as their views."""
        fresh = [(spec.size, spec.dtype) for spec in self.outputs if spec is not None]
        return fresh + [(t.view.size, t.view.dtype) for t in self._target_tensors()]

    # Module ----------------------------------------------------------------------------------------------

    def build(self) -> bytes:
        precision = self.options.precision
        builder = Builder(self.signature.name, None if precision is None else precision.name)  # type: ignore[arg-type]  # the enum's names
        results = self.emit(builder, builder.argument)
        return builder.finish(results, self._reused(len(results)))

    def _reused(self, count: int) -> list[int]:
        """Which of ``count`` results the device, too, puts where the tensor they replace was. The host donates more."""
        targets = self._target_tensors()
        shared = self._shared_cells()
        if not self.donate or len(set(shared)) != len(shared):
            return []
        first = count - len(targets)
        return [first + index for index, target in enumerate(targets) if target.whole]

    def emit(self, builder: Builder, take: Take) -> list[Value]:
        """Emit the op; gives its results in the dims their cells take.

        ``take(shape, dtype, donated=…)`` gives the values in the order of a launch's arguments.
        """
        signature = self.signature
        bases: dict[str, list[Value]] = {}
        inputs = [self._input(take, argument, bases) for argument in signature.schema.arguments]
        if self.needs_base:
            for name in signature.targets:
                bases[name] = [self._base(take, t) for t in _as_list(self.tensors[name])]
        state = take((3,), torch.uint64) if signature.row.draws else None
        names = [a.name for a in signature.schema.arguments]
        specs = self.outputs or self._draw_specs()
        context = Context(builder, specs, {n: self.meta[n] for n in names}, state)
        emitted = signature.row.emit(context, *inputs)
        results = [emitted] if isinstance(emitted, Value) or emitted is None else list(emitted)
        return self._finished(results, bases)

    def _input(self, take: Take, argument: Any, bases: dict[str, list[Value]]) -> Any:
        name = argument.name
        value = self.values[name]
        kind = argument_kind(argument, self.signature.row)
        if kind.startswith("tensor"):
            described = self.tensors[name]
            written = name in self.signature.targets
            if written and not self.signature.row.reads:
                return None
            given = [self._read(take, t, written, bases.setdefault(name, [])) for t in _as_list(described)]
            return given if isinstance(described, list) else given[0]
        if kind == "scalars":
            return [take((), _scalar_dtype(v)) for v in value]
        if kind.startswith("scalar"):
            return value if self._absent(argument, value) else take((), _scalar_dtype(value))
        return value

    def _base(self, take: Take, tensor: _Tensor) -> Value:
        return take(tensor.layout.dims, tensor.layout.dtype, donated=self.donate)

    def _read(self, take: Take, tensor: _Tensor | None, written: bool, bases: list[Value]) -> Value | None:
        if tensor is None:
            return None
        if tensor.foreign:
            return take((), tensor.layout.dtype)
        donated = written and self.donate
        base = take(tensor.layout.dims, tensor.layout.dtype, donated=donated)
        bases.append(base)
        return views.read(base, tensor.view)

    def _finished(self, results: list[Value | None], bases: dict[str, list[Value]]) -> list[Value]:
        """Results in the dims their cells take: fresh ones in storage order, written ones as whole new values."""
        count = len(self.outputs)
        finished = []
        for index, (spec, value) in enumerate(zip(self.outputs, results, strict=False)):
            if spec is None:
                continue
            _check(self.signature.name, index, spec, value)
            assert value is not None
            finished.append(_in_storage_order(value, spec))
        updates = iter(results[count:])
        # Targets may be views of one storage: each writes into what the one before it left.
        latest: dict[int | None, tuple[Value, Layout]] = {}
        for name in self.signature.targets:
            for index, tensor in enumerate(t for t in _as_list(self.tensors[name]) if t is not None):
                update = next(updates)
                assert update is not None
                update = update.convert(tensor.view.dtype).broadcast(tensor.view.size)
                own = (bases[name][index] if bases.get(name) else None, tensor.layout)
                base, layout = latest.get(tensor.cell, own)
                latest[tensor.cell] = views.write(base, layout, tensor.view, update, tensor.nbytes)
                finished.append(latest[tensor.cell][0])
        return finished


def _contiguous(view: View) -> bool:
    expected = contiguous_strides(view.size)
    return all(n == 1 or s == e for n, s, e in zip(view.size, view.stride, expected, strict=True))


def _as_list(described: Any) -> list[Any]:
    return described if isinstance(described, list) else [described]


def _describe(op: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_describe(op, item) for item in value]
    if value is None:
        return None
    if not isinstance(value, torch.Tensor) or value.device.type == "cpu":
        dtype = _foreign_dtype(value)
        return _Tensor(View((), (), 0, dtype), layout_of((), dtype), dtype.itemsize)
    check_supported(value.dtype, op_label(op))
    from emutpu.backend.storage import cell_of

    cell = cell_of(value)
    assert cell is not None
    view = View(tuple(value.shape), value.stride(), int(value.storage_offset()), value.dtype)
    if view.numel and (view.offset + span(view.size, view.stride)) * view.dtype.itemsize > cell.nbytes:
        raise IndexError(
            f"{op_label(op)}(): expected a tensor within its storage of {cell.nbytes} bytes, got {view.numel} elements of "
            f"{dtype_name(view.dtype)} at offset {view.offset}\n  issued at {describe(*capture())}\n"
            "  the storage was resized (untyped_storage().resize_): grow it before the tensor is used"
        )
    return _Tensor(view, cell.layout, cell.nbytes, id(cell))


def _foreign_dtype(value: Any) -> torch.dtype:
    if not isinstance(value, torch.Tensor):
        return _scalar_dtype(value)
    return torch.complex64 if value.dtype == torch.complex128 else value.dtype


def _scalar_dtype(value: Any) -> torch.dtype:
    for kind, dtype in (
        (bool, torch.bool),
        (int, torch.int64),
        (float, torch.float64),
        (complex, torch.complex64),
    ):
        if isinstance(value, kind):
            return dtype
    raise TypeError(f"not a scalar: {value!r}")


def _shapeless(name: str, tensor: _Tensor | None) -> str:
    if tensor is None:
        return f"{name}:none"
    return f"{name}:{dtype_name(tensor.view.dtype)}<{dtype_name(tensor.layout.dtype)}{'!' if tensor.foreign else ''}"


def _to_meta(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return None  # kept by nobody: its state comes with each launch
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu":
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, list | tuple) and value and any(isinstance(v, torch.Tensor) for v in value):
        return [_to_meta(v) for v in value]
    return value


def _on_meta(argument: Any, value: Any) -> Any:
    """Factory arguments name our device; a generator of ours means nothing to a meta kernel. A CPU scalar that is filled in
    is one of the device's to it: its Python form takes those beside real devices alone.
    """
    kind = str(argument.type)
    if "Device" in kind and argument.name == "device":
        return torch.device("meta")
    if argument.name == "value" and isinstance(value, torch.Tensor):
        return value.to("meta")
    return None if "Generator" in kind else value


def _as_on_the_cpu(
    op: torch._ops.OpOverload[..., Any], positional: list[Any], keywords: dict[str, Any], on_meta: torch.Tensor
) -> torch.Tensor:
    """A result without elements as the CPU kernel gives it; ``on_meta`` where that has none for the dtype.

    PyTorch's Python meta kernels, which stand before its compiled ones, make every such result contiguous; the compiled
    ones order its strides by the operands', on every device. There is nothing to compute.
    """
    arguments, named = tree_map(_off_meta, (positional, keywords))
    try:
        result: torch.Tensor = op(*arguments, **named)
    except NotImplementedError:
        return on_meta
    return result


def _off_meta(value: Any) -> Any:
    """Memory for a meta tensor: never written nor read, so it costs address space alone."""
    if not isinstance(value, torch.Tensor) or value.device.type != "meta":
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _dense_dims(spec: OutputSpec) -> tuple[int, ...]:
    dims = (spec.room,) if spec.room else physical_dims(spec.size, spec.stride)
    return dims if dims is not None else (span(spec.size, spec.stride),)


def _in_storage_order(value: Value, spec: OutputSpec) -> Value:
    if value.numel == 0:
        return value.reshape(_dense_dims(spec))
    if spec.room:
        return value.reshape((value.numel,)).pad([0], [spec.room - value.numel])
    if _gapped(spec):
        return _with_gaps(value, spec)
    return value.transpose(storage_order(spec.size, spec.stride))


def _gapped(spec: OutputSpec) -> bool:
    """Whether a result does not fill its storage: the scatter family keeps the strides of what it copies."""
    return 0 not in spec.size and physical_dims(spec.size, spec.stride) is None


def _with_gaps(value: Value, spec: OutputSpec) -> Value:
    view = views.View(spec.size, spec.stride, 0, spec.dtype)
    if views.overlaps(view):
        raise AssertionError(f"a result that overlaps itself: {spec}")
    dims = _dense_dims(spec)
    empty = value.builder.full(0, dims, spec.dtype)
    return views.write(empty, layout_of(dims, spec.dtype), view, value, dims[0] * spec.dtype.itemsize)[0]


def _check(op: str, index: int, spec: OutputSpec, value: Value | None) -> None:
    """A lowering that disagrees with PyTorch's meta kernel is a defect of ours: say so at once."""
    if value is None or value.shape != spec.size or value.dtype != spec.dtype:
        raise AssertionError(f"the lowering of {op} gives {value} as result {index}, PyTorch says {spec}")


def dtype_of(buffer: Buffer) -> torch.dtype:
    """The torch dtype of a buffer."""
    return torch_dtype(buffer.dtype)
