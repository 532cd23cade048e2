"""Pooling against CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, check_backward, check_forward

NAMES = [
    *(f"nn.functional.{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg") for rank in (1, 2, 3)),
    "nn.functional.adaptive_max_pool1d",
    "nn.functional.adaptive_max_pool2d",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU (which has no avg_pool3d in bfloat16)."""
    if "avg_pool3d" in name and "adaptive" not in name:
        dtype = torch.float32
    check_forward(name, dtype)


@pytest.mark.parametrize("name", [n for n in NAMES if "adaptive_max" not in n])
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name, limit=2)


def _ties() -> torch.Tensor:
    x = torch.randint(0, 3, (2, 3, 9, 8), generator=torch.Generator().manual_seed(1)).float()
    x[0, 0, 1, 1:4] = torch.nan
    x[0, 1] = -torch.inf
    return x


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": (3, 2), "stride": 2, "padding": 1, "dilation": 2, "ceil_mode": True},
        {"kernel_size": 2, "stride": 3, "ceil_mode": True},
    ],
)
def test_indices_of_ties_and_nans(options: dict[str, Any]) -> None:
    """Equal values give the first index, NaNs win, and the gradient goes where the indices say."""
    x = _ties().requires_grad_()
    device_x = x.detach().to("tpu").requires_grad_()
    expected = F.max_pool2d(x, return_indices=True, **options)
    actual = F.max_pool2d(device_x, return_indices=True, **options)
    assert_same(list(actual), list(expected), what="max_pool2d")
    cotangent = torch.randn_like(expected[0])
    (e,) = torch.autograd.grad(expected[0], x, cotangent)
    (a,) = torch.autograd.grad(actual[0], device_x, cotangent.to("tpu"))
    assert_same(a, e, what="max_pool2d gradient")


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("divisor", [None, 3])
def test_average_divisors(include: bool, divisor: int | None) -> None:
    """Padding, overhang and overrides divide as on CPU, forward and backward."""
    x = torch.randn(2, 3, 9, 8).requires_grad_()
    device_x = x.detach().to("tpu").requires_grad_()
    options = {"ceil_mode": True, "count_include_pad": include, "divisor_override": divisor}
    expected = F.avg_pool2d(x, (3, 2), 2, 1, **options)
    actual = F.avg_pool2d(device_x, (3, 2), 2, 1, **options)
    assert_same(actual, expected, what="avg_pool2d")
    expected.backward(expected.detach())
    actual.backward(actual.detach())
    assert_same(device_x.grad, x.grad, what="avg_pool2d gradient")


def test_channels_last_propagates() -> None:
    """A channels_last image stays channels_last."""
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    for pool in (F.max_pool2d, F.avg_pool2d):
        assert pool(x.to("tpu"), 2).stride() == pool(x, 2).stride()


def test_integers_are_refused() -> None:
    """In the device's words."""
    x = torch.ones(1, 1, 4, 4, dtype=torch.int64).to("tpu")
    with pytest.raises(NotImplementedError, match=r"max_pool2d_with_indices\(\): not implemented for int64"):
        F.max_pool2d(x, 2)
    with pytest.raises(NotImplementedError, match=r"avg_pool2d\(\): not implemented for int64"):
        F.avg_pool2d(x, 2)
