"""What `emutpu regions` shows, recorded while the program runs: every launch, why its outputs are live, where inputs come from.

Switched on by the environment in the program's process only; nothing of it runs otherwise.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from emutpu.backend.deferred.holders import Holder, explain
from emutpu.backend.deferred.log import LOG, Execution
from emutpu.backend.deferred.plan import Plan, Step
from emutpu.backend.dtypes import dtype_name
from emutpu.backend.location import Location, Origin, locate
from emutpu.backend.runtime import runtime

if TYPE_CHECKING:
    from emutpu.backend.deferred.values import Batch
    from emutpu.backend.pjrt import Buffer, Client
    from emutpu.backend.wrapped import MeteredClient

__all__ = ["LIMIT", "Recorder", "start"]

Document = dict[str, Any]
LIMIT = 5000
"""Launches that are kept, the first ones."""


@dataclasses.dataclass(slots=True)
class _Flush:
    """One materialisation: the plan that is being done, and who holds the pending values."""

    number: int
    at: float
    dead: int
    origins: Sequence[Origin]
    holders: dict[int, list[Holder]]
    readers: dict[int, tuple[str, Origin]]


@dataclasses.dataclass(slots=True)
class _Launch:
    execution: Execution
    flush: _Flush
    at: float
    sources: list[tuple[int, int] | None]
    died: list[int | None]


class Recorder:
    """The observer. ``folder`` gets ``<pid>.json`` and the modules at exit; ``inputs`` also keeps what the first launch of
    every region took and gave, for a replay.
    """

    def __init__(self, folder: Path, *, inputs: bool = False) -> None:
        self.folder = folder
        self.inputs = inputs
        self.meter: MeteredClient | None = None
        self.started = time.perf_counter()
        self.launches: list[_Launch] = []
        self.dropped = 0
        self.flushes = 0
        self._flush: dict[int, _Flush] = {}
        self._explained: dict[tuple[int, Any], tuple[Plan, dict[int, list[Holder]]]] = {}
        self._made: dict[int, tuple[ref[Any], int, int]] = {}
        self._saved: set[str] = set()
        self._lock = threading.RLock()

    def metered(self, client: Client) -> Client:
        """The client, with its launches counted."""
        from emutpu.backend.wrapped import MeteredClient

        self.meter = MeteredClient(client)
        return self.meter

    # While the program runs ------------------------------------------------------------------------------

    def planned(self, batch: Batch, plan: Plan, trigger: Origin) -> None:
        with self._lock:
            number = self.flushes
            self.flushes += 1
            readers: dict[int, tuple[str, Origin]] = {}
            for step in plan.steps:
                for node, k in zip(step.region.key.nodes, step.nodes, strict=True):
                    for operand in node.operands:
                        if operand < 0 and step.inputs[~operand] >= 0:
                            readers.setdefault(step.inputs[~operand], (node.op.name, batch.origins[k]))
            self._flush[threading.get_ident()] = _Flush(
                number,
                time.perf_counter(),
                plan.dead,
                batch.origins,
                self._explain(batch, plan, trigger) if len(self.launches) < LIMIT else {},
                readers,
            )

    def _explain(self, batch: Batch, plan: Plan, trigger: Origin) -> dict[int, list[Holder]]:
        """Holders of the live outputs. A plan that is done again at the same line is not looked at again."""
        key = (id(plan), trigger)
        known = self._explained.get(key)
        if known is None:
            live = {slot: batch.references[slot]() for step in plan.steps for slot in step.live}
            held = {slot: pending for slot, pending in live.items() if pending is not None}
            del live
            last = batch.state.event[0]
            count = len(batch.marks)
            issuing = frozenset(range(count - len(last.layouts), count)) if trigger[0] == _HEURISTIC else frozenset()
            known = self._explained[key] = plan, explain(held, issuing)
        return known[1]

    def launched(self, execution: Execution, arguments: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        with self._lock:
            if len(self.launches) >= LIMIT:
                self.dropped += 1
                return
            index = len(self.launches)
            sources = [self._source(argument) for argument in arguments]
            died: list[int | None] = [None] * len(results)
            launch = _Launch(
                execution,
                self._flush[threading.get_ident()],
                time.perf_counter(),
                sources,
                died,
            )
            self.launches.append(launch)
            for n, result in enumerate(results):
                self._remember(result, index, n, died)
            if self.inputs:
                self._save(execution, arguments, results)

    def _source(self, argument: Buffer) -> tuple[int, int] | None:
        """Which launch made an argument, and as which of its results."""
        made = self._made.get(id(argument))
        return made[1:] if made is not None and made[0]() is argument else None

    def _remember(self, result: Buffer, launch: int, position: int, died: list[int | None]) -> None:
        def gone(_: Any) -> None:
            died[position] = self.flushes

        self._made[id(result)] = ref(result, gone), launch, position

    def _save(self, execution: Execution, arguments: Sequence[Buffer], results: Sequence[Buffer]) -> None:
        stem = str(execution.key)
        if stem in self._saved:
            return
        self._saved.add(stem)
        client = runtime().client
        for kind, buffers in (("input", arguments), ("output", results)):
            avals = [{"shape": list(buffer.shape), "dtype": buffer.dtype.name} for buffer in buffers]
            (self.folder / f"{stem}.{kind}s").write_text(json.dumps(avals), encoding="utf-8")
            for n, buffer in enumerate(buffers):
                array = np.asarray(client.to_host(buffer))
                # numpy's format has no bf16 nor fp8: those are stored as their bytes
                plain = array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)
                np.save(self.folder / f"{stem}.{kind}{n}.npy", plain)

    # When it has ended -----------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the recording and one module for every distinct region. Raises OSError."""
        modules: dict[str, str] = {}
        for launch in self.launches:
            stem = str(launch.execution.key)
            if stem not in modules:
                region = launch.execution.step.region
                modules[stem] = region.name
                origins = [launch.execution.origins[k] for k in launch.execution.step.nodes]
                (self.folder / f"{stem}.mlir").write_text(region.text(origins), encoding="utf-8")
        path = self.folder / f"{os.getpid()}.json"
        path.write_text(json.dumps(self.document()), encoding="utf-8")

    def document(self) -> Document:
        """Everything that was recorded, as plain values."""
        cache = runtime().cache
        describe = _Describer()
        statistics = runtime().statistics() if runtime().initialized else None
        return {
            "pid": os.getpid(),
            "mode": runtime().mode.name,
            "client": runtime().client.name if runtime().initialized else None,
            "launches": self.meter.launches if self.meter else 0,
            "buffers": self.meter.buffers if self.meter else 0,
            "bytes": self.meter.bytes if self.meter else 0,
            "compiles": cache.misses,
            "compile_seconds": cache.seconds,
            "peak_hbm_bytes": statistics.peak_hbm_bytes if statistics else 0,
            "ops": dict(statistics.ops) if statistics else {},
            "flushes": self.flushes,
            "dropped": self.dropped,
            "rank": int(os.environ.get("RANK", "0")) if os.environ.get("RANK", "0").isdigit() else None,
            "regions": [describe.launch(n, launch, self.started) for n, launch in enumerate(self.launches)],
            "issued": describe.issued(list({id(launch.flush): launch.flush for launch in self.launches}.values())),
        }


