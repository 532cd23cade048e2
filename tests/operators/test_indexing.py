"""Reading and writing by index tensors and masks."""

from __future__ import annotations

import pytest
import torch
from harness import check_backward, check_forward, check_inplace

GATHERS = ["__getitem__", "gather", "index_select", "take", "take_along_dim", "nn.functional.embedding"]
SCATTERS = [
    "index_add",
    "index_copy",
    "index_fill",
    "index_put",
    "masked_fill",
    "masked_scatter",
    "put",
    "scatter",
    "scatter_add",
]
REDUCTIONS = [f"scatter_reduce.{kind}" for kind in ("sum", "mean", "amax", "amin", "prod")]
REDUCTIONS += [f"index_reduce.{kind}" for kind in ("mean", "amax", "amin", "prod")]
TYPES = [torch.float32, torch.bfloat16, torch.int64]


def _has(name: str, dtype: torch.dtype) -> bool:
    return not (name == "nn.functional.embedding" and dtype == torch.int64)


@pytest.mark.parametrize(
    ("name", "dtype"), [(n, t) for n in GATHERS + SCATTERS + REDUCTIONS for t in TYPES if _has(n, t)]
)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU."""
    check_forward(name, dtype, limit=8)


# index_fill's gradient of a tensor value takes _unique, which the device has not.
DIFFERENTIABLE = [n for n in GATHERS + SCATTERS + REDUCTIONS if n != "index_fill"]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


@pytest.mark.parametrize("name", [*SCATTERS, *REDUCTIONS])
def test_inplace(name: str) -> None:
    """In-place variants write through views and leave neighbours alone."""
    check_inplace(name, torch.float32, limit=3)


def test_gradient_of_index_fill() -> None:
    """With a number: zeros where it was written. With a tensor the device raises."""
    x = torch.ones(3, 2, device="tpu", requires_grad=True)
    index = torch.tensor([2, 0], device="tpu")
    x.index_fill(0, index, 5.0).sum().backward()
    assert x.grad.cpu().tolist() == [[0, 0], [1, 1], [0, 0]]
    value = torch.tensor(5.0, device="tpu", requires_grad=True)
    with pytest.raises(NotImplementedError, match="_unique"):
        x.index_fill(0, index, value).sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_scalar_of_the_cpu_is_filled_in(inplace: bool) -> None:
    """A value without dimensions may be on the CPU, as beside any device; one with a dimension may not."""
    x = torch.arange(6.0).reshape(2, 3)
    mask, index, value = x > 2, torch.tensor([0, 2]), torch.tensor(2.5)
    masked, indexed = x.to("tpu"), x.to("tpu")
    if inplace:
        masked.masked_fill_(mask.to("tpu"), value)
        indexed.index_fill_(1, index.to("tpu"), value)
    else:
        masked = masked.masked_fill(mask.to("tpu"), value)
        indexed = indexed.index_fill(1, index.to("tpu"), value)
    assert torch.equal(masked.cpu(), x.masked_fill(mask, value))
    assert torch.equal(indexed.cpu(), x.index_fill(1, index, value))
    with pytest.raises(RuntimeError, match="value"):
        masked.masked_fill(mask.to("tpu"), torch.ones(2))
