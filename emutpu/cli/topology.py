"""``emutpu topology``: a slice by name, in figures and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document
    from emutpu.simulator.topology import Slice

__all__ = ["command"]

_DRAWN_ROWS = 16


@click.command("topology", short_help="Show a slice: chips, torus, hosts, distances.")
@click.argument("name", required=False)
@click.option("--list", "list_chip", metavar="CHIP", help="List the legal slices of a chip.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="Draw the slice as SVG.")
@json_option("Write the slice as JSON; '-' is standard output.")
def command(name: str | None, list_chip: str | None, svg: Path | None, json_path: str | None) -> None:
    """Show the slice NAME, such as v5e-8, v5p-128, v7-64, v5p-4x4x8, or 2xv5e-16 for two slices.

    A size counts TensorCores, as Google's accelerator types do; a shape counts chips.
    """
    from emutpu.simulator.topology import legal_names, slice_named

    if (name is None) == (list_chip is None):
        raise click.UsageError("give the NAME of a slice, or --list CHIP")
    terminal = console(stderr=json_path == "-")
    try:
        if list_chip is not None:
            for legal in legal_names(list_chip):
                terminal.print(legal, markup=False)
            return
        where = slice_named(str(name))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    _print_figures(where, terminal)
    _print_grid(where, terminal)
    if svg is not None:
        from emutpu.cli._slice_svg import draw

        try:
            svg.write_text(draw(where), encoding="utf-8")
        except OSError as error:
            raise EmulatorFailure(EmulatorExit.REPORT_NOT_WRITTEN, f"the picture was not written: {error}") from error
        terminal.print(f"picture: {svg}", markup=False)
    if json_path is not None:
        write_json(_document(where), json_path)


def _document(where: Slice) -> Document:
    from emutpu._report import header
    from emutpu.simulator import pci

    notes = {}
    functions: list[dict[str, object]] | None = None
    if where.chip.pci_device is None:
        notes["pci"] = f"the PCI id of {where.chip.name} is not published"
    else:
        functions = [
            {
                "host": host,
                "address": found.address,
                "device_id": f"0x{where.chip.pci_device:04x}",
                "group": found.group,
            }
            for host in range(where.hosts)
            for found in pci.plan(where, host)
        ]
    if where.bisection_bandwidth is None:
        notes["bisection_bandwidth"] = f"the link bandwidth of {where.chip.name} is not published"
    rank = where.chip.torus_rank or 3
    return header("topology", where.chip.name) | {
        "name": where.name,
        "status": where.chip.status,
        "chips": where.chips,
        "devices": where.devices,
        "hosts": where.hosts,
        "slices": where.slices,
        "torus": list(where.shape[:rank]),
        "wrap": list(where.wrap[:rank]),
        "twistable": where.twistable,
        "host_shape": list(where.host_shape),
        "diameter": where.diameter,
        "bisection_links": where.bisection_links,
        "bisection_bandwidth": where.bisection_bandwidth,
        "coords": [
            {
                "id": device.id,
                "coords": list(device.coords),
                "core": device.core_on_chip,
                "host": device.process_index,
                "slice": device.slice_index,
            }
            for device in where.pjrt_devices()
        ],
        "pci": functions,
        "legal_world_sizes": where.legal_world_sizes,
        "notes": notes,
    }


def _print_figures(where: Slice, terminal: Console) -> None:
    from rich.table import Table

    rank = where.chip.torus_rank or 3
    rings = [axis for axis, ring in zip("xyz", where.wrap, strict=True) if ring]
    bandwidth = where.bisection_bandwidth
    table = Table(title=f"{where.name}: TPU {where.chip.name}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row(
        "chips", f"{where.chips:,} ({where.shape_text}{f', {where.slices} slices' if where.slices > 1 else ''})"
    )
    table.add_row("devices", f"{where.devices:,} ({where.chip.devices} per chip)")
    table.add_row("hosts", f"{where.hosts:,} of {'x'.join(map(str, where.host_shape[:rank]))} chips")
    table.add_row("rings", ", ".join(rings) if rings else "none: a mesh")
    table.add_row("twisted torus", "possible" if where.twistable else "no")
    table.add_row("diameter", f"{where.diameter} hops")
    table.add_row(
        "bisection",
        f"{where.bisection_links:,} links, "
        + ("bandwidth not published" if bandwidth is None else f"{bandwidth / 1e9:,.0f} GB/s"),
    )
    table.add_row("world sizes", ", ".join(map(str, where.legal_world_sizes)))
    if where.chip.status != "published":
        table.add_row("status", "unverified: press-grade figures")
    terminal.print(table)


def _print_grid(where: Slice, terminal: Console) -> None:
    """One layer of the torus: the host of every chip; '=' and '|' are links inside a host, '-' and ':' between hosts."""
    from rich.text import Text

    width, height, depth = where.shape
    if width > _DRAWN_ROWS or height > _DRAWN_ROWS:
        return
    digits = len(str(where.hosts - 1))
    colours = ("cyan", "green", "yellow", "magenta", "blue", "red")
    for y in range(height):
        row, below = Text("  "), Text("  ")
        for x in range(width):
            host = where.host_of((x, y, 0))
            colour = colours[host % len(colours)]
            row.append(f"[{host:>{digits}}]", style=colour)
            if x + 1 < width:
                row.append("=" if where.host_of((x + 1, y, 0)) == host else "-", style="dim")
            if y + 1 < height:
                mark = "|" if where.host_of((x, y + 1, 0)) == host else ":"
                below.append(mark.center(digits + 2) + " ", style="dim")
        if where.wrap[0]:
            row.append(" ~", style="dim")
        terminal.print(row)
        if y + 1 < height:
            terminal.print(below)
    if where.wrap[1]:
        terminal.print(Text("  " + ("~".center(digits + 2) + " ") * width, style="dim"))
    layers = f"; the layer z=0 of {depth}" if depth > 1 else ""
    rings = "; ~ closes a ring" if any(where.wrap) else ""
    terminal.print(
        f"  number: host of the chip; = | links within a host, - : between hosts{rings}{layers}",
        style="dim",
        markup=False,
    )
