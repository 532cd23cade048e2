"""Ops with a program inside, recorded as one op of a region: ``scan`` as a ``stablehlo.while``; and the barrier that keeps
what is recomputed apart from what it was first computed with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import fx

from emutpu.backend.cell import Cell, layout_of
from emutpu.backend.deferred.capture import Program
from emutpu.backend.deferred.ops import DeferredOp
from emutpu.backend.deferred.values import Placeholder
from emutpu.backend.hlo import Builder, Value
from emutpu.backend.pjrt import Buffer
from emutpu.backend.storage import cell_of, contiguous_strides, wrap
from emutpu.backend.strict import Take

__all__ = ["Body", "BodyOf", "CannotLoop", "barrier", "scan"]

Spec: TypeAlias = tuple[tuple[int, ...], torch.dtype]
_BARRIER = "tpu._optimization_barrier"


class CannotLoop(RuntimeError):
    """A body that cannot be the body of a loop on the device: it is recorded once for each step instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A subgraph as a region. ``arguments`` are what stood for its arguments, ``results`` the shapes and dtypes of what it
    gives (None where that is no tensor). Everything is row-major.
    """

    program: Program
    arguments: tuple[Placeholder, ...]
    results: tuple[Spec | None, ...]

    @property
    def extra(self) -> list[Buffer]:
        """What the body takes beside its arguments: scalars, constants."""
        own = {id(argument) for argument in self.arguments}
        return [value for value in self.program.inputs if id(value) not in own]

    def emit(self, builder: Builder, arguments: Sequence[Value], extra: Sequence[Value]) -> list[Value]:
        """The results that are tensors, for values of the arguments and of :attr:`extra`."""
        given = {id(stand_in): value for stand_in, value in zip(self.arguments, arguments, strict=True)}
        rest = iter(extra)
        inputs = [given[id(value)] if id(value) in given else next(rest) for value in self.program.inputs]
        made = self.program.region.emit(builder, inputs, self.program.origins)
        return [made[number] for number in self.program.outputs if isinstance(number, int)]


BodyOf = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Body]


def scan(
    body_of: BodyOf,
    combine: fx.GraphModule,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
) -> tuple[torch.Tensor | None, ...]:
    """``torch._higher_order_ops.scan`` over dim 0 of ``xs``: the last carry, then the stacked results of the steps.

    Raises CannotLoop for a body that draws random numbers, takes other things than tensors, or makes no step.
    """
    given = [*init, *xs, *additional]
    if any(not isinstance(value, torch.Tensor) for value in given) or not xs or not xs[0].shape[0]:
        raise CannotLoop
    length = int(xs[0].shape[0])
    rows = [torch.empty(x.shape[1:], dtype=x.dtype, device="meta") for x in xs]
    body = body_of(combine, [*init, *rows, *additional])
    carried = [_spec(value) for value in init]
    if list(body.results[: len(init)]) != carried:
        raise CannotLoop
    stacked = [None if r is None else ((length, *r[0]), r[1]) for r in body.results[len(init) :]]
    made = [spec for spec in stacked if spec is not None]
    operands = [_spec(value) for value in given]
    counts = len(init), len(xs), len(made)

    def emit(builder: Builder, take: Take) -> list[Value]:
        values = [take(*spec) for spec in operands]
        extra = [take(tuple(b.shape), layout.dtype) for b, layout in zip(body.extra, extras, strict=True)]
        return _loop(builder, body, length, counts, values, made, extra)

    extras = [layout_of(tuple(buffer.shape), _dtype(buffer)) for buffer in body.extra]
    region = body.program.region
    inner = f"{region.texts[0]};{region.key.inputs};{body.program.outputs}"
    op = DeferredOp(
        "higher_order.scan",
        emit,
        [layout_of(*spec) for spec in (*carried, *made)],
        (f"scan[{inner}]{counts}", f"{length};{operands};{region.texts[1]}"),
        results=[*carried, *made],
        parts=["scan"],
    )
    results = iter(_record(op, given, body.extra, [*carried, *made]))
    last = [next(results) for _ in carried]
    return (*last, *(None if spec is None else next(results) for spec in stacked))


def _loop(
    builder: Builder,
    body: Body,
    length: int,
    counts: tuple[int, int, int],
    values: Sequence[Value],
    stacked: Sequence[Spec],
    extra: Sequence[Value],
) -> list[Value]:
    """The loop. It carries its number of the step, the carry, the stacked results so far, and what never changes."""
    carries, scanned, _ = counts
    fixed = [*values[carries:], *extra]
    start = builder.full(0, (), torch.int64)
    buffers = [builder.full(0, shape, dtype) for shape, dtype in stacked]
    state = [start, *values[:carries], *buffers, *fixed]

    def condition(step: Value, *_rest: Value) -> Value:
        return step < length

    def step_of(step: Value, *rest: Value) -> list[Value]:
        carry, rest = rest[:carries], rest[carries:]
        done, rest = rest[: len(stacked)], rest[len(stacked) :]
        rows = [_row(builder, x, step) for x in rest[:scanned]]
        others = rest[scanned : len(rest) - len(extra)]
        results = body.emit(builder, [*carry, *rows, *others], rest[len(rest) - len(extra) :])
        zero = builder.full(0, (), torch.int64)
        rows = [r.reshape((1, *r.shape)) for r in results[carries:]]
        added = [
            builder.dynamic_update_slice(buffer, row, [step, *[zero] * (row.ndim - 1)])
            for buffer, row in zip(done, rows, strict=True)
        ]
        return [step + 1, *results[:carries], *added, *rest]

    return builder.while_loop(state, condition, step_of)[1 : 1 + carries + len(stacked)]


def _row(builder: Builder, x: Value, step: Value) -> Value:
    zero = builder.full(0, (), torch.int64)
    sizes = (1, *x.shape[1:])
    return builder.dynamic_slice(x, [step, *[zero] * (x.ndim - 1)], sizes).reshape(x.shape[1:])


def barrier(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same values, of which the compiler may not know that they are: what is computed from them is not merged with what
    was computed from the tensors themselves. For a recording only.
    """
    specs = [_spec(tensor) for tensor in tensors]

    def emit(builder: Builder, take: Take) -> list[Value]:
        return builder.emit_many("stablehlo.optimization_barrier", [take(*spec) for spec in specs], specs)

    op = DeferredOp(
        _BARRIER,
        emit,
        [layout_of(*spec) for spec in specs],
        (_BARRIER, str(specs)),
        results=specs,
        parts=[_BARRIER],
    )
    return tuple(_record(op, tensors, [], specs))


