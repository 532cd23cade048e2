"""Activations, pointwise losses and factories against CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, check_backward, check_forward, check_inplace, opinfo

from emutpu.backend.kernels import op_counts

ACTIVATIONS = """gelu silu hardsigmoid hardswish hardtanh leaky_relu elu celu selu softplus logsigmoid glu prelu threshold
relu relu6 softsign tanhshrink"""
LOSSES = "mse_loss l1_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss"
NAMES = [f"nn.functional.{name}" for name in (*ACTIVATIONS.split(), *LOSSES.split())] + ["sigmoid", "tanh", "logit"]
_CASES = [(n, d) for n in NAMES for d in (torch.float32, torch.bfloat16) if d in opinfo(n).dtypes]


@pytest.mark.parametrize(("name", "dtype"), _CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU."""
    check_forward(name, dtype, limit=3)


@pytest.mark.parametrize("name", NAMES)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name, limit=3)


@pytest.mark.parametrize("name", [n for n in NAMES if opinfo(n).inplace_variant is not None])
def test_inplace(name: str) -> None:
    """In-place variants write through views and leave neighbours alone."""
    check_inplace(name, torch.float32, limit=2)


EDGES = torch.tensor(
    [-4.0, -3.0, -1.0, -0.0, 0.0, 1.0, 3.0, 6.0, 20.0, 50.0, float("nan"), float("inf"), -float("inf")]
)
_EDGE_CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "relu6": F.relu6,
    "leaky_relu": F.leaky_relu,
    "elu": lambda x: F.elu(x, alpha=0.5),
    "softplus": lambda x: F.softplus(x, beta=2, threshold=10),
    "logsigmoid": F.logsigmoid,
    "threshold": lambda x: F.threshold(x, 0.5, 20.0),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(-1, 3),
    "abs": torch.abs,
}


@pytest.mark.parametrize("name", _EDGE_CASES)
def test_edges(name: str) -> None:
    """Values and gradients at the kinks, far out, and at NaN and infinities."""
    # PyTorch's own gelu gives NaN at infinity on some CPUs.
    edges = EDGES[:-2] if name.startswith("gelu") else EDGES
    results = []
    for device in ("tpu", "cpu"):
        x = edges.to(device).requires_grad_()
        y = _EDGE_CASES[name](x)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 2.0))
        results.append((y, gradient))
    assert_same(results[0], results[1], what=name)


def test_gelu_backward_under_autocast() -> None:
    """A bf16 gradient meets a float32 input (automatic mixed precision)."""
    grad, x = torch.randn(4, dtype=torch.bfloat16), torch.randn(4)
    actual = torch.ops.aten.gelu_backward(grad.to("tpu"), x.to("tpu").bfloat16())
    assert_same(actual, torch.ops.aten.gelu_backward(grad, x.bfloat16()), what="gelu_backward")


def test_bf16_scaled_in_place() -> None:
    """bf16 activations scaled in place stay bf16, gradients too."""
    x = torch.ones(3, dtype=torch.bfloat16, device="tpu", requires_grad=True)
    y = F.gelu(x)
    y *= 0.5
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


_FACTORIES: dict[str, Callable[[str], torch.Tensor]] = {
    "arange": lambda d: torch.arange(7, device=d),
    "arange_start": lambda d: torch.arange(2, 9, device=d),
    "arange_step": lambda d: torch.arange(10, 0, -3, device=d),
    "arange_float": lambda d: torch.arange(0, 1, 0.1, device=d),
    "arange_mixed": lambda d: torch.arange(0.5, 5, dtype=torch.int64, device=d),
    "arange_bf16": lambda d: torch.arange(5, dtype=torch.bfloat16, device=d),
    "arange_large": lambda d: torch.arange(2**40, 2**40 + 3, device=d),
    "arange_empty": lambda d: torch.arange(0, device=d),
    "eye": lambda d: torch.eye(3, 5, device=d),
    "eye_square": lambda d: torch.eye(4, dtype=torch.int32, device=d),
    "linspace": lambda d: torch.linspace(-1, 1, 7, device=d),
    "linspace_one": lambda d: torch.linspace(3, 5, 1, device=d),
    "linspace_int": lambda d: torch.linspace(0, 10, 5, dtype=torch.int64, device=d),
    "full": lambda d: torch.full((2, 3), 1.5, device=d),
    "full_bool": lambda d: torch.full((2,), True, device=d),
    "full_like": lambda d: torch.full_like(torch.empty(2, 3, device=d).t(), 7),
    "zeros": lambda d: torch.zeros(2, 0, 3, device=d),
    "ones": lambda d: torch.ones(4, dtype=torch.int8, device=d),
    "ones_like": lambda d: torch.ones_like(torch.empty(3, device=d, dtype=torch.bfloat16)),
    "zeros_like": lambda d: torch.zeros_like(torch.empty(3, 2, device=d)),
    "new_full": lambda d: torch.empty(1, device=d).new_full((2,), 3.0),
    "scalar_tensor": lambda d: torch.scalar_tensor(2.5, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 4, -1, device=d),
    "complex": lambda d: torch.full((2,), 1 + 2j, device=d),
}


@pytest.mark.parametrize("name", _FACTORIES)
def test_factories(name: str) -> None:
    """Values, dtypes and strides equal CPU; never more than one launch."""
    before = sum(op_counts().values())
    actual = _FACTORIES[name]("tpu")
    assert sum(op_counts().values()) <= before + 1
    expected = _FACTORIES[name]("cpu")
    assert actual.stride() == expected.stride()
    assert_same(actual, expected, what=name)


@pytest.mark.parametrize("name", ["hann_window", "blackman_window", "bartlett_window"])
def test_windows(name: str) -> None:
    """Windows compose from the factories."""
    make: Any = getattr(torch, name)
    assert_same(make(9, device="tpu"), make(9), what=name)


def test_arange_with_a_wrong_step() -> None:
    """PyTorch's own text for wrong bounds."""
    with pytest.raises(RuntimeError, match="inconsistent with step sign"):
        torch.arange(0, 5, -1, device="tpu")


def test_double_backward() -> None:
    """The second derivatives of activations run on the device."""
    for function in (F.gelu, F.silu, torch.tanh, torch.sigmoid, F.softplus):
        results = []
        for device in ("tpu", "cpu"):
            x = torch.linspace(-2, 2, 5).to(device).requires_grad_()
            (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            results.append(second)
        assert_same(results[0], results[1], what=str(function))
