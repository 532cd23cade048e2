"""What a process did on the device, as plain values: the source of every report."""

from __future__ import annotations

import dataclasses

__all__ = ["CompileStatistics", "FallbackRecord", "Statistics"]


@dataclasses.dataclass(frozen=True, slots=True)
class CompileStatistics:
    """Compile-cache requests since the start; ``seconds`` is wall time spent compiling."""

    requests: int
    hits: int
    misses: int
    seconds: float


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
