"""Workers with limits, and runs that survive being killed. The workers here are stand-ins that compute nothing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from emutpu.conformance import pool, runner
from emutpu.conformance.history import History, Plan
from emutpu.conformance.pool import Limits, Task, work_off
from tools.layout import ROOT

# Answers by the program's name; what it does instead of answering is in the name too.
STAND_IN = """
import json, os, sys, time
for line in sys.stdin:
    task = json.loads(line)
    name = task["program"]
    if "sleeps" in name: time.sleep(600)
    if "spins" in name:
        while True: pass
    if "grows" in name:
        held = bytearray(400 * 2**20); held[::4096] = b"x" * len(held[::4096]); time.sleep(600)
    if "holds" in name: kept = bytearray(200 * 2**20); kept[::4096] = b"x" * len(kept[::4096])
    if "wants" in name: wanted = bytearray(200 * 2**20); wanted[::4096] = b"x" * len(wanted[::4096]); time.sleep(2); del wanted
    if "dies" in name:
        sys.stderr.write("last words\\n"); sys.stderr.flush(); os._exit(3)
    if "slow" in name or os.environ.get("STAND_IN_SLOW"): time.sleep(0.2)
    answer = {"program": name, "mode": task["mode"], "outcome": "pass", "error": None, "traceback": [], "tier1": True,
              "tier2": True, "seconds": 0.0, "fingerprint": name, "ops": {"aten.mm.default": 1}, "worker": os.getpid(),
              "resident_bytes": 2**31 if "grown" in name else 1000}
    print(json.dumps(answer), flush=True)
