"""The model's constants: one frozen row per chip from ``constants.json``, derived from a measured row where there is none."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emutpu.simulator.chips import Chip

__all__ = ["DATA", "Expected", "Rates", "expected", "rates"]

DATA = Path(__file__).with_name("constants.json")
# A chip that libtpu's estimates do not cover takes the row of a relative; bandwidth and peak come from its own figures.
_RELATIVES = {"v4": "v5p", "v8i": "v7", "v8t": "v7"}


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """Of one device. ``bandwidth`` byte/s and ``peak`` FLOP/s of the compiler's roofline; ``arrays`` of ``side`` x ``side``
    multipliers and ``clock`` Hz; ``vmem`` bytes.

    Cycles: ``launch`` per kernel; ``stream`` per 4 KiB that a fused loop moves and ``reduce`` more per 4 KiB that a fused
    reduction reads; an operation alone costs ``plain`` per 1,024 elements (``plain_16`` more below 32 bit) and
    ``plain_read`` per 4 KiB read; ``operation`` and ``transcendental`` per 1,024 elements bound loops from below; ``mxu``
    is cycles over ideal cycles of a product; ``matrix_bytes`` a product moves per cycle.

    ``native_bf16``: the VPU computes in bf16; ``recomputes_scores``: a softmax kernel computes its product twice.
    """

    bandwidth: float
    peak: float
    arrays: int
    side: int
    vmem: int
    clock: float
    native_bf16: bool
    recomputes_scores: bool
    fetches_vectors: bool
    launch: float
    stream: float
    reduce: float
    plain: float
    plain_read: float
    plain_16: float
    operation: float
    transcendental: float
    mxu: float
    matrix_bytes: float
    derived: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Expected:
    """Efficiencies of real chips against the roofline, fitted to measured points, and the factors of the error bar."""

    matmul_efficiency: float
    bandwidth_efficiency: float
    launch_seconds: float
    low: float
    high: float


@functools.cache
def _document() -> Mapping[str, Any]:
    loaded: Mapping[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return loaded


@functools.cache
def rates(chip: Chip) -> Rates:
    """The constants of ``chip``. Raises ValueError for a chip that neither the data nor a relative covers."""
    rows = _document()["chips"]
    if chip.name in rows:
        return Rates(**rows[chip.name])
    relative = _RELATIVES.get(chip.name)
    if relative is None:
        raise ValueError(f"the cost model has no constants for chip {chip.name!r}: it knows {', '.join(rows)}")
    row = Rates(**rows[relative])
    scale = chip.bf16_flops / chip.devices / row.peak
    bandwidth = getattr(chip, "hbm_bandwidth", None)
    own = float(bandwidth) / chip.devices if bandwidth else row.bandwidth * scale
    return dataclasses.replace(
        row,
        peak=chip.bf16_flops / chip.devices,
        bandwidth=own,
        derived=f"{chip.name}: no compiler estimates exist for this chip; constants of {relative} with its own peak",
    )


@functools.cache
def expected() -> Expected:
    """The measured efficiencies."""
    return Expected(**_document()["expected"])
