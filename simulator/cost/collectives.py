"""Seconds of a collective: bytes over the links of the torus, and a latency per hop (the alpha-beta model)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from emutpu.simulator.chips import Chip, UnknownFigure
from emutpu.simulator.topology import Slice, slice_of

from .graph import Node

__all__ = ["ASSUMPTION", "Ring", "Transfer", "over_slice", "seconds", "transfer"]

ASSUMPTION = (
    "collectives: every group is a ring along one torus axis, used in both directions, not overlapped with compute; a group "
    "larger than the largest slice crosses the data-centre network"
)
_DCN_LATENCY = 10e-6  # seconds of one round between slices


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """One axis of the torus that a group spans: ``extent`` devices, of which the last is linked to the first or not."""

    extent: int
    closed: bool = True

    @property
    def links(self) -> int:
        """Links by which the worst placed device of the axis receives; also those of a cut into halves."""
        return 2 if self.closed else 1

    @property
    def hops(self) -> int:
        """Links between the two devices that are farthest apart."""
        return self.extent // 2 if self.closed else self.extent - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """Seconds over the links between chips and over the data-centre network; ``received`` are bytes per device."""

    ici: float
    dcn: float
    received: float

    @property
    def seconds(self) -> float:
        return self.ici + self.dcn


def seconds(node: Node, chip: Chip) -> Transfer:
    """One collective over the groups that its attributes name, each a ring along one axis.

    Raises UnknownFigure where the rate of the links is not published.
    """
    devices = int(node.attrs[1])
    operand = float(sum(source.spec.bytes for source in node.inputs))
    slices = -(-devices // (int(chip.figure("max_chips")) * chip.devices)) if devices > 1 else 1
    return transfer(node.op, operand, [Ring(devices // slices)], chip, slices=slices)


def transfer(
    op: str, operand: float, rings: Sequence[Ring], chip: Chip, *, per_chip: int = 1, slices: int = 1
) -> Transfer:
    """A collective of StableHLO with ``operand`` bytes per device over the axes ``rings``, whose links share the work.

    All-reduce moves 2 (n-1)/n of its operand into each device, reduce-scatter (n-1)/n, all-gather n-1 times its operand, a
    permutation one hop; all-to-all is bound by the narrowest cut into halves, which a quarter of all bytes crosses each
    way. The ``per_chip`` devices of a chip share its links. Between ``slices`` goes what is left after each slice has
    reduced its own, or before it gathers. Raises UnknownFigure where the rate of the links is not published.
    """
    rings = [ring for ring in rings if ring.extent > 1]
    devices = math.prod(ring.extent for ring in rings) * per_chip
    if devices * slices <= 1:
        return Transfer(0.0, 0.0, 0.0)
    rest, far = (devices - 1) / devices, (slices - 1) / slices
    half = sum(ring.hops for ring in rings)
    received, hops, across = {
        "all_reduce": (2 * operand * rest, 2 * half, 2 * operand / devices * far),
        "all_gather": (operand * slices * (devices - 1), half, operand * (slices - 1)),
        "reduce_scatter": (operand * rest, half, operand / devices * far),
        "all_to_all": (operand * rest, half, operand * far),
        "collective_permute": (operand, 1, operand),
        "collective_broadcast": (operand, half, operand / devices),
    }[op]
    link = float(chip.figure("ici_link_bandwidth"))
    used = 1 if op == "collective_permute" else max(1, sum(ring.links for ring in rings))
    spent = received / (used * link)
    if op == "all_to_all":
        cuts = (ring.extent * per_chip * operand / 4 / (ring.links * link) for ring in rings)
        spent = max(spent, *cuts, 0.0)
    spent += hops * float(chip.figure("ici_hop_seconds"))
    between = across / float(chip.figure("dcn_bandwidth")) + slices * _DCN_LATENCY if slices > 1 else 0.0
    return Transfer(spent, between, received)


def over_slice(op: str, operand: float, devices: int, world: int, given: Slice) -> tuple[Transfer | None, str]:
    """A collective over ``devices`` of ``world`` devices, and what was assumed; no transfer where the links are not known.

    A group of all devices of the slice uses every axis; any other is a ring along one axis. Where the ``given`` slice has
    fewer than ``world`` devices, the most compact slice of that many of its chips is taken.
    """
    chip = given.chip
    where = given if given.devices >= world else slice_of(chip, world)
    try:
        if where is None or where.devices != devices:
            return transfer(op, operand, [Ring(devices)], chip), f"{ASSUMPTION}; {op} over {devices} devices is one"
        axes = [Ring(extent, ring) for extent, ring in zip(where.shape, where.wrap, strict=True)]
        found = transfer(op, operand, axes, chip, per_chip=chip.devices, slices=where.slices)
    except UnknownFigure as error:
        return None, str(error)
    wraps = "closed" if any(where.wrap) else "open"
    return found, (
        f"collectives of all devices of {where.name} use every axis of its {wraps} {where.shape_text} torus at once, and do "
        "not overlap with compute"
    )