_HEURISTIC = "repeated_op_heuristic"


class _Describer:
    """Resolves launches to plain values; lines, and the shapes of a region, once."""

    def __init__(self) -> None:
        self._lines: dict[tuple[Any, int], Document | None] = {}
        self._shapes: dict[int, tuple[Step, list[list[Document]]]] = {}

    def launch(self, number: int, launch: _Launch, started: float) -> Document:
        execution = launch.execution
        step, key = execution.step, execution.key
        operands = self._operands(step)
        ops: list[Document] = []
        for node, k, taken in zip(step.region.key.nodes, step.nodes, operands, strict=True):
            results = [_value(size, dtype_name(dtype)) for size, dtype in node.op.results]
            first = results[0] if results else _value((), None)
            ops.append(
                {
                    "name": node.op.name,
                    "shape": first["shape"],
                    "dtype": first["dtype"],
                    **(self.line(execution.origins[k]) or dict.fromkeys(("file", "line", "code", "function"))),
                    "results": results,
                    "operands": taken,
                    "edges": list(node.operands),
                }
            )
        values = [(n, value) for n, op in enumerate(ops) for value in op["results"]]
        return {
            "id": number,
            "flush": launch.flush.number,
            "reason": execution.reason,
            "trigger": self.line(execution.trigger),
            "ops": ops,
            "inputs": self._inputs(step, operands, launch.sources),
            "outputs": self._outputs(launch, values),
            "key": {"shapeless": key.shapeless, "dimensions": key.dimensions, "options": key.options},
            "cache": {"tier": execution.tier, "hit": execution.hit, "compile_ms": round(1e3 * execution.seconds, 3)},
            "modelled": {"seconds": None, "hbm_bytes": None},
            "seconds": {
                "at": round(launch.flush.at - started, 6),
                "launched": round(launch.at - started, 6),
                "lookup": round(execution.seconds, 6),
            },
            "dead_ops": launch.flush.dead,
            "pending_ops": len(launch.flush.origins),
        }

    def issued(self, flushes: Sequence[_Flush]) -> list[list[list[Any]]]:
        """For every materialisation that launched something: how often each place issued an op, computed or not."""
        return [
            [
                [flush.number, name, line["file"], line["line"], offset, count]
                for (name, code, offset), count in Counter(flush.origins).items()
                if (line := self.line((name, code, offset))) is not None
            ]
            for flush in flushes
        ]

    def line(self, origin: Origin) -> Document | None:
        """File, line and source text of whoever issued something."""
        place = origin[1:]
        if place not in self._lines:
            self._lines[place] = _line(locate(*place))
        return self._lines[place]

    def _operands(self, step: Step) -> list[list[Document]]:
        known = self._shapes.get(id(step))
        if known is None:
            taken = [
                [_value(size, dtype_name(dtype)) for size, dtype in node.op.operands()]
                for node in step.region.key.nodes
            ]
            known = self._shapes[id(step)] = step, taken
        return known[1]

    @staticmethod
    def _inputs(
        step: Step, operands: list[list[Document]], sources: Sequence[tuple[int, int] | None]
    ) -> list[Document]:
        found: dict[int, Document] = {}
        for node, taken in zip(step.region.key.nodes, operands, strict=True):
            for number, value in zip(node.operands, taken, strict=True):
                if number < 0 and ~number not in found:
                    source = sources[~number]
                    made = None if source is None else {"region": source[0], "output": source[1]}
                    found[~number] = value | {"made_by": made}
        return [found[n] for n in sorted(found)]

    def _outputs(self, launch: _Launch, values: Sequence[tuple[int, Document]]) -> list[Document]:
        step, flush = launch.execution.step, launch.flush
        found = []
        for slot, number, died in zip(step.outputs, step.region.key.outputs, launch.died, strict=True):
            holders = flush.holders.get(slot, [])
            live = slot in step.live
            op, value = values[number]
            found.append(
                value
                | {
                    "op": op,
                    "live": live,
                    "live_because": self._because(live, holders, flush.readers.get(slot)),
                    "held_by": [dataclasses.asdict(holder) for holder in holders],
                    "freed_before": died,
                }
            )
        return found

    def _because(self, live: bool, holders: Sequence[Holder], reader: tuple[str, Origin] | None) -> str:
        if holders:
            return "; ".join(holder.text for holder in holders)
        if live:
            return "not looked at: too many launches"
        if reader is None:
            return "dead, but its op has another output that is not"
        line = self.line(reader[1])
        where = f" at {line['file']}:{line['line']}" if line else ""
        return f"nobody holds it, but {reader[0]}{where} reads it beyond a cut, which is why there is one here"


def _line(location: Location | None) -> Document | None:
    if location is None:
        return None
    return {"file": location.file, "line": location.line, "code": location.code, "function": location.function}


def _value(size: Sequence[int], dtype: str | None) -> Document:
    return {"shape": list(size), "dtype": dtype}


def start(folder: Path, *, inputs: bool = False) -> Recorder:
    """Record from now on; the caller writes at exit."""
    recorder = Recorder(folder, inputs=inputs)
    LOG.observer = recorder
    return recorder
