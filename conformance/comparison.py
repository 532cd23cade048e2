"""Two documents of runs against each other: what became worse, what better, and since which commit.

An emulated run beside one of a chip is judged by what it predicted of the chip, for that is what the chip can refute.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from emutpu.conformance import commits
from emutpu.conformance.documents import NOT_REACHED

__all__ = ["Point", "changes", "compared"]

Document = Mapping[str, Any]
Key = tuple[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A run in the order of time: its number (0 for one that is not in the history), its commit, and who passed of those
    that it has an answer of.
    """

    run: int
    commit: str | None
    changed: bool
    started: str
    passed: Mapping[Key, bool]

    def named(self) -> dict[str, Any]:
        """As reports tell of it."""
        return {"run": self.run, "commit": self.commit, "changed": self.changed, "started": self.started}


def changes(before: Document, after: Document, between: Sequence[Point] = ()) -> dict[str, list[dict[str, Any]]]:
    """What became worse and what better between two documents, by program and mode; only what both have counts.

    Worse is a program that passed and does not, also one that is not run any more, and one that still passes here and is no
    longer predicted to pass on the chip. ``between`` are the runs that were made from one to the other, the earliest first:
    with them each entry names the first run that was bad, the last that was good, and the commits after that.
    """
    old, new = _by_program(before), _by_program(after)
    found: dict[str, list[dict[str, Any]]] = {"worse": [], "better": []}
    ends = _point(before), _point(after)
    for key in (key for key in old if key in new):
        was, now = old[key], new[key]
        column = _column(before, after, was, now)
        if column is None:
            continue
        passed, passes = _passes(before, after, was, column), _passes(after, before, now, column)
        kind = "worse" if passed and not passes else "better"
        entry = {"program": key[0], "mode": key[1], "before": was["status"], "after": now["status"], "what": column}
        entry |= {"error": _why(now, column) or _why(was, column)}
        entry |= {"first_bad": _first_bad(key, [ends[0], *between, ends[1]]) if kind == "worse" else None}
        found[kind].append(entry)
    return found


def compared(before: Document, after: Document, between: Sequence[Point] = ()) -> dict[str, Any]:
    """:func:`changes`, and how far two runs agree at all; ``only_before`` and ``only_after`` are programs of one of them."""
    old, new = _by_program(before), _by_program(after)
    agreement: collections.Counter[str] = collections.Counter(
        {"both pass": 0, "both fail": 0, "before alone": 0, "after alone": 0}
    )
    for key in (key for key in old if key in new):
        column = "predicted_on_chip" if _mixed(before, after) else "status"
        passed, passes = _passes(before, after, old[key], column), _passes(after, before, new[key], column)
        both = "both pass" if passed else "both fail"
        agreement[both if passed == passes else "before alone" if passed else "after alone"] += 1
    return changes(before, after, between) | {
        "agreement": dict(agreement),
        "only_before": [f"{name} {mode}" for name, mode in old if (name, mode) not in new],
        "only_after": [f"{name} {mode}" for name, mode in new if (name, mode) not in old],
    }


def _mixed(before: Document, after: Document) -> bool:
    return bool(before.get("hardware")) != bool(after.get("hardware"))


def _passes(mine: Document, other: Document, entry: Mapping[str, Any], column: str) -> bool:
    """Whether an entry passes. The prediction speaks for an emulated run, the status for a chip."""
    if column == "status" or (_mixed(mine, other) and mine.get("hardware")):
        return bool(entry["status"] == "pass")
    return bool(entry["predicted_on_chip"])


def _column(before: Document, after: Document, was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What of an entry changed: its status, or only what is predicted; None where neither did."""
    columns = ("predicted_on_chip",) if _mixed(before, after) else ("status", "predicted_on_chip")
    for column in columns:
        if _passes(before, after, was, column) != _passes(after, before, now, column):
            return column
    return None


def _why(entry: Mapping[str, Any], column: str) -> str | None:
    if column == "predicted_on_chip" and entry["status"] == "pass" and entry.get("prediction_limits"):
        return "; ".join(entry["prediction_limits"])
    error: str | None = entry["error"]
    return error


def _point(document: Document) -> Point:
    known = {key: entry["status"] == "pass" for key, entry in _by_program(document).items()}
    environment = document.get("environment") or {}
    return Point(
        document["run"],
        environment.get("commit"),
        bool(environment.get("changed")),
        document["started"],
        known,
    )


def _first_bad(key: Key, points: Sequence[Point]) -> dict[str, Any] | None:
    """The first run after the last good one where it was bad; None where no status says so."""
    known = [(point, point.passed[key]) for point in points if key in point.passed]
    good = next((place for place in range(len(known) - 1, -1, -1) if known[place][1]), None)
    if good is None or good == len(known) - 1:
        return None
    last, bad = known[good][0], known[good + 1][0]
    return bad.named() | {"last_good": last.named(), "commits": commits.between(last.commit, bad.commit)}


def _by_program(given: Document) -> dict[Key, Mapping[str, Any]]:
    """One entry a program and mode; it is predicted to pass on the chip when one of its rows is.

    What a run that goes on still has not come to is no entry.
    """
    found: dict[Key, Mapping[str, Any]] = {}
    for entry in given["models"]:
        key = entry["program"], entry["mode"]
        if given["finished"] is None and entry["status"] == "not run" and entry["error"] == NOT_REACHED:
            continue
        if key not in found or (entry["predicted_on_chip"] and not found[key]["predicted_on_chip"]):
            found[key] = entry
    return found
