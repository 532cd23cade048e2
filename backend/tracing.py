"""Records every launch in modelled time, for a trace."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from emutpu.backend.cell import MEMORY

if TYPE_CHECKING:
    from emutpu.backend.metering import Meter, Tally

__all__ = ["Recorded", "Recorder"]

_MOST = 2_000_000


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """A launch: issued by the host at ``issued`` for ``issue``, run from ``start`` to ``end`` (picoseconds).

    ``live`` are bytes of HBM in use before it; ``units`` the seconds of each unit, which overlap.
    """

    name: str
    issued: int
    issue: int
    start: int
    end: int
    live: int
    flops: float
    hbm_bytes: float
    units: tuple[tuple[str, float], ...]


class Recorder:
    """Called by the meter for each launch. Beyond two million launches only ``dropped`` counts on."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.dropped = 0
        self._launches: list[tuple[Tally, int, int, int, int]] = []

    def __call__(self, tally: Tally, issued: int, start: int, end: int) -> None:
        if len(self._launches) < _MOST:
            self._launches.append((tally, issued, start, end, MEMORY.live))
        else:
            self.dropped += 1

    def launches(self) -> list[Recorded]:
        """What was recorded, in the order of issue."""
        issue = self.meter.issue or 0
        return [
            Recorded(
                tally.name,
                host,
                issue,
                start,
                end,
                live,
                0.0 if tally.cost is None else tally.cost.flops,
                0.0 if tally.cost is None else tally.cost.hbm_bytes,
                () if tally.cost is None else tally.cost.units,
            )
            for tally, host, start, end, live in self._launches
        ]

    def steps(self) -> list[int]:
        """When optimizer steps were done, in picoseconds."""
        return [at for at, _ in self.meter.steps]
