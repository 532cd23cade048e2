"""``emutpu cost``: what a StableHLO module would cost on a chip, by the model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from emutpu.cli._output import console, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document
    from emutpu.simulator.cost import Estimate

__all__ = ["command"]

_TOLD = 1.01
_SHOWN = 25
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@click.command("cost", short_help="Modelled cost of a StableHLO module on a chip.")
@click.argument("module", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE.mlir")
@click.option("--chip", "chip_name", required=True, help="The chip, such as v5e or v6e.")
@click.option(
    "--level", type=click.Choice(["eager", "compiled"]), default="compiled", show_default=True,
    help="Optimisation: that of single eager ops, or of torch.compile graphs.",
)  # fmt: skip
@json_option("Write the cost as JSON; '-' is standard output.")
def command(module: Path, chip_name: str, level: str, json_path: str | None) -> None:
    """Cost of FILE.mlir (StableHLO as text or bytecode) on one device: time, traffic, memory, and its fused kernels.

    Every figure is modelled. roofline_seconds and cycles follow the real compiler's own estimates, expected_seconds what
    was measured on a v6e; the error bar says how far off that may be.
    """
    from emutpu.backend.pjrt import PjrtError
    from emutpu.simulator.chips import chip
    from emutpu.simulator.cost import estimate

    terminal = console(stderr=json_path == "-")
    try:
        found = estimate(module.read_bytes(), chip(chip_name), "eager" if level == "eager" else "compiled")
    except (PjrtError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    _print(found, module.name, chip(chip_name).name, level, terminal)
    if json_path is not None:
        write_json(_document(found, module, chip(chip_name).name, level), json_path)


def _document(found: Estimate, module: Path, chip_name: str, level: str) -> Document:
    from emutpu._report import header
    from emutpu.simulator.cost.causal import UNSEEN

    body = dataclasses.asdict(found)
    low, high = body.pop("error_bar")
    notes = {}
    if math.isnan(found.masked_flops):
        body["masked_flops"], notes["masked_flops"] = None, UNSEEN
    return (
        header("cost", chip_name)
        | {"module": module.name, "level": level}
        | body
        | {"error_bar": {"low": low, "high": high}, "notes": notes}
    )


def _seconds(value: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def _amount(value: float, unit: str) -> str:
    for scale, prefix in _PREFIXES:
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def _executed(found: Estimate) -> str:
    """What runs, where the compiler counts less of it (loops once, nothing of its own calls)."""
    if found.executed_flops <= _TOLD * found.flops:
        return ""
    return f" as the compiler counts, {_amount(found.executed_flops, 'FLOP')} run"


def _print(found: Estimate, name: str, chip_name: str, level: str, terminal: Console) -> None:
    from rich.table import Table

    low, high = found.error_bar
    rows = (
        ("expected", f"{_seconds(found.expected_seconds)}, between x{low:g} and x{high:g} of that"),
        ("roofline", f"{_seconds(found.roofline_seconds)}, bound by {found.peak}"),
        ("busiest unit", found.bound),
        ("cycles", f"{found.cycles:,.0f}"),
        ("flops", _amount(found.flops, "FLOP") + _executed(found)),
        ("HBM traffic", _amount(found.hbm_bytes, "B")),
        ("peak HBM", _amount(found.peak_hbm_bytes, "B")),
    )
    terminal.print(f"{name} on {chip_name}, {level}: modelled, not measured", style="bold", markup=False)
    for label, value in rows:
        terminal.print(f"  {label:<13} {value}", markup=False)
    table = Table(title=f"kernels, longest first ({len(found.fusions)})", title_justify="left")
    for column in ("seconds", "flops", "bytes", "unit", "ops"):
        table.add_column(column, overflow="fold" if column == "ops" else "ellipsis")
    for kernel in sorted(found.fusions, key=lambda each: -each.seconds)[:_SHOWN]:
        table.add_row(
            _seconds(kernel.seconds),
            _amount(kernel.flops, ""),
            _amount(kernel.bytes, "B"),
            kernel.unit,
            " ".join(kernel.ops),
        )
    terminal.print(table)
    for text in found.assumptions:
        terminal.print(f"assumed: {text}", markup=False)
