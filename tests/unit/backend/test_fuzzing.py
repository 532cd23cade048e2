"""Every perturbation does what it says, and none of them changes a result."""

from __future__ import annotations

import dataclasses
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from emutpu.backend import fuzzing
from emutpu.backend.deferred.log import LOG
from emutpu.backend.deferred.ops import HOOKS
from emutpu.backend.deferred.queue import current_queue
from emutpu.backend.fuzzing import Disturbance
from emutpu.backend.options import EagerMode, override
from emutpu.backend.pjrt import Aval
from emutpu.backend.runtime import runtime

Disturb = Callable[..., Disturbance]


@pytest.fixture
def disturb(tmp_path: Path) -> Iterator[Disturb]:
    """``disturb({"kind": "read", "at": 2})``: this process under a plan, in DEFER_AND_FUSE, until the test ends."""
    torch.ones(1, device="tpu").add_(1)
    runtime().materialize("synchronize()")
    before = runtime().client

    def start(*perturbations: dict[str, Any]) -> Disturbance:
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"perturbations": perturbations, "report": str(tmp_path / "report.json")}))
        disturbance = fuzzing.start(path)
        runtime().replace_client(disturbance.disturbed(before))
        return disturbance

    with override(mode=EagerMode.DEFER_AND_FUSE):
        current_queue().detector.reset()
        yield start
    runtime().materialize("synchronize()")
    HOOKS.before = None
    runtime().replace_client(before)
    gc.enable()
    runtime().cache.allow = True


def program() -> list[float]:
    """Six ops and one read."""
    x = torch.ones(4).to("tpu")
    y = (x * 2 + 1) / 4
    z = y.square() - x
    return z.sum().tolist() if z.dim() == 0 else z.tolist()


def expected() -> list[float]:
    """What it computes."""
    y = (np.ones(4) * 2 + 1) / 4
    return list(y**2 - 1)


@pytest.mark.parametrize("kind", [*fuzzing.AT_OP, *fuzzing.AT_LAUNCH])
def test_results_stay_the_same(disturb: Disturb, kind: str) -> None:
    """Each kind, at the first and at a later place."""
    disturb({"kind": kind, "at": 0, "length": 2}, {"kind": kind, "at": 3, "length": 1})
    assert program() == expected()
    assert program() == expected()


def test_read(disturb: Disturb) -> None:
    """One list becomes two regions."""
    disturb({"kind": "read", "at": 2})
    since = LOG.launched
    program()
    assert len(LOG.records(since)[0].ops) == 2
    assert LOG.launched - since >= 2


def test_collect_and_hold(disturb: Disturb) -> None:
    """The collector runs where it is told to, and does not run by itself in between."""
    runs: list[str] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        runs.append(phase)

    disturbance = disturb({"kind": "hold", "at": 0, "length": 3}, {"kind": "collect", "at": 5})
    x = torch.ones(4).to("tpu")
    y = x * 2
    assert not gc.isenabled()
    y = y + 1
    y = y + 1
    y = y + 1
    assert not gc.isenabled()
    y = y + 1
    assert gc.isenabled()
    gc.disable()  # so that only the perturbation can run it
    gc.callbacks.append(note)
    try:
        y = y + 1
    finally:
        gc.callbacks.remove(note)
    assert runs == ["start", "stop"]
    assert disturbance.ops == 6


def test_forget_and_uncached(disturb: Disturb) -> None:
    """What was compiled is compiled anew, and for a while nothing is kept."""
    disturb({"kind": "forget", "at": 6}, {"kind": "uncached", "at": 12, "length": 6})
    program()
    misses = runtime().cache.misses
    program()
    assert runtime().cache.misses > misses
    program()
    assert not runtime().cache.allow
    x = torch.ones(3).to("tpu")
    for _ in range(4):
        x = x + 1
    assert not runtime().cache.allow
    x = x + 1
    assert runtime().cache.allow


