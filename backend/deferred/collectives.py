"""Collectives in DeferAndFuse's list: always done, in order, each a region of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from emutpu.backend.deferred.ops import DeferredOp, repeat_number
from emutpu.backend.deferred.values import operand
from emutpu.backend.location import capture

if TYPE_CHECKING:
    from emutpu.backend.absent_ranks import Charge
    from emutpu.backend.cell import Cell, Layout
    from emutpu.backend.hlo import Builder, Value
    from emutpu.backend.pjrt import Buffer
    from emutpu.backend.strict import Take

__all__ = ["record"]


def record(charge: Charge, targets: Sequence[Cell], sources: Sequence[Cell]) -> None:
    """Record a collective that reads both and gives each target a new value: its old one, for no other rank is there."""
    values = [operand(cell) for cell in (*targets, *sources)]
    origin = (charge.name, *capture())
    made = _op(charge, tuple(cell.layout for cell in targets), tuple(cell.layout for cell in sources))
    for cell, value in zip(targets, made.record(values, origin), strict=True):
        cell.write(value, cell.layout, origin)


def _op(charge: Charge, targets: tuple[Layout, ...], sources: tuple[Layout, ...]) -> DeferredOp:
    key = charge, targets, sources
    made = _ops.get(key)
    if made is None:
        layouts = (*targets, *sources)

        def done(values: Sequence[Buffer]) -> Sequence[Buffer]:
            charge()
            return values[: len(targets)]

        def emit(builder: Builder, take: Take) -> list[Value]:
            return [take(layout.dims, layout.dtype) for layout in layouts][: len(targets)]

        text = f"{charge};{len(targets)};{[str(layout.dtype) for layout in layouts]}"
        dims = str([layout.dims for layout in layouts])
        made = _ops[key] = DeferredOp(
            charge.name,
            emit,
            targets,
            (text, dims),
            results=[(layout.dims, layout.dtype) for layout in targets],
            parts=[charge.name],
            repeat=repeat_number(f"{text}|{dims}"),
            collective=done,
        )
    return made


_ops: dict[tuple[Charge, tuple[Layout, ...], tuple[Layout, ...]], DeferredOp] = {}
