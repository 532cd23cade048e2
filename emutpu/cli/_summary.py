"""The human summary at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from emutpu._report import Document
from emutpu._settings import NO_CHIP

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_summary"]

_TOP_OPS = 8
_TOP_FALLBACKS = 20


def print_summary(document: Document, console: Console) -> None:
    """Print what a run document says: ops, compiles, fallbacks, memory, time."""
    from rich.table import Table
    from rich.text import Text

    chip = "host without a TPU" if document["chip"] == NO_CHIP else document["chip"]
    table = Table(title=f"emulated {chip}, not hardware", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    if document["ops"]["dispatched"] is None:
        table.add_row("report", Text(document["notes"]["ops"]))
    else:
        _measured_rows(table, document)
    ended = f" ({document['signal']})" if document["signal"] else ""
    table.add_row("modelled", Text("not available: " + document["notes"]["modelled"]))
    table.add_row("wall time", f"{document['wall_seconds']:.2f} s on this host")
    table.add_row("exit code", f"{document['exit_code']}{ended}")
    console.print(table)


def _measured_rows(table: Table, document: Document) -> None:
    from rich.text import Text

    ops, compiles = document["ops"], document["compiles"]
    table.add_row("ops dispatched", f"{ops['dispatched']:,}")
    top = list(ops["by_name"].items())[:_TOP_OPS]
    if top:
        table.add_row("most frequent", Text("\n".join(f"{count:>9,}  {name}" for name, count in top)))
    rate = f", {compiles['hits'] / compiles['requests']:.1%} hits" if compiles["requests"] else ""
    table.add_row("compile requests", f"{compiles['requests']:,}{rate}")
    table.add_row("compilations", f"{compiles['misses']:,} in {compiles['seconds']:.2f} s")
    table.add_row("CPU fallbacks", Text(_fallbacks(document)))
    table.add_row("peak HBM", _bytes(document["peak_hbm_bytes"]))
    if document["processes"] > 1:
        table.add_row("processes", f"{document['processes']} (counts added up, peak HBM of the fullest device)")


def _fallbacks(document: Document) -> str:
    entries = document["fallbacks"]
    lines = [f"{entry['count']:>9,}  {entry['op']}  {entry['location']}" for entry in entries[:_TOP_FALLBACKS]]
    if len(entries) > _TOP_FALLBACKS:
        lines.append(f"... and {len(entries) - _TOP_FALLBACKS} more; see --json")
    return "\n".join(lines) or "none"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
