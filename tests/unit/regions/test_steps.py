"""Where a step of a program ends."""

from __future__ import annotations

from typing import Any

import pytest

from emutpu.cli._regions.analysis import add_steps, nbytes


def _regions(*flushes: tuple[str, int]) -> list[dict[str, Any]]:
    return [
        {"process": 1, "flush": n, "reason": reason, "trigger": {"file": "a.py", "line": line}}
        for n, (reason, line) in enumerate(flushes)
    ]


@pytest.mark.parametrize(
    ("flushes", "steps"),
    [
        ([(".cpu()", 5), (".cpu()", 5), (".cpu()", 5)], [0, 1, 2]),
        ([(".cpu()", 5), (".cpu()", 9), (".cpu()", 5), (".cpu()", 9)], [0, 0, 1, 1]),
        ([("repeated_op_heuristic", 2), ("repeated_op_heuristic", 2), (".cpu()", 5)] * 2, [0, 0, 0, 1, 1, 1]),
        ([("repeated_op_heuristic", 2)] * 3, [0, 1, 2]),
        ([(".cpu()", 5), (".cpu()", 6)], [0, 1]),
    ],
)
def test_steps(flushes: list[tuple[str, int]], steps: list[int]) -> None:
    """A loop that reads once or twice, one that the repeated-op rule cuts as well, none that reads, no loop."""
    regions = _regions(*flushes)
    add_steps(regions)
    assert [region["step"] for region in regions] == steps


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("bool", 1), ("float8_e4m3fn", 1), ("complex64", 8), ("int64", 8), (None, 0)],
)
def test_bytes(dtype: str | None, size: int) -> None:
    """Dense bytes by the name of a dtype."""
    assert nbytes({"shape": [3, 2], "dtype": dtype}) == 6 * size