def _record(
    op: DeferredOp, tensors: Sequence[torch.Tensor], extra: Sequence[Buffer], specs: Sequence[Spec]
) -> list[torch.Tensor]:
    cells = [_whole(tensor) for tensor in tensors]
    values: list[Any] = [cell.value for cell in cells]
    origin = (op.name, None, 0)
    made = op.record([*values, *extra], origin)
    results = []
    for value, (size, dtype) in zip(made, specs, strict=True):
        layout = layout_of(size, dtype)
        nbytes = layout.numel * dtype.itemsize
        results.append(wrap(value, layout, nbytes, dtype, size, contiguous_strides(size), origin))
    return results


def _whole(tensor: torch.Tensor) -> Cell:
    """A cell that holds the tensor's values row-major and nothing else."""
    cell = cell_of(tensor)
    size = tuple(tensor.shape)
    plain = (
        cell is not None
        and cell.value is not None
        and tensor.is_contiguous()
        and not tensor.storage_offset()
        and cell.layout is layout_of(size, tensor.dtype)
        and not (tensor.is_conj() or tensor.is_neg())
    )
    if not plain:
        cell = cell_of(tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))
    assert cell is not None
    return cell


def _spec(tensor: torch.Tensor) -> Spec:
    return tuple(tensor.shape), tensor.dtype


def _dtype(buffer: Buffer) -> torch.dtype:
    from emutpu.backend.dtypes import torch_dtype

    layout = getattr(buffer, "layout", None)
    if layout is not None:
        found: torch.dtype = layout.dtype
        return found
    return torch_dtype(buffer.dtype)
