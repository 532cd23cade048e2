"""Processes that answer lines of JSON with lines of JSON, one job at a time, under limits; and a crew of them for a list of jobs.

What may kill or stall its process (a program of the model suite, an op of the sweep, the TPU compiler) runs in one of these, and
the end of the process is an answer about the job that it had. Imports neither torch nor jax.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Child", "End", "Ended", "Limits", "Seat", "paths", "resident_of", "seconds_of", "work_off"]

J = TypeVar("J")
R = TypeVar("R")
J_contra = TypeVar("J_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
_TICK = 0.5  # seconds between looks at a child's time and memory
_STRETCH = 16  # jobs in a row for one seat


class End(enum.Enum):
    """Why a child gives no answer: it took too long on the clock or of the processor, grew too large, or died."""

    CLOCK = "clock"
    PROCESSOR = "processor"
    MEMORY = "memory"
    DIED = "died"


class Ended(Exception):
    """A child gave no answer and is gone. ``code`` is its exit code where it died by itself; ``words`` its standard error."""

    def __init__(self, end: End, code: int | None, words: str) -> None:
        super().__init__(f"the process ended with {code}" if end is End.DIED else f"over its limit of {end.value}")
        self.end, self.code, self.words = end, code, words


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Of one answer: ``clock`` and ``processor`` in seconds, ``memory`` in bytes that are resident; None is no limit."""

    clock: float | None = None
    processor: float | None = None
    memory: int | None = None


def paths() -> str:
    """What this process imports from, as a ``PYTHONPATH`` for its children."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


class Child:
    """One process. ``processor_seconds`` is what its latest answer took, of all its threads."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], limits: Limits) -> None:
        self.processor_seconds = 0.0
        self._limits = limits
        self._words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed with the child
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, env=dict(environment)
        )

    def ask(self, job: Any) -> Any:
        """The answer to a job, both what JSON can say. Raises Ended; the child is then of no more use."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: reading says so
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        return self.hear()

    def hear(self) -> Any:
        """What it says next, unasked. Raises Ended."""
        worked = seconds_of(self._process.pid)
        line = self._line(time.monotonic(), worked)
        if not line.endswith(b"\n"):
            code = self._process.wait()
            raise Ended(End.DIED, code, self.words())
        self.processor_seconds = seconds_of(self._process.pid) - worked
        return json.loads(line)

    def _line(self, started: float, worked: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, got = self._process.stdout.fileno(), b""
        while not got.endswith(b"\n"):
            self._check(started, worked)
            if select.select([descriptor], [], [], min(_TICK, self._limits.clock or _TICK))[0]:
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    return got
                got += chunk
        return got

    def _check(self, started: float, worked: float) -> None:
        limits, pid = self._limits, self._process.pid
        over = (
            (End.PROCESSOR, limits.processor, lambda: seconds_of(pid) - worked),
            (End.CLOCK, limits.clock, lambda: time.monotonic() - started),
            (End.MEMORY, limits.memory, lambda: resident_of(pid)),
        )
        for end, limit, measure in over:
            if limit is not None and measure() > limit:
                self._process.kill()
                self._process.wait()
                raise Ended(end, None, self.words())

    def words(self) -> str:
        """Its standard error so far."""
        self._words.seek(0)
        return self._words.read()

    def close(self, patience: float = 0.0) -> None:
        """End the process, whatever it does: at once, or ``patience`` seconds after its input has ended."""
        if patience and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._words):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a job that was not read
                    stream.close()


def seconds_of(pid: int) -> float:
    """Seconds of processor time of a process, of all its threads; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stream:
            fields = stream.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):  # it has just ended: the pipe will say so
        return 0.0


def resident_of(pid: int) -> int:
    """Bytes that a process occupies; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended: the pipe will say so
        return 0


# ------------------------------------------------------------------------------------------------------ a crew


class Seat(Protocol[J_contra, R_co]):
    """Who answers jobs one after the other: a child at a time, with another in its place when it ended or is spent."""

    def answer(self, job: J_contra, /) -> R_co: ...

    def close(self) -> None:
        """End the child, also while :meth:`answer` waits in another thread."""
        ...


def work_off(jobs: Iterable[J], seats: int, seat: Callable[[], Seat[J, R]], finished: Callable[[J, R], None]) -> None:
    """Have every job answered by one of ``seats`` seats. ``finished`` gets each answer as it comes, one at a time.

    Jobs that follow each other are mostly answered by one seat, whose child has compiled, or loaded, what they have in common.
    Returns when all are done; an exception of ``finished`` or of a seat ends the work and is raised here.
    """
    seats = max(1, seats)
    crew = _Crew(jobs, seats, seat, finished)
    threads = [threading.Thread(target=crew.serve, daemon=True) for _ in range(seats)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_TICK)
    except BaseException:  # any, Ctrl-C too: no child is left behind, and it goes on
        crew.stop()
        for thread in threads:
            thread.join()
        raise
    if crew.failures:
        raise crew.failures[0]


class _Crew(Generic[J, R]):
    """What the threads share."""

    def __init__(
        self, jobs: Iterable[J], seats: int, seat: Callable[[], Seat[J, R]], finished: Callable[[J, R], None]
    ) -> None:
        self.failures: list[BaseException] = []
        self._waiting, self._of = collections.deque(jobs), seats
        self._seat, self._finished = seat, finished
        self._lock = threading.Lock()
        self._seats: list[Seat[J, R]] = []
        self._stopped = False

    def stop(self) -> None:
        """Take no more jobs, and end what runs."""
        self._stopped = True
        for seat in list(self._seats):
            seat.close()

    def _jobs(self) -> Iterator[J]:
        """For one thread: stretches of what waits, shorter towards the end so that all threads end together."""
        while stretch := self._stretch():
            for job in stretch:
                if self.failures or self._stopped:
                    return
                yield job

    def _stretch(self) -> list[J]:
        with self._lock:
            length = max(1, min(_STRETCH, len(self._waiting) // (4 * self._of)))
            return [self._waiting.popleft() for _ in range(min(length, len(self._waiting)))]

    def serve(self) -> None:
        """Take jobs until there are none, or a thread has failed."""
        seat = self._seat()
        self._seats.append(seat)
        try:
            for job in self._jobs():
                answer = seat.answer(job)
                with self._lock:
                    if not self._stopped:
                        self._finished(job, answer)
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            if not self._stopped:
                self.failures.append(error)
        finally:
            seat.close()
