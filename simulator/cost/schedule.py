"""Which values a schedule of kernels keeps in VMEM, and which operands it fetches there ahead of time.

Mirrors what the compiler's memory-space assignment does to small programs: one argument is fetched before the program
starts, where its first user is a product, a convolution or a plain reduction; every argument that is first needed later
is fetched while earlier kernels run; intermediate values stay in VMEM where they fit.
"""

from __future__ import annotations

import dataclasses

from .graph import Node
from .kernels import Kernel
from .layout import padded_bytes

__all__ = ["Placement", "place"]

_RESERVED = 0.15  # share of VMEM that windows and scratch take
_AHEAD = ("dot", "convolution")


@dataclasses.dataclass(slots=True)
class Placement:
    """Ids of the values in VMEM, the bytes each kernel has fetched for it, and the peaks of HBM temporaries."""

    resident: set[int]
    fetched: list[int]
    temporaries: int


def place(kernels: list[Kernel], arguments: list[Node], outputs: set[int], vmem: int) -> Placement:
    """Place the values of kernels that run in this order into ``vmem`` bytes."""
    capacity = int(vmem * (1 - _RESERVED))
    uses: dict[int, list[int]] = {}
    values: dict[int, Node] = {}
    for index, kernel in enumerate(kernels):
        for read in kernel.reads:
            uses.setdefault(id(read), []).append(index)
            values[id(read)] = read
    fetched = [0] * len(kernels)
    resident: set[int] = set()
    occupied = [0] * len(kernels)  # bytes of VMEM in use while kernel i runs
    _place_intermediates(kernels, uses, outputs, capacity, occupied, resident)
    ahead = _program_prefetch(kernels, arguments, uses, capacity, occupied)
    if ahead is not None:
        resident.add(id(ahead))
        fetched[uses[id(ahead)][0]] += padded_bytes(ahead.spec)
        _occupy(occupied, 0, uses[id(ahead)][-1], padded_bytes(ahead.spec))
    for argument in sorted((a for a in arguments if id(a) in uses), key=lambda a: uses[id(a)][0]):
        window = (
            None
            if id(argument) in resident
            else _window(uses[id(argument)], padded_bytes(argument.spec), occupied, capacity)
        )
        if window is not None:
            resident.add(id(argument))
            fetched[window[0]] += padded_bytes(argument.spec)
            _occupy(occupied, *window, padded_bytes(argument.spec))
    return Placement(resident, fetched, _temporaries(kernels, uses, outputs, resident))


def _window(uses: list[int], size: int, occupied: list[int], capacity: int) -> tuple[int, int] | None:
    """The kernels during which a fetched argument stays: to its last user where there is room, else for one kernel."""
    later = [index for index in uses if index > 0]
    if not later or not _room(occupied, later[0], later[0], size, capacity):
        return None
    return (later[0], later[-1]) if _room(occupied, later[0], later[-1], size, capacity) else (later[0], later[0])


def _place_intermediates(
    kernels: list[Kernel],
    uses: dict[int, list[int]],
    outputs: set[int],
    capacity: int,
    occupied: list[int],
    resident: set[int],
) -> None:
    for index, kernel in enumerate(kernels):
        for root in kernel.roots:
            if id(root) in outputs or id(root) not in uses:
                continue
            size, last = padded_bytes(root.spec), uses[id(root)][-1]
            if _room(occupied, index, last, size, capacity):
                _occupy(occupied, index, last, size)
                resident.add(id(root))


def _program_prefetch(
    kernels: list[Kernel], arguments: list[Node], uses: dict[int, list[int]], capacity: int, occupied: list[int]
) -> Node | None:
    best: Node | None = None
    for argument in arguments:
        if id(argument) not in uses:
            continue
        first = uses[id(argument)]
        kernel = kernels[first[0]]
        plain = kernel.kind == "reduce" and len(kernel.members) == 1 and len(first) == 1
        if not plain and not all(kernels[i].kind in _AHEAD for i in first):
            continue
        size = padded_bytes(argument.spec)
        if (
            size <= capacity
            and _room(occupied, 0, first[-1], size, capacity)
            and (best is None or size > padded_bytes(best.spec))
        ):
            best = argument
    return best


def _room(occupied: list[int], first: int, last: int, size: int, capacity: int) -> bool:
    return all(occupied[index] + size <= capacity for index in range(first, last + 1))


def _occupy(occupied: list[int], first: int, last: int, size: int) -> None:
    for index in range(first, last + 1):
        occupied[index] += size


def _temporaries(kernels: list[Kernel], uses: dict[int, list[int]], outputs: set[int], resident: set[int]) -> int:
    """The most bytes of intermediate values that are alive in HBM at once."""
    changes = [0] * (len(kernels) + 1)
    for index, kernel in enumerate(kernels):
        for root in kernel.roots:
            if id(root) in resident or id(root) in outputs:
                continue
            size = padded_bytes(root.spec)
            changes[index] += size
            changes[uses[id(root)][-1] + 1 if id(root) in uses else index + 1] -= size
    alive = peak = 0
    for change in changes:
        alive += change
        peak = max(peak, alive)
    return peak
