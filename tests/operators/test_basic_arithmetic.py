"""Arithmetic that everything else rests on."""

from __future__ import annotations

import pytest
import torch
from harness import check_backward, check_forward, check_inplace

NAMES = ["add", "sub", "mul", "div.no_rounding_mode", "exp", "tanh", "sigmoid", "neg"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU for floats and integers, with PyTorch's promotion."""
    check_forward(name, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


@pytest.mark.parametrize("name", NAMES)
def test_inplace(name: str) -> None:
    """In-place variants write through views and leave neighbours alone."""
    check_inplace(name, torch.float32)
