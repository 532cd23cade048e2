"""``emutpu run``: a program on the emulated device, with a report at its end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

from emutpu import _settings
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, write_json
from emutpu.cli._program import MODES, ProgramCommand, script

__all__ = ["command", "run_program"]


@click.command(
    "run",
    cls=ProgramCommand,
    short_help="Run a program on the emulated device.",
    context_settings={"allow_interspersed_args": False},
)
@click.option("--chip", type=click.Choice(_settings.CHIPS), help="The emulated chip; 'none' is a host without a TPU.")
@click.option("--topology", metavar="NAME", help="The emulated slice, such as v5e-8 or v5p-4x4x4.")
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
@click.option("--pci", is_flag=True, help="Show the slice in /sys and /dev, for code that looks for TPUs there.")
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
    arguments = ["-m", module, *program] if module else script(program)
    environment: dict[str, str] = dict(MODES[mode]) if mode else {}
    environment |= _hardware(chip, topology)
    # With chips in sight jax would look for libtpu first; the emulator computes on jax's CPU device.
    environment |= {"JAX_PLATFORMS": "cpu"} if pci and not os.environ.get("JAX_PLATFORMS") else {}
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
    return run_program(arguments, environment, json_path, pci=pci)


def run_program(arguments: list[str], environment: dict[str, str], json_path: str | None, *, pci: bool = False) -> int:
    """Run ``python *arguments``, print the summary, write the report, and give the program's exit code.

    With ``pci`` the program sees the emulated slice in ``/sys`` and ``/dev``. Raises SettingError for a bad variable and EmulatorFailure when the program could not be run.
    """
    from emutpu.cli._launch import launch, report_of
    from emutpu.cli._summary import print_summary

    effective = _settings.read({**os.environ, **environment})
    if effective.forbid:
        raise EmulatorFailure(EmulatorExit.FORBIDDEN, "EMUTPU_FORBID is set: emulated results are not allowed here")
    with contextlib.ExitStack() as stack:
        prefix = stack.enter_context(_hardware_in_sight(effective)) if pci else []
        outcome = launch(arguments, environment, prefix=prefix, stdout_to_stderr=json_path == "-")
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


def _hardware(chip: str | None, topology: str | None) -> dict[str, str]:
    """The variables for ``--chip`` and ``--topology``. Raises UsageError for an illegal slice or a contradiction."""
    if topology is None:
        # A slice from the environment would contradict the chip that is asked for here.
        return {"EMUTPU_CHIP": chip, "EMUTPU_TOPOLOGY": ""} if chip else {}
    from emutpu.simulator.topology import slice_named

    try:
        where = slice_named(topology)
    except ValueError as error:
        raise click.UsageError(f"--topology {topology}: {error}") from None
    if chip not in (None, where.chip.name):
        raise click.UsageError(f"--chip {chip} contradicts --topology {topology}")
    return {"EMUTPU_CHIP": where.chip.name, "EMUTPU_TOPOLOGY": where.name}


@contextlib.contextmanager
def _hardware_in_sight(settings: _settings.Settings) -> Iterator[list[str]]:
    """What to start the program with so that it sees the fake PCI tree of its slice.

    Raises UsageError for a chip without one, EmulatorFailure where this system allows no namespace.
    """
    from emutpu import _namespace
    from emutpu.simulator.chips import chip
    from emutpu.simulator.pci import DEVICES, write_tree
    from emutpu.simulator.topology import Slice, slice_named

    if settings.chip == _settings.NO_CHIP:
        raise click.UsageError("--pci shows the emulated TPUs, but EMUTPU_CHIP=none emulates a host without one")
    with tempfile.TemporaryDirectory(prefix="emutpu-pci-") as folder:
        tree = Path(folder) / "tree"
        try:
            where = slice_named(settings.topology) if settings.topology else Slice(chip(settings.chip), (1, 1, 1))
            others = [entry.name for entry in Path("/", DEVICES).glob("*")]
            write_tree(where, tree, host=settings.task_id or 0, taken=others)
        except ValueError as error:
            raise click.UsageError(f"--pci: {error}") from None
        prefix = [sys.executable, "-I", _namespace.__file__, str(tree)]
        attempt = subprocess.run(prefix, capture_output=True, text=True, check=False)
        if attempt.returncode != 0:
            raise EmulatorFailure(
                EmulatorExit.NO_NAMESPACE,
                f"--pci needs a mount namespace, which this system does not allow: {attempt.stderr.strip()}. Run as root, "
                "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or docker run --cap-add SYS_ADMIN), or "
                f"mount the tree that `emutpu pci DIR {where.name}` writes into a container",
            )
        yield prefix
