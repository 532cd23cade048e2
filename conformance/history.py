"""Every run that was made, in one SQLite file: what was asked for, and the answer of each program as it came.

An answer is committed before the next task is taken, so that a run which was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

__all__ = ["History", "Plan", "Run"]

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY, plan TEXT NOT NULL, started TEXT NOT NULL, finished TEXT, seconds REAL NOT NULL DEFAULT 0,
    environment TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    run INTEGER NOT NULL REFERENCES runs, program TEXT NOT NULL, mode TEXT NOT NULL, answer TEXT NOT NULL,
    PRIMARY KEY (run, program, mode)) WITHOUT ROWID;
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """What a run was asked for. ``shard`` is (number, of how many), from 1; ``manifest`` a digest of the manifest."""

    suite: str
    modes: tuple[str, ...]
    chip: str
    shard: tuple[int, int]
    only: str | None
    manifest: str

    def text(self) -> str:
        """The same for the same plan."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A run of the past. Times are UTC, ISO 8601; ``finished`` is None for one that was ended; ``seconds`` it worked."""

    id: int
    plan: Plan
    started: str
    finished: str | None
    seconds: float
    environment: Mapping[str, Any]


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")


class History:
    """The file. Use it as a context manager; one process writes at a time, from any of its threads."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = sqlite3.connect(path, timeout=60, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(_TABLES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def start(self, plan: Plan, environment: Mapping[str, Any]) -> int:
        """A new run; gives its number."""
        cursor = self._connection.execute(
            "INSERT INTO runs (plan, started, environment) VALUES (?, ?, ?)",
            (plan.text(), _now(), json.dumps(environment)),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def unfinished(self, plan: Plan) -> int | None:
        """The latest run of this very plan that did not come to its end."""
        found = self._connection.execute(
            "SELECT id FROM runs WHERE plan = ? AND finished IS NULL ORDER BY id DESC LIMIT 1", (plan.text(),)
        ).fetchone()
        return None if found is None else int(found[0])

    def record(self, run: int, answer: Mapping[str, Any]) -> None:
        """Keep one answer. Raises sqlite3.IntegrityError for a program that has one already in this run and mode."""
        self._connection.execute(
            "INSERT INTO results VALUES (?, ?, ?, ?)", (run, answer["program"], answer["mode"], json.dumps(answer))
        )

    def worked(self, run: int, seconds: float) -> None:
        """Add to the time that a run took."""
        self._connection.execute("UPDATE runs SET seconds = seconds + ? WHERE id = ?", (seconds, run))

    def finish(self, run: int) -> None:
        """The run has an answer of every program."""
        self._connection.execute("UPDATE runs SET finished = ? WHERE id = ?", (_now(), run))

    def runs(self) -> Sequence[Run]:
        """All runs, the latest first."""
        rows = self._connection.execute(
            "SELECT id, plan, started, finished, seconds, environment FROM runs ORDER BY id DESC"
        )
        return [
            Run(number, _plan(plan), started, finished, seconds, json.loads(environment))
            for number, plan, started, finished, seconds, environment in rows
        ]

    def answers(self, run: int) -> Iterator[dict[str, Any]]:
        """The answers of a run, by program and mode."""
        rows = self._connection.execute("SELECT answer FROM results WHERE run = ? ORDER BY program, mode", (run,))
        return (json.loads(answer) for (answer,) in rows)

    def outcomes(self, run: int) -> dict[tuple[str, str], str]:
        """Program and mode → outcome, without reading the rest of the answers."""
        rows = self._connection.execute(
            "SELECT program, mode, json_extract(answer, '$.outcome') FROM results WHERE run = ?", (run,)
        )
        return {(program, mode): outcome for program, mode, outcome in rows}

    def done(self, run: int) -> set[tuple[str, str]]:
        """Program and mode of every answer of a run."""
        return set(self._connection.execute("SELECT program, mode FROM results WHERE run = ?", (run,)))

    def export(self, run: int, path: Path) -> None:
        """The answers as JSON lines, written whole or not at all."""
        partial = path.with_suffix(".partial")
        with contextlib.closing(partial.open("w", encoding="utf-8")) as stream:
            stream.writelines(json.dumps(answer) + "\n" for answer in self.answers(run))
        partial.replace(path)


def _plan(text: str) -> Plan:
    fields = json.loads(text)
    return Plan(**fields | {"modes": tuple(fields["modes"]), "shard": tuple(fields["shard"])})
