"""The modelled clock: exact, the same on every client and load, and read by events, steps and traces."""

from __future__ import annotations

import dataclasses
import io
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jax.profiler import ProfileData

from emutpu import _jaxlib
from emutpu.backend.metering import PICOSECONDS, Meter, MeteringClient
from emutpu.backend.modelled import modelled_statistics
from emutpu.backend.pjrt import Aval, CompileOptions, Device, ExecutableMemory, ModelledCost, Topology
from emutpu.backend.runtime import runtime
from emutpu.backend.tracing import Recorder

US = 10**6  # picoseconds

TRAINING = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 300), nn.GELU(), nn.Dropout(0.1), nn.Linear(300, 10)).to("tpu")
optimizer = torch.optim.AdamW(model.parameters())
x, y = torch.randn(32, 64).to("tpu"), torch.zeros(32, dtype=torch.int64).to("tpu")
start, end = (torch.Event("tpu", enable_timing=True) for _ in range(2))
start.record()
for step in range(3):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
end.record()
torch.accelerator.synchronize()
from emutpu.backend.runtime import runtime
keys = sorted(map(str, runtime().cache.entries()))
print(repr(runtime().statistics().modelled), start.elapsed_time(end), keys, torch.accelerator.max_memory_allocated())
"""


class _Executable:
    """An executable that takes a known time."""

    name = "aten.known.default"
    arguments: tuple[Aval, ...] = ()
    results: tuple[Aval, ...] = ()
    donated: frozenset[int] = frozenset()

    def __init__(self, microseconds: float) -> None:
        self.seconds = microseconds * 1e-6

    def launch(self, arguments: Any) -> list[Any]:
        return []

    execute = launch

    def serialize(self) -> bytes:
        return b""

    def memory(self) -> ExecutableMemory:
        return ExecutableMemory(0, 0, 0, 0)

    def cost(self) -> ModelledCost:
        cost = ModelledCost(self.seconds, flops=1e6, hbm_bytes=2e6, error_bar=0.5, bound="mxu", units=(("ici", 1e-6),))
        return dataclasses.replace(cost, masked_flops=2.5e5, ici_bytes=4e6)


class _Client:
    """A client whose executables take what their module says, in microseconds."""

    name = "known"
    computes = False
    topology = Topology(
        "one", "v5e", (Device(0, "TPU"),), {"bf16_flops_per_device": 1e12, "host_bytes_per_second_per_device": 1e9}
    )

    def compile(self, module: bytes, options: CompileOptions) -> Any:
        return _Executable(float(module))


def _launcher(meter: Meter, microseconds: float) -> Callable[[], object]:
    client = MeteringClient(_Client(), meter)  # type: ignore[arg-type]  # as much of a client as the meter needs
    executable = client.compile(str(microseconds).encode(), CompileOptions())
    return lambda: executable.launch([])


def test_the_host_runs_ahead_and_waits() -> None:
    """Short launches are bound by the host, long ones by the device; a wait brings the host to the device."""
    meter = Meter(issue=5 * US)
    short, long = _launcher(meter, 1), _launcher(meter, 100)
    for _ in range(4):
        short()
    assert (meter.host, meter.device) == (20 * US, 21 * US)
    long()
    long()
    assert (meter.host, meter.device, meter.now()) == (30 * US, 225 * US, 225 * US)
    meter.wait()
    assert meter.host == meter.device == 225 * US
    short()
    assert (meter.host, meter.device) == (230 * US, 231 * US)


def test_transfers_take_the_hosts_link() -> None:
    """Bytes to the device occupy it; bytes from it make the host wait for device and link."""
    meter = Meter(issue=5 * US)
    _launcher(meter, 100)()
    meter.transfer(10_000, to_device=True)
    assert (meter.host, meter.device) == (5 * US, 115 * US)
    meter.transfer(20_000, to_device=False)
    assert meter.host == meter.device == 135 * US
    assert meter.transfers == 30_000


def test_figures_of_a_report() -> None:
    """Busy time, FLOPs, links and steps follow from the launches."""
    meter = Meter(issue=0)
    launch = _launcher(meter, 10)
    for _ in range(3):
        launch()
        meter.step()
    figures = modelled_statistics(meter)
    assert (figures.launches, figures.device_seconds, figures.steps) == (3, 30 * US / PICOSECONDS, 3)
    assert figures.step_seconds == 10 * US / PICOSECONDS
    assert (figures.flops, figures.peak_flops, figures.masked_flops) == (3e6, 1e12, 7.5e5)
    assert figures.between_steps == (pytest.approx(20e-6), 2e6, 5e5)
    assert (figures.ici_bytes, figures.ici_use) == (12e6, pytest.approx(0.1))
    assert figures.error_bar == pytest.approx(0.5)
    assert figures.bound == {"mxu": 30 * US / PICOSECONDS}


def test_measured_issue_follows_this_host() -> None:
    """With issue time measured, the modelled host is as late as this one."""
    meter = Meter(issue=None)
    _launcher(meter, 1)()
    before = meter.host
    time.sleep(0.02)
    assert meter.host - before >= 20_000 * US
    assert modelled_statistics(meter).host_issue is None


def test_identical_on_every_client_and_load(passes: Callable[..., str]) -> None:
    """Seconds, event times, keys and peak memory are equal to the last digit: CPU client, and a dry run on a busy machine."""
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(10_000))

    expected = passes(TRAINING)
    assert "host_issue=5e-06" in expected
    burners = [threading.Thread(target=burn) for _ in range(3)]
    for burner in burners:
        burner.start()
    try:
        assert passes(TRAINING, EMUTPU_CLIENT="dry_run") == expected
    finally:
        stop.set()
        for burner in burners:
            burner.join()


def test_event_time_is_modelled() -> None:
    """A launch of a known cost between two events takes that long, whatever this host does."""
    x = torch.ones(512, 512, device="tpu")
    x @ x
    start, end = (torch.Event("tpu", enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    before = {id(tally): tally.calls for tally in runtime().meter.tallies}
    start.record()
    x @ x
    time.sleep(0.05)
    end.record()
    (tally,) = (t for t in runtime().meter.tallies if t.name == "aten.mm.default" and t.calls > before.get(id(t), 0))
    assert tally.cost is not None
    assert start.elapsed_time(end) == pytest.approx((tally.duration + 5 * US) / 1e9)
    assert isinstance(start, torch.Event)


def test_causal_attention_discards_half() -> None:
    """Of seven products of attention, forward and backward, a causal mask discards half; without one nothing is."""
    query = torch.ones(2, 4, 64, 16, device="tpu", requires_grad=True)
    key, value = (torch.ones(2, 2, 64, 16, device="tpu", requires_grad=True) for _ in range(2))

    def discarded(*, causal: bool) -> float:
        before = {id(tally): tally.calls for tally in runtime().meter.tallies}
        attention = torch.nn.functional.scaled_dot_product_attention
        attention(query, key, value, is_causal=causal, enable_gqa=True).sum().backward()
        torch.accelerator.synchronize()
        launched = [(t.calls - before.get(id(t), 0), t.cost) for t in runtime().meter.tallies]
        return sum(calls * cost.masked_flops for calls, cost in launched if calls and cost is not None)

    products = 7 * 2 * (2 * 4) * 64 * 64 * 16
    assert discarded(causal=True) == products / 2
    assert discarded(causal=False) == 0
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        assert discarded(causal=True) == products / 7 * 6 / 2  # one region computes the scores once


COLLECTIVES = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from emutpu.backend.runtime import runtime
dist.init_process_group("cpu:fake,tpu:fake", store=FakeStore(), rank=0, world_size=16)
part, whole = torch.ones(1 << 20, device="tpu"), torch.empty(16 << 20, device="tpu")
half = dist.new_group(list(range(8)))
dist.all_gather_into_tensor(whole, part)
dist.reduce_scatter_tensor(part, whole)
dist.all_reduce(part)
dist.all_reduce(part, group=half)
dist.broadcast(part, 0)
dist.all_to_all_single(torch.empty_like(part), part)
dist.all_reduce(torch.ones(4))
runtime().synchronize()
for tally in runtime().meter.tallies:
    if tally.name.startswith("c10d"):
        print(tally.name, tally.calls, tally.duration, tally.cost.ici_bytes)
"""


