"""Seconds of a collective by the alpha-beta model of a ring on the torus: latency per hop and bytes over the links."""

from __future__ import annotations

from emutpu.simulator.chips import Chip

from .graph import Node

__all__ = ["ASSUMPTION", "seconds"]

_HOP = 1e-6  # seconds per ICI hop (scaling book)
# Bytes per second that one device moves around a ring, both directions of one axis (twice the one-way link rate).
_RING = {"v4": 90e9, "v5e": 90e9, "v5p": 180e9, "v6e": 180e9, "v7": 200e9, "v8i": 200e9, "v8t": 400e9}
ASSUMPTION = (
    "collectives: a bidirectional ring over one torus axis per group, 1 us per hop, not overlapped with compute"
)


def seconds(node: Node, chip: Chip) -> float:
    """Seconds of one collective over the groups that its attributes name. Raises ValueError for a chip without links."""
    devices = int(node.attrs[1])
    if chip.name not in _RING:
        raise ValueError(f"no interconnect figures for chip {chip.name!r}")
    if devices <= 1:
        return 0.0
    operand = sum(source.spec.bytes for source in node.inputs)
    rate = _RING[chip.name]
    share = (devices - 1) / devices
    hops = devices // 2
    moved = {
        "all_reduce": 2 * operand * share,
        "all_gather": operand * (devices - 1),
        "reduce_scatter": operand * share,
        "all_to_all": operand * devices / 8,
        "collective_permute": operand / 2,
        "collective_broadcast": operand,
    }[node.op]
    rounds = {"all_reduce": 2 * hops, "collective_permute": 1}.get(node.op, hops)
    return moved / rate + rounds * _HOP
