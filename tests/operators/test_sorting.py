"""Sorting, scans, searches, histograms and membership."""

from __future__ import annotations

import math

import pytest
import torch
from harness import assert_same, check_backward, check_forward

SCANS = ["cumsum", "cumprod", "cummax", "cummin"]
SEARCHES = ["searchsorted", "bucketize", "isin"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("name", SCANS + SEARCHES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU, indices included."""
    check_forward(name, dtype)


@pytest.mark.parametrize("name", ["logcumsumexp", "histc", "topk", "sort", "msort", "quantile"])
def test_floats(name: str) -> None:
    """Equals CPU where the values are distinct."""
    check_forward(name, torch.float32)


@pytest.mark.parametrize("name", [*SCANS, "sort", "topk", "msort"])
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


@pytest.mark.parametrize("descending", [False, True])
def test_stable_sort(descending: bool) -> None:
    """Equal keys keep their order; NaN is the largest; -0.0 equals 0.0; every dtype."""
    keys = torch.tensor([[3.0, math.nan, -0.0, 0.0, math.inf, 3.0, math.nan, -math.inf, 0.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        given = keys.to(dtype)
        expected = given.sort(dim=1, descending=descending, stable=True)
        assert_same(given.to("tpu").sort(dim=1, descending=descending, stable=True), expected, what=f"{dtype}")
    for integers in (
        torch.tensor([5, 1, 5, -3, 1]),
        torch.tensor([True, False, True, False]),
        torch.tensor([250, 3], dtype=torch.uint8),
    ):
        expected = integers.sort(descending=descending, stable=True)
        actual = integers.to("tpu").sort(descending=descending, stable=True)
        assert_same(actual, expected, what=f"{integers.dtype}")
    assert_same(torch.tensor(4.0).to("tpu").sort(), torch.tensor(4.0).sort(), what="scalar")
    assert_same(torch.zeros(0, 2).to("tpu").sort(0), torch.zeros(0, 2).sort(0), what="empty")


def test_argsort() -> None:
    """Argsort along another dimension, stable."""
    x = torch.tensor([[2, 1], [2, 0], [1, 1]])
    assert_same(x.to("tpu").argsort(dim=0, stable=True), x.argsort(dim=0, stable=True), what="argsort")


def test_topk_ranks_nan_first() -> None:
    """A NaN is the largest; the smallest end leaves it last."""
    x = torch.tensor([1.0, 5.0, 7.0, math.nan])
    assert x.to("tpu").topk(2).indices.tolist() == [3, 2]
    assert x.to("tpu").topk(3, largest=False).indices.tolist() == [0, 1, 2]
    assert x.to("tpu").topk(0).values.shape == (0,)
    with pytest.raises(RuntimeError, match="not in range"):
        x.to("tpu").topk(5)


def test_scans_with_nan_and_ties() -> None:
    """A NaN stays; of equals the last is named."""
    x = torch.tensor([[1.0, 1.0, math.nan, 3.0, math.nan], [2.0, -1.0, 2.0, -1.0, 0.0]])
    for function in (torch.cummax, torch.cummin):
        assert_same(function(x.to("tpu"), 1), function(x, 1), what=function.__name__)
    assert_same(x.to("tpu").cumsum(1), x.cumsum(1), what="cumsum")
    infinite = torch.tensor([-math.inf, -math.inf, 1.0, math.inf, 2.0])
    assert_same(infinite.to("tpu").logcumsumexp(0), infinite.logcumsumexp(0), what="logcumsumexp")
    assert_same(torch.tensor(True).to("tpu").cumsum(0), torch.tensor(True).cumsum(0), what="scalar")


def test_gradient_of_logcumsumexp() -> None:
    """For moderate values; PyTorch's formula loses digits for large ones, on CPU too."""
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    on_device, on_host = x.to("tpu").requires_grad_(), x.clone().requires_grad_()
    on_device.logcumsumexp(1).sin().sum().backward()
    on_host.logcumsumexp(1).sin().sum().backward()
    assert_same(on_device.grad, on_host.grad, what="logcumsumexp")


def test_long_cumsum() -> None:
    """Four thousand rows of positions, as every attention mask makes them."""
    mask = (torch.arange(3 * 4096).reshape(3, 4096) % 3 > 0).long()
    assert_same(mask.to("tpu").cumsum(-1), mask.cumsum(-1), what="positions")
    written = mask.to("tpu")
    written.cumsum_(-1)
    assert_same(written, mask.cumsum(-1), what="in place")


def test_search_sides_and_sorter() -> None:
    """Left and right sides, scalars, int32 results, an order given by a sorter, NaN at the end."""
    edges = torch.tensor([1.0, 3.0, 3.0, 5.0])
    x = torch.tensor([[0.0, 3.0], [5.0, math.nan]])
    for right in (False, True):
        assert_same(
            torch.bucketize(x.to("tpu"), edges.to("tpu"), right=right),
            torch.bucketize(x, edges, right=right),
            what="bucketize",
        )
    shuffled, order = edges[[2, 0, 3, 1]], torch.tensor([1, 0, 3, 2])
    actual = torch.searchsorted(shuffled.to("tpu"), x.to("tpu"), sorter=order.to("tpu"), out_int32=True)
    assert_same(actual, torch.searchsorted(shuffled, x, sorter=order, out_int32=True), what="sorter")
    assert_same(
        torch.searchsorted(edges.to("tpu"), 3, side="right"), torch.searchsorted(edges, 3, side="right"), what="scalar"
    )
    assert_same(
        torch.bucketize(2.5, torch.tensor([1, 2, 3]).to("tpu")),
        torch.bucketize(2.5, torch.tensor([1, 2, 3])),
        what="float among integers",
    )


def _counts(device: str) -> list[torch.Tensor]:
    experts = torch.tensor([0, 3, 3, 1, 3, 0]).to(device)
    return [
        torch.histc(experts.float(), bins=4, min=0, max=3),
        torch.histc(experts.float(), bins=5000),
        torch.histc(torch.tensor([2.0, 2.0]).to(device), bins=3),
        torch.histc(torch.tensor([-1.0, 0.5, 1.0, 9.0]).to(device), bins=2, min=0, max=1),
        torch.isin(experts, torch.tensor([1, 3]).to(device), invert=True),
        torch.isin(experts, 3),
        torch.isin(3, experts),
        torch.isin(experts[:0], experts),
    ]


def test_counts_and_membership() -> None:
    """Bounds, last edges, more bins than fit a comparison, nothing at all."""
    for index, (actual, expected) in enumerate(zip(_counts("tpu"), _counts("cpu"), strict=True)):
        assert_same(actual, expected, what=f"case {index}")