"""
PLENTY = Limits(60, 2**31)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """Workers that answer at once."""
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", STAND_IN])


def answers_of(names, limits=PLENTY, jobs=1):
    """Answers by program."""
    found = {}
    tasks = [Task(name, "strict") for name in names]
    work_off(
        tasks,
        jobs=jobs,
        environment={},
        limits=limits,
        finished=lambda answer: found.update({answer["program"]: answer}),
    )
    return found


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_task_is_answered_once(jobs):
    """In one process or several."""
    names = [f"p{n}" for n in range(20)]
    found = answers_of(names, jobs=jobs)
    assert sorted(found) == sorted(names)
    assert len({answer["worker"] for answer in found.values()}) <= jobs


def test_neighbours_share_a_worker():
    """What follows each other has modules in common; towards the end nobody waits for a long stretch of another."""
    names = [f"slow{n:02}" for n in range(24)]
    found = answers_of(names, jobs=2)
    changes = sum(found[one]["worker"] != found[other]["worker"] for one, other in itertools.pairwise(names))
    assert len({answer["worker"] for answer in found.values()}) == 2
    assert changes <= 17  # one by one it is 23 or so


def test_the_full_suite_multiplies_natively(monkeypatch, tmp_path):
    """`full` computes HIGHEST by one product, the smaller suites as the chip does; the environment has the last word."""
    monkeypatch.delenv("EMUTPU_HOST_HIGHEST", raising=False)
    chosen = {
        suite: runner._variables(runner.plan_of(suite, ["strict"], "v5e", (1, 1), None), tmp_path)[
            "EMUTPU_HOST_HIGHEST"
        ]
        for suite in ("smoke", "reps", "full")
    }
    assert chosen == {"smoke": "passes", "reps": "passes", "full": "native"}
    run(tmp_path, suite="smoke")
    with History(tmp_path / runner.DATABASE) as history:
        assert history.runs()[0].environment["highest"] == "passes"
    monkeypatch.setenv("EMUTPU_HOST_HIGHEST", "passes")
    full = runner.plan_of("full", ["strict"], "v5e", (1, 1), None)
    assert runner._variables(full, tmp_path)["EMUTPU_HOST_HIGHEST"] == "passes"


def test_a_dead_worker_is_the_outcome_of_its_program():
    """With its last words, and the next program has a fresh worker."""
    found = answers_of(["a", "dies", "b"])
    assert found["dies"]["outcome"] == "crash"
    assert "ended with 3" in found["dies"]["error"]
    assert "last words" in found["dies"]["error"]
    assert found["b"]["outcome"] == "pass"
    assert found["a"]["worker"] != found["b"]["worker"]


def test_limits(monkeypatch):
    """Processor time, time on the clock, memory."""
    monkeypatch.setattr(pool, "_PATIENCE", 200)
    spins = answers_of(["spins", "a"], Limits(0.5, 2**31))
    assert spins["spins"]["outcome"] == "timeout"
    assert "processor time" in spins["spins"]["error"]
    assert spins["a"]["outcome"] == "pass"
    monkeypatch.setattr(pool, "_PATIENCE", 0.05)
    sleeps = answers_of(["sleeps"])["sleeps"]
    assert sleeps["outcome"] == "timeout"
    assert "no answer" in sleeps["error"]
    monkeypatch.setattr(pool, "_PATIENCE", 10)  # a busy machine is slow to start a process
    large = answers_of(["grows"], Limits(60, 200 * 2**20))["grows"]
    assert large["outcome"] == "crash"
    assert "occupied more than" in large["error"]


def test_the_memory_of_earlier_programs_is_no_finding():
    """A program that outgrows a worker with another before it is asked again in a fresh one, and only that counts."""
    found = answers_of(["holds", "wants", "a"], Limits(60, 350 * 2**20))
    assert {answer["outcome"] for answer in found.values()} == {"pass"}
    assert found["holds"]["worker"] != found["wants"]["worker"] == found["a"]["worker"]


def test_workers_are_replaced():
    """After a number of programs, or grown to half of the limit."""
    assert len({answer["worker"] for answer in answers_of("abcdef", Limits(60, 2**31, 2)).values()}) == 3
    assert len({answer["worker"] for answer in answers_of("abc").values()}) == 1
    assert len({answer["worker"] for answer in answers_of(["grown", "a", "b"]).values()}) == 2


def test_an_error_in_the_callers_hands_ends_the_work():
    """No task is lost silently."""

    def broken(answer):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        work_off([Task("a", "strict"), Task("b", "strict")], jobs=2, environment={}, limits=PLENTY, finished=broken)


def test_shards_are_a_partition():
    """Every program is in exactly one of n shards, whatever else is in the manifest."""
    whole = [program.name for program in runner.selected("smoke", (1, 1), None)]
    parts = [program.name for n in (1, 2, 3) for program in runner.selected("smoke", (n, 3), None)]
    assert sorted(parts) == sorted(whole)
    assert runner.selected("full", (1, 1), "timm/resnet18")[0].name == "timm/resnet18"


def test_twins():
    """Programs of one fingerprint are one task in each mode, the first of them; without a fingerprint each is its own."""
    a, b, c, d = (Task(name, "strict") for name in "abcd")
    other = Task("b", "defer")
    marks = {"a": "x", "b": None, "c": "x", "d": None}
    assert runner.twins([a, b, c, d, other], marks) == {a: [c], b: [], d: [], other: []}


def test_answers_are_credited_to_twins(tmp_path, monkeypatch):
    """Nine programs of two fingerprints: two are run, all have an answer; also where a kill came between."""
    chosen = [
        dataclasses.replace(program, fingerprint="even" if n % 2 else "odd")
        for n, program in enumerate(runner.selected("smoke", (1, 1), None)[:9])
    ]
    monkeypatch.setattr(runner, "selected", lambda *given: chosen)
    seen = []
    run(tmp_path, progress=lambda state: seen.append((state.done, state.total)))
    assert seen[-1] == (9, 9)
    assert len(seen) == 2
    with History(tmp_path / runner.DATABASE) as history:
        answers = {answer["program"]: answer for answer in history.answers(1)}
        assert {answer.get("same_as") for answer in answers.values()} == {None, chosen[0].name, chosen[1].name}
        assert [answers[program.name]["worker"] for program in chosen[:2]] == [
            answers[program.name]["worker"] for program in chosen[2:4]
        ]
        number = history.start(runner.plan_of("smoke", ["strict"], "v5e", (1, 1), None), {})
        for program in chosen[:3]:
            history.record(number, {"program": program.name, "mode": "strict", "worker": 0})
    states = []
    assert run(tmp_path, resume=True, progress=states.append) == number
    assert not states
    with History(tmp_path / runner.DATABASE) as history:
        assert {answer["worker"] for answer in history.answers(number)} == {0}
        assert sum(1 for _ in history.answers(number)) == 9


def run(folder, resume=False, suite="smoke", progress=lambda state: None):
    """A run of the smoke suite with stand-ins."""
    plan = runner.plan_of(suite, ["strict"], "v5e", (1, 1), None)
    return runner.run(plan, folder, jobs=2, limits=PLENTY, resume=resume, progress=progress)


def test_a_run_is_in_the_history(tmp_path):
    """Answers, progress to the end, JSON lines; a second run is another run, with the same answers."""
    seen = []
    first = run(tmp_path, progress=lambda state: seen.append((state.done, state.total)))
    second = run(tmp_path, resume=True)  # nothing is unfinished
    assert (first, second) == (1, 2)
    assert seen == [(n, 40) for n in range(1, 41)]
    with History(tmp_path / runner.DATABASE) as history:
        runs = history.runs()
        assert [entry.id for entry in runs] == [2, 1]
        assert all(entry.finished for entry in runs)
        one, two = ([a | {"worker": 0, "processor_seconds": 0} for a in history.answers(entry.id)] for entry in runs)
    assert one == two
    lines = (tmp_path / "run-1.jsonl").read_text().splitlines()
    assert len(lines) == 40
    assert [json.loads(line)["program"] for line in lines] == sorted(json.loads(line)["program"] for line in lines)


RUNS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_running as t
from emutpu.conformance import pool
pool.COMMAND = [sys.executable, "-c", t.STAND_IN]
t.run(Path(sys.argv[1]))
"""


