"""Bytes that a kernel moves, counted as the compiler does, and which values it finds in VMEM.

The compiler's count takes every operand and result of every kernel in its padded layout, wherever it lives, and four
times the size of each operand that is fetched into VMEM ahead of its kernel (start and end of the copy, both ends).
What really crosses the HBM bus is less: ``hbm`` excludes values that live in VMEM between two kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .graph import Node
from .kernels import Kernel
from .tables import MOVEMENT

__all__ = ["Traffic", "read_bytes", "result_bytes"]

_TILE_ROWS, _LANES = 8, 128


@dataclasses.dataclass(slots=True)
class Traffic:
    """Bytes of one kernel: its own operands ``read`` and results ``written``, and ``copied`` by its ``copies`` relayouts, ``timed`` of them in
    cycles of their own.

    ``hbm`` are those that cross the HBM bus while it runs, ``to_hbm`` says whether a result does.
    """

    read: int = 0
    written: int = 0
    copied: int = 0
    copies: int = 0
    timed: int = 0
    hbm: int = 0
    to_hbm: bool = True

    @property
    def counted(self) -> int:
        """All of them, as the compiler counts."""
        return self.read + self.written + self.copied


_PARTIAL = frozenset({"slice", "dynamic_slice", "gather"})


def read_bytes(kernel: Kernel, value: Node) -> int:
    """Bytes of ``value`` that ``kernel`` reads: all of it, or the parts that its slices and gathers touch."""
    whole = value.spec.padded
    users = [m for m in kernel.members.values() if any(value is s for s in m.inputs)]
    if kernel.kind == "scatter" and kernel.key.inputs[0] is value:
        return _scattered(kernel.key)
    if (
        kernel.kind == "dynamic_update_slice"
        and users
        and all(u.op == "dynamic_update_slice" and u.inputs[0] is value for u in users)
    ):
        return 0  # updated in place; the copy, where one is needed, is a kernel of its own
    if not users or any(user.op not in _PARTIAL or user.inputs[0] is not value for user in users):
        return whole
    touched = sum(_gathered(user) if user.op == "gather" else user.spec.padded for user in users)
    return min(touched, whole) if all(user.op != "gather" for user in users) else touched


def _scattered(node: Node) -> int:
    """A scattered row is read and written with the other rows of its tile."""
    updates = node.inputs[-1].spec
    return updates.padded * (_TILE_ROWS if len(node.spec.shape) > 1 else 1)


def _gathered(node: Node) -> int:
    """A gathered row comes with the other rows of its tile, a gathered element with its tile."""
    base, sizes = node.inputs[0].spec, node.attrs[0]
    if len(base.shape) < 2:
        return node.spec.padded
    if math.prod(sizes) == 1:
        return node.spec.size * _TILE_ROWS * _LANES * base.bytes // max(base.size, 1)
    return node.spec.padded * _TILE_ROWS


def result_bytes(kernel: Kernel) -> int:
    """Bytes that ``kernel`` writes."""
    total = 0
    for root in kernel.roots:
        if root.op == "dynamic_update_slice":
            total += root.inputs[1].spec.padded
            continue
        if root.op == "scatter" and len(root.specs) == 1:
            total += _scattered(root)
            continue
        total += sum(spec.padded for spec in root.specs)
    return total


def is_bitcast(kernel: Kernel, outputs: Sequence[Node]) -> bool:
    """Whether a kernel only renames: a reshape that keeps the tiles. A result that is an argument renamed is a copy."""
    if kernel.kind != "loop":
        return False
    if any(read.op == "parameter" for read in kernel.reads) and any(kernel.roots[0] is node for node in outputs):
        return False
    for member in kernel.members.values():
        if member.op != "reshape":
            return False
        if not _keeps_tiles(member):
            return False
    return True


def _keeps_tiles(node: Node) -> bool:
    before = [e for e in node.inputs[0].spec.shape if e != 1]
    after = [e for e in node.spec.shape if e != 1]
    if before == after or not before or not after:
        return True
    if before[-1] == after[-1]:
        return True
    return before[-1] % 128 == 0 and after[-1] % 128 == 0 and len(before) == 1 == len(after)


def moves_only(kernel: Kernel) -> bool:
    """Whether a kernel only changes addresses (a copy, transpose, slice, pad or concatenation)."""
    return all(member.op in MOVEMENT for member in kernel.members.values())
