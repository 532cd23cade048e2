"""Autocast: which dtype each class of op runs in, with gradients, and what falls through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from emutpu.backend.autocast import FLOAT32, LOWER_PRECISION


def _tensor(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(size).numel()
    return (torch.arange(count).view(size) / count).to(dtype).to("tpu")


LOWER: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "addmm": lambda x: torch.addmm(x, x, x),
    "linear": lambda x: F.linear(x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "conv": lambda x: F.conv2d(x[None, None], x[None, None, :2, :2]),
}
FULL: dict[str, Callable[[torch.Tensor], Any]] = {
    "mse_loss": lambda x: F.mse_loss(x, x * 2),
    "l1_loss": lambda x: F.l1_loss(x, x * 2),
    "prod": lambda x: x.prod(0),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(4, dtype=torch.int64, device="tpu")),
}


def test_tables() -> None:
    """TorchTPU's 135 registrations: 37 in the lower precision, 98 in float32, each an overload of PyTorch's."""
    assert (len(LOWER_PRECISION), len(FLOAT32), LOWER_PRECISION & FLOAT32) == (37, 98, frozenset())
    for name in LOWER_PRECISION | FLOAT32:
        base, _, overload = name.partition(".")
        assert getattr(getattr(torch.ops.aten, base), overload or "default")
        full = f"aten::{base}.{overload}" if overload else f"aten::{base}"
        assert torch._C._dispatch_has_kernel_for_dispatch_key(full, "AutocastPrivateUse1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", LOWER)
def test_lower_precision(name: str, dtype: torch.dtype) -> None:
    """Matmuls and convolutions take and give the autocast dtype, and equal the same op on cast operands."""
    x = _tensor(4, 4)
    with torch.autocast("tpu", dtype=dtype):
        result = LOWER[name](x)
    assert result.dtype == dtype
    assert torch.equal(result.cpu(), LOWER[name](x.to(dtype)).cpu())
    assert LOWER[name](x).dtype == torch.float32


@pytest.mark.parametrize("name", FULL)
def test_float32(name: str) -> None:
    """Losses and the like compute in float32 from lower operands."""
    x = _tensor(4, 4, dtype=torch.bfloat16)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        result = FULL[name](x)
    assert result.dtype == torch.float32
    assert torch.equal(result.cpu(), FULL[name](x.float()).cpu())


def test_everything_else_falls_through() -> None:
    """Ops without a rule keep their operands' dtype; float64 and integers are never cast; off means off."""
    x, half = _tensor(2, 2), _tensor(2, 2, dtype=torch.float16)
    with torch.autocast("tpu", dtype=torch.bfloat16):
        assert ((x + x).dtype, (half * half).dtype, torch.relu(half).dtype) == (torch.float32, *[torch.float16] * 2)
        assert (x.double() @ x.double()).dtype == torch.float64
        with torch.autocast("tpu", enabled=False):
            assert (x @ x).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_default_dtype() -> None:
    """float16, as torch reports for the device (pass bfloat16 explicitly); unknown dtypes are refused with a warning."""
    assert torch.get_autocast_dtype("tpu") == torch.float16
    x = _tensor(2, 2)
    with torch.autocast("tpu"):
        assert torch.is_autocast_enabled("tpu")
        assert (x @ x).dtype == torch.float16


def test_gradients() -> None:
    """Parameters keep float32 gradients; activations get gradients in the dtype they had."""
    weight = torch.nn.Parameter(_tensor(4, 4))
    x = _tensor(3, 4).requires_grad_()
    with torch.autocast("tpu", dtype=torch.bfloat16):
        hidden = F.linear(x, weight)
        loss = F.mse_loss(hidden, torch.zeros_like(hidden))
    loss.backward()
    assert (hidden.dtype, loss.dtype, weight.grad.dtype, x.grad.dtype) == (torch.bfloat16, *[torch.float32] * 3)
    host_weight = weight.detach().cpu().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.linear(x.detach().cpu(), host_weight)
    F.mse_loss(expected.float(), torch.zeros(3, 4)).backward()
    torch.testing.assert_close(weight.grad.cpu(), host_weight.grad, rtol=2e-2, atol=2e-2)
