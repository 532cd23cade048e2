"""``emutpu fuzz``: drawing, comparing, minimising, and whole searches over honest and faulty programs."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import runpy
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emutpu.backend import fuzzing
from emutpu.backend.options import EagerMode, override
from emutpu.backend.runtime import runtime
from emutpu.cli import fuzz
from emutpu.cli._fuzz.minimise import minimise
from emutpu.cli._fuzz.outputs import difference
from emutpu.cli._fuzz.running import Program, Result
from emutpu.cli._fuzz.schedule import KINDS, draw, text
from emutpu.cli._output import console

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Write = Callable[[str], str]
Valid = Callable[[Any, str], dict[str, Any]]

# A client whose second executable of a name is wrong: what a stale or mixed-up cache entry does.
FAULTY = """
import numpy, torch
from emutpu.backend.runtime import runtime
from emutpu.backend.wrapped import WrappedClient, WrappedExecutable

class Stale(WrappedExecutable):
    def run(self, arguments, launch):
        return [runtime().client.from_host(numpy.zeros(r.shape, r.dtype)) for r in launch(arguments)]

class Faulty(WrappedClient):
    def __init__(self, inner):
        super().__init__(inner)
        self.seen = set()
    def wrap(self, executable):
        fault = executable.name in self.seen
        self.seen.add(executable.name)
        return Stale(executable) if fault else executable

def main():
    x = torch.ones(4).to("tpu")
    for step in range(3):
        x = (x * 0.5).sin() + 1
        print(step, x.sum().item())

if __name__ == "__main__":
    torch.ones(1).to("tpu")
    runtime().replace_client(Faulty(runtime().client))
    main()
"""
SEED = 39  # draws forget, hold and late for a run of 13 ops and 4 launches


def test_schedules_are_reproducible() -> None:
    """Equal arguments, equal schedules; other runs and seeds differ; places lie inside the program."""
    assert draw(3, 1, 50, 9) == draw(3, 1, 50, 9)
    schedules = [draw(seed, run, 50, 9) for seed in range(5) for run in range(5)]
    assert len({json.dumps(s) for s in schedules}) == len(schedules)
    for perturbation in (p for s in schedules for p in s):
        assert 0 <= perturbation["at"] < (9 if KINDS[perturbation["kind"]][0] else 50)
        assert perturbation["kind"] in text(perturbation)
    assert {p["kind"] for s in schedules for p in s} == set(KINDS)
    assert draw(0, 0, 0, 0) == []


@given(st.integers(1, 24), st.sets(st.integers(0, 23), min_size=1, max_size=4))
def test_minimise_finds_a_minimal_set(count: int, needed: set[int]) -> None:
    """Whatever a failure needs is found, and nothing else is kept."""
    needed = {n % count for n in needed}
    asked: list[tuple[int, ...]] = []

    def fails(part: Sequence[int]) -> bool:
        asked.append(tuple(part))
        return needed <= set(part)

    found, minimal = minimise(list(range(count)), fails, 10_000)
    assert set(found) == needed
    assert minimal
    assert len(asked) == len(set(asked))


def test_minimise_stops() -> None:
    """With few attempts it gives something that fails, and says that it may have elements to spare."""
    found, minimal = minimise(list(range(64)), lambda part: {0, 63} <= set(part), 3)
    assert {0, 63} <= set(found)
    assert not minimal


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("loss 0.123456\n", "loss 0.123457\n", True),
        ("loss 0.123456\n", "loss 0.133457\n", False),
        ("step 3 1e-3", "step 3 1.00001e-3", True),
        ("step 3 0.5", "step 4 0.5", False),
        ("nan", "nan", True),
        ("nan 1.0", "0.0 1.0", False),
        ("a\nb", "a\n", False),
        ([1, 2.0], [1, 2.00001], True),
        ([1, 2.0], [1, 2], False),
        ({"values": [[1.0, 2.0]]}, {"values": [[1.0, 2.5]]}, False),
        (True, 1, False),
    ],
)
def test_comparison(expected: Any, found: Any, same: bool) -> None:
    """Numbers within the tolerance, all else exactly."""
    assert (difference(expected, found, 1e-4, 1e-6) is None) == same


class _Here(Program):
    """Runs the faulty program in this process: the same engine, client and perturbations, without a start-up each time."""

    def run(self, perturbations: Sequence[dict[str, Any]], timeout: float) -> Result:
        from emutpu.backend.deferred.ops import HOOKS
        from emutpu.backend.deferred.queue import current_queue, forget

        plan = self.folder / "plan.json"
        content = {"perturbations": list(perturbations), "report": str(self.folder / "report.json")}
        plan.write_text(json.dumps(content))
        namespace = runpy.run_path(self.arguments[0], run_name="faulty")
        honest = runtime().client
        disturbance = fuzzing.start(plan)
        runtime().replace_client(namespace["Faulty"](disturbance.disturbed(honest)))
        forget()
        output = io.StringIO()
        try:
            with override(mode=EagerMode.DEFER_AND_FUSE), contextlib.redirect_stdout(output):
                current_queue().detector.reset()
                namespace["main"]()
        finally:
            HOOKS.before = None
            runtime().replace_client(honest)
            forget()
            gc.enable()
        assert disturbance.client is not None
        return Result(0, output.getvalue(), "", None, disturbance.ops, disturbance.client.count, False)


def test_a_faulty_client_is_found_and_minimised(
    tmp_path: Path, program: Write, valid: Valid, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of recompilation needs one perturbation of three, and the replay file holds exactly that one."""
    torch.ones(1, device="tpu").add_(1)
    script = tmp_path / program(FAULTY)
    made = _Here((str(script),), {"TORCH_TPU_DEFER_AND_FUSE": "1"}, tmp_path, None, 1e-4, 1e-6)
    replay = tmp_path / "replay.json"
    document = valid(fuzz._search(made, SEED, 1, None, 60, str(replay), console(stderr=False)), "fuzz")
    (finding,) = document["findings"]
    assert [p["kind"] for p in finding["perturbations"]] == ["forget"]
    assert finding["minimal"]
    assert "instead of" in finding["difference"]
    assert json.loads(replay.read_text())["perturbations"] == finding["perturbations"]
    assert "1 of them are enough" in capsys.readouterr().out


