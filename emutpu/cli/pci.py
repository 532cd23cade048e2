"""``emutpu pci``: a fake sysfs and /dev tree of a slice, for code that looks for TPUs there."""

from __future__ import annotations

from pathlib import Path

import click

from emutpu.cli._output import console

__all__ = ["command"]


@click.command("pci", short_help="Write a fake PCI tree of a slice.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.argument("slice_name", metavar="SLICE")
@click.option("--host", type=click.IntRange(min=0), default=0, show_default=True, help="Which host of the slice.")
def command(directory: Path, slice_name: str, host: int) -> None:
    """Write /sys/bus/pci/devices and /dev/vfio of one host of SLICE (such as v5e-4) below DIRECTORY.

    DIRECTORY is new, empty, or an older tree, which is replaced. `emutpu run --pci` shows a tree to one program; a
    container sees it by mounting the two directories.
    """
    from emutpu.simulator.pci import DEVICES, write_tree
    from emutpu.simulator.topology import slice_named

    try:
        where = slice_named(slice_name)
        found = write_tree(where, directory, host)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except OSError as error:
        raise click.ClickException(str(error)) from None
    terminal = console(stderr=False)
    terminal.print(
        f"{where.name}, host {host} of {where.hosts}: {len(found)} PCI functions of vendor 0x1ae0", markup=False
    )
    for function in found:
        terminal.print(f"  {directory / DEVICES / function.address}  /dev/vfio/{function.group}", markup=False)
