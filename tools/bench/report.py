"""The document and the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from emutpu import _report, _settings
from tools.bench.case import Bounded, Case, Measurement

__all__ = ["Outcome", "document", "measurement_from", "row", "table"]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """A case with what came of it: a measurement, or the ``error`` that prevented one."""

    case: Case
    measurement: Measurement | None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """The bound was measured and holds."""
        return self.measurement is not None and self.case.holds(self.measurement)


def document(outcomes: Sequence[Outcome], *, quick: bool) -> dict[str, Any]:
    """``emutpu.bench/1``."""
    notes = {f"results.{o.case.name}": o.error for o in outcomes if o.error is not None}
    head = _report.header("bench", _settings.settings().chip)
    return head | {"quick": quick, "results": [row(outcome) for outcome in outcomes], "notes": notes}


def row(outcome: Outcome) -> dict[str, Any]:
    """One result; figures are null where nothing was measured. ``samples`` has one element per round."""
    case, measured = outcome.case, outcome.measurement
    return {
        "name": case.name,
        "what": case.what,
        "against": case.against,
        "unit": case.unit,
        "value": measured.value if measured else None,
        "baseline": measured.baseline if measured else None,
        "ratio": measured.ratio if measured else None,
        "ratio_best": measured.best if measured else None,
        "bound": case.bound,
        "bounded": case.bounded.value,
        "ok": case.holds(measured) if measured else None,
        "samples": _samples(measured) if measured else [],
        "extra": dict(measured.extra) if measured else {},
    }


def _samples(measured: Measurement) -> list[dict[str, float]]:
    rounds = zip(measured.pairs, measured.ratios, strict=True)
    return [{"value": value, "baseline": baseline, "ratio": ratio} for (value, baseline), ratio in rounds]


def table(outcomes: Sequence[Outcome]) -> Table:
    """One line per case, with its bound and whether that holds."""
    made = Table(title="emutpu beside its baselines, measured alternately (medians over rounds)")
    for name in ("case", "what", "value", "baseline", "ratio", "best ratio", "bound", "verdict"):
        words = name in ("case", "what", "verdict")
        made.add_column(name, justify="left" if words else "right", no_wrap=name != "verdict")
    for outcome in outcomes:
        made.add_row(*_cells(outcome), style=None if outcome.ok else "red")
    return made


def _cells(outcome: Outcome) -> list[str]:
    case, measured = outcome.case, outcome.measurement
    limit = f"≤ {_number(case.bound)}" + ("×" if case.bounded is Bounded.RATIO else f" {case.unit}")
    what = f"{case.what}\n/ {case.against}"
    if measured is None:
        return [case.name, what, "-", "-", "-", "-", limit, outcome.error or "not measured"]
    what += "".join(f"\n{name}: {_number(figure)}" for name, figure in measured.extra.items())
    figures = [f"{_number(figure)} {case.unit}" for figure in (measured.value, measured.baseline)]
    ratios = [f"{_number(figure)}×" for figure in (measured.ratio, measured.best)]
    return [case.name, what, *figures, *ratios, limit, "holds" if outcome.ok else "FAILS"]


def _number(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 1000 else f"{figure:.3g}"


def measurement_from(record: Mapping[str, Any]) -> Measurement:
    """The measurement that a child process wrote."""
    return Measurement(tuple((value, baseline) for value, baseline in record["pairs"]), record["extra"])
