"""Seconds of a collective: bytes over the links of a ring, and a latency per hop (the alpha-beta model)."""

from __future__ import annotations

from emutpu.simulator.chips import Chip

from .graph import Node

__all__ = ["ASSUMPTION", "seconds"]

ASSUMPTION = (
    "collectives: every group is a ring along one torus axis, used in both directions, not overlapped with compute; a group "
    "larger than the largest slice crosses the data-centre network"
)
_DCN_LATENCY = 10e-6  # seconds of one round between slices


def seconds(node: Node, chip: Chip) -> float:
    """Seconds of one collective over the groups that its attributes name.

    All-reduce moves 2 (n-1)/n of its operand over each device's links, reduce-scatter (n-1)/n, all-gather n-1 times its
    operand, all-to-all n/8 of it (the bisection of a ring), a permutation one hop. Raises UnknownFigure where the rate of
    the links is not published.
    """
    devices = int(node.attrs[1])
    if devices <= 1:
        return 0.0
    operand = float(sum(source.spec.bytes for source in node.inputs))
    share, half = (devices - 1) / devices, devices // 2
    moved, hops = {
        "all_reduce": (2 * operand * share, 2 * half),
        "all_gather": (operand * (devices - 1), half),
        "reduce_scatter": (operand * share, half),
        "all_to_all": (operand * max(1.0, devices / 8), half),
        "collective_permute": (operand * 2, 1),
        "collective_broadcast": (operand, half),
    }[node.op]
    link = float(chip.figure("ici_link_bandwidth"))
    spent = moved / (2 * link) + hops * float(chip.figure("ici_hop_seconds"))
    largest = int(chip.figure("max_chips")) * chip.devices
    if devices > largest:
        slices = -(-devices // largest)
        spent += 2 * operand * (slices - 1) / slices / float(chip.figure("dcn_bandwidth")) + slices * _DCN_LATENCY
    return spent