def test_collectives_of_absent_ranks(passes: Callable[..., str]) -> None:
    """With the fake process group every collective of device tensors takes the time of its bytes on the slice's links."""
    lines = [line.split() for line in passes(COLLECTIVES, EMUTPU_CHIP="v5p").splitlines()]
    # 16 chips are 2 x 2 x 4 with open ends: three links of 100 GB/s, five hops of 1 us; 8 of them a ring with two links.
    size = 4 * 2**20
    expected = [
        ("_allgather_base_", 15 * size, 15 * size / 300e9 + 5e-6),
        ("_reduce_scatter_base_", 15 * size, 15 * size / 300e9 + 5e-6),
        ("allreduce_", 2 * 15 / 16 * size, 2 * 15 / 16 * size / 300e9 + 10e-6),
        ("allreduce_", 2 * 7 / 8 * size, 2 * 7 / 8 * size / 200e9 + 8e-6),
        ("broadcast_", size, size / 300e9 + 5e-6),
        ("alltoall_base_", 15 / 16 * size, 4 * size / 4 / 100e9 + 5e-6),
    ]
    assert [(name, int(calls)) for name, calls, *_ in lines] == [(f"c10d.{name}", 1) for name, *_ in expected]
    for (_, _, duration, received), (_, moved, seconds) in zip(lines, expected, strict=True):
        assert float(received) == pytest.approx(moved)
        assert int(duration) / PICOSECONDS == pytest.approx(seconds)


def test_debug_mode_waits_for_every_launch() -> None:
    """With blocking launches the modelled host is never behind: the device idles while it issues."""
    x = torch.ones(256, 256, device="tpu")
    x + x
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING):
        x + x
        assert runtime().meter.lead == 0


