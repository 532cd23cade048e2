"""``emutpu aot-check``: every module that a program reaches, through the real TPU compiler."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emutpu.cli._aot import TOPOLOGIES, Job, cache_folder, compiled, require_libtpu
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document

__all__ = ["command"]

_MODULE_SUFFIXES = (".mlir", ".mlirbc")
_LEVELS = {"O0": "eager", "O1": "eager", "O2": "compiled", "O3": "compiled"}
_SHOWN = 20


@click.command(
    "aot-check",
    short_help="Compile what a program reaches with the real TPU compiler.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--chip",
    "chips",
    multiple=True,
    type=click.Choice(list(TOPOLOGIES)),
    help="Compile for this chip; may be repeated. [v5e]",
)
@click.option(
    "--dry-run", is_flag=True, help="Run the program without computing: shapes only, so reads of values fail."
)
@click.option("--no-cache", is_flag=True, help="Ask the compiler again for modules it has seen.")
@json_option(
    "Write the findings as JSON; '-' is standard output, and the program's output then goes to standard error."
)
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    chips: tuple[str, ...],
    dry_run: bool,
    no_cache: bool,
    json_path: str | None,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Run SCRIPT on the emulated device, and compile every module that it compiles with libtpu, ahead of time.

    No TPU is needed. SCRIPT may also be a StableHLO module (.mlir). Exits with 1 when the compiler refuses a module, or
    when the program itself fails.
    """
    if not os.path.isfile(script):
        raise click.UsageError(f"there is no file {script!r}")
    chips = tuple(dict.fromkeys(chips)) or ("v5e",)
    version = require_libtpu()
    terminal = console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="emutpu-aot-") as folder:
        code = 0
        if script.endswith(_MODULE_SUFFIXES):
            jobs = [Job(Path(script), Path(script).stem, chip, "O2", script, 1) for chip in chips]
        else:
            code = _run_program([script, *arguments], Path(folder), chips[0], dry_run, json_path == "-")
            jobs = list(_jobs(Path(folder), chips))
        modules = list(_with_progress(jobs, version, None if no_cache else cache_folder(os.environ), terminal))
    document = _document(chips, version, code, modules)
    _print(document, terminal)
    if json_path is not None:
        write_json(document, json_path)
    return 0 if document["ok"] else 1


def _run_program(arguments: list[str], folder: Path, chip: str, dry_run: bool, quiet: bool) -> int:
    from emutpu.cli._launch import launch

    environment = {"EMUTPU_CHIP": chip, "EMUTPU_TOPOLOGY": "", "EMUTPU_RECORD_MODULES": str(folder)}
    # A program that finds its executables in a cache compiles nothing that could be written down.
    environment |= {"TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled", "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": ""}
    environment |= {"EMUTPU_CLIENT": "dry_run"} if dry_run else {}
    return launch(arguments, environment, stdout_to_stderr=quiet).exit_code


def _jobs(folder: Path, chips: tuple[str, ...]) -> Iterator[Job]:
    from emutpu._modules import recorded

    found = list(recorded(folder))
    for chip in chips:
        for path, facts in found:
            yield Job(path, facts["name"], chip, facts["effort"], facts["file"], facts["line"], facts["code"])


def _with_progress(jobs: list[Job], version: str, cache: Path | None, terminal: Console) -> Iterator[Document]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("compiling for {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs))
        try:
            for job, answer in compiled(jobs, version, cache):
                progress.update(task, advance=1, description=job.chip)
                yield _row(job, answer)
        except OSError as error:
            raise EmulatorFailure(
                EmulatorExit.REPORT_NOT_WRITTEN, f"the answers of the compiler cannot be kept: {error}; use --no-cache"
            ) from error


def _row(job: Job, answer: dict[str, Any]) -> Document:
    memory = [answer.get(name) for name in ("argument_bytes", "output_bytes", "temporary_bytes")]
    return {
        "name": job.name,
        "chip": job.chip,
        "effort": job.effort,
        "file": job.file,
        "line": job.line,
        "code": job.code,
        "ok": answer["ok"],
        "error": answer["error"],
        "cycles": answer.get("cycles"),
        "optimal_seconds": answer.get("optimal_seconds"),
        "flops": answer.get("flops"),
        "hbm_bytes": sum(part for part in memory if part is not None) if answer["ok"] else None,
        "temporary_bytes": answer.get("temporary_bytes"),
        "cached": answer["cached"],
        "modelled": _modelled(job),
    }


def _modelled(job: Job) -> Document:
    """What our own model says of the same module: peak memory, cycles and expected seconds; null with the reason."""
    from emutpu.backend.pjrt import PjrtError
    from emutpu.simulator.chips import chip
    from emutpu.simulator.cost import estimate

    level: Any = _LEVELS[job.effort]
    try:
        found = estimate(job.path.read_bytes(), chip(job.chip), level)
    except (PjrtError, ValueError) as error:
        return {"cycles": None, "seconds": None, "hbm_bytes": None, "reason": str(error)}
    return {
        "cycles": found.cycles,
        "seconds": found.expected_seconds,
        "hbm_bytes": found.peak_hbm_bytes,
        "reason": None,
    }


def _document(chips: tuple[str, ...], version: str, code: int, modules: list[Document]) -> Document:
    from emutpu._report import header

    notes = {
        "modelled": "emutpu's model of the same module; the compiler's figures are estimates too, none is measured"
    }
    if code != 0:
        notes["program"] = f"the program ended with exit code {code}: modules after that point were not reached"
    elif not modules:
        notes["program"] = "the program compiled nothing: it never used the device"
    return header("aot-check", chips[0]) | {
        "chips": list(chips),
        "libtpu": version,
        "ok": code == 0 and bool(modules) and all(row["ok"] for row in modules),
        "exit_code": code,
        "modules": modules,
        "summary": {
            chip: dict(Counter("ok" if row["ok"] else "failed" for row in modules if row["chip"] == chip))
            for chip in chips
        },
        "notes": notes,
    }


def _print(document: Document, terminal: Console) -> None:
    failed = [row for row in document["modules"] if not row["ok"]]
    for row in failed[:_SHOWN]:
        where = f"{row['file']}:{row['line']}" if row["file"] else "no line of the program"
        terminal.print(f"[bold red]{row['chip']}[/] {row['name']} at ", end="")
        terminal.print(where, markup=False)
        if row["code"]:
            terminal.print(f"    {row['code']}", markup=False)
        terminal.print(f"    {_first_lines(row['error'])}", markup=False)
    if len(failed) > _SHOWN:
        terminal.print(f"... and {len(failed) - _SHOWN} more; --json has them all", markup=False)
    for chip, counts in document["summary"].items():
        rows = [row for row in document["modules"] if row["chip"] == chip]
        peak = max((row["hbm_bytes"] or 0 for row in rows), default=0)
        both = [row for row in rows if row["cycles"] and row["modelled"]["cycles"] is not None]
        cycles, ours = (sum(part["cycles"] for part in parts) for parts in (both, [row["modelled"] for row in both]))
        terminal.print(
            f"{chip}: {counts.get('ok', 0)} of {len(rows)} modules compile (libtpu {document['libtpu']}), largest "
            f"{peak / 2**20:,.1f} MiB of HBM, {cycles:,} estimated cycles for one launch of each "
            f"(emutpu's model: {ours:,.0f})",
            markup=False,
        )
    if "program" in document["notes"]:
        terminal.print(document["notes"]["program"], markup=False)


def _first_lines(error: str) -> str:
    return " ".join(line.strip() for line in error.splitlines()[:3] if line.strip())
