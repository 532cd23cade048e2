"""No test sees the compiled frames of another; products are computed at `highest`; what pads inputs is poison."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from emutpu.backend.dynamism import transfer


def _poisoned(extents: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """NaN, the greatest integer, or true."""
    if dtype.kind == "b":
        return np.ones(extents, dtype)
    return np.full(extents, np.iinfo(dtype).max if dtype.kind in "iu" else float("nan"), dtype)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled before, full precision, and padding that would be seen."""
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    monkeypatch.setattr(transfer, "_blank", _poisoned)
    yield
    torch.set_float32_matmul_precision(precision)
    torch._dynamo.reset()
