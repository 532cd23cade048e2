"""A slice as SVG: one panel per layer of the torus, chips with their device ids, hosts as boxes, rings as arcs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emutpu.simulator.topology import Coordinates, Slice

__all__ = ["draw"]

_STEP = 44
_CHIP = 26
_MARGIN = 26
_GAP = 22
_HEAD = 92
_FOOT = 40
_NARROWEST = 640
_WIDEST = 2400
_PANELS = 32
_STYLE = """
text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1b2733}
.title{font-size:20px;font-weight:600}.figures{font-size:13px;fill:#4a5a6a}.layer{font-size:12px;fill:#4a5a6a}
.id{font-size:10px;text-anchor:middle;dominant-baseline:central}
.host{fill:#eef3f8;stroke:#b9c8d6;stroke-width:1}.chip{fill:#fff;stroke:#2f6f9f;stroke-width:1.4}
.link{stroke:#2f6f9f;stroke-width:1.6}.ring{stroke:#c2691c;stroke-width:1.4;fill:none}
"""


def draw(where: Slice) -> str:
    """The picture of one of the slices (all are alike), complete and self-contained."""
    width, height, depth = where.shape
    shown = min(depth, _PANELS)
    panel = (width * _STEP + 2 * _MARGIN, height * _STEP + 2 * _MARGIN)
    columns = _columns(shown, (_WIDEST + _GAP) // (panel[0] + _GAP), panel)
    rows = math.ceil(shown / columns)
    total = max(_NARROWEST, columns * (panel[0] + _GAP) + _GAP), _HEAD + rows * (panel[1] + _GAP) + _FOOT
    left = _GAP - _MARGIN
    box = f'viewBox="0 0 {total[0]} {total[1]}" width="{total[0]}" height="{total[1]}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img" aria-label="{escape(where.name)}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{total[0]}" height="{total[1]}" fill="#fff"/>',
        *_head(where),
    ]
    for z in range(shown):
        x, y = left + z % columns * (panel[0] + _GAP), _HEAD + z // columns * (panel[1] + _GAP)
        parts.append(f'<g transform="translate({x:g},{y:g})">')
        parts += _panel(where, z)
        parts.append("</g>")
    parts += _foot(where, total[1], shown)
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _columns(panels: int, most: int, panel: tuple[int, int]) -> int:
    """Columns for that many panels, at most ``most``: no gaps in the last row if possible, then nearest to a square."""
    return min(
        range(1, min(panels, max(1, most)) + 1),
        key=lambda n: (-panels % n, abs(math.log(n * panel[0] / (math.ceil(panels / n) * panel[1] * 1.6)))),
    )


def _head(where: Slice) -> Iterator[str]:
    bandwidth = where.bisection_bandwidth
    cut = f", {bandwidth / 1e9:,.0f} GB/s" if bandwidth else ""
    slices = f"{where.slices} slices of " if where.slices > 1 else ""
    lines = (
        f"{slices}{where.shape_text} chips, {where.devices:,} devices, {where.hosts:,} host{'s' * (where.hosts > 1)}",
        f"diameter {where.diameter} hops, bisection {where.bisection_links:,} links{cut}"
        + (", can be twisted" if where.twistable else ""),
    )
    yield f'<text class="title" x="{_GAP}" y="36">{escape(where.name)} (emulated TPU {escape(where.chip.name)})</text>'
    for number, line in enumerate(lines):
        yield f'<text class="figures" x="{_GAP}" y="{58 + 19 * number}">{escape(line)}</text>'


def _panel(where: Slice, z: int) -> Iterator[str]:
    width, height, depth = where.shape
    if depth > 1:
        yield f'<text class="layer" x="{_MARGIN + 4}" y="10">z = {z}</text>'
    yield from _hosts(where)
    for one, other in where.links():
        if one[2] == other[2] == z:
            yield _link(where, one, other)
    for y in range(height):
        for x in range(width):
            centre = _centre(x, y)
            yield (
                f'<rect class="chip" x="{centre[0] - _CHIP / 2:g}" y="{centre[1] - _CHIP / 2:g}" width="{_CHIP}" '
                f'height="{_CHIP}" rx="5"><title>chip ({x}, {y}, {z}), host {where.host_of((x, y, z))}</title></rect>'
            )
            yield from _label(where, (z * height + y) * width + x, centre)


def _label(where: Slice, number: int, centre: tuple[float, float]) -> Iterator[str]:
    """The ids of a chip's devices, one below the other."""
    count = where.chip.devices
    size = 10 if count == 1 and number < 1000 else 8
    for core in range(count):
        y = centre[1] + (core - (count - 1) / 2) * 9
        yield f'<text class="id" x="{centre[0]:g}" y="{y:g}" style="font-size:{size}px">{number * count + core}</text>'


def _centre(x: int, y: int) -> tuple[float, float]:
    return _MARGIN + (x + 0.5) * _STEP, _MARGIN + (y + 0.5) * _STEP


def _hosts(where: Slice) -> Iterator[str]:
    width, height, _ = where.host_shape
    for y in range(0, where.shape[1], height):
        for x in range(0, where.shape[0], width):
            yield (
                f'<rect class="host" x="{_MARGIN + x * _STEP + 3}" y="{_MARGIN + y * _STEP + 3}" '
                f'width="{width * _STEP - 6}" height="{height * _STEP - 6}" rx="8"/>'
            )


def _link(where: Slice, one: Coordinates, other: Coordinates) -> str:
    """A line to the neighbour, or an arc beyond the panel's edge from the last chip of a row back to the first."""
    (x1, y1), (x2, y2) = _centre(*one[:2]), _centre(*other[:2])
    half = _CHIP / 2
    if other[0] == one[0] + 1:
        return f'<path class="link" d="M{x1 + half:g} {y1:g}H{x2 - half:g}"/>'
    if other[1] == one[1] + 1:
        return f'<path class="link" d="M{x1:g} {y1 + half:g}V{y2 - half:g}"/>'
    if one[1] == other[1]:
        return (
            f'<path class="ring" d="M{x1 + half:g} {y1:g}q14 0 14 8"/>'
            f'<path class="ring" d="M{x2 - half:g} {y2:g}q-14 0 -14 8"/>'
        )
    return f'<path class="ring" d="M{x1:g} {y1 + half:g}q0 14 8 14"/><path class="ring" d="M{x2:g} {y2 - half:g}q0 -14 8 -14"/>'


def _foot(where: Slice, bottom: int, shown: int) -> Iterator[str]:
    notes = ["number: device id", "grey box: host"]
    if any(where.wrap):
        closed = " and ".join(axis for axis, ring in zip("xyz", where.wrap, strict=True) if ring)
        notes.append(f"orange ends: the ring along {closed} closes")
    if where.shape[2] > 1:
        notes.append("layers are joined along z, chip by chip")
    if shown < where.shape[2]:
        notes.append(f"the first {shown} of {where.shape[2]} layers")
    yield f'<text class="layer" x="{_GAP}" y="{bottom - 18}">{escape("; ".join(notes))}</text>'
