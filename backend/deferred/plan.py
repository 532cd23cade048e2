"""Which recorded ops are computed, and as which regions.

The rules are those that recordings of TorchTPU 0.2.0 show (``docs/regions.md``): everything live is computed, dead ops
never; the list stays one region when everything that has to be given out is live anyway, and is cut after every op that
has to give something out when one of them is dead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from emutpu.backend.deferred.region import Node, Region, RegionKey, region

if TYPE_CHECKING:
    from emutpu.backend.deferred.ops import DeferredOp
    from emutpu.backend.deferred.trace import Event, State

__all__ = ["Plan", "Region", "Step", "make_plan", "recorded_region"]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One region of a plan.

    ``nodes``  positions of its ops in the batch; ``inputs`` and ``outputs`` are numbers of values of the batch, inputs of
    the batch itself as ``~n``; ``live`` are the outputs that somebody holds.
    """

    region: Region
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    live: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The regions of a batch, in order; ``dead`` counts the ops that are never computed."""

    steps: tuple[Step, ...]
    dead: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Recorded:
    """A recorded op at its place: the numbers of its operands, and of its values."""

    op: DeferredOp
    operands: Sequence[int]
    first: int

    @property
    def values(self) -> range:
        return range(self.first, self.first + len(self.op.layouts))


def make_plan(state: State, marks: bytes, *, whole: bool) -> Plan:
    """Decide for the batch that ended in ``state``; ``whole`` forbids cuts (an aggressive heuristic)."""
    recorded = _recorded(state.events())
    live = [node.op.collective is not None or any(marks[v] for v in node.values) for node in recorded]
    needed, last_use = _needed(recorded, live)
    order = sorted(needed)
    cuts = _cuts(live, needed, last_use)
    outputs = {k for k in needed if live[k]}
    ends = _beside_collectives(recorded, order)
    if not whole and cuts != outputs:
        outputs = cuts
        ends |= cuts
    pieces = _cut(order, ends)
    outputs |= {k for piece in pieces for k in piece if last_use.get(k, -1) > piece[-1]}
    steps = tuple(_step(recorded, piece, outputs, marks) for piece in pieces)
    return Plan(steps, len(recorded) - len(needed))


def recorded_region(
    state: State, values: Sequence[int]
) -> tuple[Region, tuple[int, ...], tuple[int, ...], dict[int, int]]:
    """All that ``values`` need as one region: the region, its ops' positions, its inputs, each value's result number."""
    recorded = _recorded(state.events())
    wanted = set(values)
    live = [any(v in wanted for v in node.values) for node in recorded]
    needed, _ = _needed(recorded, live)
    marks = bytes(v in wanted for v in range(sum(len(node.op.layouts) for node in recorded)))
    step = _step(recorded, sorted(needed), {k for k in needed if live[k]}, marks)
    return step.region, step.nodes, step.inputs, {value: n for n, value in enumerate(step.outputs)}


def _recorded(events: Sequence[Event]) -> list[_Recorded]:
    found = []
    first = 0
    for op, *operands in events:
        found.append(_Recorded(op, operands, first))
        first += len(op.layouts)
    return found


def _needed(recorded: Sequence[_Recorded], live: Sequence[bool]) -> tuple[set[int], dict[int, int]]:
    """Ops that are live or feed one that is, and for each the last needed op that reads it."""
    producer = {value: k for k, node in enumerate(recorded) for value in node.values}
    needed: set[int] = set()
    last_use: dict[int, int] = {}
    for k in range(len(recorded) - 1, -1, -1):
        if not live[k] and k not in last_use:
            continue
        needed.add(k)
        for operand in recorded[k].operands:
            if operand >= 0:
                last_use.setdefault(producer[operand], k)
    return needed, last_use


def _cuts(live: Sequence[bool], needed: set[int], last_use: dict[int, int]) -> set[int]:
    """Walk backwards: a live op is a cut, and so is a dead one that is read beyond the cut behind it."""
    cuts: set[int] = set()
    behind = len(live)
    for k in sorted(needed, reverse=True):
        if live[k] or last_use[k] > behind:
            cuts.add(k)
            behind = k
    return cuts


def _beside_collectives(recorded: Sequence[_Recorded], order: Sequence[int]) -> set[int]:
    """Where the list is cut because a collective comes, or has just come."""
    found: set[int] = set()
    for before, k in zip([-1, *order], order, strict=False):
        if recorded[k].op.collective is not None:
            found |= {before, k}
    return found


def _cut(nodes: Sequence[int], ends: set[int]) -> list[list[int]]:
    pieces: list[list[int]] = [[]]
    for k in nodes:
        pieces[-1].append(k)
        if k in ends:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _step(recorded: Sequence[_Recorded], piece: Sequence[int], outputs: set[int], marks: bytes) -> Step:
    local: dict[int, int] = {}
    inputs: list[int] = []
    nodes: list[Node] = []
    count = 0
    for k in piece:
        operands = []
        for operand in recorded[k].operands:
            if operand not in local:
                local[operand] = ~len(inputs)
                inputs.append(operand)
            operands.append(local[operand])
        nodes.append(Node(recorded[k].op, tuple(operands)))
        for value in recorded[k].values:
            local[value] = count
            count += 1
    given = [k for k in piece if k in outputs]
    values = tuple(value for k in given for value in recorded[k].values)
    key = RegionKey(tuple(nodes), tuple(local[v] for v in values))
    return Step(region(key), tuple(piece), tuple(inputs), values, tuple(v for v in values if marks[v]))
