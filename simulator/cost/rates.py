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
    multipliers and ``clock`` Hz; ``vmem`` bytes, of which values may take ``vmem_share``. ``native_bf16``: the VPU computes
    in bf16; ``recomputes_scores``: a softmax kernel computes its product twice; ``chains``: two products in a row may share a kernel; ``vector_products``: a product with a
    vector runs on the VPU; ``copy_transfers``: how often a relayout of a running sum counts its bytes; ``megacore``: two cores
    share a device, so that what one kernel leaves in VMEM the next cannot read.

    Cycles: ``launch`` per kernel; ``stream`` per 4 KiB that a fused loop moves; ``mxu`` over the ideal of a product,
    ``eager`` the multiple of that in an op compiled on its own; ``whole`` the share for an operation alone whose operands fit in the scoped part of VMEM. The others are multiples of ``stream`` that all chips
    share: ``reduce`` more per 4 KiB that a fused reduction reads;
    ``plain`` per 1,024 elements of an operation alone (``plain_16`` more below 32 bit) and ``plain_read`` per 4 KiB it
    reads; ``turn`` per 1,024 elements of a transpose; ``result`` per 1,024 results of a product that go to HBM, ``kept`` to
    VMEM; ``scan`` per step of a running sum; ``operation`` and ``transcendental`` per 1,024 elements bound loops from below.
    """

    bandwidth: float
    peak: float
    arrays: int
    side: int
    vmem: int
    vmem_share: float
    clock: float
    native_bf16: bool
    recomputes_scores: bool
    vector_products: bool
    chains: bool
    copy_transfers: int
    megacore: bool
    stream: float
    launch: float
    mxu: float
    eager: float
    whole: float
    reduce: float
    plain: float
    plain_read: float
    plain_16: float
    turn: float
    result: float
    kept: float
    scan: float
    operation: float
    transcendental: float
    derived: str = ""

    @classmethod
    def of(cls, chip: Chip, row: Mapping[str, Any], shared: Mapping[str, float]) -> Rates:
        """From the chip's table, its row of constants, and the shared multiples of the row's ``stream``."""
        figures = {"side": chip.figure("mxu_side"), "vmem": chip.figure("vmem_bytes"), "clock": chip.figure("clock_hz")}
        return cls(**figures, **row, **{name: value * row["stream"] for name, value in shared.items()})

    @property
    def matrix_bytes(self) -> float:
        """Bytes per cycle between HBM and a product."""
        return self.bandwidth / self.clock


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
    rows, shared = _document()["chips"], _document()["shared"]
    if chip.name in rows:
        return Rates.of(chip, rows[chip.name], shared)
    relative = _RELATIVES.get(chip.name)
    if relative is None:
        raise ValueError(f"the cost model has no constants for chip {chip.name!r}: it knows {', '.join(rows)}")
    row = Rates.of(chip, rows[relative], shared)
    peak, bandwidth = chip.bf16_flops / chip.devices, float(chip.figure("hbm_bandwidth")) / chip.devices
    slower = (row.bandwidth / row.clock) / (bandwidth / row.clock)
    per_byte = {name: getattr(row, name) * slower for name in ("stream", *shared)}
    return dataclasses.replace(
        row,
        peak=peak,
        bandwidth=bandwidth,
        arrays=max(1, round(peak / (2 * row.side**2 * row.clock))),
        **per_byte,
        derived=f"{chip.name}: the compiler's estimates do not cover this chip; its own rates with the habits of {relative}",
    )


@functools.cache
def expected() -> Expected:
    """The measured efficiencies."""
    return Expected(**_document()["expected"])
