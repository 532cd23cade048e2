"""The report of a run as a static site that needs nothing else, and opens from ``file://``.

``index.html`` holds the overview and the tables of all programs and models. What only one program's page shows lies in
shards beside it, ``data/<n>.js``: each a call with gzip in base64, which the page loads when it is asked for, since a page from a
file may not fetch one. For machines there are ``report.json``, ``junit.xml``, ``summary.md`` and ``badge.svg``.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from emutpu.conformance.documents import NOT_ATTEMPTED, OUTCOMES
from emutpu.conformance.prediction import missing_kernels
from emutpu.conformance.summaries import TIER_NAMES, badge_colour, junit, share, summary

__all__ = ["write"]

_A_SHARD = 60  # programs
_FIRST_LINE = 220  # characters of an error in the table
_DETAILS = (
    "stage",
    "error",
    "traceback",
    "fingerprint",
    "tokens_equal",
    "ill_conditioned",
    "trained",
    "missing_kernels",
    "data_dependent",
    "prediction_limits",
    "full_size_bytes",
    "full_size",
    "noise_error",
    "same_as",
    "cpu_perplexity",
    "perplexity",
    "default_perplexity",
    "tier3_error",
    "executables",
    "compiles",
    "compile_seconds",
    "fallbacks",
    "fallback_ops",
    "regions",
    "region_reasons",
    "peak_hbm_bytes",
    "modelled",
    "ops",
)
_NUMBERS = ("max_rel_error", "gradient_error", "logit_noise", "gradient_noise", "default_error", "seconds")
Document = Mapping[str, Any]


def write(document: Document, folder: Path) -> int:
    """Write the site; gives the number of files. Raises OSError."""
    import jinja2

    templates = str(files("emutpu").joinpath("templates"))
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True)
    whole = document if document.get("results") else dict(document) | _from_models(document["models"])
    programs = _programs(whole)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for stale in (folder / "data").glob("*.js"):
        stale.unlink()
    shards = _shards(whole, programs)
    for name, shard in shards.items():
        (folder / "data" / f"{name}.js").write_text(_packed(name, shard), encoding="ascii")
    (folder / "index.html").write_text(_index(environment, whole, programs), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(summary(whole), encoding="utf-8")
    (folder / "junit.xml").write_bytes(junit(whole))
    told = whole["predicted_on_chip"]["passed"], whole["predicted_on_chip"]["attempted"]
    badge = environment.get_template("conformance-badge.svg.html").render(
        share=share(*told), colour=badge_colour(*told)
    )
    (folder / "badge.svg").write_text(badge, encoding="utf-8")
    return len(shards) + 5


def _from_models(models: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """``results`` of a document that has rows alone, such as one that was written by hand of a chip."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in models:
        empty = dict.fromkeys((*_DETAILS, *_NUMBERS, "tier3"))
        found.setdefault((row["program"], row["mode"]), empty | dict(row) | {"ops": None, "representative": False})
    return {"results": list(found.values()), "op_names": []}


def _programs(document: Document) -> list[dict[str, Any]]:
    """One entry a program: its results by mode, and the models that it is credited to."""
    found: dict[str, dict[str, Any]] = {}
    for result in document["results"]:
        entry = found.setdefault(result["program"], {"first": result, "modes": {}, "models": {}})
        entry["modes"][result["mode"]] = result
    for row in document["models"]:
        model = found[row["program"]]["models"].setdefault(
            row["id"], {"told": [row["kind"], row["source"]], "modes": {}}
        )
        model["modes"][row["mode"]] = row
    return list(found.values())


class _Strings:
    """A table of strings, each once."""

    def __init__(self) -> None:
        self._places: dict[str, int] = {}

    def place(self, text: str) -> int:
        return self._places.setdefault(text, len(self._places))

    def all(self) -> list[str]:
        return list(self._places)


def _index(environment: Any, document: Document, programs: Sequence[dict[str, Any]]) -> str:
    from markupsafe import Markup

    data = _table(document, programs)
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # nothing may end the element that it is in
    return str(
        environment.get_template("conformance.html").render(
            document=document,
            cards=_cards(document),
            tiers=_tiers(document),
            baseline=(document.get("trends") or {}).get("baseline"),
            data=Markup(text),  # noqa: S704  # JSON, with every < escaped
        )
    )


