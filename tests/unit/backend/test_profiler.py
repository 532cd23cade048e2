"""``torch.profiler`` sees the device: a launch is an event with its modelled duration."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from emutpu.backend.metering import PICOSECONDS
from emutpu.backend.profiling import DeviceProfile
from emutpu.backend.runtime import runtime
from emutpu.backend.tracing import Recorder

BOTH = [ProfilerActivity.CPU, ProfilerActivity.PrivateUse1]


def _device(events: Any) -> list[Any]:
    return [event for event in events if event.device_type == torch.autograd.DeviceType.PrivateUse1]


def _step() -> None:
    x = torch.ones(64, 96, device="tpu", requires_grad=True)
    weight = torch.ones(96, 32, device="tpu", requires_grad=True)
    (x @ weight).relu().sum().backward()
    torch.accelerator.synchronize()


def test_launches_are_events_with_modelled_durations() -> None:
    """One event per launch, in order; together they last as long as the device was busy by the meter."""
    before = {id(tally): tally.calls for tally in runtime().meter.tallies}
    with profile(activities=BOTH) as found:
        _step()
    launched = [
        (tally.name, tally.duration)
        for tally in runtime().meter.tallies
        for _ in range(tally.calls - before.get(id(tally), 0))
    ]
    events = _device(found.events())
    assert sorted((event.name, round(event.device_time_total * 1e6)) for event in events) == sorted(launched)
    starts = [event.time_range.start for event in events]
    assert starts == sorted(starts)
    assert starts[0] > 0
    assert any("mm" in event.name for event in events)


def test_an_operator_has_the_time_of_its_launches() -> None:
    """``key_averages`` gives ``aten::mm`` the device time of its kernel, and an op that launches nothing none."""
    x, weight = torch.ones(64, 96, device="tpu"), torch.ones(96, 32, device="tpu")
    with profile(activities=BOTH) as found:
        x @ weight
        x.view(96, 64)
    rows = {row.key: row for row in found.key_averages() if row.device_type == torch.autograd.DeviceType.CPU}
    (kernel,) = _device(found.events())
    assert rows["aten::mm"].self_device_time_total == pytest.approx(kernel.device_time_total)
    assert kernel.device_time_total > 0
    assert kernel.flops == 2 * 64 * 96 * 32
    assert rows["aten::view"].device_time_total == 0
    assert "Self TPU" in found.key_averages().table(sort_by="self_device_time_total")


def test_the_same_times_in_every_run() -> None:
    """Device events of a repeated program are equal to the last digit, whatever this host did meanwhile."""
    runs = []
    _step()
    for _ in range(2):
        with profile(activities=BOTH) as found:
            _step()
        runs.append([(event.name, event.time_range.start, event.time_range.end) for event in _device(found.events())])
    assert runs[0] == runs[1]


def test_deferred_work_before_the_profile_is_not_in_it() -> None:
    """Regions are events; what was recorded before the profile belongs to the time before."""
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        earlier = torch.ones(8, 8, device="tpu") * 3
        with profile(activities=BOTH) as found:
            later = torch.ones(16, 16, device="tpu") * 2 + 1
            later.sum().item()
        names = [event.name for event in _device(found.events())]
        assert len(names) == 1
        assert names[0].startswith("region")
        assert earlier.sum().item() == 192


def test_without_the_device_nothing_is_recorded() -> None:
    """A profile of the CPU alone is PyTorch's own."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        _step()
    assert not _device(found.events())
    assert runtime().meter.trace is None


def test_a_schedule_profiles_its_active_steps() -> None:
    """Of wait, warm-up and two active steps, the active ones have their launches."""
    x = torch.ones(8, 8, device="tpu")
    seen: list[int] = []
    with profile(
        activities=BOTH,
        schedule=schedule(wait=1, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda found: seen.append(len(_device(found.events()))),
    ) as found:
        for _ in range(5):
            x = x * 2
            found.step()
    assert seen == [2]
    assert runtime().meter.trace is None


def test_a_recorder_goes_on_through_a_profile() -> None:
    """``emutpu run --trace`` records the same launches whether or not the program profiles itself."""
    recorder = Recorder(runtime().meter)
    runtime().meter.record(recorder)
    try:
        torch.ones(4, 4, device="tpu") * 2
        with profile(activities=BOTH) as found:
            torch.ones(4, 4, device="tpu") * 3
        assert runtime().meter.trace is recorder
        torch.ones(4, 4, device="tpu") * 4
    finally:
        runtime().meter.record(None)
    launches = recorder.launches()
    inside = _device(found.events())
    assert 0 < len(inside) < len(launches)
    issues = [launch.issued for launch in launches]
    assert issues == sorted(issues)


def test_an_error_inside_ends_the_recording() -> None:
    """A profile that is left by an exception leaves nothing behind."""
    x = torch.ones(4, 4, device="tpu")
    with pytest.raises(RuntimeError, match="shape"), profile(activities=BOTH):
        x.view(3)
    assert runtime().meter.trace is None


def test_events_beyond_the_bound_are_counted() -> None:
    """A profile keeps two million launches, and says how many it left out."""
    profile_ = DeviceProfile(runtime().meter)
    profile_.launches = [None] * 2_000_000  # type: ignore[list-item]  # only their number matters
    profile_(runtime().meter.tally(_Named()), 0, 0, PICOSECONDS)
    assert profile_.dropped == 1


class _Named:
    name = "named"

    def memory(self) -> None:
        return None

    def cost(self) -> None:
        return None


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_chrome_trace(name: str, tmp_path: Path) -> None:
    """The exported trace has the device's row, its launches, and an arrow from a row of the host to each."""
    with profile(activities=BOTH) as found:
        _step()
    path = tmp_path / name
    found.export_chrome_trace(str(path))
    raw = path.read_bytes()
    trace = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
    rows = {
        event["pid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    (device,) = [process for process, title in rows.items() if title == "emulated v5e, not hardware"]
    kernels = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == device]
    assert [kernel["name"] for kernel in kernels] == [event.name for event in _device(found.events())]
    assert all(kernel["args"]["modelled"] == "not hardware" for kernel in kernels)
    host = [e for e in trace["traceEvents"] if e["ph"] == "X" and e.get("cat") == "cpu_op"]
    starts = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "s" and str(e["id"]).startswith("emutpu")}
    ends = [e for e in trace["traceEvents"] if e["ph"] == "f" and e["id"] in starts]
    assert len(ends) == len(kernels)
    for end, kernel in zip(ends, kernels, strict=True):
        begin = starts[end["id"]]
        assert (end["pid"], end["tid"], end["ts"]) == (device, kernel["tid"], kernel["ts"])
        around = [
            op
            for op in host
            if (op["pid"], op["tid"]) == (begin["pid"], begin["tid"])
            and op["ts"] <= begin["ts"] <= op["ts"] + op["dur"]
        ]
        assert around
