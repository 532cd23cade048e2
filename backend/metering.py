"""The modelled device: its clock and its memory, kept at the launch.

Every executable that the process compiles goes through :class:`MeteringClient`. A launch advances two times: the host's,
by what issuing a launch takes, and the device's, by the modelled cost of the executable, which starts when it was issued
and the device is free. Both are whole picoseconds, so that sums are exact and do not depend on the order of anything.
Memory is counted by live cells (:mod:`emutpu.backend.cell`); a launch whose results and temporaries do not fit
gives failed results, as the device does, and nothing is computed.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from emutpu.backend.cell import MEMORY
from emutpu.backend.hbm import Snapshot, allocation_failure, snapshot
from emutpu.backend.location import capture
from emutpu.backend.pjrt import ErrorBuffer, ExecutableMemory, MemoryStats

if TYPE_CHECKING:
    import numpy as np

    from emutpu.backend.pjrt import (
        Buffer,
        Client,
        CompileOptions,
        Executable,
        ModelledCost,
        PjrtError,
        Topology,
    )

__all__ = ["DEFAULT_ISSUE", "Meter", "MeteringClient", "Rates", "Tally"]

PICOSECONDS = 10**12
DEFAULT_ISSUE = 5_000_000
"""Picoseconds of host time per launch: 5 us, an assumption (jaxlib's own dispatch takes 3 to 6 us on a host CPU)."""

_Launch = Callable[[Sequence["Buffer"]], Sequence["Buffer"]]
_Trace = Callable[["Tally", int, int, int], None]


@dataclasses.dataclass(slots=True)
class Tally:
    """How often an executable was launched, and what one launch costs (``duration`` in picoseconds).

    ``counters`` give the launches so far, one for each way to launch. ``executable`` gives what was compiled as long as the
    compile cache holds it, else None.
    """

    name: str
    cost: ModelledCost | None
    duration: int
    memory: ExecutableMemory
    counters: list[Callable[[], int]] = dataclasses.field(default_factory=list)
    executable: Callable[[], Executable | None] = lambda: None

    @property
    def calls(self) -> int:
        total = 0
        for counter in self.counters:
            total += counter()
        return total


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What the meter needs of the device: peak FLOP/s, and bytes per second over HBM and from the host; 0 if unknown."""

    flops: float = 0.0
    hbm: float = 0.0
    host: float = 0.0


class Meter:
    """The modelled clock of the process's device.

    ``host`` is the host's time and ``device`` when the device will have done all that was issued, both in picoseconds since
    the device was first used. ``issue`` is the host time of a launch in picoseconds, None to measure it. ``steps`` are
    (time, FLOPs so far, those of them behind a causal mask) when an optimizer step had been issued and done. ``trace`` is called with tally, host time, start
    and end of each launch while somebody records. ``refused`` counts launches that did not fit in memory; ``unread`` is
    the first of their errors that no read has met yet.

    What a launch touches is ``lead`` alone, how far the device is behind the host: the host's time follows from the number
    of launches.
    """

    __slots__ = (
        "_base",
        "_charged",
        "_traced",
        "issue",
        "lead",
        "peak",
        "rates",
        "refused",
        "started",
        "steps",
        "tallies",
        "trace",
        "transfers",
        "unread",
    )

    def __init__(self, issue: int | None = DEFAULT_ISSUE) -> None:
        self.issue = issue
        self.rates = Rates()
        self.lead = 0
        self._base = 0
        self._traced = 0
        self._charged: dict[tuple[str, ModelledCost | None], Callable[[], None]] = {}
        self.tallies: list[Tally] = []
        self.steps: list[tuple[int, float, float]] = []
        self.transfers = 0
        self.refused = 0
        self.unread: PjrtError | None = None
        self.trace: _Trace | None = None
        self.peak: Snapshot | None = None
        self.started = time.perf_counter_ns()

    # Time ------------------------------------------------------------------------------------------------

    @property
    def launches(self) -> int:
        """Launches so far."""
        return sum(tally.calls for tally in self.tallies)

    @property
    def host(self) -> int:
        self._measure()
        return self._base + (self.issue or 0) * self.launches

    @property
    def device(self) -> int:
        return self.host + self.lead

    def now(self) -> int:
        """When everything issued so far is done, in picoseconds; the host's time if that is later."""
        return self.host + max(self.lead, 0)

    def wait(self) -> None:
        """The host waits for the device."""
        self._measure()
        self._base += max(self.lead, 0)
        self.lead = 0

    def transfer(self, nbytes: int, *, to_device: bool) -> None:
        """Bytes cross between host and device. A read waits for the device, and for itself."""
        self._measure()
        self.transfers += nbytes
        duration = round(nbytes / self.rates.host * PICOSECONDS) if self.rates.host else 0
        self.lead = max(self.lead, 0) + duration
        if not to_device:
            self.wait()

    def step(self) -> None:
        """An optimizer step has been issued."""
        launches, flops, masked = 0, 0.0, 0.0
        for tally in self.tallies:  # once only: a program has as many tallies as modules, and asks at every step
            calls = tally.calls
            launches += calls
            if calls and tally.cost is not None:
                flops += calls * tally.cost.flops
                masked += calls * tally.cost.masked_flops
        self._measure()
        now = self._base + (self.issue or 0) * launches + max(self.lead, 0)
        self.steps.append((now, flops, masked))

    def _measure(self) -> None:
        """Let the host's time be this host's, where it is measured."""
        if self.issue is None:
            passed = max(0, (time.perf_counter_ns() - self.started) * 1000 - self._base)
            self._base += passed
            self.lead -= passed

    # Launches --------------------------------------------------------------------------------------------

    def charge(self, name: str, cost: ModelledCost | None) -> None:
        """A launch of which nothing runs here, such as a collective whose other ranks are not there."""
        charged = self._charged.get((name, cost))
        if charged is None:
            tally = Tally(name, cost, _picoseconds(cost), _NO_MEMORY)
            self.tallies.append(tally)
            charged = self._charged[name, cost] = self._chargeable(tally)
        charged()

    def _chargeable(self, tally: Tally) -> Callable[[], None]:
        calls = 0
        tally.counters.append(lambda: calls)

        def launch() -> None:
            nonlocal calls
            if self.trace is not None:
                self._tell(tally)
            calls += 1
            self._measure()
            self.lead = max(self.lead - (self.issue or 0), 0) + tally.duration

        return launch

    def record(self, trace: _Trace | None) -> None:
        """Call ``trace`` for every launch from now on; None stops."""
        self.trace = trace
        self._traced = self.launches
        self.refresh()

    def refresh(self) -> None:
        """Set the ceiling above which launches are looked at closely: all of them while somebody records."""
        limit = MEMORY.limit
        if self.trace is not None:
            MEMORY.ceiling = -1
        else:
            MEMORY.ceiling = MEMORY.peak if limit is None else min(MEMORY.peak, limit)

    def tally(self, executable: Executable) -> Tally:
        """Begin to count an executable's launches."""
        needs, cost = executable.memory(), executable.cost()
        tally = Tally(executable.name, cost, _picoseconds(cost), needs, executable=weakref.ref(executable))
        self.tallies.append(tally)
        return tally

    def metered(self, executable: Executable, tally: Tally, run: _Launch) -> _Launch:
        """``run`` with time and memory kept: about 0.2 us more than ``run`` itself."""
        needs = tally.memory
        transient = needs.results - needs.aliased + needs.temporaries
        duration, issue, memory, meter = tally.duration, self.issue, MEMORY, self
        gain = duration - (issue or 0)
        refused = self._attendant(executable, tally, transient)
        calls = 0
        tally.counters.append(lambda: calls)

        def launch(arguments: Sequence[Buffer]) -> Sequence[Buffer]:
            nonlocal calls
            if memory.live + transient > memory.ceiling:
                failed = refused(arguments)
                if failed is not None:
                    return failed
            calls += 1
            lead = meter.lead
            meter.lead = lead + gain if lead > issue else duration  # type: ignore[operator]  # measured otherwise, below
            return run(arguments)

        def measured(arguments: Sequence[Buffer]) -> Sequence[Buffer]:
            nonlocal calls
            if memory.live + transient > memory.ceiling:
                failed = refused(arguments)
                if failed is not None:
                    return failed
            calls += 1
            meter._measure()
            meter.lead = max(meter.lead, 0) + duration
            return run(arguments)

        return measured if issue is None else launch

    def _attendant(
        self, executable: Executable, tally: Tally, transient: int
    ) -> Callable[[Sequence[Buffer]], Sequence[Buffer] | None]:
        """What happens before a launch beyond the ceiling: None to go on, or the results of one that does not fit."""

        def refused(arguments: Sequence[Buffer]) -> Sequence[Buffer] | None:
            failed = any(argument.__class__ is ErrorBuffer for argument in arguments)
            wanted = MEMORY.live + transient
            if not failed and MEMORY.limit is not None and wanted > MEMORY.limit:
                return self._out_of_memory(executable, tally, arguments)
            if not failed and wanted > MEMORY.peak:
                self._new_peak(wanted, tally.name)
            if self.trace is not None:
                self._tell(tally)
            return None

        return refused

    def _tell(self, tally: Tally) -> None:
        """Tell the recorder of a launch that is about to happen."""
        assert self.trace is not None
        self._measure()
        issue = self.issue or 0
        host = self._base + issue * self._traced
        self._traced += 1
        start = host + max(issue, self.lead)
        self.trace(tally, host, start, start + tally.duration)

    def _out_of_memory(self, executable: Executable, tally: Tally, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        needs = tally.memory
        # The tensors that results replace in place may not have been written yet: their memory is asked for now.
        error = allocation_failure(tally.name, needs.results, needs.temporaries, counted=needs.aliased)
        self.refused += 1
        if self.unread is None:
            self.unread = error
        for position in executable.donated:
            arguments[position].delete()
        return [ErrorBuffer(aval, error) for aval in executable.results]

    def _new_peak(self, wanted: int, op: str) -> None:
        MEMORY.peak = wanted
        self.refresh()
        # A look at all live cells takes its time, so only where it tells something new.
        if wanted > _WORTH_A_LOOK and (self.peak is None or wanted > self.peak.bytes * _GROWTH):
            self.peak = snapshot(wanted, op, capture())

    def admit(self, nbytes: int, op: str, counted: int = 0) -> PjrtError | None:
        """None where a transfer of ``nbytes`` (in HBM) to the device has room, else the error that it has not.

        ``counted`` bytes of them are among those in use already.
        """
        wanted = MEMORY.live + nbytes - counted
        if MEMORY.limit is not None and wanted > MEMORY.limit:
            return allocation_failure(op, nbytes, 0, counted)
        if wanted > MEMORY.peak:
            self._new_peak(wanted, op)
        return None


def _picoseconds(cost: ModelledCost | None) -> int:
    return round(cost.seconds * PICOSECONDS) if cost is not None else 0


_NO_MEMORY = ExecutableMemory(0, 0, 0, 0)
_WORTH_A_LOOK = 64 * 2**20
_GROWTH = 1.02


class _MeteredExecutable:
    """An executable whose launches are metered."""

    __slots__ = ("__weakref__", "_checked", "_inner", "arguments", "donated", "launch", "name", "results")

    def __init__(self, inner: Executable, meter: Meter) -> None:
        tally = meter.tally(inner)
        self._inner = inner
        self.name = inner.name
        self.arguments = inner.arguments
        self.results = inner.results
        self.donated = inner.donated
        self.launch = meter.metered(inner, tally, inner.launch)
        self._checked = meter.metered(inner, tally, inner.execute)

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        """The inner executable's checks, then the metered launch."""
        return self._checked(arguments)

    def serialize(self) -> bytes:
        return self._inner.serialize()

    def memory(self) -> ExecutableMemory:
        return self._inner.memory()

    def cost(self) -> ModelledCost | None:
        return self._inner.cost()


class MeteringClient:
    """A client whose executables, transfers and waits advance a meter. Everything else is the inner client's."""

    def __init__(self, inner: Client, meter: Meter) -> None:
        self.inner = inner
        self.meter = meter
        attributes = inner.topology.attributes
        meter.rates = Rates(
            flops=_number(attributes.get("bf16_flops_per_device")),
            hbm=_number(attributes.get("hbm_bytes_per_second_per_device")),
            host=_number(attributes.get("host_bytes_per_second_per_device")),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def topology(self) -> Topology:
        return self.inner.topology

    @property
    def computes(self) -> bool:
        return self.inner.computes

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        return _MeteredExecutable(self.inner.compile(module, options), self.meter)

    def deserialize(self, blob: bytes, options: CompileOptions) -> Executable:
        return _MeteredExecutable(self.inner.deserialize(blob, options), self.meter)

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> Buffer:
        return self.inner.from_host(array, zero_copy=zero_copy)

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        if isinstance(buffer, ErrorBuffer) and buffer.error is self.meter.unread:
            self.meter.unread = None
        array = self.inner.to_host(buffer)
        self.meter.transfer(array.nbytes, to_device=False)
        return array

    def synchronize(self) -> None:
        """Wait; raises the first failure that nobody has read."""
        self.inner.synchronize()
        self.meter.wait()
        error, self.meter.unread = self.meter.unread, None
        if error is not None:
            raise error

    def memory_stats(self) -> MemoryStats:
        """The emulated device's memory, by live cells."""
        return MemoryStats(MEMORY.live, MEMORY.peak, MEMORY.limit, MEMORY.buffers, 0)

    def close(self) -> None:
        self.inner.close()


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