def test_a_replay_file_reproduces(emutpu: Command, program: Write, valid: Valid, tmp_path: Path) -> None:
    """In a process of its own the minimal schedule fails as it did, and the exit code says so."""
    recorded = {
        "schema": "emutpu.fuzz-replay/1",
        "program": [program(FAULTY)],
        "environment": {"TORCH_TPU_DEFER_AND_FUSE": "1"},
        "result": None,
        "rtol": 1e-4,
        "atol": 1e-6,
        "perturbations": [{"kind": "forget", "at": 6, "length": 0}],
    }
    (tmp_path / "replay.json").write_text(json.dumps(recorded))
    replayed = emutpu("fuzz", "--replay", "replay.json", "--json", "-")
    assert replayed.returncode == 1, replayed.stderr
    (finding,) = valid(replayed.stdout, "fuzz")["findings"]
    assert "instead of" in finding["difference"]
    assert "forget at op 6" in replayed.stderr


def test_an_honest_program(emutpu: Command, program: Write, valid: Valid) -> None:
    """Gradients, updates and random numbers under other schedules come to the same, to the last element of the result."""
    text = """
import torch
torch.manual_seed(0)
w = torch.nn.Linear(4, 4).to("tpu")
x = torch.rand(4, device="tpu")
for step in range(2):
    w(x).square().sum().backward()
    with torch.no_grad():
        for p in w.parameters():
            p -= 0.1 * p.grad
            p.grad = None
    print(w.bias.sum().item())
answer = [p.detach() for p in w.parameters()] + [x]
print("done")
"""
    result = emutpu("fuzz", "--runs", "1", "--result", "answer", "--json", "-", program(text), "--seed", "7")
    assert result.returncode == 0, result.stderr
    document = valid(result.stdout, "fuzz")
    assert document["runs"] == 1
    assert document["launches"] > 1


def test_a_program_that_is_not_deterministic(emutpu: Command, program: Write) -> None:
    """Two undisturbed runs that differ are said to, before anything is blamed on a schedule."""
    result = emutpu("fuzz", program("import os, torch\ntorch.ones(1).to('tpu')\nprint(os.getpid())\n"))
    assert result.returncode == 1
    assert "two undisturbed runs differ" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fuzz"], "nothing to run"),
        (["fuzz", "--replay", "program.py"], "no replay file"),
        (["fuzz", "--replay", "program.py", "program.py"], "give no SCRIPT"),
        (["fuzz", "--runs", "0", "program.py"], "--runs"),
    ],
)
def test_wrong_usage(emutpu: Command, program: Write, arguments: list[str], message: str) -> None:
    """Found before anything runs, in one line."""
    program("{}")
    result = emutpu(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
