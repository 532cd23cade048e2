"""Runs the sweep in worker processes, so that an op that kills or stalls its process is one finding, not the end."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from emutpu import _workers
from emutpu._workers import Child, End, Ended

__all__ = ["summary", "sweep"]

Item = dict[str, str]
_NAMES_A_WORKER = 150  # then a fresh one: executables pile up


class _Seat:
    """One process at a time, asked one name after the other."""

    def __init__(self, samples: int, patience: float) -> None:
        self._samples, self._patience = samples, patience
        self._child: Child | None = None
        self._asked = 0

    def answer(self, name: str) -> list[Item]:
        """The items of one entry; the end of the process is one of them."""
        child = self._child
        if child is None:
            child, self._asked = self._start(), 0
            self._child = child
        self._asked += 1
        try:
            items: list[Item] = child.ask(name)["items"]
        except Ended as ended:
            self.close()
            late = ended.end is End.CLOCK
            how = f"no answer within {self._patience:.0f} s" if late else f"the process ended with code {ended.code}"
            return [{"kind": "process", "dtype": "", "outcome": "error", "message": how}]
        if self._asked >= _NAMES_A_WORKER:
            self.close()
        return items

    def _start(self) -> Child:
        command = [sys.executable, "-m", "emutpu.cli._sweep", str(self._samples)]
        environment = {**os.environ, "PYTHONPATH": _workers.paths()}
        return Child(command, environment, _workers.Limits(clock=self._patience))

    def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.close()


def sweep(
    names: Sequence[str], *, jobs: int, samples: int, patience: float, progress: Callable[[int], None]
) -> dict[str, list[Item]]:
    """Every entry's items by name, from ``jobs`` processes at once. ``patience`` is in seconds, for one entry."""
    results: dict[str, list[Item]] = {}

    def finished(name: str, items: list[Item]) -> None:
        results[name] = items
        progress(len(results))

    _workers.work_off(names, min(jobs, len(names)), lambda: _Seat(samples, patience), finished)
    return {name: results[name] for name in names}


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
