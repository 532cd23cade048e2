"""Worker processes with limits of time and memory, each asked one program at a time.

A worker that is late or too large is killed, and that is the outcome of its program; so is its death. Workers are replaced
after a number of programs, or when they have grown: executables pile up.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = ["COMMAND", "Limits", "Task", "processor_seconds", "work_off"]

Answer = dict[str, Any]
COMMAND = [sys.executable, "-X", "faulthandler", "-m", "emutpu.conformance.worker"]
_PROGRAMS_A_WORKER = 60
_PATIENCE = 10  # seconds on the clock for each of processor time
_TICK = 0.5  # seconds between looks at a worker's memory
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
    """

    seconds: float
    memory: int


class _Worker:
    """One process."""

    def __init__(self, environment: Mapping[str, str], limits: Limits) -> None:
        self.asked, self.resident = 0, 0
        self._limits = limits
        self._words = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed with the worker
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                **environment,
            },
        )

    def ask(self, task: Task) -> tuple[Answer, bool]:
        """The answer, and whether the worker lives on."""
        self.asked += 1
        started = time.monotonic()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(dataclasses.asdict(task)).encode() + b"\n")
            self._process.stdin.flush()
            line = self._line(started + _PATIENCE * self._limits.seconds, processor_seconds(self._process.pid))
        except _Ended as ended:
            self.close()
            return _failure(task, ended.outcome, str(ended), time.monotonic() - started), False
        except BrokenPipeError:
            return _failure(task, "crash", self._last_words(), time.monotonic() - started), False
        if not line.endswith(b"\n"):
            return _failure(task, "crash", self._last_words(), time.monotonic() - started), False
        answer: Answer = json.loads(line)
        self.resident = answer.pop("resident_bytes")
        return answer, True

    def _line(self, deadline: float, worked: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, got = self._process.stdout.fileno(), b""
        while not got.endswith(b"\n"):
            if processor_seconds(self._process.pid) - worked > self._limits.seconds:
                raise _Ended("timeout", f"took more than {self._limits.seconds:g} seconds of processor time")
            if time.monotonic() > deadline:
                raise _Ended("timeout", f"gave no answer for {_PATIENCE * self._limits.seconds:g} seconds")
            if _resident(self._process.pid) > self._limits.memory:
                raise _Ended("crash", f"occupied more than {self._limits.memory / 2**30:.1f} GiB")
            if select.select([descriptor], [], [], _TICK)[0]:
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    return got
                got += chunk
        return got

    def _last_words(self) -> str:
        code = self._process.wait()
        self._words.seek(0)
        return f"the process ended with {code}: {self._words.read()[-_TAIL:].strip()}"

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._words):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:  # a task that was not read
                    continue

    @property
    def spent(self) -> bool:
        """Whether the next program should have a fresh process."""
        return self.asked >= _PROGRAMS_A_WORKER or self.resident > self._limits.memory // 2


class _Ended(Exception):
    def __init__(self, outcome: str, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome


def processor_seconds(pid: int) -> float:
    """Seconds of processor time of a process, of all its threads; 0 when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:  # it has just ended: the pipe will say so
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):  # it has just ended: the pipe will say so
        return 0


def _failure(task: Task, outcome: str, error: str, seconds: float) -> Answer:
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
    tasks: Iterable[Task],
    *,
    jobs: int,
    environment: Mapping[str, str],
    limits: Limits,
    finished: Callable[[Answer], None],
) -> None:
    """Run every task in one of ``jobs`` processes. ``finished`` gets each answer as it comes, one at a time.

    Returns when all are done; an exception of ``finished`` ends the work and is raised here.
    """
    crew = _Crew(tasks, environment, limits, finished)
    threads = [threading.Thread(target=crew.serve, daemon=True) for _ in range(max(1, jobs))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(_TICK)
    except BaseException:  # any, Ctrl-C too: no worker is left behind, and it goes on
        crew.stop()
        for thread in threads:
            thread.join()
        raise
    if crew.failures:
        raise crew.failures[0]


class _Crew:
    """What the threads share."""

    def __init__(
        self,
        tasks: Iterable[Task],
        environment: Mapping[str, str],
        limits: Limits,
        finished: Callable[[Answer], None],
    ) -> None:
        self.failures: list[BaseException] = []
        self._waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
        for task in tasks:
            self._waiting.put(task)
        self._environment, self._limits, self._finished = environment, limits, finished
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._stopped = False

    def stop(self) -> None:
        """Take no more tasks, and end what runs."""
        self._stopped = True
        for worker in list(self._workers):
            worker.close()

    def serve(self) -> None:
        """Take tasks until there are none."""
        worker: _Worker | None = None
        try:
            while not self.failures and not self._stopped:
                try:
                    task = self._waiting.get_nowait()
                except queue.Empty:
                    return
                if worker is None:
                    worker = _Worker(self._environment, self._limits)
                    self._workers.add(worker)
                answer, alive = worker.ask(task)
                with self._lock:
                    if not self._stopped:
                        self._finished(answer)
                if not alive or worker.spent:
                    self._retire(worker)
                    worker = None
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            if not self._stopped:
                self.failures.append(error)
        finally:
            if worker is not None:
                self._retire(worker)

    def _retire(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.close()
