"""A run of a suite: which programs, in which processes, into which history."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import importlib.metadata
import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from emutpu.conformance import commits, manifest
from emutpu.conformance.history import History, Plan
from emutpu.conformance.manifest import Program
from emutpu.conformance.pool import Limits, Task, work_off
from emutpu.conformance.tiers import applies
from emutpu.conformance.worker import CHIPS

__all__ = [
    "DATABASE",
    "EXECUTORS",
    "LOCAL",
    "Progress",
    "chosen_for_faults",
    "digest",
    "environment",
    "mutate",
    "mutations",
    "mutations_of",
    "plan_of",
    "run",
    "selected",
    "twins",
]

DATABASE = "history.sqlite"
MUTATIONS = "mutations.json"
LOCAL, RAY = EXECUTORS = ("local", "ray")
_LIBRARIES = ("torch", "jax", "jaxlib", "timm", "transformers", "diffusers", "torchvision")


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands after an answer: tasks done of all, and the seconds that the rest will take at this pace."""

    done: int
    total: int
    remaining: float
    answer: Mapping[str, Any]


def digest() -> str:
    """Of the manifest's files: runs of different manifests are never continued."""
    found = hashlib.sha256()
    for name in ("programs.jsonl", "models.jsonl", "sources.json"):
        found.update(files("emutpu.conformance").joinpath("data", name).read_bytes())
    return found.hexdigest()[:16]


def selected(suite: str, shard: tuple[int, int], only: str | None) -> list[Program]:
    """The programs of a suite's shard whose name matches ``only``. A program is always in the same
    shard of so many, together with those of its fingerprint.
    """
    number, of = shard
    return [
        program
        for program in manifest.select(suite)
        if zlib.crc32((program.fingerprint or program.name).encode()) % of == number - 1
        and (only is None or fnmatch.fnmatchcase(program.name, only))
    ]


def twins(tasks: Iterable[Task], fingerprints: Mapping[str, str | None]) -> dict[Task, list[Task]]:
    """The tasks to run, and by each of them those that are the same program by fingerprint in the same mode: it is
    no new evidence to run these too. Who comes first is run. ``fingerprints`` is by name; None is a program of its own.
    """
    found: dict[Task, list[Task]] = {}
    first: dict[tuple[str, str], Task] = {}
    for task in tasks:
        mark = fingerprints[task.program]
        leader = task if mark is None else first.setdefault((mark, task.mode), task)
        if leader is task:
            found[task] = []
        else:
            found[leader].append(task)
    return found


def plan_of(suite: str, modes: Iterable[str], chip: str, shard: tuple[int, int], only: str | None) -> Plan:
    """The plan of such a run with the manifest that is here."""
    return Plan(suite, tuple(dict.fromkeys(modes)), chip, shard, only, digest())


