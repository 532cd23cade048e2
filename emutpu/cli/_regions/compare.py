"""Two comparisons: one program in three modes, and two reports of a program."""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from emutpu._report import Document, header
from emutpu.cli._program import MODES
from emutpu.cli._regions import collect
from emutpu.cli._regions.analysis import place
from emutpu.cli._regions.terminal import amount, ops_text, seconds

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["diff", "load", "modes", "print_diff", "print_modes"]

_NAMES = {"strict": "Strict", "debug": "Debug", "defer": "DeferAndFuse"}


# --------------------------------------------------------------------------------------------------- modes


def modes(arguments: Sequence[str], folder: Path, variables: Mapping[str, str], *, quiet: bool) -> Document:
    """Run the program in every mode: launches, what they leave in HBM, compilations, regions."""
    rows = []
    for mode in MODES:
        (folder / mode).mkdir()
        recording = collect.record(arguments, folder / mode, mode, variables, quiet=quiet)
        document = collect.document_of(recording, variables["EMUTPU_CHIP"], arguments)
        totals = document["totals"]
        rows.append(
            {
                "mode": mode,
                "launches": totals["launches"],
                "hbm_values": totals["buffers"],
                "hbm_bytes": totals["bytes"],
                "peak_hbm_bytes": max(process["peak_hbm_bytes"] for process in document["processes"]),
                "compiles": totals["compiles"],
                "compile_seconds": totals["compile_seconds"],
                "regions": len(document["regions"]) + totals["dropped"],
                "materialisations": totals["flushes"],
                "wall_seconds": document["wall_seconds"],
                "exit_code": document["exit_code"],
            }
        )
    return header("regions-modes", variables["EMUTPU_CHIP"]) | {
        "program": list(arguments),
        "modes": rows,
        "notes": {"regions": "in Strict and Debug every op is launched on its own, which is no region"},
    }


def print_modes(document: Document, console: Console) -> None:
    """The three modes beside each other."""
    from rich.table import Table

    table = Table(title=f"eager modes on emulated {document['chip']}, not hardware", title_justify="left")
    table.add_column("")
    for row in document["modes"]:
        table.add_column(_NAMES[row["mode"]], justify="right")
    lines: dict[str, Callable[[Document], str]] = {
        "launches": lambda row: f"{row['launches']:,}",
        "values written to HBM": lambda row: f"{row['hbm_values']:,}",
        "bytes written to HBM": lambda row: amount(row["hbm_bytes"]),
        "peak HBM": lambda row: amount(row["peak_hbm_bytes"]),
        "compilations": lambda row: f"{row['compiles']:,}",
        "compiling on this host": lambda row: seconds(row["compile_seconds"]),
        "regions": lambda row: f"{row['regions']:,}" if row["mode"] == "defer" else "-",
        "materialisations": lambda row: f"{row['materialisations']:,}" if row["mode"] == "defer" else "-",
        "exit code": lambda row: str(row["exit_code"]),
    }
    for name, text in lines.items():
        table.add_row(name, *(text(row) for row in document["modes"]))
    console.print(table)


# --------------------------------------------------------------------------------------------------- diff


def load(path: str) -> Document:
    """A report that ``--json`` wrote. Raises UsageError for anything else."""
    try:
        document: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path!r} cannot be read as a report: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != "emutpu.regions/1":
        raise click.UsageError(f"{path!r} is no report of `emutpu regions --json`")
    return cast("Document", document)


def _signature(region: Document) -> tuple[str, ...]:
    return tuple(op["name"] for op in region["ops"])


def diff(before: Document, after: Document) -> Document:
    """Align the regions of two reports by their ops, and say where they differ."""
    old, new = before["regions"], after["regions"]
    matcher = difflib.SequenceMatcher(None, [_signature(r) for r in old], [_signature(r) for r in new], autojunk=False)
    rows: list[Document] = []
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            rows += [_pair(x, y) for x, y in zip(old[a:b], new[c:d], strict=True)]
            continue
        rows += [{"change": "removed", "a": x["id"], "b": None, "text": _told(x)} for x in old[a:b]]
        rows += [{"change": "added", "a": None, "b": y["id"], "text": _told(y)} for y in new[c:d]]
    return header("regions-diff", after["chip"]) | {
        "equal": all(row["change"] == "same" for row in rows),
        "rows": rows,
        "summary": {"a": before["summary"], "b": after["summary"]},
        "notes": {},
    }


def _told(region: Document) -> str:
    return f"{region['reason']} at {place(region['trigger'])}: {ops_text(region)}"


def _pair(x: Document, y: Document) -> Document:
    found = []
    shapes = [
        f"{op['name']} at {place(op)}: {was['shape']} -> {now['shape']}"
        for old, op in zip(x["ops"], y["ops"], strict=True)
        for was, now in zip(old["results"], op["results"], strict=False)
        if was != now
    ]
    found += shapes
    if x["reason"] != y["reason"]:
        found.append(f"was {x['reason']} at {place(x['trigger'])}")
    for part in ("shapeless", "dimensions", "options"):
        if x["key"][part] != y["key"][part] and not (part == "dimensions" and shapes):
            found.append(f"{part} key differs")
    if len(x["outputs"]) != len(y["outputs"]):
        found.append(f"{len(x['outputs'])} -> {len(y['outputs'])} outputs")
    if x["cache"]["hit"] != y["cache"]["hit"]:
        found.append("hit -> miss" if x["cache"]["hit"] else "miss -> hit")
    change = "changed" if found else "same"
    return {"change": change, "a": x["id"], "b": y["id"], "text": "; ".join([_told(y), *found])}


_COUNTS: Mapping[str, Callable[[Any], str]] = {
    **dict.fromkeys(("regions", "distinct_regions", "ops", "materialisations"), "{:,}".format),
    "hit_rate": "{:.1%}".format,
    "modelled_hbm_bytes": lambda value: "unknown" if value is None else amount(value),
}


def print_diff(document: Document, console: Console) -> None:
    """What differs, with runs of equal regions in one line."""
    from rich.text import Text

    marks = {"removed": ("-", "red"), "added": ("+", "green"), "changed": ("~", "yellow")}
    for change, rows in itertools.groupby(document["rows"], key=lambda row: row["change"]):
        if change == "same":
            console.print(f"  {len(list(rows))} regions are equal", style="dim")
            continue
        mark, style = marks[change]
        for row in rows:
            ids = "/".join("-" if number is None else str(number) for number in (row["a"], row["b"]))
            console.print(Text(f"{mark} {ids:>9}  {row['text']}", style=style))
    a, b = document["summary"]["a"], document["summary"]["b"]
    for name, text in _COUNTS.items():
        if a[name] != b[name]:
            console.print(f"{name}: {text(a[name])} -> {text(b[name])}", markup=False)
    if document["equal"]:
        console.print("the runs have the same regions", style="green")
