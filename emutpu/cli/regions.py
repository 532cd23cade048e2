"""``emutpu regions``: why a DeferAndFuse program was cut into these regions."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from emutpu import _settings
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, writable, write_json
from emutpu.cli._program import ToolCommand, script

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document

__all__ = ["command"]

_CHIPS = [name for name in _settings.CHIPS if name != _settings.NO_CHIP]


def _shown(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[int | None, ...]:
    """Numbers of regions; None stands for all of them."""
    if any(value != "all" and not value.isdigit() for value in values):
        raise click.BadParameter("expected the number of a region, or 'all'")
    return tuple(None if value == "all" else int(value) for value in values)


@click.command(
    "regions",
    cls=ToolCommand,
    short_help="Why a DeferAndFuse program was cut into its regions.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--chip", type=click.Choice(_CHIPS), help="The emulated chip, whose cost is modelled.")
@click.option(
    "--show", metavar="ID", multiple=True, callback=_shown, help="All about one region, or 'all'; repeatable."
)
@click.option("--stablehlo", metavar="ID", type=int, multiple=True, help="Print the StableHLO of a region; repeatable.")
@click.option("--compare-modes", is_flag=True, help="Run in Strict, Debug and DeferAndFuse, and compare.")
@click.option("--diff", nargs=2, metavar="A B", help="Align two reports that --json wrote; no SCRIPT is run.")
@click.option(
    "--export", metavar="DIR", help="Write every region as StableHLO with inputs, and a script that replays them."
)
@click.option("--html", metavar="FILE", callback=writable, help="Write a self-contained page.")
@click.option("--trace", metavar="FILE", callback=writable, help="Write a trace for ui.perfetto.dev.")
@json_option("Write the report as JSON; '-' is standard output, and the program's output then goes to standard error.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def command(
    chip: str | None,
    show: tuple[int | None, ...],
    stablehlo: tuple[int, ...],
    compare_modes: bool,
    diff: tuple[str, str] | None,
    export: str | None,
    html: str | None,
    trace: str | None,
    json_path: str | None,
    module: str | None,
    program: tuple[str, ...],
) -> int:
    """Run SCRIPT (or -m MODULE) in DeferAndFuse and report its regions: what triggered each, what is in it, why each of its
    outputs is live, what it was compiled for, and what to do about it.

    Options may also stand behind SCRIPT; everything else there is the program's, and so is all that follows a --.
    Exits with 0 also when there is advice; 1 when the program fails, or --diff finds a difference.
    """
    terminal = console(stderr=json_path == "-")
    if diff is not None:
        if program or module:
            raise click.UsageError("--diff compares two reports, and runs no program")
        return _diff(*diff, json_path, terminal)
    arguments = ["-m", module, *program] if module else script(program)
    chosen = _chip(chip)
    with tempfile.TemporaryDirectory(prefix="emutpu-regions-") as folder:
        if compare_modes:
            return _modes(arguments, Path(folder), chosen, json_path, terminal)
        document = _report(arguments, Path(folder), chosen, inputs=export is not None, quiet=json_path == "-")
        _unknown([*show, *stablehlo], document)
        _print(document, show, terminal)
        for number in stablehlo:
            terminal.print(_module(document, Path(folder), number), markup=False, soft_wrap=True)
        _write(document, Path(folder), export, html, trace, terminal)
    if json_path is not None:
        write_json(document, json_path)
    return 1 if document["exit_code"] else 0


def _chip(chip: str | None) -> dict[str, str]:
    """The variables for the chip. Raises EmulatorFailure where emulation is forbidden, UsageError without a chip."""
    variables = {"EMUTPU_CHIP": chip, "EMUTPU_TOPOLOGY": ""} if chip else {}
    effective = _settings.read({**os.environ, **variables})
    if effective.forbid:
        raise EmulatorFailure(EmulatorExit.FORBIDDEN, "EMUTPU_FORBID is set: emulated results are not allowed here")
    if effective.chip == _settings.NO_CHIP:
        raise click.UsageError("EMUTPU_CHIP=none emulates a host without a TPU: it has no regions")
    return variables | {"EMUTPU_CHIP": effective.chip}


def _report(
    arguments: Sequence[str], folder: Path, variables: dict[str, str], *, inputs: bool, quiet: bool
) -> Document:
    from emutpu.cli._regions import advice, analysis, collect

    recording = collect.record(arguments, folder, "defer", variables, inputs=inputs, quiet=quiet)
    document = collect.document_of(recording, variables["EMUTPU_CHIP"], arguments)
    regions = document["regions"]
    analysis.add_steps(regions)
    analysis.add_changes(regions)
    analysis.add_costs(document, folder, document["chip"])
    document["summary"] = analysis.summary(document)
    document["advice"] = advice.advise(regions, recording.issued, document["summary"]["hit_rate"])
    return document


def _unknown(numbers: Sequence[int | None], document: Document) -> None:
    count = len(document["regions"])
    for number in numbers:
        if number is not None and number >= count:
            raise click.UsageError(f"there is no region {number}: the program had {count}")


def _module(document: Document, folder: Path, number: int) -> str:
    from emutpu.cli._regions.analysis import stem_of

    return (folder / f"{stem_of(document['regions'][number])}.mlir").read_text(encoding="utf-8")


def _print(document: Document, show: Sequence[int | None], terminal: Console) -> None:
    from emutpu.cli._regions import terminal as report

    regions = document["regions"]
    if show:
        wanted = range(len(regions)) if None in show else [number for number in show if number is not None]
        for number in wanted:
            report.print_region(regions[number], terminal)
    else:
        report.print_regions(regions, terminal)
    report.print_summary(document, terminal)
    report.print_advice(document["advice"], terminal)


def _write(
    document: Document, folder: Path, export: str | None, html: str | None, trace: str | None, terminal: Console
) -> None:
    from emutpu.cli._regions import export as exporter
    from emutpu.cli._regions import page
    from emutpu.cli._regions import trace as tracer

    try:
        if html is not None:
            Path(html).write_text(page.render(document, folder), encoding="utf-8")
            terminal.print(f"page: {html}", markup=False)
        if trace is not None:
            Path(trace).write_text(tracer.render(document), encoding="utf-8")
            terminal.print(f"trace: {trace}", markup=False)
        if export is not None:
            count = exporter.write(document, folder, Path(export))
            terminal.print(f"{count} regions to replay: python {Path(export) / 'replay.py'}", markup=False)
    except OSError as error:
        raise EmulatorFailure(EmulatorExit.REPORT_NOT_WRITTEN, f"the report was not written: {error}") from error


def _modes(
    arguments: Sequence[str], folder: Path, variables: dict[str, str], json_path: str | None, terminal: Console
) -> int:
    from emutpu.cli._regions import compare

    document = compare.modes(arguments, folder, variables, quiet=json_path == "-")
    compare.print_modes(document, terminal)
    if json_path is not None:
        write_json(document, json_path)
    return 1 if any(mode["exit_code"] for mode in document["modes"]) else 0


def _diff(before: str, after: str, json_path: str | None, terminal: Console) -> int:
    from emutpu.cli._regions import compare

    document = compare.diff(compare.load(before), compare.load(after))
    compare.print_diff(document, terminal)
    if json_path is not None:
        write_json(document, json_path)
    return 0 if document["equal"] else 1
