"""What the meter and the cells know, as the plain values of a report."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

from emutpu.backend.cell import MEMORY
from emutpu.backend.errors import describe
from emutpu.backend.hbm import Holder, largest
from emutpu.backend.metering import PICOSECONDS, Meter
from emutpu.backend.statistics import MemoryStatistics, ModelledStatistics

__all__ = ["memory_statistics", "modelled_statistics"]

_TOP = 10


def modelled_statistics(meter: Meter) -> ModelledStatistics:
    """Time and work by the model, up to now."""
    launched = [tally for tally in meter.tallies if tally.calls]
    busy = sum(tally.calls * tally.duration for tally in launched)
    seconds = max(meter.host, meter.device) / PICOSECONDS
    costs = [(tally, tally.cost) for tally in launched if tally.cost is not None]
    flops = sum(tally.calls * cost.flops for tally, cost in costs)
    traffic = sum(tally.calls * cost.hbm_bytes for tally, cost in costs)
    step_seconds, step_share = _steps(meter)
    return ModelledStatistics(
        seconds=seconds,
        device_seconds=busy / PICOSECONDS,
        host_seconds=meter.host / PICOSECONDS,
        host_issue=None if meter.issue is None else meter.issue / PICOSECONDS,
        launches=sum(tally.calls for tally in launched),
        flops=flops,
        hbm_bytes=traffic,
        transfer_bytes=meter.transfers,
        steps=len(meter.steps),
        step_seconds=step_seconds,
        mfu=_share(flops, meter.rates.flops * seconds),
        step_mfu=_share(meter.step_flops, meter.rates.flops * step_share),
        hbm_use=_share(traffic, meter.rates.hbm * seconds),
        error_bar=sum(t.calls * t.duration * c.error_bar for t, c in costs) / busy if busy else None,
        bound=_by_bound(meter),
        top=_top(meter),
        unmodelled=dict(Counter({tally.name: tally.calls for tally in launched if tally.cost is None})),
        assumptions=tuple(dict.fromkeys(text for _, cost in costs for text in cost.assumptions)),
    )


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole and part else None


def _steps(meter: Meter) -> tuple[float | None, float]:
    """Median seconds between two optimizer steps, and the seconds from the first to the last."""
    times = [at for at, _ in meter.steps]
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    if not between:
        return None, 0.0
    return statistics.median(between) / PICOSECONDS, (times[-1] - times[0]) / PICOSECONDS


def _by_bound(meter: Meter) -> dict[str, float]:
    """Device seconds by the unit that bounds each launch."""
    found: Counter[str] = Counter()
    for tally in meter.tallies:
        if tally.calls and tally.cost is not None:
            found[tally.cost.bound] += tally.calls * tally.duration
    return {unit: time / PICOSECONDS for unit, time in found.most_common()}


def _top(meter: Meter) -> tuple[tuple[str, int, float], ...]:
    calls: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    for tally in meter.tallies:
        calls[tally.name] += tally.calls
        spent[tally.name] += tally.calls * tally.duration
    return tuple((name, calls[name], time / PICOSECONDS) for name, time in spent.most_common(_TOP) if calls[name])


def memory_statistics(meter: Meter, chip_bytes: int) -> MemoryStatistics:
    """Who held memory near the peak: the last snapshot, or what is live now where none was worth taking."""
    peak = meter.peak
    holders = peak.holders if peak is not None else largest()
    return MemoryStatistics(
        limit_bytes=MEMORY.limit,
        chip_bytes=chip_bytes,
        missing_bytes=max(0, MEMORY.peak - chip_bytes),
        peak_op=None if peak is None else peak.op,
        peak_line=None if peak is None else describe(peak.code, peak.offset),
        holders=tuple(_holder(holder) for holder in holders),
    )


def _holder(holder: Holder) -> tuple[int, int, tuple[int, ...], str, str, str]:
    op, line = ("", "not written yet") if holder.origin is None else (holder.origin[0], describe(*holder.origin[1:]))
    return holder.bytes, holder.dense, holder.shape, holder.dtype, op, line
