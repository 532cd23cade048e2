"""``emutpu conformance predict``: the memory that programs take at full size, by dry runs."""

from __future__ import annotations

from pathlib import Path

import click

from emutpu import _settings
from emutpu.cli._output import console, json_option, write_json

__all__ = ["device_memory", "predict_command"]

_GIB = 2**30
_SHOWN = 20


def device_memory(chip: str) -> int:
    """Bytes of HBM of one device of a chip."""
    from emutpu.simulator.chips import chip as row

    return row(chip).hbm_bytes


@click.command("predict")
@click.option(
    "--suite", type=click.Choice(("smoke", "reps", "full")), default="smoke", show_default=True, help="Which programs."
)
@click.option("--only", metavar="PATTERN", help="Only programs with such a name, as in 'timm/resnet*'.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Worker processes.")
@click.option("--fresh", is_flag=True, help="Estimate those again that have an estimate.")
@click.option(
    "--results",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default="reports/conformance",
    show_default=True,
    help="Where the estimates are kept, beside the history of runs.",
)
@json_option("Write the counts as JSON; '-' is standard output.")
def predict_command(suite: str, only: str | None, jobs: int, fresh: bool, folder: Path, json_path: str | None) -> int:
    """Estimate the memory of programs at full size, forward at batch 1, in dry runs: nothing is computed.

    Reports predict with it which rows fit a device of the chip. Estimates come with the package; this makes those that are
    missing. Exits with 1 when a program has none afterwards.
    """
    from emutpu._report import header
    from emutpu.conformance.estimates import estimate
    from emutpu.conformance.pool import Limits
    from emutpu.conformance.runner import selected

    if not selected(suite, (1, 1), only):
        raise click.UsageError("no program of the suite matches --only")
    chip = _settings.settings().chip
    if chip == _settings.NO_CHIP:
        raise click.UsageError("EMUTPU_CHIP=none is a host without a TPU: there is no device to look at")
    terminal = console(stderr=json_path == "-")
    with terminal.status("estimating") as status:
        found = estimate(
            suite,
            only,
            folder,
            chip=chip,
            jobs=jobs,
            limits=Limits(120, 6 * _GIB),
            progress=lambda done, total: status.update(f"estimating: {done} of {total}"),
            fresh=fresh,
        )
    for program, error in list(found["failed"].items())[:_SHOWN]:
        terminal.print(f"no estimate  {program}: {error}", markup=False)
    terminal.print(
        f"{found['estimated']:,} of {found['programs']:,} programs estimated, {found['forward']:,} of them with their forward"
    )
    if json_path is not None:
        write_json(header("conformance-predict", chip) | found, json_path)
    return 1 if found["failed"] else 0
