"""Reductions: sums, products, extrema, any and all, variances, norms, counts."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from harness import assert_same, check_backward, check_forward

REDUCTIONS = [
    "sum",
    "prod",
    "amax",
    "amin",
    "aminmax",
    "max.reduction_no_dim",
    "min.reduction_no_dim",
    "max.reduction_with_dim",
    "min.reduction_with_dim",
    "any",
    "all",
    "count_nonzero",
    "logsumexp",
]
INDICES = ["argmax", "argmin"]
FLOATS = [
    "mean",
    "var",
    "var.unbiased",
    "std",
    "var_mean",
    "linalg.vector_norm",
    "linalg.norm",
    "norm",
    "norm.inf",
    "norm.fro",
    "nn.functional.normalize",
]
DIFFERENTIABLE = [
    "sum",
    "mean",
    "prod",
    "amax",
    "aminmax",
    "max.reduction_no_dim",
    "max.reduction_with_dim",
    "logsumexp",
    "var",
    "std",
    "var_mean",
    "linalg.vector_norm",
    "norm",
    "norm.inf",
    "nn.functional.normalize",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, dtype: torch.dtype) -> None:
    """Values, dtypes and indices equal CPU."""
    check_forward(name, dtype, limit=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", INDICES)
def test_indices(name: str, dtype: torch.dtype) -> None:
    """Indices equal CPU, with and without a dimension."""
    check_forward(name, dtype, limit=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FLOATS)
def test_floats(name: str, dtype: torch.dtype) -> None:
    """Means, spreads and norms equal CPU."""
    check_forward(name, dtype)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


def test_ties_and_nan_of_extrema() -> None:
    """The first of equal values is named; a NaN beats every number, the first NaN the others."""
    rows = torch.tensor(
        [[1.0, 3.0, 3.0, 2.0], [1.0, math.nan, 9.0, math.nan], [-math.inf] * 4, [math.inf, 1.0, math.inf, 0.0]]
    )
    for function in (torch.max, torch.min):
        assert_same(function(rows.to("tpu"), 1), function(rows, 1), what=function.__name__)
        assert_same(function(rows.to("tpu")), function(rows), what=function.__name__)
    for function in (torch.argmax, torch.argmin):
        assert_same(function(rows.to("tpu"), 1), function(rows, 1), what=function.__name__)
        assert_same(function(rows.to("tpu")), function(rows), what=function.__name__)
    for function in (torch.amax, torch.amin):
        assert_same(function(rows.to("tpu"), 1), function(rows, 1), what=function.__name__)
    integers = torch.tensor([[5, 5, -5], [0, 0, 0]])
    assert_same(integers.to("tpu").max(1), integers.max(1), what="integers")


def test_empty_and_scalar_inputs() -> None:
    """Zero-size and 0-d inputs give what CPU gives, and the same refusals."""
    empty, scalar = torch.zeros(0, 3), torch.tensor(2.5)
    for function in (torch.sum, torch.mean, torch.prod, torch.any, torch.all, torch.std, torch.count_nonzero):
        assert_same(function(empty.to("tpu")), function(empty), what=f"{function.__name__} of nothing")
        assert_same(function(scalar.to("tpu")), function(scalar), what=f"{function.__name__} of a scalar")
    assert_same(scalar.to("tpu").max(0), scalar.max(0), what="max of a scalar")
    assert_same(scalar.to("tpu").argmax(), scalar.argmax(), what="argmax of a scalar")
    assert_same(empty.to("tpu").sum(1), empty.sum(1), what="sum of no rows")
    with pytest.raises((RuntimeError, IndexError), match="zero-size dimension"):
        empty.to("tpu").amax(0)
    with pytest.raises(RuntimeError):
        empty.to("tpu").max()


def test_sums_of_integers_and_narrow_floats() -> None:
    """Integers add up in int64; 16-bit floats in float32, rounded once."""
    bytes_ = torch.full((1000,), 200, dtype=torch.uint8)
    assert_same(bytes_.to("tpu").sum(), bytes_.sum(), what="uint8")
    narrow = torch.full((4096,), 1.0, dtype=torch.bfloat16)
    assert narrow.to("tpu").sum().item() == 4096.0
    assert_same(narrow.to("tpu").sum(dtype=torch.float32), narrow.sum(dtype=torch.float32), what="dtype")
    assert_same(bytes_.to("tpu").bool().any(), bytes_.bool().any(), what="any")
    assert bytes_.to("tpu").any().dtype == torch.uint8


def test_correction_is_no_part_of_the_key() -> None:
    """Another correction is another value of one executable, and equals CPU, also past the number of elements."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    on_device = x.to("tpu")
    for correction in (2, 3, 7):
        assert_same(on_device.var(1, correction=correction), x.var(1, correction=correction), what=f"{correction}")


def test_out_and_list_of_dimensions() -> None:
    """out= resizes and fills its target; several dimensions reduce at once."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    out = torch.empty(0, device="tpu")
    torch.sum(x.to("tpu"), (0, -1), out=out)
    assert_same(out, x.sum((0, -1)), what="sum out")
    assert_same(x.to("tpu").bool().any((0, 2)), x.bool().any((0, 2)), what="any over two")
    assert_same(x.to("tpu").norm(1.5, (0, 2)), x.norm(1.5, (0, 2)), what="norm")
    values, indices = torch.empty(0, device="tpu"), torch.empty(0, dtype=torch.int64, device="tpu")
    torch.max(x.to("tpu"), 1, out=(values, indices))
    assert_same((values, indices), tuple(x.max(1)), what="max out")


def test_missing_on_the_device() -> None:
    """What the device lacks is refused in its words."""
    x = torch.randn(4, 5, device="tpu")
    for call in (
        x.median,
        x.nansum,
        lambda: x.kthvalue(1),
        lambda: torch.std_mean(x),
        lambda: torch.renorm(x, 2, 0, 1),
    ):
        with pytest.raises(NotImplementedError, match="is not implemented for TPU"):
            call()


_BEYOND = """
import math, torch
rows = torch.tensor([[3.0, 1.0, math.nan, 2.0], [4.0, 7.0, 4.0, 1.0]])
calls = [
    lambda t: t.median(), lambda t: t.median(1), lambda t: t.nanmedian(1), lambda t: t.nansum(0),
    lambda t: t.kthvalue(3, 1), lambda t: t[1].mode(), lambda t: torch.std_mean(t[1], 0), lambda t: t[1:].renorm(2, 0, 1),
    lambda t: torch.nn.functional.huber_loss(t[1], t[0].nan_to_num(9.0)),
]
for index, call in enumerate(calls):
    torch.testing.assert_close(call(rows.to("tpu")), call(rows), equal_nan=True, check_device=False, msg=str(index))
"""


def test_beyond_the_device() -> None:
    """With EMUTPU_BEYOND=1 the missing ones equal CPU, NaN and ties included."""
    environment = os.environ | {"EMUTPU_BEYOND": "1"}
    done = subprocess.run([sys.executable, "-c", _BEYOND], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
