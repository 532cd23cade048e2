"""What a process did on the device, as plain values: the source of every report."""

from __future__ import annotations

import dataclasses

__all__ = ["CompileStatistics", "FallbackRecord", "Statistics", "TierStatistics"]


@dataclasses.dataclass(frozen=True, slots=True)
class TierStatistics:
    """What one tier of the compile cache did. ``seconds`` is wall time of loading; ``where`` its directory or URL.

    ``rejected`` entries were corrupt, foreign or unfinished; ``failed`` counts reads and writes that the file system
    refused; ``evicted`` the entries removed to stay below the size cap.
    """

    tier: int
    where: str | None
    hits: int
    misses: int
    writes: int = 0
    rejected: int = 0
    failed: int = 0
    evicted: int = 0
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class CompileStatistics:
    """Compile-cache requests since the start; ``seconds`` is wall time spent compiling.

    A ``miss`` compiled; what a lower tier had is a hit. ``tiers`` are the tiers in use, nearest first.
    """

    requests: int
    hits: int
    misses: int
    seconds: float
    tiers: tuple[TierStatistics, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class FallbackRecord:
    """An op that ran on the CPU because a fallback was allowed. ``location`` is ``file:line`` of the user's call."""

    op: str
    count: int
    location: str


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot. ``ops`` counts launches by overload name (``aten.add.Tensor``); bytes are device memory."""

    ops: dict[str, int]
    compiles: CompileStatistics
    fallbacks: tuple[FallbackRecord, ...]
    live_buffers: int
    live_hbm_bytes: int
    peak_hbm_bytes: int