def _table(document: Document, programs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What every view of the page needs: rows of plain numbers, and tables of the strings in them."""
    strings, modes = _Strings(), list(document["modes"])
    trends = document.get("trends") or {}
    lines = {(line["program"], line["mode"]): line["outcomes"] for line in trends.get("timelines", ())}
    rows = []
    for entry in programs:
        first = entry["first"]
        rows.append(
            [
                first["program"],
                *(strings.place(first[name]) for name in ("builder", "task", "group", "arch")),
                int(bool(first.get("representative"))),
                [_model(name, model, modes, strings) for name, model in entry["models"].items()],
                [_cell(entry["modes"].get(mode), strings) for mode in modes],
                [lines.get((first["program"], mode), "") for mode in modes],
            ]
        )
    return {
        "modes": modes,
        "outcomes": OUTCOMES,
        "numbers": _NUMBERS,
        "limits": document.get("limits") or {},
        "shard": _A_SHARD,
        "strings": strings.all(),
        "programs": rows,
        "runs": trends.get("runs", []),
        "baseline": trends.get("baseline"),
        "mutations": document.get("mutations"),
        "bounded": document.get("bounded"),
        "perplexity": document.get("perplexity") or [],
        "prediction": document.get("prediction"),
        "device_bytes": document.get("device_bytes") or {},
        "without_float64": (document.get("noise") or {}).get("without_float64", {}),
        "not_run": document["not_run"],
        "tiers": TIER_NAMES,
        "chip": document["chip"],
    }


def _model(name: str, model: Mapping[str, Any], modes: Sequence[str], strings: _Strings) -> list[Any]:
    """Id, kind, source, a digit a mode for what is predicted, and what only this size of the program is limited by."""
    rows = [model["modes"].get(mode, {}) for mode in modes]
    predicted = "".join(str(_verdict(row.get("predicted_on_chip"))) for row in rows)
    limits = {limit for row in rows for limit in row.get("prediction_limits", ()) if limit.startswith("memory")}
    told = [strings.place(text) for text in model["told"]]
    return [name, *told, predicted, *(strings.place(limit) for limit in sorted(limits))]


def _verdict(passed: bool | None) -> int:
    return {True: 2, False: 1, None: 0}[passed]


def _cell(result: Mapping[str, Any] | None, strings: _Strings) -> list[Any] | None:
    """Outcome, verdicts as bits, numbers, first line of the error, and the ops that stand in the way."""
    if result is None:
        return None
    verdicts = [_verdict(result.get(tier)) for tier in TIER_NAMES]
    error = (result["error"] or "").partition("\n")[0][:_FIRST_LINE]
    ops = sorted({*result["missing_kernels"], *([_plain(result["op"])] if result["op"] else [])})
    return [
        OUTCOMES.index(result["status"]),
        verdicts,
        [_short(result.get(name)) for name in _NUMBERS],
        strings.place(error) if error else -1,
        [strings.place(op) for op in ops],
        strings.place(result["fingerprint"]) if result["fingerprint"] else -1,
    ]


def _plain(op: str) -> str:
    """The name of an op without what all of them have."""
    return op.replace("::", ".").removeprefix("aten.").removesuffix(".default")


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.3g}")


def _shards(document: Document, programs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """By name: ``ops``, which ops each program ran in any mode, and the details of so many programs in each of the others."""
    names = document.get("op_names") or []
    lacking = set(missing_kernels(names))
    used = [
        sorted({place for result in entry["modes"].values() for place, _ in result["ops"] or ()}) for entry in programs
    ]
    missing = [int(_plain(name) in lacking) for name in names]
    found: dict[str, Any] = {"ops": {"names": names, "missing": missing, "used": used}}
    for start in range(0, len(programs), _A_SHARD):
        part = programs[start : start + _A_SHARD]
        found[str(start // _A_SHARD)] = [
            {mode: {name: result.get(name) for name in _DETAILS} for mode, result in entry["modes"].items()}
            for entry in part
        ]
    return found


def _packed(name: str, shard: Any) -> str:
    """A script that hands over a shard; the same bytes for the same shard."""
    text = json.dumps(shard, separators=(",", ":")).encode()
    return f'shard("{name}","{base64.b64encode(gzip.compress(text, 9, mtime=0)).decode()}")\n'


def _cards(document: Document) -> list[tuple[str, str]]:
    told = document["predicted_on_chip"]
    attempted = sum(count for outcome, count in document["of_programs"].items() if outcome not in NOT_ATTEMPTED)
    cards = [
        (
            share(told["passed"], told["attempted"]),
            f"predicted on the chip: {told['passed']:,} of {told['attempted']:,} rows",
        )
    ]
    distinct = document.get("predicted_distinct")
    if distinct:
        passed, of = distinct["passed"], distinct["attempted"]
        where = ", each in every mode" if len(document["modes"]) > 1 else ""
        cards.append((share(passed, of), f"predicted on the chip: {passed:,} of {of:,} distinct programs{where}"))
    passed = document["of_programs"].get("pass", 0)
    cards += [
        (share(passed, attempted), f"pass on the emulated device: {passed:,} of {attempted:,} programs"),
        (f"{document['distinct_programs']:,}", f"distinct programs behind {document['rows']:,} rows"),
        (f"{sum(document['not_run'].values()):,}", "rows not run, each with its reason"),
        (f"{len(document['corpus_bugs']):,}", "programs that fail on the CPU too: the suite's own defects"),
    ]
    found = document.get("mutations")
    if found and found["injected"]:
        cards.append(
            (
                share(found["caught"], found["injected"]),
                f"of {found['injected']:,} injected faults caught by tier 2, in {found['programs']} models",
            )
        )
    return cards


def _modes(document: Document) -> Mapping[str, Any]:
    found: Mapping[str, Any] = document.get("by_mode") or {}
    return found


def _tiers(document: Document) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """Name of a tier, and by mode the shares of rows, programs and distinct programs that passed it."""
    found = []
    for tier, name in TIER_NAMES.items():
        cells = [tiers.get(tier) for tiers in _modes(document).values()]
        if any(cells):
            shown = [
                None if cell is None else {kind: (share(*counts), *counts) for kind, counts in cell.items()}
                for cell in cells
            ]
            found.append((name, shown))
    return found
