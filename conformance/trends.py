"""What the history says beside one run: how the tiers went from run to run, and what changed since a baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emutpu.conformance import documents, manifest
from emutpu.conformance.comparison import Point, changes
from emutpu.conformance.history import History, Run
from emutpu.conformance.manifest import Model
from emutpu.conformance.prediction import Memory

__all__ = ["LETTERS", "added", "against", "baseline_of", "between"]

MOST = 40
"""Runs that a report looks back at."""
LETTERS = {
    "pass": "P",
    "mismatch": "M",
    "crash": "C",
    "unsupported": "U",
    "timeout": "T",
    "not run": "N",
    "corpus bug": "B",
}
"""Outcomes in the timeline of a program; a dot is a run without it."""


def comparable(run: Run, history: History) -> list[Run]:
    """The runs of the same suite, shard, pattern and chip up to this one, the earliest first."""
    mine = run.plan
    same = [
        other
        for other in history.runs()
        if other.id <= run.id
        and (other.plan.suite, other.plan.shard, other.plan.only, other.plan.chip)
        == (mine.suite, mine.shard, mine.only, mine.chip)
        and set(other.plan.modes) & set(mine.modes)
        and (other.finished or other.id == run.id)
    ]
    return same[:MOST][::-1]


def baseline_of(run: Run, history: History) -> Run | None:
    """The latest finished run before this one that is like it."""
    earlier = [other for other in comparable(run, history) if other.id != run.id]
    return earlier[-1] if earlier else None


def between(history: History, first: int, last: int, chip: str) -> list[Point]:
    """The runs on a chip whose numbers lie between two, both left out, the earliest first."""
    runs = [run for run in history.runs()[::-1] if first < run.id < last and run.plan.chip == chip]
    return [_point(run, history) for run in runs]


def _point(run: Run, history: History) -> Point:
    passed = {key: status == "pass" for key, status in history.outcomes(run.id).items()}
    environment = run.environment
    return Point(run.id, environment.get("commit"), bool(environment.get("changed")), run.started, passed)


def added(
    document: Mapping[str, Any],
    run: Run,
    history: History,
    baseline: Mapping[str, Any] | None,
    sizes: Memory | None = None,
) -> dict[str, Any]:
    """The document of ``run`` with its field ``trends``. ``sizes`` is the memory that predictions are made with.

    There ``runs`` are the comparable runs with their tiers, the earliest first; ``timelines`` the outcomes of each program and mode
    in those runs, a letter each; ``baseline`` what changed since the run or document of that name, None without one.
    """
    runs = comparable(run, history)
    models = documents.credited(manifest.programs().values())
    timelines: dict[tuple[str, str], list[str]] = {}
    told = []
    for place, other in enumerate(runs):
        answers = list(history.answers(other.id))
        for answer in answers:
            line = timelines.setdefault((answer["program"], answer["mode"]), ["."] * len(runs))
            line[place] = LETTERS[answer["outcome"]]
        told.append(_told(other, answers, models, sizes))
    found = {
        "runs": told,
        "timelines": [
            {"program": program, "mode": mode, "outcomes": "".join(line)}
            for (program, mode), line in sorted(timelines.items())
        ],
        "baseline": None if baseline is None else _against(document, baseline, _after(history, document, baseline)),
    }
    notes = {name: note for name, note in document["notes"].items() if name != "trends"}
    return dict(document) | {"trends": found, "notes": notes}


def against(document: Mapping[str, Any], baseline: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a run that no history here holds, with what changed since a baseline."""
    return dict(document) | {"trends": {"runs": [], "timelines": [], "baseline": _against(document, baseline, [])}}


def _after(history: History, document: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[Point]:
    return between(history, baseline["run"], document["run"], document["chip"]) if baseline["run"] else []


def _told(
    run: Run, answers: Sequence[Mapping[str, Any]], models: Mapping[str, Sequence[Model]], sizes: Memory | None
) -> dict[str, Any]:
    programs = manifest.programs()
    results = [
        documents.judged(programs[answer["program"]], answer["mode"], answer, models[answer["program"]], sizes)[0]
        | {name: answer.get(name) for name in ("program", "mode", "fingerprint")}
        for answer in answers
        if answer["program"] in programs
    ]
    return {
        "run": run.id,
        "commit": run.environment.get("commit"),
        "changed": bool(run.environment.get("changed")),
        "emutpu": run.environment["versions"].get("emutpu"),
        "torch": run.environment["versions"].get("torch"),
        "started": run.started,
        "finished": run.finished,
        "seconds": run.seconds,
        "programs": len(answers),
        "by_mode": {mode: documents.tiers_of(mode, results, models) for mode in run.plan.modes},
    }


def _against(document: Mapping[str, Any], baseline: Mapping[str, Any], points: Sequence[Point]) -> dict[str, Any]:
    environment = baseline.get("environment") or {}
    return {
        "run": baseline["run"],
        "commit": environment.get("commit"),
        "changed": bool(environment.get("changed")),
        "started": baseline["started"],
    } | changes(baseline, document, points)