def test_a_killed_run_goes_on(tmp_path):
    """A kill -9 in the middle; the same options with resume finish it: no answer is lost, none is there twice."""
    here = os.path.dirname(os.path.abspath(__file__))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "STAND_IN_SLOW": "1"}
    child = subprocess.Popen([sys.executable, "-c", RUNS, str(tmp_path), here], env=environment)
    database = tmp_path / runner.DATABASE
    deadline = time.monotonic() + 120
    done = set()
    while len(done) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
        if database.is_file():
            with History(database) as history:
                done = history.done(1)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert 5 <= len(done) < 40
    with History(database) as history:
        before = {answer["program"]: answer["worker"] for answer in history.answers(1)}
        assert history.runs()[0].finished is None
    states = []
    assert run(tmp_path, resume=True, progress=states.append) == 1
    assert states[0].done == len(before) + 1
    assert len(states) == 40 - len(before)
    with History(database) as history:
        after = {answer["program"]: answer["worker"] for answer in history.answers(1)}
        assert history.runs()[0].finished
    assert len(after) == 40
    assert {name: after[name] for name in before} == before


def test_another_plan_is_not_continued(tmp_path):
    """An unfinished run of other options, or of another manifest, stays as it is."""
    plan = runner.plan_of("smoke", ["strict"], "v5e", (1, 1), None)
    with History(tmp_path / runner.DATABASE) as history:
        number = history.start(plan, {})
        assert history.unfinished(plan) == number
        assert history.unfinished(runner.plan_of("smoke", ["defer"], "v5e", (1, 1), None)) is None
        assert history.unfinished(Plan("smoke", ("strict",), "v5e", (1, 1), None, "another")) is None
        history.finish(number)
        assert history.unfinished(plan) is None
