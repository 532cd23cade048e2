"""The report of a run as a static site that needs nothing else: an overview with filters, and a page for each program.

``index.html``, ``programs/<name>-<mode>.html``, and for machines ``report.json``, ``junit.xml``, ``summary.md`` and
``badge.svg``. It opens from ``file://`` and asks no server for anything.
"""

from __future__ import annotations

import collections
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

__all__ = ["summary", "write"]

_OUTCOMES = ("pass", "mismatch", "crash", "unsupported", "timeout", "not run", "corpus bug")
_FAILED = ("mismatch", "crash", "unsupported", "timeout")
_SHOWN = 20
Document = Mapping[str, Any]


def write(document: Document, folder: Path) -> int:
    """Write the site; gives the number of pages. Raises OSError."""
    import jinja2

    templates = str(files("emutpu").joinpath("templates"))
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True)
    programs = _programs(document)
    pages = folder / "programs"
    pages.mkdir(parents=True, exist_ok=True)
    for stale in pages.glob("*.html"):
        stale.unlink()
    page = environment.get_template("conformance-program.html")
    for entry in programs:
        text = page.render(entry=entry, document=document)
        (pages / f"{entry['page']}.html").write_text(text, encoding="utf-8")
    (folder / "index.html").write_text(_index(environment, document, programs), encoding="utf-8")
    (folder / "report.json").write_text(json.dumps(document) + "\n", encoding="utf-8")
    (folder / "summary.md").write_text(summary(document), encoding="utf-8")
    (folder / "junit.xml").write_bytes(_junit(document, programs))
    badge = environment.get_template("conformance-badge.svg.html").render(share=_share(document["tier2"]))
    (folder / "badge.svg").write_text(badge, encoding="utf-8")
    return len(programs) + 1


