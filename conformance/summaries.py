"""What other programs show of a run: Markdown for a pull request, JUnit for a CI service, a badge."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any

from emutpu.conformance.documents import NOT_ATTEMPTED, OUTCOMES

__all__ = ["TIER_NAMES", "badge_colour", "junit", "share", "summary"]

FAILED = tuple(outcome for outcome in OUTCOMES if outcome not in ("pass", *NOT_ATTEMPTED))
TIER_NAMES = {
    "predicted_on_chip": "predicted on the chip",
    "emulated": "pass on the emulated device",
    "tier1": "run and train",
    "tier2": "agree with the CPU",
    "tier3": "agree at default precision",
}
"""What a row that passed did, in the order of tables: the headline first."""
_SHOWN = 20
_GOOD, _FAIR = 0.99, 0.95
Document = Mapping[str, Any]


def share(passed: int, attempted: int) -> str:
    """As a percentage that is never rounded up to all, nor down to nothing."""
    if not attempted:
        return "-"
    exact = 100 * passed / attempted
    shown = f"{exact:.1f}"
    if shown == "100.0" and passed < attempted:
        shown = "99.9"
    return f"{'0.1' if shown == '0.0' and passed else shown} %"


def summary(document: Document) -> str:
    """Markdown: the headline, tiers by mode, what changed since the baseline, and what fails."""
    told = document["predicted_on_chip"]
    lines = [
        f"### emutpu conformance: {document['suite']}, {', '.join(document['modes'])}, {document['chip']}",
        "",
        f"**{share(told['passed'], told['attempted'])} predicted on the chip**: {told['passed']:,} of {told['attempted']:,} rows"
        + _distinct(document),
        "",
    ]
    lines += _tiers(document) + _changes(document) + _failing(document)
    return "\n".join(lines) + "\n"


def _distinct(document: Document) -> str:
    told = document.get("predicted_distinct")
    return f", {told['passed']:,} of {told['attempted']:,} distinct programs" if told else ""


def _tiers(document: Document) -> list[str]:
    by_mode = document.get("by_mode") or {}
    if not by_mode:
        return []
    lines = ["| | " + " | ".join(by_mode) + " |", "|---" * (len(by_mode) + 1) + "|"]
    for tier, name in TIER_NAMES.items():
        cells = [_tier(tiers.get(tier)) for tiers in by_mode.values()]
        if any(cells):
            lines.append(f"| {name} | {' | '.join(cells)} |")
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in document["of_programs"].items())
    return [*lines, "", f"Programs: {outcomes}. Rows not run: {sum(document['not_run'].values()):,}.", ""]


def _tier(counts: Mapping[str, Sequence[int]] | None) -> str:
    if counts is None:
        return ""
    rows, distinct = counts["rows"], counts["distinct"]
    return f"{share(*rows)} ({rows[0]:,} of {rows[1]:,} rows, {distinct[0]:,} of {distinct[1]:,} distinct)"


def _changes(document: Document) -> list[str]:
    base = (document.get("trends") or {}).get("baseline")
    if base is None:
        return []
    commit = f" ({base['commit'][:10]})" if base["commit"] else ""
    worse, better = base["worse"], base["better"]
    lines = [f"Against run {base['run']}{commit}: {len(worse)} worse, {len(better)} better."]
    if worse:
        lines += ["", "| worse | mode | was | is | since |", "|---|---|---|---|---|"]
        lines += [
            f"| {entry['program']} | {entry['mode']} | {entry['before']} | {entry['after']} | {_since(entry['first_bad'])} |"
            for entry in worse[:_SHOWN]
        ]
        lines += _more(worse)
    return [*lines, ""]


def _since(bad: Mapping[str, Any] | None) -> str:
    if bad is None:
        return ""
    if not bad["commits"]:
        return f"run {bad['run']}" + (f", {bad['commit'][:10]}" if bad["commit"] else "")
    newest = bad["commits"][0]
    more = f" and {len(bad['commits']) - 1} before it" if len(bad["commits"]) > 1 else ""
    return _cell(f"{newest['commit'][:10]} {newest['subject']}{more}")


def _failing(document: Document) -> list[str]:
    failed = [entry for entry in document["results"] if entry["status"] in FAILED]
    if not failed:
        return []
    lines = ["| program | mode | outcome | error |", "|---|---|---|---|"]
    lines += [
        f"| {entry['program']} | {entry['mode']} | {entry['status']} | {_cell(entry['error'])} |"
        for entry in failed[:_SHOWN]
    ]
    return lines + _more(failed)


def _more(entries: Sequence[Any]) -> list[str]:
    return ["", f"and {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []


def _cell(text: str | None) -> str:
    return (text or "").partition("\n")[0][:200].replace("|", "\\|")


def badge_colour(passed: int, attempted: int) -> str:
    """Of the badge: green from 99 %, amber from 95 %, grey where nothing was attempted."""
    if not attempted:
        return "#6b7280"
    part = passed / attempted
    return "#1a7f4b" if part >= _GOOD else "#a15c07" if part >= _FAIR else "#b3261e"


def junit(document: Document) -> bytes:
    """A test suite of JUnit: a case of each program and mode."""
    results = document["results"]
    suite = ET.Element(
        "testsuite",
        name=f"emutpu conformance {document['suite']}",
        tests=str(len(results)),
        failures=str(sum(entry["status"] in FAILED for entry in results)),
        skipped=str(sum(entry["status"] in NOT_ATTEMPTED for entry in results)),
    )
    for entry in results:
        case = ET.SubElement(
            suite, "testcase", classname=entry["mode"], name=entry["program"], time=f"{entry['seconds'] or 0:.3f}"
        )
        if entry["status"] != "pass":
            kind = "failure" if entry["status"] in FAILED else "skipped"
            told = ET.SubElement(case, kind, message=f"{entry['status']}: {_printable(entry['error'])}")
            told.text = _printable("\n".join(entry["traceback"]))
    ET.indent(suite)
    text: bytes = ET.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text


def _printable(text: str | None) -> str:
    """XML has no place for most control characters."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text or "")
