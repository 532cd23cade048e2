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
_TOP_TIMES = 5
_CROWDED = 0.8


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
    _modelled_rows(table, document)
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
    if document["regions"]:
        table.add_row("regions", Text("\n".join(_region(row) for row in document["regions"])))
    table.add_row("CPU fallbacks", Text(_fallbacks(document)))
    table.add_row("peak HBM", Text(_memory(document)))
    if document["processes"] > 1:
        table.add_row("processes", f"{document['processes']} (counts added up, peak HBM of the fullest device)")


def _region(row: Document) -> str:
    return f"{row['count']:,} for {row['reason']}: {row['ops']:,} ops, {row['hits'] / row['count']:.1%} hits"


def _memory(document: Document) -> str:
    peak, memory = document["peak_hbm_bytes"], document["hbm"]
    if memory is None:
        return _bytes(peak)
    lines = [f"{_bytes(peak)} of {_bytes(memory['chip_bytes'])} ({peak / memory['chip_bytes']:.1%}), modelled"]
    if memory["missing_bytes"]:
        where = f" in {memory['peak_op']} at {memory['peak_line']}" if memory["peak_op"] else ""
        lines.append(f"does not fit: {_bytes(memory['missing_bytes'])} are missing{where}")
    if memory["missing_bytes"] or peak > _CROWDED * memory["chip_bytes"]:
        for held in memory["largest"]:
            shape = ",".join(map(str, held["shape"]))
            lines.append(f"{_bytes(held['bytes']):>12}  {held['dtype']}[{shape}]  {held['op']}  {held['line']}")
    return "\n".join(lines)


def _modelled_rows(table: Table, document: Document) -> None:
    from rich.text import Text

    known = document["modelled"]
    if known["seconds"] is None:
        table.add_row("modelled", Text("not available: " + document["notes"].get("modelled", "nothing was launched")))
        return
    bar = f", within a factor of {1 + known['error_bar']:.3g}" if known["error_bar"] is not None else ""
    issue = known["host_issue_seconds"]
    issued = "measured" if issue is None else f"{issue * 1e6:g} us per launch, assumed"
    lines = [
        f"{_seconds(known['seconds'])}{bar}",
        f"device busy {_seconds(known['device_seconds'])}, {known['launches']:,} launches issued ({issued})",
    ]
    if known["mfu"] is not None:
        use = f", HBM bandwidth {known['hbm_use']:.1%}" if known["hbm_use"] is not None else ""
        lines.append(f"MFU {_full_and_causal(known, 'mfu')} of all FLOPs that run{use}{_links(known)}")
    if known["step_seconds"] is not None:
        share = f", MFU {_full_and_causal(known, 'step_mfu')}" if known["step_mfu"] is not None else ""
        lines.append(f"optimizer step {_seconds(known['step_seconds'])} (median of {known['steps'] - 1}){share}")
    table.add_row("modelled", Text("\n".join(lines)))
    slow = [
        f"{_seconds(row['seconds']):>10}  {row['launches']:>7,}  {row['name']}" for row in known["top"][:_TOP_TIMES]
    ]
    table.add_row("device time", Text("\n".join(slow) or "none"))
    warned = [*known["assumptions"], *(f"{n:,} launches of {op} have no cost" for op, n in known["unmodelled"].items())]
    if warned:
        table.add_row("assumed", Text("\n".join(warned[:_TOP_TIMES])))


def _full_and_causal(known: Document, name: str) -> str:
    """One figure where no causal mask was found, else both, as far as they are known."""
    full, causal = known[name], known[f"{name}_causal"]
    if causal is None:
        return f"{full:.2%} full (causal not known: a mask came as a tensor)"
    return f"{full:.2%}" if causal == full else f"{causal:.2%} causal, {full:.2%} full"


def _links(known: Document) -> str:
    if not known["ici_use"]:
        return "; no traffic between chips"
    return f", ICI and DCN busy {known['ici_use']:.1%} ({_bytes(known['ici_bytes'])})"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value * 1e6:.4g} us"


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
