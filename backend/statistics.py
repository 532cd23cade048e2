"""What a process did on the device, as plain values: the source of every report."""

from __future__ import annotations

import dataclasses

__all__ = [
    "CompileStatistics",
    "FallbackRecord",
    "MemoryStatistics",
    "ModelledStatistics",
    "RegionStatistics",
    "Statistics",
    "TierStatistics",
]


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
class RegionStatistics:
    """Launches of regions for one reason: how many, the ops in them, and how many had not to be compiled."""

    reason: str
    count: int
    ops: int
    hits: int


@dataclasses.dataclass(frozen=True, slots=True)
class FallbackRecord:
    """An op that ran on the CPU because a fallback was allowed. ``location`` is ``file:line`` of the user's call."""

    op: str
    count: int
    location: str


@dataclasses.dataclass(frozen=True, slots=True)
class ModelledStatistics:
    """Modelled time and work so far; nothing here is measured, except ``host_seconds`` where issuing is.

    ``seconds`` is when the device has done all that was issued, of which it was busy ``device_seconds``;
    ``host_issue`` is the modelled host time per launch, None where it is measured. ``steps`` are optimizer steps issued,
    ``step_seconds`` the median time between two, ``between_steps`` are seconds, FLOPs and masked FLOPs from the first to
    the last. ``flops`` counts all of the executables, recomputation included; ``masked_flops`` are those of them that a
    causal mask discards (NaN where a mask is not seen), ``peak_flops`` the device's bf16 FLOP/s. ``hbm_use`` is HBM traffic against its bandwidth,
    ``ici_use`` the share of time that links between chips are busy. ``error_bar`` is relative, weighted by time. ``top`` are (name,
    launches, seconds), ``unmodelled`` counts launches without a cost, ``assumptions`` what the model assumed.
    """

    seconds: float
    device_seconds: float
    host_seconds: float
    host_issue: float | None
    launches: int
    flops: float
    hbm_bytes: float
    transfer_bytes: int
    steps: int
    step_seconds: float | None
    peak_flops: float
    masked_flops: float
    between_steps: tuple[float, float, float]
    ici_bytes: float
    ici_use: float | None
    hbm_use: float | None
    error_bar: float | None
    bound: dict[str, float]
    top: tuple[tuple[str, int, float], ...]
    unmodelled: dict[str, int]
    assumptions: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryStatistics:
    """Who held HBM near its peak. ``limit_bytes`` is None where unlimited; ``missing_bytes`` is what the peak exceeds the
    chip's memory by. ``holders`` are (bytes, dense bytes, shape, dtype, op, line), largest first.
    """

    limit_bytes: int | None
    chip_bytes: int
    missing_bytes: int
    peak_op: str | None
    peak_line: str | None
    holders: tuple[tuple[int, int, tuple[int, ...], str, str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot. ``ops`` counts ops by overload name (``aten.add.Tensor``), launched or recorded; bytes are device memory."""

    ops: dict[str, int]
    compiles: CompileStatistics
    fallbacks: tuple[FallbackRecord, ...]
    live_buffers: int
    live_hbm_bytes: int
    peak_hbm_bytes: int
    modelled: ModelledStatistics | None = None
    memory: MemoryStatistics | None = None
    regions: tuple[RegionStatistics, ...] = ()