def test_an_unknown_kind(disturb: Disturb) -> None:
    """A plan of another version is refused rather than ignored."""
    with pytest.raises(ValueError, match="unknown perturbation 'shuffle'"):
        disturb({"kind": "shuffle", "at": 0})


def test_counts_and_results_are_written(disturb: Disturb, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops and launches, and a named variable of the program as plain values."""
    import __main__

    disturbance = disturb()
    program()
    disturbance.result = "answer"
    value = {"t": torch.ones(2).to("tpu") * 2, "n": [1, "x"]}
    monkeypatch.setattr(__main__, "answer", value, raising=False)
    disturbance.write()
    written = json.loads(disturbance.report.read_text())
    assert written["ops"] == 6
    assert written["launches"] >= 1
    assert written["result"] == {"t": {"shape": [2], "values": [2.0, 2.0]}, "n": [1, "x"]}


# --------------------------------------------------------------------------------------------------- launches


@dataclasses.dataclass
class Fake:
    """A buffer, and an executable, that note what happens to them."""

    name: str
    log: list[str]
    donated: frozenset[int] = frozenset()
    results: tuple[Aval, ...] = (Aval((1,), np.dtype(np.float32)),)
    shape = (1,)
    dtype = np.dtype(np.float32)
    nbytes = 4

    def launch(self, arguments: Sequence[Any]) -> list[Any]:
        self.log.append(f"{self.name}({', '.join(a.name for a in arguments)})")
        return [Fake(self.name.lower(), self.log)]

    execute = launch

    def block_until_ready(self) -> Any:
        self.log.append(f"wait {self.name}")
        return self


def _client(*perturbations: tuple[str, int, int]) -> tuple[Any, list[str]]:
    log: list[str] = []
    by_launch: dict[int, list[fuzzing.Perturbation]] = {}
    for kind, at, length in perturbations:
        by_launch.setdefault(at, []).append(fuzzing.Perturbation(kind, at, length))
    return fuzzing._DisturbedClient(Fake("inner", log), by_launch), log  # type: ignore[arg-type]  # a fake


def test_late_launches_complete_after_younger_ones() -> None:
    """A is held until two others ran; then it is done though nobody asked."""
    client, log = _client(("late", 0, 2))
    a, b, c, d = (client.wrap(Fake(name, log)) for name in "ABCD")
    a.launch([])
    b.launch([])
    c.launch([])
    d.launch([])
    assert log == ["B()", "C()", "A()", "D()"]


def test_late_launches_are_done_for_whoever_needs_them() -> None:
    """A launch that reads a held result, a host read, and a donation that could destroy its argument."""
    client, log = _client(("late", 0, 9), ("late", 2, 9), ("late", 3, 9))
    x = Fake("x", log)
    (held,) = client.wrap(Fake("A", log)).launch([x])
    client.wrap(Fake("B", log)).launch([held])
    assert log == ["A(x)", "B(a)"]
    client.wrap(Fake("C", log)).launch([x])
    client.wrap(Fake("D", log)).launch([x])
    client.wrap(Fake("E", log, frozenset({0}))).launch([x])
    assert log[2:] == ["D(x)", "C(x)", "E(x)"]


def test_wait() -> None:
    """The host waits for the results of the launch that the plan names, and for no other."""
    client, log = _client(("wait", 1, 0))
    client.wrap(Fake("A", log)).launch([])
    client.wrap(Fake("B", log)).launch([])
    assert log == ["A()", "B()", "wait b"]


def test_a_late_failure_is_raised_at_the_read() -> None:
    """Not at the launch that happened to come after it."""
    client, log = _client(("late", 0, 1))

    class Failing(Fake):
        def launch(self, arguments: Sequence[Any]) -> list[Any]:
            raise RuntimeError("broken")

    (held,) = client.wrap(Failing("A", log)).launch([])
    client.wrap(Fake("B", log)).launch([])
    assert log == ["B()"]
    with pytest.raises(RuntimeError, match="broken"):
        held.block_until_ready()
