"""Ops that only move data."""

from __future__ import annotations

import pytest
import torch
from harness import check_backward, check_forward

NAMES = [
    "cat",
    "stack",
    "repeat",
    "flip",
    "roll",
    "rot90",
    "tril",
    "triu",
    "diag_embed",
    "diagonal",
    "diagonal_scatter",
    "select_scatter",
    "slice_scatter",
    "as_strided_scatter",
    "unfold",
    "as_strided",
    "split",
    "unbind",
    "block_diag",
    "nn.functional.pad.constant",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
    "nn.functional.channel_shuffle",
]
FORWARD_ONLY = ["tril_indices", "triu_indices"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU."""
    check_forward(name, dtype, limit=6 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("name", NAMES)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)
