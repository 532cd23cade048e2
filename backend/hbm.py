"""Who holds the device's memory: its largest live tensors with the lines that made them, and the error when it is full."""

from __future__ import annotations

import dataclasses
import types

from emutpu.backend.cell import ADDRESSES, MEMORY
from emutpu.backend.errors import describe
from emutpu.backend.location import Origin
from emutpu.backend.pjrt import ResourceExhausted

__all__ = ["Holder", "Snapshot", "allocation_failure", "largest", "snapshot"]

_SHOWN = 8
_REMEDIES = (
    "a smaller batch, activation checkpointing (torch.utils.checkpoint), bfloat16, or sharding over more chips; "
    "EMUTPU_HBM=unlimited (emutpu run --hbm unlimited) goes on and reports how much is missing"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """A live tensor's memory: ``bytes`` of HBM, ``dense`` without tile padding, and who wrote it last."""

    bytes: int
    dense: int
    shape: tuple[int, ...]
    dtype: str
    origin: Origin | None

    def __str__(self) -> str:
        padding = f" ({human(self.dense)} without padding)" if self.bytes > 1.05 * self.dense else ""
        shape = ",".join(map(str, self.shape))
        by = f"{self.origin[0]} at {describe(*self.origin[1:])}" if self.origin else "not written yet"
        return f"{human(self.bytes)} {self.dtype}[{shape}]{padding} by {by}"


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """Memory at a moment: ``bytes`` in use (results and temporaries of ``op`` included), and the largest holders."""

    bytes: int
    op: str
    code: types.CodeType | None
    offset: int
    holders: tuple[Holder, ...]


def human(nbytes: int) -> str:
    """Bytes as PjRt writes them: ``15.75G``, ``512B``."""
    size = float(nbytes)
    for unit in ("B", "K", "M", "G", "T"):
        if size < 1024 or unit == "T":
            break
        size /= 1024
    return f"{nbytes}B" if unit == "B" else f"{size:.2f}{unit}"


def largest(count: int = _SHOWN) -> tuple[Holder, ...]:
    """The live tensors that hold most memory, largest first."""
    cells = {id(cell): cell for reference in list(ADDRESSES.values()) if (cell := reference()) is not None}
    found = sorted(cells.values(), key=lambda cell: -cell.held)[:count]
    return tuple(
        Holder(c.held, c.nbytes, c.layout.dims, str(c.layout.dtype).removeprefix("torch."), c.origin)
        for c in found
        if c.held
    )


def snapshot(nbytes: int, op: str, line: tuple[types.CodeType | None, int]) -> Snapshot:
    """Who holds memory right now, while ``op`` wants ``nbytes`` in all."""
    return Snapshot(nbytes, op, *line, largest())


def allocation_failure(op: str, results: int, temporaries: int, counted: int = 0) -> ResourceExhausted:
    """The device's error for an allocation of results or temporaries that does not fit, with who holds its memory.

    ``counted`` bytes of the results are among those in use already.
    """
    assert MEMORY.limit is not None
    used = MEMORY.live - counted
    free = max(0, MEMORY.limit - used)
    if results > free:
        said = (
            f"Error allocating device buffer: Attempting to allocate {human(results)}. That was not possible. "
            f"There are {human(free)} free.; (0x0x0_HBM0)"
        )
    else:
        left = free - results
        said = (
            f"Attempting to reserve {human(temporaries)} at the bottom of memory. That was not possible. "
            f"There are {human(left)} free, 0B reserved, and {human(left)} reservable."
        )
    lines = [f"  {human(used)} of {human(MEMORY.limit)} were in use; the largest live tensors:"]
    lines += [f"    {holder}" for holder in largest()]
    lines += [f"  what helps: {_REMEDIES}"]
    return ResourceExhausted("\n".join((said, *lines)), op=op)
