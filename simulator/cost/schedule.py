"""Which values a schedule of kernels keeps in VMEM, and which operands it fetches there ahead of time.

Mirrors what the compiler's memory-space assignment does to small programs: one argument is fetched before the program
starts, where its first user is a product, a convolution or a plain reduction; every argument that is first needed later
is fetched while earlier kernels run; intermediate values stay in VMEM where they fit.
"""

from __future__ import annotations

import dataclasses

from .graph import Node
from .kernels import PRODUCTS, Kernel
from .relayout import lies_as_wanted
from .tables import FREE

__all__ = ["Placement", "place"]


@dataclasses.dataclass(slots=True)
class Placement:
    """Ids of the values in VMEM, the bytes each kernel has fetched for it and stored behind it, and the peak of HBM
    temporaries.
    """

    resident: set[int]
    fetched: list[int]
    stored: list[int]
    temporaries: int


def place(
    kernels: list[Kernel],
    arguments: list[Node],
    outputs: set[int],
    capacity: int,
    seconds: list[float],
    rate: list[float],
    *,
    shared: bool = True,
) -> Placement:
    """Place the values of kernels that run in this order into ``capacity`` bytes of VMEM.

    ``seconds`` is how long each kernel runs; ``rate`` holds the byte/s of a fetch, or nothing where none is made ahead.
    ``shared``: what a kernel leaves in VMEM the next one finds there; else only what one loop makes.
    """
    uses: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        for read in kernel.reads:
            uses.setdefault(id(read), []).append(index)
    fetched, stored = [0] * len(kernels), [0] * len(kernels)
    resident: set[int] = set()
    occupied = [0] * len(kernels)  # bytes of VMEM in use while kernel i runs
    if rate:
        ahead = _program_prefetch(kernels, arguments, outputs, uses, capacity, occupied)
        if ahead is not None:
            resident.add(id(ahead))
            last = uses[id(ahead)][-1]
            again = _crowded(kernels, uses, outputs, last, ahead.spec.padded, capacity)
            fetched[uses[id(ahead)][0]] += ahead.spec.padded * (2 if again else 1)
            _occupy(occupied, 0, last if again else len(kernels) - 1, ahead.spec.padded)
    _place_intermediates(kernels, uses, outputs, capacity, occupied, resident, loops_only=not shared)
    if rate and shared:
        _store_results(kernels, uses, outputs, resident, stored, (occupied, capacity))
    if rate:
        _fetch(kernels, arguments, outputs, uses, seconds, rate[0], _Vmem(capacity, occupied, resident, fetched))
    return Placement(resident, fetched, stored, _temporaries(kernels, uses, outputs, resident))


@dataclasses.dataclass(slots=True)
class _Vmem:
    capacity: int
    occupied: list[int]
    resident: set[int]
    fetched: list[int]


def _fetch(
    kernels: list[Kernel],
    arguments: list[Node],
    outputs: set[int],
    uses: dict[int, list[int]],
    seconds: list[float],
    rate: float,
    vmem: _Vmem,
) -> None:
    """Fetch what is in HBM and needed later, one after the other, where it arrives in time."""
    begins = [0.0]
    for second in seconds:
        begins.append(begins[-1] + second)
    waiting = [(0, argument) for argument in arguments]
    waiting += [(i + 1, root) for i, k in enumerate(kernels) for root in k.roots if id(root) not in outputs]
    free = 0.0
    for ready, value in sorted(((r, v) for r, v in waiting if id(v) in uses), key=lambda entry: uses[id(entry[1])][0]):
        if id(value) in vmem.resident:
            continue
        size = value.spec.padded
        tried = uses[id(value)] if value.op == "parameter" else uses[id(value)][:1]
        for position, use in enumerate(tried):
            start = max(free, begins[ready])
            if use <= ready or start + size / rate > begins[use]:
                continue
            window = _window(uses[id(value)][position:], size, vmem.occupied, vmem.capacity)
            if window is None:
                continue
            free = start + size / rate
            if value.op == "parameter":
                vmem.resident.add(id(value))
            vmem.fetched[window[0]] += size
            _occupy(vmem.occupied, *window, size)
            break


