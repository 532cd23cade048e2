"""Runs programs of the model suite on the CPU alone: ``python -m tools.corpus [--only PATTERN] [--suite reps] [--jobs N]``.

What fails here is a defect of the suite: its shrinking, its inputs, or a library. Prints the failures by cause, and writes
what was found into the manifest (not with ``--dry``): the fingerprint of a program that runs, and the cause for one that does
not. ``reports/corpus.jsonl`` keeps every answer, so that a run that was stopped goes on, and ``--again`` repeats what failed.
The libraries are imported once; programs run in forks of that process.

``--blind`` asks instead whether an answer could show a fault: it names the programs of which a result hardly moves when all
weights move by a hundredth, or when what it sees, hears or reads is something else (``reports/blind.jsonl``).
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import dataclasses
import gc
import hashlib
import json
import os
import re
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from emutpu._workers import seconds_of
from emutpu.conformance.manifest import Program
from tools.layout import ROOT
from tools.manifest import DATA, jsonl

__all__ = ["main"]

RECORD = ROOT / "reports" / "corpus.jsonl"
BLIND = ROOT / "reports" / "blind.jsonl"
_SECONDS = 60  # of processor time a program
_PROGRAMS_A_FORK = 40
_NAMES = 10
_PR_SET_PDEATHSIG = 1
_QUIET = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
Answer = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write. Gives the exit code: 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="full", choices=("smoke", "reps", "full"))
    parser.add_argument("--only", help="only programs with such a name, as in 'timm/*'; several with commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="run what failed again, not only what was never run")
    parser.add_argument("--fresh", action="store_true", help="run everything again")
    parser.add_argument(
        "--trace", action="store_true", help="only one forward, without drawn weights: a third of the time, no training"
    )
    parser.add_argument("--blind", action="store_true", help="only whether answers depend on weights and inputs")
    parser.add_argument("--dry", action="store_true", help="leave the manifest as it is")
    options = parser.parse_args(arguments)
    os.environ.update(_QUIET)
    programs = _selected(options.suite, options.only)
    path, ask = (BLIND, _blind) if options.blind else (RECORD, _trace if options.trace else _examine)
    if options.blind:
        programs = _distinct(programs)
    known = {} if options.fresh else _recorded(path)
    left = [p for p in programs if not _settled(known.get(_key(p)), options.again)]
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as record:

        def finished(program: Program, answer: Answer) -> None:
            record.write(json.dumps({"key": _key(program)} | answer) + "\n")
            record.flush()

        _work_off(left, options.jobs, ask, finished)
    known = _recorded(path)
    answers = [known[_key(program)] for program in programs]
    failed = _print(answers)
    if not (options.dry or options.blind):
        _write({answer["program"]: answer for answer in answers})
    return 1 if failed else 0


def _selected(suite: str, only: str | None) -> list[Program]:
    from emutpu.conformance.runner import selected

    patterns: list[str | None] = [*only.split(",")] if only else [None]
    return list({p.name: p for pattern in patterns for p in selected(suite, (1, 1), pattern)}.values())


def _key(program: Program) -> str:
    """Of what a program is made from, and not of what is recorded about it."""
    fields = dataclasses.asdict(program)
    made = [fields[name] for name in ("name", "shrink", "options", "inputs", "gain", "seed", "task")]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]


def _distinct(programs: Sequence[Program]) -> list[Program]:
    """Those that run on the CPU, one of each fingerprint."""
    return list({program.fingerprint: program for program in programs[::-1] if program.fingerprint}.values())[::-1]


def _recorded(path: Path) -> dict[str, Answer]:
    if not path.is_file():
        return {}
    answers = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {answer["key"]: answer for answer in answers}


def _settled(answer: Answer | None, again: bool) -> bool:
    return answer is not None and (answer["outcome"] == "pass" or not again)


# ----------------------------------------------------------------------------------------------------- processes


@dataclasses.dataclass(slots=True)
class _Fork:
    """A process that answers its programs in order."""

    pid: int
    stream: int
    programs: list[Program]
    pending: bytes = b""
    spent: float = 0.0  # processor seconds when its present program began


def _work_off(
    programs: Sequence[Program],
    jobs: int,
    ask: Callable[[Program], Answer],
    finished: Callable[[Program, Answer], None],
) -> None:
    if not programs:
        return
    _import(programs)
    waiting = [list(programs[first : first + _PROGRAMS_A_FORK]) for first in range(0, len(programs), _PROGRAMS_A_FORK)]
    forks: list[_Fork] = []
    done, started = 0, time.monotonic()
    try:
        while waiting or forks:
            while waiting and len(forks) < jobs:
                forks.append(_forked(waiting.pop(0), ask))
            for fork in list(forks):
                for answer in _heard(fork):
                    finished(fork.programs.pop(0), answer)
                    done += 1
                if not fork.programs or fork.pid < 0:
                    forks.remove(fork)
                    os.close(fork.stream)
                    if fork.programs:
                        waiting.insert(0, fork.programs)
            print(f"\r{done}/{len(programs)} {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)
    finally:
        for fork in forks:
            os.kill(fork.pid, signal.SIGKILL)
    print(file=sys.stderr)


def _import(programs: Sequence[Program]) -> None:
    import importlib

    from emutpu.conformance.torchvision_schemas import declare

    warnings.simplefilter("ignore")
    declare()
    for library in [*({program.builder for program in programs} - {"trained"}), "emutpu.conformance.gates", "jax"]:
        importlib.import_module(library)
    gc.freeze()


def _forked(programs: list[Program], ask: Callable[[Program], Answer]) -> _Fork:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return _Fork(pid, reading, programs)
    try:
        os.close(reading)
        _answer_all(programs, ask, writing)
    finally:
        os._exit(0)


def _answer_all(programs: Sequence[Program], ask: Callable[[Program], Answer], stream: int) -> None:
    import torch

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would read the answers
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    for program in programs:
        os.write(stream, json.dumps(ask(program)).encode() + b"\n")
        gc.collect()


def _examine(program: Program) -> Answer:
    """What the suite does on the CPU: forward and a training step."""
    from emutpu.conformance.gates import CPU_ONLY, examine

    report = examine(program, CPU_ONLY, fallbacks=int)
    kept = ("program", "outcome", "stage", "error", "traceback", "fingerprint", "seconds")
    return {name: getattr(report, name) for name in kept}


def _trace(program: Program) -> Answer:
    """The fingerprint alone."""
    from emutpu.conformance.building import build
    from emutpu.conformance.fingerprints import fingerprint

    started = time.perf_counter()
    answer: Answer = {"program": program.name, "outcome": "pass", "stage": None, "error": None, "traceback": []}
    try:
        built = build(program, drawn=False)
        answer["fingerprint"] = fingerprint(built.model, built.inputs)
    except Exception:  # noqa: BLE001  # the whole examination says what it is
        return _examine(program)
    return answer | {"seconds": time.perf_counter() - started}


_MOVED = 0.01  # of every weight, relative
_SHOWN = 1e-3  # tenfold what tier 2 allows
_ANOTHER = 99  # seed


def _other(value: Any) -> Any:
    """Other noise, or the same tokens in another order."""
    import torch

    drawn = torch.Generator().manual_seed(_ANOTHER)
    return torch.randn(value.shape, generator=drawn).to(value) if value.is_floating_point() else value.roll(1, -1)


def _blind(program: Program) -> Answer:
    """Outcome ``blind`` for a program of which some result, or all of the answer, hardly moves; the error says with what."""
    import torch

    from emutpu.conformance.agreement import relative_error
    from emutpu.conformance.building import build, results_of
    from emutpu.conformance.gates import seed

    started = time.perf_counter()
    answer: Answer = {"program": program.name, "outcome": "pass", "stage": None, "error": None, "traceback": []}
    try:
        built = build(program)

        def results(**changed: Any) -> list[Any]:
            seed()
            with torch.no_grad():
                return results_of(built.model(**{**built.inputs, **changed}))

        expected = results()
        told = [
            f"with another {name}"
            for name, value in built.inputs.items()
            if isinstance(value, torch.Tensor) and (value.is_floating_point() or name == "input_ids") and value.dim()
            if max(map(relative_error, results(**{name: _other(value)}), expected)) < _SHOWN
        ]
        with torch.no_grad():
            for parameter in built.model.parameters():
                if parameter.is_floating_point():
                    parameter.mul_(1 + _MOVED * torch.randn_like(parameter))
        moved = enumerate(map(relative_error, results(), expected))
        told += [f"with other weights result {place}" for place, moves in moved if moves < _SHOWN]
        if told:
            answer |= {"outcome": "blind", "error": f"hardly moves {', '.join(told)}"}
    except Exception as error:  # noqa: BLE001  # an argument that has to fit another one, which is no finding
        answer |= {"outcome": "not measured", "error": f"{type(error).__name__}: {error}"}
    return answer | {"fingerprint": program.fingerprint, "seconds": time.perf_counter() - started}


def _heard(fork: _Fork) -> Iterator[Answer]:
    """The answers that came within a moment. A process that died or was late is an answer, and its pid becomes -1."""
    readable = select.select([fork.stream], [], [], 0.2)[0]
    chunk = os.read(fork.stream, 1 << 20) if readable else None
    fork.pending += chunk or b""
    *lines, fork.pending = fork.pending.split(b"\n")
    for line in lines:
        fork.spent = seconds_of(fork.pid)
        yield json.loads(line)
    if not fork.programs:
        os.waitpid(fork.pid, 0)
    elif chunk == b"":
        _, status = os.waitpid(fork.pid, 0)
        fork.pid = -1
        yield _failure(fork.programs[0], "crash", f"the process ended with {os.waitstatus_to_exitcode(status)}")
    elif seconds_of(fork.pid) - fork.spent > _SECONDS:
        os.kill(fork.pid, signal.SIGKILL)
        os.waitpid(fork.pid, 0)
        fork.pid = -1
        yield _failure(fork.programs[0], "timeout", f"took more than {_SECONDS} seconds of processor time")


def _failure(program: Program, outcome: str, error: str) -> Answer:
    lacking: Answer = {"stage": "cpu", "traceback": [], "fingerprint": None, "seconds": float(_SECONDS)}
    return {"program": program.name, "outcome": outcome, "error": error} | lacking


# ------------------------------------------------------------------------------------------------------- findings


def _cause(answer: Mapping[str, Any]) -> str:
    """What failed, in a line, the same on every machine."""
    text = re.sub(r"\s+", " ", answer["error"] or "")
    return re.sub(r"0x[0-9a-f]+|/\S+/", "", text)[:160]


def _print(answers: Sequence[Mapping[str, Any]]) -> int:
    counts = collections.Counter(answer["outcome"] for answer in answers)
    causes: dict[str, list[str]] = {}
    for answer in sorted(answers, key=lambda answer: answer["program"]):
        if answer["outcome"] != "pass":
            where = (answer["traceback"] or [""])[-1].rpartition("site-packages/")[2].partition(" ")[0]
            cause = re.sub(r"\d+", "#", _cause(answer))
            causes.setdefault(f"{answer['outcome']}: {cause} {where}", []).append(answer["program"])
    for cause, names in sorted(causes.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):4} {cause}\n     {' '.join(names[:_NAMES])}")
    slow = sorted(answers, key=lambda answer: -answer["seconds"])[:_NAMES]
    print("slowest:", ", ".join(f"{answer['program']} {answer['seconds']:.1f} s" for answer in slow))
    prints = {answer["fingerprint"] for answer in answers if answer["outcome"] == "pass"} - {None}
    print(f"{len(answers)} programs, {len(prints)} distinct; {dict(counts)}")
    return len(answers) - counts["pass"]


def _write(answers: Mapping[str, Mapping[str, Any]]) -> None:
    path = DATA / "programs.jsonl"
    programs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for program in programs:
        answer = answers.get(program["name"])
        if answer is not None:
            passed = answer["outcome"] == "pass"
            program["fingerprint"] = answer["fingerprint"] if passed else None
            program["expected"] = "pass" if passed else f"{answer['outcome']}: {_cause(answer)}"
    path.write_text(jsonl(programs), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
