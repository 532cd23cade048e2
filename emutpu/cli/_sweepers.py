"""Runs the sweep in worker processes, so that an op that kills or stalls its process is one finding, not the end."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["summary", "sweep"]

Item = dict[str, str]
_NAMES_A_WORKER = 150  # then a fresh one: executables pile up


class _Worker:
    """One process, asked one name at a time."""

    def __init__(self, samples: int, patience: float) -> None:
        self.asked = 0
        self._patience = patience
        self._process = subprocess.Popen(
            [sys.executable, "-m", "emutpu.cli._sweep", str(samples)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
        )

    def ask(self, name: str) -> tuple[list[Item], bool]:
        """The items of one entry, and whether the process lives on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.asked += 1
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(self._patience, give_up)
        timer.start()
        try:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            items: list[Item] = json.loads(answer)["items"]
            return items, True
        code = self._process.wait()
        how = f"no answer within {self._patience:.0f} s" if late.is_set() else f"the process ended with code {code}"
        return [{"kind": "process", "dtype": "", "outcome": "error", "message": how}], False

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        if self._process.poll() is None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def sweep(
    names: Sequence[str], *, jobs: int, samples: int, patience: float, progress: Callable[[int], None]
) -> dict[str, list[Item]]:
    """Every entry's items by name, from ``jobs`` processes at once. ``patience`` is in seconds, for one entry."""
    crew = _Crew(names, samples, patience, progress)
    threads = [threading.Thread(target=crew.serve) for _ in range(max(1, min(jobs, len(names))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if crew.failures:
        raise crew.failures[0]
    return {name: crew.results[name] for name in names}


class _Crew:
    """What the threads share: names to do, results, and what went wrong in a thread itself."""

    def __init__(self, names: Sequence[str], samples: int, patience: float, progress: Callable[[int], None]) -> None:
        self.results: dict[str, list[Item]] = {}
        self.failures: list[BaseException] = []
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        for name in names:
            self._waiting.put(name)
        self._start: Callable[[], _Worker] = lambda: _Worker(samples, patience)
        self._progress = progress
        self._lock = threading.Lock()

    def serve(self) -> None:
        """Take names until there are none, or a thread has failed."""
        worker: _Worker | None = None
        try:
            while not self.failures:
                try:
                    name = self._waiting.get_nowait()
                except queue.Empty:
                    return
                worker = self._answer(name, worker or self._start())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            self.failures.append(error)
        finally:
            if worker is not None:
                worker.close()

    def _answer(self, name: str, worker: _Worker) -> _Worker | None:
        """Keep one entry's items; the worker, if it is to be asked again."""
        items, alive = worker.ask(name)
        with self._lock:
            self.results[name] = items
            self._progress(len(self.results))
        if alive and worker.asked < _NAMES_A_WORKER:
            return worker
        worker.close()
        return None


def summary(results: dict[str, list[Item]]) -> dict[str, Any]:
    """Counts, and what is not ok as ``{name, kind, dtype, message}``."""
    rows = [{"name": name, **item} for name, items in results.items() for item in items]

    def of(outcome: str) -> list[Item]:
        return [{k: v for k, v in row.items() if k != "outcome"} for row in rows if row["outcome"] == outcome]

    return {
        "tested": len(rows),
        "ok": len(of("ok")),
        "mismatch": of("mismatch"),
        "unsupported": of("unsupported"),
        "error": of("error"),
    }