def _window(uses: list[int], size: int, occupied: list[int], capacity: int) -> tuple[int, int] | None:
    """The kernels during which a fetched value stays: to its last user where there is room, else for one kernel."""
    if not uses or not _room(occupied, uses[0], uses[0], size, capacity):
        return None
    return (uses[0], uses[-1]) if _room(occupied, uses[0], uses[-1], size, capacity) else (uses[0], uses[0])


def _place_intermediates(
    kernels: list[Kernel],
    uses: dict[int, list[int]],
    outputs: set[int],
    capacity: int,
    occupied: list[int],
    resident: set[int],
    *,
    loops_only: bool,
) -> None:
    for index, kernel in enumerate(kernels):
        if loops_only and (kernel.kind in PRODUCTS or len(kernel.roots) > 1):
            continue
        for root in kernel.roots:
            if id(root) in outputs or id(root) not in uses:
                continue
            size, last = root.spec.padded, uses[id(root)][-1]
            if _room(occupied, index, last, size, capacity):
                _occupy(occupied, index, last, size)
                resident.add(id(root))


def _store_results(
    kernels: list[Kernel],
    uses: dict[int, list[int]],
    outputs: set[int],
    resident: set[int],
    stored: list[int],
    room: tuple[list[int], int],
) -> None:
    """A result of the program that a later kernel reads is made in VMEM and copied out behind its kernel."""
    occupied, capacity = room
    for index, kernel in enumerate(kernels):
        for root in kernel.roots:
            if id(root) not in outputs or id(root) not in uses or uses[id(root)][0] <= index:
                continue
            size, last = root.spec.padded, uses[id(root)][-1]
            if _room(occupied, index, last, size, capacity):
                _occupy(occupied, index, last, size)
                resident.add(id(root))
                stored[index] += size


def _program_prefetch(
    kernels: list[Kernel],
    arguments: list[Node],
    outputs: set[int],
    uses: dict[int, list[int]],
    capacity: int,
    occupied: list[int],
) -> Node | None:
    best: Node | None = None
    for argument in arguments:
        if id(argument) not in uses:
            continue
        first = uses[id(argument)]
        kernel = kernels[first[0]]
        plain = len(first) == 1 and _plain_reduction(kernel, outputs)
        wanted = all(lies_as_wanted(kernels[index], argument) for index in first)
        if not (plain or wanted or _picked_from(kernel, argument)):
            continue
        size = argument.spec.padded
        if (
            size <= capacity
            and _room(occupied, 0, first[-1], size, capacity)
            and (best is None or size > best.spec.padded)
        ):
            best = argument
    return best


def _crowded(
    kernels: list[Kernel], uses: dict[int, list[int]], outputs: set[int], last: int, size: int, capacity: int
) -> bool:
    """Whether later values want the room of the argument that was fetched before the program starts: it is then fetched
    again at the end, for the next run.
    """
    wanted = [size] * len(kernels)
    for index, kernel in enumerate(kernels):
        for root in kernel.roots:
            if id(root) not in outputs and id(root) in uses and root.spec.padded <= capacity:
                _occupy(wanted, index, uses[id(root)][-1], root.spec.padded)
    return any(each > capacity for each in wanted[last + 1 :])


def _picked_from(kernel: Kernel, value: Node) -> bool:
    """Whether a kernel picks parts of ``value`` at places that are known when it runs: the whole of it is fetched."""
    key = kernel.key
    return key.op in ("gather", "dynamic_slice") and key.inputs[0] is value and len(kernel.roots) == 1


def _plain_reduction(kernel: Kernel, outputs: set[int]) -> bool:
    """Whether a kernel is one reduction whose results are the program's."""
    key = kernel.key
    final = id(key) in outputs or any(id(part) in outputs for part in key.users)
    return key.op == "reduce" and final and _lone(kernel)


def _lone(kernel: Kernel) -> bool:
    return sum(member.op not in FREE for member in kernel.members.values()) == 1


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
            size = root.spec.padded
            changes[index] += size
            changes[uses[id(root)][-1] + 1 if id(root) in uses else index + 1] -= size
    alive = peak = 0
    for change in changes:
        alive += change
        peak = max(peak, alive)
    return peak
