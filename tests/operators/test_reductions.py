"""Reductions, softmax, normalisation, losses by class."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import assert_same, check_backward, check_forward
from torch import nn
from torch.nn import functional as F

REDUCTIONS = ["sum", "mean", "prod", "amax", "amin", "aminmax", "max.reduction_no_dim", "min.reduction_no_dim",
              "max.reduction_with_dim", "min.reduction_with_dim", "argmax", "argmin", "any", "all"]
FLOAT_ONLY = {"mean"}
SOFTMAX = ["softmax", "log_softmax", "nn.functional.softmin"]
LOSSES = ["nn.functional.nll_loss", "nn.functional.cross_entropy"]
NORMS = ["nn.functional.batch_norm", "nn.functional.layer_norm", "nn.functional.group_norm",
         "nn.functional.instance_norm", "native_layer_norm", "native_batch_norm", "nn.functional.rms_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    """Values, dtypes and indices equal CPU."""
    if name in FLOAT_ONLY and not dtype.is_floating_point:
        pytest.skip("mean is for floats")
    check_forward(name, dtype, limit=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SOFTMAX + LOSSES + NORMS)
def test_float_ops(name: str, dtype: torch.dtype) -> None:
    """Softmax, losses and normalisations equal CPU."""
    check_forward(name, dtype)


@pytest.mark.parametrize("name", ["sum", "mean", *SOFTMAX, *LOSSES, *NORMS])
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)
