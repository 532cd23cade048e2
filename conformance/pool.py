"""Worker processes with limits of time and memory, each asked one program at a time.

A worker that is late or too large is killed, and that is the outcome of its program; so is its death. Workers are replaced
after a number of programs, or when they have grown: executables pile up.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from emutpu import _workers
from emutpu._workers import Child, End, Ended

__all__ = ["COMMAND", "Answer", "Finished", "Limits", "Seat", "Task", "failure", "work_off"]

Answer = dict[str, Any]
Finished = Callable[[Answer], None]
COMMAND = [sys.executable, "-X", "faulthandler", "-m", "emutpu.conformance.worker"]
_PATIENCE = 10  # seconds on the clock for each of processor time
_TAIL = 1500  # characters of a dead worker's last words


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """A program of the manifest in one mode."""

    program: str
    mode: str


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Of one program: ``seconds`` of processor time, and ``memory`` in bytes that its process may occupy.

    On the clock it has ten times as long: a busy machine is no finding, a program that waits for ever is one.
    ``programs`` is how many a process is asked before another takes its place.
    """

    seconds: float
    memory: int
    programs: int = 250


class Seat:
    """One process at a time, started when it is needed; another takes its place when it has ended, or is spent.

    A process is spent after ``limits.programs`` programs, or when it has grown to half of what it may occupy. A program that
    outgrows a process with others before it is asked again in a fresh one: what is in their memory is no finding about it.
    """

    def __init__(self, environment: Mapping[str, str], limits: Limits) -> None:
        self._environment, self._limits = environment, limits
        self._child: Child | None = None
        self._asked = 0

    def answer(self, task: Task) -> Answer:
        """Of a process that may have to start first. Whatever becomes of that process is the answer too."""
        started = time.monotonic()
        try:
            return self._asked_of(task)
        except Ended as ended:
            fresh = self._asked == 1
            self.close()
            if ended.end is End.MEMORY and not fresh:
                return self.answer(task)
            return failure(task, *self._told(ended), time.monotonic() - started)

    def _asked_of(self, task: Task) -> Answer:
        """What the process says. Raises Ended."""
        child = self._child
        if child is None:
            child, self._asked = self._start(), 0
            self._child = child
        self._asked += 1
        found: Answer = child.ask(dataclasses.asdict(task))
        if self._asked >= self._limits.programs or found["resident_bytes"] > self._limits.memory // 2:
            self.close()
        return found | {"processor_seconds": child.processor_seconds}

    def close(self) -> None:
        """End the process, if there is one. May be called from another thread while :meth:`answer` waits."""
        child, self._child = self._child, None
        if child is not None:
            child.close()

    def _start(self) -> Child:
        limits = _workers.Limits(_PATIENCE * self._limits.seconds, self._limits.seconds, self._limits.memory)
        return Child(COMMAND, {**os.environ, "PYTHONPATH": _workers.paths(), **self._environment}, limits)

    def _told(self, ended: Ended) -> tuple[str, str]:
        """The outcome, and the error."""
        limits = self._limits
        return {
            End.PROCESSOR: ("timeout", f"took more than {limits.seconds:g} seconds of processor time"),
            End.CLOCK: ("timeout", f"gave no answer for {_PATIENCE * limits.seconds:g} seconds"),
            End.MEMORY: ("crash", f"occupied more than {limits.memory / 2**30:.1f} GiB"),
            End.DIED: ("crash", f"{ended}: {ended.words[-_TAIL:].strip()}"),
        }[ended.end]


def failure(task: Task, outcome: str, error: str, seconds: float) -> Answer:
    """The answer of a program that its process did not live to give."""
    return {
        "program": task.program,
        "mode": task.mode,
        "outcome": outcome,
        "stage": "process",
        "error": error,
        "traceback": [],
        "tier1": False,
        "seconds": seconds,
    }


def work_off(
    tasks: Iterable[Task], *, jobs: int, environment: Mapping[str, str], limits: Limits, finished: Finished
) -> None:
    """Run every task in one of ``jobs`` processes. ``finished`` gets each answer as it comes, one at a time.

    Returns when all are done; an exception of ``finished`` ends the work and is raised here.
    """
    _workers.work_off(tasks, jobs, lambda: Seat(environment, limits), lambda _, answer: finished(answer))
