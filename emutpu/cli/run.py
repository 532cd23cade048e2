"""``emutpu run``: a program on the emulated device, with a report at its end."""

from __future__ import annotations

import os

import click

from emutpu import _settings
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, write_json

__all__ = ["command", "run_program"]

_MODES = {
    "strict": {"TORCH_TPU_LAUNCH_BLOCKING": "0", "TORCH_TPU_DEFER_AND_FUSE": "0"},
    "debug": {"TORCH_TPU_LAUNCH_BLOCKING": "1", "TORCH_TPU_DEFER_AND_FUSE": "0"},
}
_NOT_YET = {
    "--mode defer": "every op is dispatched on its own",
    "--pci": "there is no fake PCI tree",
}


class _RunCommand(click.Command):
    """Stops reading options at the program, as Python does: what follows SCRIPT or ``-m MODULE`` is the program's."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        takes_value = {
            name
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            if args[at] == "-m" or (args[at].startswith("-m") and not args[at].startswith("--")):
                end = at + (2 if args[at] == "-m" else 1)
                return super().parse_args(context, [*args[:end], "--", *args[end:]])
            at += 2 if args[at] in takes_value else 1
        return super().parse_args(context, args)


@click.command(
    "run",
    cls=_RunCommand,
    short_help="Run a program on the emulated device.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--chip", type=click.Choice(_settings.CHIPS), help="The emulated chip; 'none' is a host without a TPU.")
@click.option("--topology", metavar="NAME", help="The emulated slice, such as v5e-1.")
@click.option("--mode", type=click.Choice(["strict", "debug", "defer"]), help="Eager mode at the start.")
@click.option("--precision", type=click.Choice(_settings.PRECISIONS), help="float32 matmul precision at the start.")
@click.option("--allow-fallback", is_flag=True, help="Run ops that are not implemented on the CPU, and report them.")
@click.option("--dry-run", is_flag=True, help="Shapes and costs only; nothing is computed.")
@click.option(
    "--dry-values", metavar="SEED", type=int, help="In a dry run, reads give made-up values instead of raising."
)
@click.option(
    "--hbm", metavar="BYTES", help="Memory of the device, such as 16GiB; 'unlimited' reports what is missing."
)
@click.option("--host-issue", metavar="US", help="Modelled host time per launch in microseconds, or 'measured'.")
@click.option("--pci", is_flag=True, help="Show the program a fake PCI tree of the slice.")
@click.option(
    "--trace",
    metavar="FILE",
    help="Write a trace of the modelled device: .json for Perfetto, .xplane.pb or a directory for XProf.",
)
@json_option("Write the report as JSON; '-' is standard output, and the program's output then goes to standard error.")
@click.option("-m", "module", metavar="MODULE", help="Run a module, as `python -m` does.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def command(
    chip: str | None,
    topology: str | None,
    mode: str | None,
    precision: str | None,
    allow_fallback: bool,
    dry_run: bool,
    dry_values: int | None,
    hbm: str | None,
    host_issue: str | None,
    pci: bool,
    trace: str | None,
    json_path: str | None,
    module: str | None,
    program: tuple[str, ...],
) -> int:
    """Run SCRIPT (or -m MODULE) in a fresh interpreter on the emulated device, and end with a summary.

    Exits with the program's own code (128 + n when signal n killed it); 70-79 are failures of the emulator.
    """
    asked = {"--mode defer": mode == "defer", "--pci": pci}
    for option, reason in _NOT_YET.items():
        if asked[option]:
            raise click.UsageError(f"{option} is not available in this version of emutpu: {reason}")
    arguments = ["-m", module, *program] if module else _script(program)
    environment: dict[str, str] = dict(_MODES[mode]) if mode else {}
    chip = _chip(chip, topology)
    environment |= {"EMUTPU_CHIP": chip} if chip else {}
    environment |= {"EMUTPU_PRECISION": precision} if precision else {}
    environment |= {"EMUTPU_ALLOW_FALLBACK": "1"} if allow_fallback else {}
    if dry_values is not None and not dry_run:
        raise click.UsageError("--dry-values is for --dry-run: values are computed otherwise")
    further = {
        "EMUTPU_CLIENT": "dry_run" if dry_run else None,
        "EMUTPU_DRY_VALUES": None if dry_values is None else str(dry_values),
        "EMUTPU_HBM": hbm,
        "EMUTPU_HOST_ISSUE": host_issue,
        "EMUTPU_TRACE": None if trace is None else _trace(trace),
    }
    environment |= {name: value for name, value in further.items() if value is not None}
    return run_program(arguments, environment, json_path)


def run_program(arguments: list[str], environment: dict[str, str], json_path: str | None) -> int:
    """Run ``python *arguments``, print the summary, write the report, and give the program's exit code.

    Raises SettingError for a bad variable and EmulatorFailure when the program could not be run.
    """
    from emutpu.cli._launch import launch, report_of
    from emutpu.cli._summary import print_summary

    effective = _settings.read({**os.environ, **environment})
    if effective.forbid:
        raise EmulatorFailure(EmulatorExit.FORBIDDEN, "EMUTPU_FORBID is set: emulated results are not allowed here")
    outcome = launch(arguments, environment, stdout_to_stderr=json_path == "-")
    document = report_of(outcome, effective.chip)
    terminal = console(stderr=True)
    print_summary(document, terminal)
    if json_path is not None:
        write_json(document, json_path)
        if json_path != "-":
            terminal.print(f"report: {json_path}", markup=False)
    return outcome.exit_code


def _trace(path: str) -> str:
    from emutpu.simulator.trace import trace_format

    try:
        trace_format(path)
    except ValueError as error:
        raise click.UsageError(f"--trace: {error}") from None
    return os.path.abspath(path)


def _script(program: tuple[str, ...]) -> list[str]:
    if not program:
        raise click.UsageError("nothing to run: give a SCRIPT or -m MODULE")
    script = program[0]
    if script != "-" and not os.path.exists(script):
        raise click.UsageError(f"there is no file {script!r}")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise click.UsageError(f"{script!r} is a directory without a __main__.py")
    return list(program)


def _chip(chip: str | None, topology: str | None) -> str | None:
    if topology is None:
        return chip
    name, _, size = topology.lower().rpartition("-")
    if name not in _settings.CHIPS or name == _settings.NO_CHIP or not size.isdigit() or int(size) < 1:
        raise click.UsageError(f"--topology {topology} is not a slice: expected CHIP-SIZE, such as v5e-1")
    from emutpu.simulator.topology import single_chip

    only = single_chip(name).name
    if topology.lower() != only:
        raise click.UsageError(
            f"--topology {topology} is not available in this version of emutpu: it emulates one chip, {only}"
        )
    if chip not in (None, name):
        raise click.UsageError(f"--chip {chip} contradicts --topology {topology}")
    return name
