"""``emutpu fuzz``: whether a program's results depend on what they must not depend on."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emutpu import _settings
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, writable, write_json
from emutpu.cli._program import MODES, ToolCommand, script

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document
    from emutpu.cli._fuzz.running import Program, Result

__all__ = ["command"]

_REPLAY = "emutpu.fuzz-replay/1"
_FIRST_TIMEOUT = 600.0


@click.command(
    "fuzz",
    cls=ToolCommand,
    short_help="Find results that depend on the schedule.",
    context_settings={"allow_interspersed_args": False},
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the perturbations: the same seed, the same runs."
)
@click.option("--runs", type=click.IntRange(min=1), default=20, show_default=True, help="Disturbed runs.")
@click.option(
    "--mode", type=click.Choice(list(MODES)), default="defer", show_default=True, help="Eager mode at the start."
)
@click.option("--result", metavar="NAME", help="Compare this global variable of the program too, to the last element.")
@click.option(
    "--rtol", type=click.FloatRange(min=0), default=1e-4, show_default=True, help="Relative, for printed numbers."
)
@click.option(
    "--atol", type=click.FloatRange(min=0), default=1e-6, show_default=True, help="Absolute, for printed numbers."
)
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds; ten times the undisturbed run + 30."
)
@click.option(
    "--attempts", type=click.IntRange(min=0), default=60, show_default=True, help="Runs to minimise a failure."
)
@click.option(
    "--save", metavar="FILE", default="fuzz-replay.json", show_default=True, callback=writable, help="The replay file."
)
@click.option(
    "--replay",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="Reproduce a failure; needs no SCRIPT.",
)
@json_option("Write what was found as JSON; '-' is standard output.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def command(
    seed: int,
    runs: int,
    mode: str,
    result: str | None,
    rtol: float,
    atol: float,
    timeout: float | None,
    attempts: int,
    save: str,
    replay: str | None,
    json_path: str | None,
    module: str | None,
    program: tuple[str, ...],
) -> int:
    """Run SCRIPT (or -m MODULE) under other schedules: when the garbage collector runs, where pending work is materialised, what
    is in the compile cache, in which order launches complete. What it prints must stay the same.

    Numbers may differ by --rtol and --atol, because fused and single ops round differently on the CPU; with
    EMUTPU_CLIENT=interpreter they do not, and --rtol 0 --atol 0 is fair. A failure is minimised to a replay file.

    Exits with 1 when a failure is found (or reproduced). Options may also stand behind SCRIPT.
    """
    from emutpu.cli._fuzz.running import Program

    if _settings.read(os.environ).forbid:
        raise EmulatorFailure(EmulatorExit.FORBIDDEN, "EMUTPU_FORBID is set: emulated results are not allowed here")
    terminal = console(stderr=json_path == "-")
    with tempfile.TemporaryDirectory(prefix="emutpu-fuzz-") as folder:
        if replay is not None:
            if program or module:
                raise click.UsageError("--replay knows its program; give no SCRIPT")
            recorded = _load(replay)
            made = Program(
                tuple(recorded["program"]),
                recorded["environment"],
                Path(folder),
                recorded["result"],
                recorded["rtol"],
                recorded["atol"],
            )
            document = _replay(made, recorded, timeout, terminal)
        else:
            arguments = ("-m", module, *program) if module else tuple(script(program))
            environment = dict(MODES[mode])
            made = Program(arguments, environment, Path(folder), result, rtol, atol)
            document = _search(made, seed, runs, timeout, attempts, save, terminal)
    if json_path is not None:
        write_json(document, json_path)
    return 1 if document["findings"] else 0


def _load(path: str) -> Document:
    try:
        recorded: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{path!r} cannot be read as a replay file: {error}") from None
    if not isinstance(recorded, dict) or recorded.get("schema") != _REPLAY:
        raise click.UsageError(f"{path!r} is no replay file of `emutpu fuzz`")
    made: Document = recorded
    return made


def _undisturbed(program: Program, timeout: float | None) -> tuple[Result, float]:
    """The run that the others are compared with, and how long the others may take."""
    started = time.monotonic()
    expected = program.run([], timeout or _FIRST_TIMEOUT)
    seconds = time.monotonic() - started
    if expected.timed_out:
        raise EmulatorFailure(
            EmulatorExit.PROGRAM_NOT_STARTED,
            f"the undisturbed program did not end within {seconds:.0f} s: give --timeout",
        )
    if expected.ops is None:
        raise EmulatorFailure(
            EmulatorExit.PROGRAM_NOT_STARTED,
            f"the program (exit code {expected.exit_code}) wrote no counts: it never imported torch with emutpu active, or "
            f"ended without exit handlers\n{expected.errors.strip()}",
        )
    return expected, timeout or 30 + 10 * seconds


def _search(
    program: Program, seed: int, runs: int, timeout: float | None, attempts: int, save: str, terminal: Console
) -> Document:
    from emutpu.cli._fuzz.schedule import draw

    expected, limit = _undisturbed(program, timeout)
    again = program.difference(expected, program.run([], limit))
    document = _document(program, seed, expected)
    if again is not None:
        terminal.print(f"two undisturbed runs differ: {again}", style="red", markup=False)
        terminal.print("seed the program, and print neither times nor addresses", markup=False)
        document["findings"].append(
            {"run": None, "difference": again, "perturbations": [], "minimal": False, "replay": None}
        )
        return document
    for run in range(runs):
        perturbations = draw(seed, run, expected.ops or 0, expected.launches or 0)
        found = program.difference(expected, program.run(perturbations, limit))
        document["runs"] += 1
        if found is not None:
            terminal.print(f"run {run} of seed {seed}, {len(perturbations)} perturbations: {found}", markup=False)
            how = run, limit, attempts, save
            document["findings"].append(_minimised(program, perturbations, how, found, expected, terminal))
            return document
    terminal.print(
        f"{runs} disturbed runs of {expected.ops} ops and {expected.launches} launches came to the same", style="green"
    )
    return document


def _minimised(
    program: Program,
    perturbations: list[Document],
    how: tuple[int, float, int, str],
    first: str,
    expected: Result,
    terminal: Console,
) -> Document:
    from emutpu.cli._fuzz.minimise import minimise
    from emutpu.cli._fuzz.schedule import text

    run, limit, attempts, save = how
    seen: list[str] = [first]

    def fails(part: Sequence[Document]) -> bool:
        found = program.difference(expected, program.run(part, limit))
        if found is not None:
            seen.append(found)
        return found is not None

    few, minimal = minimise(perturbations, fails, attempts)
    found = seen[-1]  # the search goes on with whatever fails, so the last failure is that of the smallest schedule
    replay = {
        "schema": _REPLAY,
        "program": list(program.arguments),
        "environment": dict(program.environment),
        "result": program.name,
        "rtol": program.rtol,
        "atol": program.atol,
        "perturbations": list(few),
        "difference": found,
    }
    try:
        Path(save).write_text(json.dumps(replay, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise EmulatorFailure(EmulatorExit.REPORT_NOT_WRITTEN, f"the replay file was not written: {error}") from error
    for perturbation in few:
        terminal.print(f"  {text(perturbation)}", markup=False)
    more = "" if minimal else " (not minimal: more --attempts may find fewer)"
    terminal.print(f"{len(few)} of them are enough{more}: {found}", markup=False)
    terminal.print(f"emutpu fuzz --replay {save}", markup=False)
    return {"run": run, "difference": found, "perturbations": list(few), "minimal": minimal, "replay": save}


def _replay(program: Program, recorded: Document, timeout: float | None, terminal: Console) -> Document:
    from emutpu.cli._fuzz.schedule import text

    expected, limit = _undisturbed(program, timeout)
    document = _document(program, None, expected) | {"runs": 1}
    perturbations = recorded["perturbations"]
    found = program.difference(expected, program.run(perturbations, limit))
    for perturbation in perturbations:
        terminal.print(f"  {text(perturbation)}", markup=False)
    if found is None:
        terminal.print("the program comes to the same under this schedule", style="green")
        return document
    terminal.print(found, style="red", markup=False)
    document["findings"].append(
        {"run": None, "difference": found, "perturbations": perturbations, "minimal": None, "replay": None}
    )
    return document


def _document(program: Program, seed: int | None, expected: Result) -> Document:
    from emutpu._report import header

    return header("fuzz", _settings.read(os.environ).chip) | {
        "program": list(program.arguments),
        "seed": seed,
        "runs": 0,
        "ops": expected.ops,
        "launches": expected.launches,
        "exit_code": expected.exit_code,
        "findings": [],
        "notes": {},
    }
