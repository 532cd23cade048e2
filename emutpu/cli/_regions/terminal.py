"""The report for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from emutpu._report import Document
from emutpu.cli._regions.analysis import nbytes, place, steps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

__all__ = ["amount", "label", "ops_text", "print_advice", "print_region", "print_regions", "print_summary", "seconds"]

_LINES = 60
_OPS = 3


def amount(count: float | None) -> str:
    """Bytes for people; a dash where they are unknown."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def seconds(value: float | None) -> str:
    """A time for people; a dash where it is unknown."""
    if value is None:
        return "-"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def short(name: str) -> str:
    """``relu`` of ``aten.relu.default``."""
    return name.removeprefix("aten.").removeprefix("c10d.").removesuffix(".default")


def label(name: str) -> str:
    """``pow`` of ``aten.pow.Tensor_Scalar``."""
    return short(name).partition(".")[0]


def ops_text(region: Document, shown: int = _OPS) -> str:
    """The first ops of a region by name, runs of one op counted."""
    runs: list[list[Any]] = []
    for op in region["ops"]:
        name = label(op["name"])
        if runs and runs[-1][0] == name:
            runs[-1][1] += 1
        else:
            runs.append([name, 1])
    words = [name if count == 1 else f"{name} x{count}" for name, count in runs]
    more = f" ... ({len(region['ops'])} ops)" if len(words) > shown else ""
    return ", ".join(words[:shown]) + more


def tier_text(region: Document) -> str:
    """Where the executable came from."""
    cache = region["cache"]
    names = {0: f"compiled {cache['compile_ms']:.0f} ms", 1: "hit"}
    return str(names.get(cache["tier"], f"tier {cache['tier']} {cache['compile_ms']:.0f} ms"))


def print_summary(document: Document, console: Console) -> None:
    """The totals."""
    from rich.table import Table
    from rich.text import Text

    found, totals = document["summary"], document["totals"]
    table = Table(
        title=f"regions on emulated {document['chip']}, not hardware", show_header=False, title_justify="left"
    )
    table.add_column(style="bold")
    table.add_column()
    rate = "-" if found["hit_rate"] is None else f"{found['hit_rate']:.1%}"
    table.add_row("regions", f"{found['regions']:,} ({found['distinct_regions']:,} distinct) of {found['ops']:,} ops")
    table.add_row("materialisations", f"{found['materialisations']:,} in {found['steps']:,} steps")
    table.add_row("why", Text("\n".join(f"{count:>6,}  {reason}" for reason, count in found["by_reason"].items())))
    table.add_row("cache", f"{rate} hits, {seconds(found['compile_ms'] / 1e3)} compiling on this host")
    table.add_row("written to HBM", f"{totals['buffers']:,} values, {amount(totals['bytes'])}")
    table.add_row("modelled", Text(_modelled(document)))
    table.add_row("exit code", str(document["exit_code"]))
    console.print(table)


def _modelled(document: Document) -> str:
    found = document["summary"]
    if found["modelled_seconds"] is None:
        return "not available" + (": " + document["notes"]["modelled"] if "modelled" in document["notes"] else "")
    low, high = document["error_bar"] or (1, 1)
    return (
        f"{seconds(found['modelled_seconds'])} (x{low:g} to x{high:g}) and {amount(found['modelled_hbm_bytes'])} of "
        "HBM traffic on the chip"
    )


def print_regions(regions: Sequence[Document], console: Console) -> None:
    """One line for every region, under what triggered it; steps that repeat the one before are one line."""
    from rich.text import Text

    previous: list[tuple[str, tuple[str, ...]]] = []
    lines = 0
    for step in steps(regions):
        shape = [(flush.trigger_text, tuple(ops_text(r) for r in flush.regions)) for flush in step]
        members = [region for flush in step for region in flush.regions]
        number = members[0]["step"]
        if shape == previous and all(region["cache"]["hit"] for region in members):
            console.print(Text(f"step {number}: as the one before, all hits", style="dim"))
            lines += 1
        else:
            for flush in step:
                code = (flush.trigger or {}).get("code") or ""
                console.print(Text.assemble((f"step {number}: ", "bold"), flush.trigger_text, (f"  {code}", "dim")))
                for region in flush.regions:
                    console.print(_line(region))
                lines += 1 + len(flush.regions)
        previous = shape
        if lines > _LINES:
            left = len(regions) - members[-1]["id"] - 1
            if left:
                console.print(f"... and {left} more regions; --json and --html have all of them", markup=False)
            return


def _line(region: Document) -> Text:
    from rich.text import Text

    hit = region["cache"]["hit"]
    moved = f"{amount(sum(map(nbytes, region['inputs'])))} -> {amount(sum(map(nbytes, region['outputs'])))}"
    return Text.assemble(
        f"  {region['id']:>4}  {ops_text(region):<46}  {moved:<24}  ",
        (f"{tier_text(region):<16}", "green" if hit else "yellow"),
        (f"  {seconds(region['modelled']['seconds'])} modelled", "dim"),
    )


def print_region(region: Document, console: Console) -> None:
    """Everything about one region."""
    trigger = region["trigger"]
    console.print(f"region {region['id']}", style="bold", markup=False)
    lines = [f"  {region['reason']} at {place(trigger)}" + (f": {trigger['code']}" if trigger else "")]
    key = region["key"]
    lines.append(f"  key {key['shapeless']} {key['dimensions']} {key['options']}: {tier_text(region)}")
    changed = region["changed"]
    if changed is not None:
        lines.append(f"  since region {changed['since']} of the same ops:")
        lines += [
            f"    {short(c['name'])} at {place(c)}: dimension {c['dim']} of {c['value']} {c['before']} -> {c['after']}"
            for c in changed["dimensions"]
        ] or ["    strides or offsets differ"]
    for n, value in enumerate(region["inputs"]):
        made = value["made_by"]
        origin = f"from region {made['region']}" if made else "from the host, or not of a region"
        lines.append(f"  in  {n:>3}  {_value(value):<24} {origin}")
    for n, op in enumerate(region["ops"]):
        code = f"  {op['code']}" if op["code"] else ""
        lines.append(f"  op  {n:>3}  {short(op['name']):<24} {_value(op):<20} {place(op)}{code}")
    for value in region["outputs"]:
        lines.append(f"  out      {_value(value):<24} {value['live_because']}")
    modelled = region["modelled"]
    lines.append(f"  modelled {seconds(modelled['seconds'])}, {amount(modelled['hbm_bytes'])} of HBM traffic")
    for line in lines:
        console.print(line, markup=False)


def _value(value: Document) -> str:
    return f"{value['dtype']}[{', '.join(map(str, value['shape']))}]"


def print_advice(advice: Sequence[Document], console: Console) -> None:
    """The advice, or that there is none."""
    from rich.text import Text

    if not advice:
        console.print("no advice: nothing here looks costly", style="green")
    for item in advice:
        console.print(Text.assemble((f"{item['kind']}: ", "bold yellow"), item["text"]))