def _recorded(path: Path) -> tuple[list[Any], str]:
    from emutpu.simulator import trace

    meter = Meter(issue=5 * US)
    launch, slow = _launcher(meter, 1), _launcher(meter, 20)
    launch()
    recorder = Recorder(meter)
    meter.record(recorder)
    try:
        slow()
        launch()
        meter.step()
    finally:
        meter.record(None)
    launch()
    return recorder.launches(), trace.write(str(path), recorder.launches(), recorder.steps(), "v5e", (1e12, 2e9))


def test_trace_for_perfetto(tmp_path: Path) -> None:
    """Host and device rows in modelled microseconds, a link with an arrow from its launch, memory; begins and ends match."""
    launches, path = _recorded(tmp_path / "trace.json")
    assert [(r.issued, r.start, r.end) for r in launches] == [
        (5 * US, 10 * US, 30 * US),
        (10 * US, 30 * US, 31 * US),
    ]
    events = json.loads(Path(path).read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = [(rows[e["pid"], e["tid"]], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert {("issue", 5.0, 5.0), ("launches", 10.0, 20.0), ("launches", 30.0, 1.0), ("steps", 0.0, 31.0)} <= set(slices)
    assert ("ICI", 10.0, 1.0) in slices
    arrows = {kind: [(e["id"], rows[e["pid"], e["tid"]]) for e in events if e["ph"] == kind] for kind in "sf"}
    assert dict(arrows["s"]).keys() == dict(arrows["f"]).keys()
    assert (dict(arrows["s"])["ici0"], dict(arrows["f"])["ici0"]) == ("launches", "ICI")
    assert [e["args"]["bytes"] >= 0 for e in events if e["ph"] == "C"] == [True, True]


def test_trace_for_xprof(tmp_path: Path) -> None:
    """JAX's own reader finds the device's modules, ops and steps in TensorBoard's layout."""
    launches, path = _recorded(tmp_path)
    assert Path(path).parents[2] == tmp_path / "plugins"
    planes = {plane.name: plane for plane in ProfileData.from_file(path).planes}
    lines = {line.name: list(line.events) for line in planes["/device:TPU:0"].lines}
    assert [(e.name, e.start_ns * 1000, e.duration_ns * 1000) for e in lines["XLA Modules"]] == [
        (r.name, r.start, r.end - r.start) for r in launches
    ]
    assert len(lines["XLA Ops"]) == 2
    assert [e.duration_ns for e in lines["Steps"]] == [31_000]
    assert dict(planes["/device:TPU:0"].stats)["peak_teraflops_per_second"] == 1
    assert "/host:CPU" in planes


def test_xprof_reads_it(tmp_path: Path) -> None:
    """XProf's own converter shows the launches, the step and the host's row in its trace viewer."""
    converter = pytest.importorskip("xprof.convert.raw_to_tool_data", reason="xprof is not installed: 100 MB")
    launches, path = _recorded(tmp_path)
    data, _ = converter.xspace_to_tool_data([path], "trace_viewer@", {})
    events = json.loads(data)["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    slices = [(rows[e["pid"], e["tid"]], e["name"]) for e in events if e.get("ph") == "X"]
    assert sorted(name for row, name in slices if row == "XLA Modules") == sorted(launch.name for launch in launches)
    assert {"Steps", "XLA Ops", "issue (modelled)"} <= {row for row, _ in slices}
    overview, _ = converter.xspace_to_tool_data([path], "overview_page", {})
    assert json.loads(overview)


@pytest.mark.nightly
def test_the_clock_costs_a_launch_little() -> None:
    """At most 0.3 us more than the CPU client's own launch, in bursts taken in turns; wants a quiet machine."""
    torch.ones(8, device="tpu")
    client: Any = runtime().client
    while hasattr(client, "inner"):
        client = client.inner
    module = "func.func public @main(%a: tensor<8xf32>) -> tensor<8xf32> { return %a : tensor<8xf32> }"
    executable = client.compile(_bytecode(module), CompileOptions())
    meter, arguments = runtime().meter, [client.from_host(np.ones(8, np.float32))]
    metered = meter.metered(executable, meter.tally(executable), executable.launch)

    def burst(launch: Callable[[Any], Any]) -> float:
        begin = time.perf_counter()
        for _ in range(4000):
            launch(arguments)
        return (time.perf_counter() - begin) / 4000

    differences = []
    for turn in range(60):
        first, second = (metered, executable.launch) if turn % 2 else (executable.launch, metered)
        times = {launch is metered: burst(launch) for launch in (first, second)}
        differences.append(times[True] - times[False])
    assert sorted(differences)[30] <= 0.3e-6


def _bytecode(text: str) -> bytes:
    written = io.BytesIO()
    _jaxlib.ir.Module.parse(text, context=_jaxlib.context()).operation.write_bytecode(written)
    return written.getvalue()
