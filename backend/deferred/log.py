"""What the regions were: a bounded ring of executions, resolved to plain records only when somebody asks."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from emutpu.backend.cache import COMPILED
from emutpu.backend.dtypes import dtype_name
from emutpu.backend.location import Location, Origin, locate
from emutpu.backend.statistics import RegionStatistics

if TYPE_CHECKING:
    from emutpu.backend.deferred.plan import Plan, Step
    from emutpu.backend.deferred.region import Node
    from emutpu.backend.deferred.values import Batch
    from emutpu.backend.keys import Key
    from emutpu.backend.pjrt import Buffer

__all__ = [
    "LOG",
    "Execution",
    "Observer",
    "OpRecord",
    "RegionRecord",
    "ValueRecord",
    "input_records",
    "op_record",
]

_LENGTH = 10_000


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRecord:
    """An input or output of a region."""

    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OpRecord:
    """An op of a region. ``operands`` are numbers of the region's values (inputs as ``~n``); ``location`` the user's line."""

    name: str
    parts: tuple[str, ...]
    operands: tuple[int, ...]
    results: tuple[ValueRecord, ...]
    location: Location | None


@dataclasses.dataclass(frozen=True, slots=True)
class RegionRecord:
    """One launch of a region. ``tier`` of the compile cache had it, 0 where it was compiled, which is no ``hit``;
    ``seconds`` is the wall time of loading or compiling it, 0 in tier 1.

    ``undefined`` results of ops that give outputs are outputs too on the device, empty ones.
    """

    index: int
    reason: str
    trigger: Location | None
    ops: tuple[OpRecord, ...]
    inputs: tuple[ValueRecord, ...]
    outputs: tuple[ValueRecord, ...]
    undefined: int
    output_numbers: tuple[int, ...]
    live: tuple[bool, ...]
    key: Key
    tier: int
    seconds: float

    @property
    def hit(self) -> bool:
        """True unless it was compiled."""
        return self.tier != COMPILED


class Execution:
    """A launch as the engine notes it, without resolving anything."""

    __slots__ = ("index", "key", "origins", "reason", "seconds", "step", "tier", "trigger")

    def __init__(
        self,
        origins: Sequence[Origin],
        step: Step,
        reason: str,
        trigger: Origin,
        key: Key,
        tier: int,
        seconds: float,
    ) -> None:
        self.index = next(_indices)
        self.origins = origins
        self.step = step
        self.reason = reason
        self.trigger = trigger
        self.key = key
        self.tier = tier
        self.seconds = seconds

    @property
    def hit(self) -> bool:
        """True unless it was compiled."""
        return self.tier != COMPILED

    def resolve(self) -> RegionRecord:
        """With lines, shapes and dtypes."""
        step = self.step
        nodes = step.region.key.nodes
        ops = tuple(op_record(node, self.origins[k]) for node, k in zip(nodes, step.nodes, strict=True))
        values = [value for op in ops for value in op.results]
        numbers = step.region.key.outputs
        return RegionRecord(
            index=self.index,
            reason=self.reason,
            trigger=locate(*self.trigger[1:]),
            ops=ops,
            inputs=input_records(nodes),
            outputs=tuple(values[n] for n in numbers),
            undefined=_undefined(nodes, frozenset(numbers)),
            output_numbers=numbers,
            live=tuple(v in step.live for v in step.outputs),
            key=self.key,
            tier=self.tier,
            seconds=self.seconds,
        )


def op_record(node: Node, origin: Origin) -> OpRecord:
    """An op of a region with its line."""
    results = tuple(ValueRecord(dtype_name(dtype), size) for size, dtype in node.op.results)
    return OpRecord(node.op.name, node.op.parts, node.operands, results, locate(*origin[1:]))


def _undefined(nodes: Sequence[Node], outputs: frozenset[int]) -> int:
    """How many undefined results the ops have whose values are outputs."""
    count = first = 0
    for node in nodes:
        values = range(first, first + len(node.op.layouts))
        first = values.stop
        count += node.op.undefined if outputs & set(values) else 0
    return count


def input_records(nodes: Sequence[Node]) -> tuple[ValueRecord, ...]:
    """Dtype and shape of a region's inputs, in their order."""
    found: dict[int, ValueRecord] = {}
    for node in nodes:
        for number, (shape, dtype) in zip(node.operands, node.op.operands(), strict=True):
            if number < 0 and ~number not in found:
                found[~number] = ValueRecord(dtype_name(dtype), shape)
    return tuple(found[i] for i in range(len(found)))


class Observer(Protocol):
    """Who wants to see every materialisation while it happens (:mod:`emutpu.backend.deferred.recorder`)."""

    def planned(self, batch: Batch, plan: Plan, trigger: Origin) -> None:
        """Before the regions of a plan are launched; the pending values are still held by whoever holds them."""
        ...

    def launched(self, execution: Execution, arguments: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        """After one of its regions was."""
        ...


class _Log:
    """The last launches, oldest first, and counts of all. ``observer`` is None unless somebody watches."""

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self._ring: deque[Execution] = deque(maxlen=_LENGTH)
        self._counts: dict[str, list[int]] = {}
        self._lock = threading.RLock()

    def add(self, execution: Execution) -> None:
        """Note a launch."""
        self._ring.append(execution)
        with self._lock:
            counts = self._counts.setdefault(execution.reason, [0, 0, 0])
            counts[0] += 1
            counts[1] += len(execution.step.nodes)
            counts[2] += execution.hit

    def statistics(self) -> tuple[RegionStatistics, ...]:
        """Counts since the start, by reason, the most frequent first."""
        with self._lock:
            rows = [RegionStatistics(reason, *counts) for reason, counts in self._counts.items()]
        return tuple(sorted(rows, key=lambda row: (-row.count, row.reason)))

    def records(self, since: int = 0) -> list[RegionRecord]:
        """All launches from index ``since`` on."""
        return [execution.resolve() for execution in list(self._ring) if execution.index >= since]

    def clear(self) -> None:
        """Forget them; the numbering goes on."""
        self._ring.clear()

    @property
    def launched(self) -> int:
        """How many launches were noted since the start."""
        ring = self._ring
        return ring[-1].index + 1 if ring else 0


_indices = itertools.count()
LOG = _Log()
