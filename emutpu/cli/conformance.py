"""``emutpu conformance``: real architectures at small sizes on the device, against the CPU."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from emutpu import _settings
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, write_json
from emutpu.cli._predict import device_memory, predict_command

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu.conformance.comparison import Point
    from emutpu.conformance.history import History, Run
    from emutpu.conformance.prediction import Memory
    from emutpu.conformance.runner import Progress

__all__ = ["command"]

_SCHEMA = "emutpu.conformance/1"
_FOLDER = "reports/conformance"
_SHOWN = 20
_COMMITS = 3
_GIB = 2**30
_CAUGHT = 0.97
_SMALL_MEMORY = 5 * _GIB
_SMALL_PROGRAMS = 20


def _shard(context: click.Context, parameter: click.Parameter, given: str) -> tuple[int, int]:
    number, _, of = given.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        raise click.BadParameter(f"{given!r} is not i/n with i from 1 to n")
    return int(number), int(of)


_suite = click.option(
    "--suite", type=click.Choice(("smoke", "reps", "full")), default="smoke", show_default=True, help="Which programs."
)
_only = click.option("--only", metavar="PATTERN", help="Only programs with such a name, as in 'timm/resnet*'.")
_results = click.option(
    "--results",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=_FOLDER,
    show_default=True,
    help="Where the history of all runs is kept.",
)


@click.group("conformance", short_help="A suite of real architectures against the CPU, and its reports.")
def command() -> None:
    """Build real architectures at small sizes, run them on the emulated device and on the CPU, and keep what happened.

    Needs the extra: pip install 'emutpu[models]'.
    """


@command.command("list")
@_suite
@_only
@json_option("Write the rows as JSON; '-' is standard output.")
def list_command(suite: str, only: str | None, json_path: str | None) -> None:
    """Show the programs of a suite, and how many models each of them stands for."""
    from emutpu._report import header
    from emutpu.conformance import manifest
    from emutpu.conformance.runner import digest, selected

    terminal = console(stderr=json_path == "-")
    programs = selected(suite, (1, 1), only)
    names = {program.name for program in programs}
    models = collections.Counter(model.program for model in manifest.models())
    for program in programs:
        terminal.print(f"{program.name}  {program.task}  {models[program.name]} models", markup=False)
    total = sum(models[name] for name in names)
    groups = len({program.group for program in programs})
    terminal.print(f"{len(programs):,} programs of {groups:,} groups stand for {total:,} models")
    if json_path is not None:
        rows = [row for row in manifest.rows() if row.program.name in names]
        write_json(
            header("conformance-list", _settings.settings().chip)
            | {
                "suite": suite,
                "manifest": digest(),
                "rows": len(rows),
                "programs": len(programs),
                "sources": [dataclasses.asdict(source) for source in manifest.sources().values()],
                "models": [
                    dataclasses.asdict(row.model) | {"task": row.program.task, "group": row.program.group}
                    for row in rows
                ],
            },
            json_path,
        )


@command.command("run")
@_suite
@click.option(
    "--mode",
    "modes",
    multiple=True,
    type=click.Choice(("strict", "defer", "compile", "bounded")),
    default=("strict",),
    show_default=True,
    help="How ops run; several times for several modes. 'bounded' compiles causal language models for several lengths.",
)
@click.option("--chip", type=click.Choice(_settings.CHIPS), help="The emulated chip; default that of EMUTPU_CHIP.")
@click.option("--shard", callback=_shard, default="1/1", show_default=True, metavar="i/n", help="One of n parts.")
@_only
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Worker processes.")
@click.option("--resume", is_flag=True, help="Go on with the latest unfinished run of the same options.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=300, show_default=True, help="Processor seconds for one program."
)
@click.option("--memory", type=click.FloatRange(1), default=6, show_default=True, help="GiB for one worker process.")
@click.option(
    "--small-runner",
    is_flag=True,
    help="For machines of 7 GB: one worker of at most 5 GiB, a fresh one every 20 programs.",
)
@click.option(
    "--executor",
    type=click.Choice(("local", "ray")),
    default="local",
    show_default=True,
    help="Processes of this machine, or of a Ray cluster (pip install 'emutpu[ray]'; RAY_ADDRESS names one).",
)
@_results
@json_option("Write the report as JSON; '-' is standard output.")
def run_command(
    suite: str,
    modes: tuple[str, ...],
    chip: str | None,
    shard: tuple[int, int],
    only: str | None,
    jobs: int,
    resume: bool,
    timeout: float,
    memory: float,
    small_runner: bool,
    executor: str,
    folder: Path,
    json_path: str | None,
) -> int:
    """Run the programs of a suite, each of them once, and credit the outcome to every model that is such a program.

    An outcome is pass, crash, mismatch, unsupported, timeout, not run, or a corpus bug: a program that fails on the CPU
    too. Exits with 1 unless every program that was attempted passed.
    """
    from emutpu.conformance import runner
    from emutpu.conformance.farm import NoRay
    from emutpu.conformance.pool import Limits

    chip = chip or _settings.settings().chip
    if chip == _settings.NO_CHIP:
        raise click.UsageError("EMUTPU_CHIP=none is a host without a TPU: there is no device to look at")
    if not runner.selected(suite, shard, only):
        raise click.UsageError("no program of the suite is in this shard and matches --only")
    if small_runner:
        jobs, limits = 1, Limits(timeout, _SMALL_MEMORY, _SMALL_PROGRAMS)
    else:
        limits = Limits(timeout, int(memory * _GIB))
    terminal = console(stderr=json_path == "-")
    try:
        number = runner.run(
            runner.plan_of(suite, modes, chip, shard, only),
            folder,
            jobs=jobs,
            limits=limits,
            resume=resume,
            progress=lambda state: _tell(state, terminal),
            executor=executor,
        )
    except NoRay as error:
        raise click.UsageError(str(error)) from error
    document = _document(folder, number)
    _print(document, terminal)
    if json_path is not None:
        write_json(document, json_path)
    attempted = document["of_programs"]
    return 1 if set(attempted) - {"pass", "not run", "corpus bug"} else 0


def _tell(state: Progress, terminal: Console) -> None:
    answer = state.answer
    left = f"{state.remaining / 60:.0f} min left" if state.remaining >= 90 else f"{state.remaining:.0f} s left"
    detail = "" if answer["outcome"] == "pass" else f": {(answer['error'] or '').partition(chr(10))[0][:160]}"
    terminal.print(
        f"[{state.done}/{state.total}, {left}] {answer['outcome']}  {answer['program']} {answer['mode']} "
        f"({answer['seconds']:.1f} s){detail}",
        markup=False,
    )


def _document(folder: Path, number: int | None) -> dict[str, Any]:
    """The document of a run, or of the latest. Raises UsageError where there is none."""
    with _history(folder) as history:
        return _of_run(folder, history, _run(folder, history, number))


def _history(folder: Path) -> History:
    from emutpu.conformance.history import History
    from emutpu.conformance.runner import DATABASE

    if not (folder / DATABASE).is_file():
        raise click.UsageError(f"{folder} holds no runs: `emutpu conformance run` makes one")
    return History(folder / DATABASE)


def _run(folder: Path, history: History, number: int | None) -> Run:
    runs = [run for run in history.runs() if number is None or run.id == number]
    if not runs:
        raise click.UsageError(f"{folder} has no run {number}" if number else f"{folder} holds no runs")
    return runs[0]


def _of_run(folder: Path, history: History, run: Run) -> dict[str, Any]:
    from emutpu.conformance.documents import document
    from emutpu.conformance.runner import mutations

    found = document(run, history.answers(run.id), mutations(folder), _sizes(folder, run.plan.chip))
    return _headed(run.plan.chip, found)


def _headed(chip: str, found: dict[str, Any]) -> dict[str, Any]:
    """A document with what all start with, and with what a device of each of the modelled chips has."""
    from emutpu._report import header
    from emutpu.conformance.worker import CHIPS

    return header("conformance", chip) | found | {"device_bytes": {name: device_memory(name) for name in CHIPS}}


def _sizes(folder: Path, chip: str) -> Memory:
    """What programs take at full size, and what a device of the chip has."""
    from emutpu.conformance.estimates import memory

    return memory(folder, device_memory(chip))


def _print(document: Mapping[str, Any], terminal: Console) -> None:
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in document["of_programs"].items())
    terminal.print(f"run {document['run']}: {document['programs']:,} programs, {outcomes}")
    for tier, what in (("tier1", "run and train"), ("tier2", "agree with the CPU"), ("predicted_on_chip", "predicted")):
        counts = document[tier]
        share = f" ({counts['passed'] / counts['attempted']:.1%})" if counts["attempted"] else ""
        terminal.print(f"  {what:>18}: {counts['passed']:,} of {counts['attempted']:,} rows{share}")
    for reason, count in list(document["not_run"].items())[:_SHOWN]:
        terminal.print(f"  not run, {count} rows: {reason}", markup=False)
    bugs = document["corpus_bugs"]
    if bugs:
        more = f" and {len(bugs) - _SHOWN} more" if len(bugs) > _SHOWN else ""
        terminal.print(f"  fail on the CPU too: {', '.join(bugs[:_SHOWN])}{more}", markup=False)


def _given(folder: Path, name: str, chip: str) -> dict[str, Any]:
    """A document by the number of its run in ``folder``, or from a file: a report, or the answers of a run as JSON lines.

    ``chip`` is taken for answers that were made on an unnamed one.
    """
    if name.isdecimal():
        return _document(folder, int(name))
    try:
        text = Path(name).read_text(encoding="utf-8")
        read = _read(text)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{name!r} cannot be read as JSON: {error}") from error
    if len(read) == 1 and isinstance(read[0], dict) and read[0].get("schema") == _SCHEMA:
        return read[0]
    return _imported(name, read, chip, _sizes(folder, chip))


def _read(text: str) -> list[Any]:
    try:
        return [json.loads(text)]
    except ValueError as error:
        if not str(error).startswith("Extra data"):  # what a second line is
            raise
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _imported(name: str, answers: list[Any], chip: str, sizes: Memory) -> dict[str, Any]:
    from emutpu.conformance.documents import OUTCOMES, imported

    for number, answer in enumerate(answers, 1):
        if not isinstance(answer, dict) or not {"program", "mode", "outcome"} <= set(answer):
            raise click.UsageError(
                f"{name!r} is neither a report of `emutpu conformance run --json` nor JSON lines of answers with program, "
                f"mode and outcome: see its line {number}"
            )
        if answer["outcome"] not in OUTCOMES:
            raise click.UsageError(
                f"{name!r}, line {number}: {answer['outcome']!r} is none of the outcomes {', '.join(OUTCOMES)}"
            )
    return _headed(chip, imported(answers, chip, sizes))


@command.command("mutate")
@click.option(
    "--suite",
    type=click.Choice(("families", "smoke", "reps", "full")),
    default="families",
    show_default=True,
    help="Which programs; 'families' are those of smoke and some of every package and task.",
)
@_only
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Worker processes.")
@_results
@json_option("Write the counts as JSON; '-' is standard output.")
def mutate_command(suite: str, only: str | None, jobs: int, folder: Path, json_path: str | None) -> int:
    """Put faults into the programs of a suite, one call of one op at a time, and count how many tier 2 would catch.

    Runs on the CPU alone. The counts are kept beside the history, and the report shows them. Exits with 1 when less than
    97 % of the faults are caught.
    """
    from emutpu._report import header
    from emutpu.conformance import runner
    from emutpu.conformance.pool import Limits

    if not runner.chosen_for_faults(suite, only):
        raise click.UsageError("no program of the suite matches --only")
    terminal = console(stderr=json_path == "-")
    with terminal.status("mutating") as status:
        found = runner.mutate(
            suite,
            only,
            folder,
            jobs=jobs,
            limits=Limits(120, 6 * _GIB),
            progress=lambda done, total: status.update(f"mutating: {done} of {total}"),
        )
    for fault, counts in found["by_fault"].items():
        terminal.print(f"{counts['caught']:>6} of {counts['injected']} caught: {fault}")
    for missed in found["missed"]:
        terminal.print(f"missed  {missed}", markup=False)
    for program, error in found["failed"].items():
        terminal.print(f"not run  {program}: {(error or '').partition(chr(10))[0][:160]}", markup=False)
    terminal.print(f"{found['caught']} of {found['injected']} faults in {found['programs']} programs caught")
    if json_path is not None:
        write_json(header("conformance-mutations", _settings.settings().chip) | found, json_path)
    return 0 if found["injected"] and found["caught"] >= _CAUGHT * found["injected"] else 1


command.add_command(predict_command)


@command.command("compare")
@click.argument("before")
@click.argument("after")
@click.option(
    "--chip",
    type=click.Choice(_settings.CHIPS),
    default="v5e",
    show_default=True,
    help="Of a file of JSON lines, which does not name one.",
)
@_results
@json_option("Write the changes as JSON; '-' is standard output.")
def compare_command(before: str, after: str, chip: str, folder: Path, json_path: str | None) -> int:
    """Say what became worse and better from run BEFORE to run AFTER.

    Each is the number of a run, the JSON report of any machine, or the JSON lines of a run. Where one of them was made on a
    chip, the other counts by what it predicted of the chip. Exits with 1 when a program that passed does not pass any more,
    and names the first run, and the commits, since when.
    """
    from emutpu._report import header
    from emutpu.conformance.comparison import compared

    terminal = console(stderr=json_path == "-")
    old, new = _given(folder, before, chip), _given(folder, after, chip)
    found = compared(old, new, _between(folder, before, after, old, new))
    for side, document in ((before, old), (after, new)):
        if "unknown_programs" in document["notes"]:
            terminal.print(f"{side}: {document['notes']['unknown_programs']}", markup=False)
    for kind in ("worse", "better"):
        terminal.print(f"{len(found[kind])} {kind}")
        for entry in found[kind]:
            _tell_change(entry, terminal)
    terminal.print(", ".join(f"{count} {what}" for what, count in found["agreement"].items()))
    for side in ("before", "after"):
        if found[f"only_{side}"]:
            terminal.print(f"{len(found[f'only_{side}'])} programs are in {side} alone and not compared")
    if json_path is not None:
        write_json(header("conformance-compare", new["chip"]) | {"before": before, "after": after} | found, json_path)
    return 1 if found["worse"] else 0


def _between(folder: Path, before: str, after: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Point]:
    """The runs from one to the other, where both are of one history and in that order."""
    from emutpu.conformance.trends import between

    if not (before.isdecimal() and after.isdecimal()):
        return []
    with _history(folder) as history:
        return between(history, old["run"], new["run"], new["chip"])


def _tell_change(entry: Mapping[str, Any], terminal: Console) -> None:
    what = "" if entry["what"] == "status" else f" ({entry['what']})"
    terminal.print(
        f"  {entry['program']} {entry['mode']}: {entry['before']} -> {entry['after']}{what}: "
        f"{(entry['error'] or '').partition(chr(10))[0][:200]}",
        markup=False,
    )
    bad = entry["first_bad"]
    if bad is not None and bad["commit"] is not None:
        listed = bad["commits"]
        last = (bad["last_good"]["commit"] or "unknown")[:10]
        after = "" if not listed else f": {'; '.join(c['commit'][:10] + ' ' + c['subject'] for c in listed[:_COMMITS])}"
        more = f"; and {len(listed) - _COMMITS} before" if listed and len(listed) > _COMMITS else ""
        terminal.print(
            f"    first bad in run {bad['run']} at {bad['commit'][:10]}, good at {last}{after}{more}", markup=False
        )


@command.command("report")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="reports/conformance/site",
    show_default=True,
    help="The folder of the site.",
)
@click.option(
    "--baseline",
    metavar="RUN",
    help="What to compare with: the number of a run or a file as `compare` takes; by default the run before of the same suite.",
)
@_results
@json_option("Write the report as JSON too; '-' is standard output.")
def report_command(runs: tuple[str, ...], out: Path, baseline: str | None, folder: Path, json_path: str | None) -> None:
    """Make a static site of a run: the number of one, its JSON report, or by default the latest.

    Several are joined: the shards of a suite, or its modes, that different machines ran.
    """
    from emutpu.conformance.site import write

    if len(runs) <= 1 and (not runs or runs[0].isdecimal()):
        document = _with_trends(folder, int(runs[0]) if runs else None, baseline)
    else:
        document = _from_files(folder, runs, baseline)
    try:
        files = write(document, out)
    except OSError as error:
        raise EmulatorFailure(EmulatorExit.REPORT_NOT_WRITTEN, f"the report was not written: {error}") from error
    console(stderr=json_path == "-").print(f"{files:,} files: {out / 'index.html'}")
    if json_path is not None:
        write_json(document, json_path)


def _from_files(folder: Path, runs: tuple[str, ...], baseline: str | None) -> dict[str, Any]:
    """The document of one file, or of several runs and files together."""
    from emutpu.conformance.documents import joined
    from emutpu.conformance.trends import against

    parts = [_given(folder, run, "v5e") for run in runs]
    document = parts[0]
    if len(parts) > 1:
        bare = [run for run, part in zip(runs, parts, strict=True) if "results" not in part]
        if bare:
            raise click.UsageError(f"{', '.join(bare)} has rows alone, without the results that reports are joined by")
        try:
            document = _headed(document["chip"], joined(parts, _sizes(folder, document["chip"])))
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    return document if baseline is None else against(document, _given(folder, baseline, document["chip"]))


def _with_trends(folder: Path, number: int | None, baseline: str | None) -> dict[str, Any]:
    """The document of a run with what the history says beside it."""
    from emutpu.conformance.trends import added, baseline_of

    with _history(folder) as history:
        run = _run(folder, history, number)
        document = _of_run(folder, history, run)
        if baseline is not None:
            before: dict[str, Any] | None = _given(folder, baseline, run.plan.chip)
        else:
            found = baseline_of(run, history)
            before = None if found is None else _of_run(folder, history, found)
        return added(document, run, history, before, _sizes(folder, run.plan.chip))
