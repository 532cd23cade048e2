"""Bytes of arrays in HBM, against the TPU compiler's own figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emutpu.simulator.hbm import tiled_bytes

ROWS = json.loads((Path(__file__).parents[1] / "data" / "hbm_tiling.json").read_text())["rows"]
SIZES = {"f64": 8, "c64": 8, "i64": 8, "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i8": 1, "bool": 1, "f8": 1}


@pytest.mark.parametrize("dtype", sorted(SIZES))
def test_tiled_bytes_are_the_compilers(dtype: str) -> None:
    """Every recorded array takes exactly what the TPU compiler allots it."""
    rows = [row for row in ROWS if row[0] == dtype]
    assert len(rows) == 41
    wrong = [(shape, tiled_bytes(shape, SIZES[dtype]), given) for _, shape, given, _ in rows]
    assert [row for row in wrong if row[1] != row[2]] == []