def _programs(document: Document) -> list[dict[str, Any]]:
    """One entry a program and mode: the answer, with the models that it is credited to."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in document["models"]:
        key = row["program"], row["mode"]
        if key not in found:
            page = re.sub(r"[^\w.-]", "-", f"{row['program']}-{row['mode']}")
            found[key] = dict(row) | {"page": page, "models": []}
        found[key]["models"].append({"id": row["id"], "kind": row["kind"], "source": row["source"]})
    return list(found.values())


def _index(environment: Any, document: Document, programs: Sequence[dict[str, Any]]) -> str:
    from markupsafe import Markup

    columns = (
        "program",
        "mode",
        "status",
        "builder",
        "task",
        "group",
        "max_rel_error",
        "seconds",
        "page",
        "op",
        "error",
    )
    rows = [[entry[name] for name in columns] + [len(entry["models"]), _ids(entry)] for entry in programs]
    data = {"columns": [*columns, "rows", "ids"], "rows": rows}
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # nothing may end the element that it is in
    return str(
        environment.get_template("conformance.html").render(
            document=document,
            cards=_cards(document),
            outcomes=_OUTCOMES,
            by_builder=_table(programs, "builder"),
            by_task=_table(programs, "task"),
            by_mode=_table(programs, "mode"),
            missing=_missing(programs),
            data=Markup(text),  # noqa: S704  # JSON, with every < escaped
        )
    )


def _ids(entry: Mapping[str, Any]) -> str:
    return " ".join(model["id"] for model in entry["models"])


def _share(tier: Mapping[str, int]) -> str:
    return f"{tier['passed'] / tier['attempted']:.1%}" if tier["attempted"] else "-"


def _cards(document: Document) -> list[tuple[str, str]]:
    def of(tier: Mapping[str, int]) -> str:
        return f"{tier['passed']:,} of {tier['attempted']:,} rows"

    attempted = sum(count for outcome, count in document["of_programs"].items() if outcome not in _OUTCOMES[-2:])
    return [
        (_share(document["predicted_on_chip"]), f"predicted on the chip: {of(document['predicted_on_chip'])}"),
        (_share(document["tier1"]), f"run and train: {of(document['tier1'])}"),
        (_share(document["tier2"]), f"agree with the CPU: {of(document['tier2'])}"),
        (f"{document['of_programs'].get('pass', 0):,} of {attempted:,}", "programs attempted that pass everything"),
        (f"{document['distinct_programs']:,}", f"distinct programs behind {document['rows']:,} rows"),
        (f"{sum(document['not_run'].values()):,}", "rows not run, each with its reason"),
        (f"{len(document['corpus_bugs']):,}", "programs that fail on the CPU too: the suite's own defects"),
    ]


def _table(programs: Iterable[Mapping[str, Any]], column: str) -> list[tuple[str, list[int]]]:
    """Value of the column, and how many programs had each outcome; the largest first."""
    found: dict[str, collections.Counter[str]] = {}
    for entry in programs:
        found.setdefault(entry[column], collections.Counter())[entry["status"]] += 1
    ordered = sorted(found.items(), key=lambda item: (-item[1].total(), item[0]))
    return [(value, [counts[outcome] for outcome in _OUTCOMES]) for value, counts in ordered]


def _missing(programs: Iterable[Mapping[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Op → programs: what TorchTPU lacks a kernel of, and what the emulator refused."""
    found: dict[str, list[dict[str, Any]]] = {}
    for entry in programs:
        for op in {*entry["missing_kernels"], *([entry["op"]] if entry["op"] else [])}:
            found.setdefault(op, []).append({"name": entry["program"], "page": entry["page"]})
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def summary(document: Document) -> str:
    """Markdown for a pull request."""
    lines = [
        f"### emutpu conformance: {document['suite']}, {', '.join(document['modes'])}, {document['chip']}",
        "",
        "| | rows |",
        "|---|---|",
    ]
    for tier, what in (
        ("predicted_on_chip", "predicted on the chip"),
        ("tier1", "run and train"),
        ("tier2", "agree with the CPU"),
    ):
        counts = document[tier]
        lines.append(f"| {what} | {counts['passed']:,} of {counts['attempted']:,} ({_share(counts)}) |")
    lines.append("")
    lines.append(", ".join(f"{count} programs {outcome}" for outcome, count in document["of_programs"].items()))
    failed = [entry for entry in _programs(document) if entry["status"] in _FAILED]
    if failed:
        lines += ["", "| program | mode | outcome | error |", "|---|---|---|---|"]
        lines += [
            f"| {entry['program']} | {entry['mode']} | {entry['status']} | {_cell(entry['error'])} |"
            for entry in failed[:_SHOWN]
        ]
        if len(failed) > _SHOWN:
            lines += ["", f"and {len(failed) - _SHOWN} more"]
    return "\n".join(lines) + "\n"


def _cell(text: str | None) -> str:
    return (text or "").partition("\n")[0][:200].replace("|", "\\|")


def _junit(document: Document, programs: Sequence[Mapping[str, Any]]) -> bytes:
    suite = ET.Element(
        "testsuite",
        name=f"emutpu conformance {document['suite']}",
        tests=str(len(programs)),
        failures=str(sum(entry["status"] in _FAILED for entry in programs)),
        skipped=str(sum(entry["status"] in _OUTCOMES[-2:] for entry in programs)),
    )
    for entry in programs:
        case = ET.SubElement(
            suite, "testcase", classname=entry["mode"], name=entry["program"], time=f"{entry['seconds'] or 0:.3f}"
        )
        if entry["status"] != "pass":
            kind = "failure" if entry["status"] in _FAILED else "skipped"
            told = ET.SubElement(case, kind, message=f"{entry['status']}: {_printable(entry['error'])}")
            told.text = _printable("\n".join(entry["traceback"]))
    ET.indent(suite)
    text: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text


def _printable(text: str | None) -> str:
    """XML has no place for most control characters."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text or "")