def environment() -> dict[str, Any]:
    """What a result depends on beside the plan: versions, the commit, and the machine."""
    from emutpu import __version__

    versions: dict[str, str | None] = {"emutpu": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            versions[library] = None
    return {"versions": versions, "machine": platform.machine(), "cpus": os.cpu_count()} | commits.current()


def run(
    plan: Plan,
    folder: Path,
    *,
    jobs: int,
    limits: Limits,
    resume: bool,
    progress: Callable[[Progress], None],
    executor: str = LOCAL,
) -> int:
    """Run what the plan names and has no answer yet; gives the run's number in the history of ``folder``.

    With ``resume`` the latest unfinished run of the same plan goes on. The answers are also in ``run-<number>.jsonl``.
    Programs of one fingerprint are run once, and the answer is credited to the others (``same_as`` says of which).
    ``executor`` is one of :data:`EXECUTORS`; raises ImportError where it needs what is not installed.
    """
    programs = selected(plan.suite, plan.shard, plan.only)
    tasks = [Task(program.name, mode) for mode in plan.modes for program in programs if applies(program, mode)]
    groups = twins(tasks, {program.name: program.fingerprint for program in programs})
    work = _executor(executor)
    variables = _variables(plan, folder)
    with History(folder / DATABASE) as history:
        number = history.unfinished(plan) if resume else None
        if number is None:
            number = history.start(plan, environment() | {"highest": variables["EMUTPU_HOST_HIGHEST"]})
        ledger = _Ledger(history, number, groups, progress)
        work(ledger.left, jobs=jobs, environment=variables, limits=limits, finished=ledger.finished)
        history.export(number, folder / f"run-{number}.jsonl")
        history.finish(number)
    return number


def _executor(name: str) -> Callable[..., None]:
    if name == LOCAL:
        return work_off
    from emutpu.conformance import farm

    farm.check()
    return farm.work_off


class _Ledger:
    """Keeps answers as they come, credits them to the twins of their program, and tells how far the run is."""

    def __init__(
        self,
        history: History,
        number: int,
        groups: Mapping[Task, Sequence[Task]],
        progress: Callable[[Progress], None],
    ) -> None:
        self._history, self._number, self._groups, self._progress = history, number, groups, progress
        self._total = sum(1 + len(others) for others in groups.values())
        self._done = history.done(number)
        known = {(answer["program"], answer["mode"]): answer for answer in history.answers(number)}
        for task in groups:  # a run may have been killed between an answer and its credits
            if (task.program, task.mode) in known:
                self._credit(known[task.program, task.mode])
        self.left = [task for task in groups if (task.program, task.mode) not in self._done]
        self._asked, self._of = 0, len(self.left)
        self._started = self._last = time.monotonic()

    def finished(self, answer: dict[str, Any]) -> None:
        """Keep an answer of a process."""
        self._keep(answer)
        self._credit(answer)
        now = time.monotonic()
        self._history.worked(self._number, now - self._last)
        self._last = now
        self._asked += 1
        pace = (now - self._started) / self._asked
        self._progress(Progress(len(self._done), self._total, pace * (self._of - self._asked), answer))

    def _credit(self, answer: Mapping[str, Any]) -> None:
        for task in self._groups[Task(answer["program"], answer["mode"])]:
            if (task.program, task.mode) not in self._done:
                self._keep({**answer, "program": task.program, "same_as": answer["program"], "seconds": 0.0})

    def _keep(self, answer: Mapping[str, Any]) -> None:
        self._history.record(self._number, answer)
        self._done.add((answer["program"], answer["mode"]))


def chosen_for_faults(suite: str, only: str | None) -> list[Program]:
    """The programs of a mutation run: of a suite, or across families, whose name matches ``only``."""
    from emutpu.conformance.mutation import FAMILIES, families

    if suite != FAMILIES:
        return selected(suite, (1, 1), only)
    return [program for program in families() if only is None or fnmatch.fnmatchcase(program.name, only)]


def mutate(
    suite: str, only: str | None, folder: Path, *, jobs: int, limits: Limits, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """Put faults into every program of a suite, on the CPU, and keep in ``folder`` how many tier 2 would catch.

    ``progress`` is told how many programs are done, and of how many.
    """
    programs = chosen_for_faults(suite, only)
    answers: list[dict[str, Any]] = []

    def finished(answer: dict[str, Any]) -> None:
        answers.append(answer)
        progress(len(answers), len(programs))

    tasks = [Task(program.name, "mutate") for program in programs]
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    work_off(tasks, jobs=jobs, environment=variables, limits=limits, finished=finished)
    found = mutations_of(answers) | {"suite": suite, "manifest": digest()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MUTATIONS).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _of_gradients(fault: Mapping[str, Any]) -> str:
    error = fault.get("gradient_error")
    return "" if error is None else f", gradients {error:.1e}"


def mutations_of(answers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts of the answers of a mutation run: injected and caught by fault, and every fault that was missed."""
    kept = sorted(answers, key=lambda answer: answer["program"])
    faults = [(answer["program"], fault) for answer in kept for fault in answer.get("faults", ())]
    by_fault = {
        name: {
            "injected": sum(fault["fault"] == name for _, fault in faults),
            "caught": sum(fault["fault"] == name and fault["caught"] for _, fault in faults),
        }
        for name in sorted({fault["fault"] for _, fault in faults})
    }
    return {
        "programs": len({program for program, _ in faults}),
        "injected": len(faults),
        "caught": sum(fault["caught"] for _, fault in faults),
        "by_fault": by_fault,
        "missed": [
            f"{program}: {fault['fault']} ({fault['error']:.1e}{_of_gradients(fault)})"
            for program, fault in faults
            if not fault["caught"]
        ],
        "failed": {a["program"]: a["error"] for a in kept if a["outcome"] not in {"pass", "missed"}},
    }


def mutations(folder: Path) -> dict[str, Any] | None:
    """What the latest mutation run of this very manifest found, or None."""
    if not (folder / MUTATIONS).is_file():
        return None
    found: dict[str, Any] = json.loads((folder / MUTATIONS).read_text(encoding="utf-8"))
    return found if found["manifest"] == digest() else None


def _variables(plan: Plan, folder: Path) -> dict[str, str]:
    """Of a worker: offline, one thread, the device as asked for, and a cache that all workers and later runs share."""
    fixed = {
        "EMUTPU_CHIP": plan.chip,
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "CONFORMANCE_FOLDER": str(folder.resolve()),
    }
    defaults = {
        "EMUTPU_BEYOND": "1",
        "EMUTPU_CACHE_MAX_BYTES": "8G",  # the modules of all programs in Strict take 2.1
        "EMUTPU_COST_CHIPS": ",".join(CHIPS),
        "EMUTPU_HOST_COMPILE": "quick",  # a program launches most of its modules once or twice
        "EMUTPU_HOST_HIGHEST": "native" if plan.suite == "full" else "passes",  # the chip's own way takes twice as long
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",
        "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": str((folder / "cache").resolve()),
    }
    return fixed | {name: os.environ.get(name, value) for name, value in defaults.items()}
