"""Device events of ``torch.profiler``: every launch with its modelled duration.

Kineto takes activities of a backend from C++ only, so its results hold the host's side. While a profile that asks for the
device runs, the meter's launches are recorded beside it; they join its events, and its Chrome trace, when these are read.
Durations are modelled. A row in modelled time beside rows in this host's cannot show when one happens relative to the
other: the device's row starts where the profile does, and arrows lead to each launch from where it was issued.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE

if TYPE_CHECKING:
    from emutpu.backend.metering import Meter, Tally

__all__ = ["DeviceProfile", "add_device_rows", "device_events", "start"]

_MOST = 2_000_000
_PROCESS = 1 << 20  # of the device's row: no process of this host
_US = 10**6  # picoseconds


@dataclasses.dataclass(frozen=True, slots=True)
class Launched:
    """A launch: from ``start`` to ``end`` in picoseconds of modelled time since the profile began, issued at
    ``host_ns`` (this host's time since the epoch) on ``thread``.
    """

    tally: Tally
    host_ns: int
    thread: int
    start: int
    end: int


class DeviceProfile:
    """Records the launches between :func:`start` and :meth:`stop`. Beyond two million only ``dropped`` counts on."""

    def __init__(self, meter: Meter) -> None:
        self.launches: list[Launched] = []
        self.dropped = 0
        self._meter = meter
        self._origin = meter.now()
        self._other = meter.trace

    def __call__(self, tally: Tally, issued: int, start: int, end: int) -> None:
        if self._other is not None:
            self._other(tally, issued, start, end)
        if len(self.launches) == _MOST:
            self.dropped += 1
            return
        origin = self._origin
        self.launches.append(Launched(tally, time.time_ns(), threading.get_native_id(), start - origin, end - origin))

    def stop(self) -> None:
        """Record no more; whoever recorded before goes on."""
        if self._meter.trace is self:
            self._meter.record(self._other)


def start() -> DeviceProfile:
    """Begin to record. What is deferred belongs to the time before, and is launched first."""
    runtime().materialize("synchronize()")
    meter = runtime().meter
    profile = DeviceProfile(meter)
    meter.record(profile)
    return profile


def device_events(profile: DeviceProfile, events: list[FunctionEvent], trace_start_ns: int) -> list[FunctionEvent]:
    """``events`` of the host with those of the device, in the order of their start.

    A launch counts as a kernel of the innermost event of the host that was running when it was issued, as kernels of
    other devices do; so operators have ``device_time``.
    """
    hosts = _Innermost(event for event in events if event.device_type == DeviceType.CPU and not event.is_async)
    correlation = max((event.id for event in events), default=0)
    found = list(events)
    for launch in profile.launches:
        correlation += 1
        name, took = launch.tally.name, (launch.end - launch.start) / _US
        host = hosts.at((launch.host_ns - trace_start_ns) / 1000)
        if host is not None:
            host.append_kernel(name, 0, took)
        found.append(
            FunctionEvent(
                id=correlation,
                name=name,
                trace_name=name,
                thread=0,
                start_us=launch.start / _US,
                end_us=launch.end / _US,
                stack=[],
                input_shapes=[],
                concrete_inputs=[],
                kwinputs={},
                use_device=DEVICE.type,
                device_type=DeviceType.PrivateUse1,
                device_index=0,
                device_resource_id=0,
                flops=None if launch.tally.cost is None else round(launch.tally.cost.flops),
                linked_correlation_id=0 if host is None else host.id,
                activity_type="kernel",
                metadata_json=json.dumps(_figures(launch.tally))[1:-1],
            )
        )
    found.sort(key=lambda event: (event.time_range.start, -event.time_range.end))
    return found


class _Innermost:
    """Finds the shortest of nested intervals around a time."""

    def __init__(self, events: Iterable[FunctionEvent]) -> None:
        self._events = sorted(events, key=lambda event: event.time_range.start)
        self._starts = [event.time_range.start for event in self._events]
        self._around: list[int] = []  # for each event the nearest earlier one that ends after it starts
        open_: list[int] = []
        for index, event in enumerate(self._events):
            while open_ and self._events[open_[-1]].time_range.end < event.time_range.start:
                open_.pop()
            self._around.append(open_[-1] if open_ else -1)
            open_.append(index)

    def at(self, time_us: float) -> FunctionEvent | None:
        index = bisect.bisect_right(self._starts, time_us) - 1
        while index >= 0:
            if self._events[index].time_range.end >= time_us:
                return self._events[index]
            index = self._around[index]
        return None


def _figures(tally: Tally) -> dict[str, Any]:
    cost = tally.cost
    if cost is None:
        return {"modelled": "no model of this operation: it takes no time"}
    return {
        "modelled": "not hardware",
        "flops": cost.flops,
        "hbm_bytes": cost.hbm_bytes,
        "bound": cost.bound,
        "error_bar": cost.error_bar,
    }


def add_device_rows(profile: DeviceProfile, path: str, trace_start_ns: int) -> None:
    """Add the device's row to the Chrome trace in ``path``, with an arrow from where each launch was issued."""
    with open(path, encoding="utf-8") as stream:
        trace = json.load(stream)
    base = int(trace.get("baseTimeNanoseconds", 0))
    trace["traceEvents"] += _rows(profile, (trace_start_ns - base) / 1000, base)
    with open(path, "w", encoding="utf-8") as stream:
        json.dump(trace, stream)


def _rows(profile: DeviceProfile, begin: float, base_ns: int) -> Iterator[dict[str, Any]]:
    chip = runtime().client.topology.chip
    for kind, thread, name in (
        ("process_name", 0, f"emulated {chip}, not hardware"),
        ("process_labels", 0, "modelled time since the profile began"),
        ("thread_name", 1, "launches"),
    ):
        key = "labels" if kind == "process_labels" else "name"
        yield {"ph": "M", "name": kind, "pid": _PROCESS, "tid": thread, "ts": begin, "args": {key: name}}
    for number, launch in enumerate(profile.launches, 1):
        at, name = begin + launch.start / _US, launch.tally.name
        place = {"pid": _PROCESS, "tid": 1, "ts": at}
        arguments = {"correlation": number, **_figures(launch.tally)}
        yield {
            "ph": "X",
            "cat": "kernel",
            "name": name,
            "dur": (launch.end - launch.start) / _US,
            **place,
            "args": arguments,
        }
        flow = {"cat": "ac2g", "name": "ac2g", "id": f"emutpu{number}"}
        issued = (launch.host_ns - base_ns) / 1000
        yield {"ph": "s", **flow, "pid": os.getpid(), "tid": launch.thread, "ts": issued}
        yield {"ph": "f", "bp": "e", **flow, **place}
