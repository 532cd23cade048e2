"""Ops whose result's size is in the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import assert_same, check_backward, check_forward

NAMES = ["nonzero", "argwhere", "masked_select", "unique_consecutive", "bincount", "repeat_interleave"]
INTEGERS = {"bincount"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU."""
    if name in INTEGERS and dtype != torch.int64:
        dtype = torch.int32
    check_forward(name, dtype, limit=4)


@pytest.mark.parametrize("name", ["masked_select", "repeat_interleave", "masked_scatter"])
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


VALUES = {
    "integers": torch.tensor([[3, 1, 3, 0], [1, 1, 2, 0]]),
    "one": torch.tensor([7]),
    "none": torch.tensor([], dtype=torch.int64),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5),
    "bools": torch.tensor([True, False, True]),
    "zeros": torch.tensor([0.0, -0.0, 1.0]),
    "nan": torch.tensor([float("nan"), 1.0, float("nan"), -float("inf")]),
}
FLAGS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.parametrize("name", VALUES)
def test_unique(name: str) -> None:
    """Sorted distinct values, inverse and counts; NaNs are all distinct."""
    x = VALUES[name]
    for inverse, counts in FLAGS:
        expected = torch.unique(x, return_inverse=inverse, return_counts=counts)
        assert_same(torch.unique(x.to("tpu"), return_inverse=inverse, return_counts=counts), expected, what=name)


@pytest.mark.parametrize("name", VALUES)
def test_unique_consecutive(name: str) -> None:
    """Runs, over all elements and along each dimension."""
    x = VALUES[name]
    for dim in [None, *range(x.dim())]:
        if dim is not None and not x.numel():
            continue
        expected = torch.unique_consecutive(x, return_inverse=True, return_counts=True, dim=dim)
        actual = torch.unique_consecutive(x.to("tpu"), return_inverse=True, return_counts=True, dim=dim)
        assert_same(actual, expected, what=f"{name} along {dim}")


def test_unique_along_a_dimension_is_missing_on_the_device() -> None:
    """TorchTPU 0.2.0 has no unique_dim."""
    with pytest.raises(NotImplementedError, match="unique_dim"):
        torch.unique(torch.ones(2, 2, device="tpu"), dim=0)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_unique_along_a_dimension_beyond_the_device(dim: int) -> None:
    """The lowering that EMUTPU_BEYOND=1 registers: rows in lexicographic order."""
    from emutpu.backend import data_dependent

    x = torch.tensor([[1, 2, 1], [1, 2, 1], [0, 3, 0], [1, -2, 1]])
    expected = torch.unique(x, dim=dim, return_inverse=True, return_counts=True)
    actual = data_dependent.unique_dim(x.to("tpu"), dim, True, True, True)
    assert_same(actual, expected, what=f"unique along {dim}")


def test_unsorted_unique_is_refused() -> None:
    """As on the device."""
    with pytest.raises(NotImplementedError, match=r"unique2\(\): sorted=False is not yet supported"):
        torch.unique(torch.ones(3, device="tpu"), sorted=False)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (2, 3, 4), (0, 3), (3, 0)])
def test_nonzero(shape: tuple[int, ...]) -> None:
    """Positions in row-major order, for any rank and for nothing."""
    x = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0))
    for value in (x, x.bool(), x.float(), torch.zeros_like(x)):
        assert_same(value.to("tpu").nonzero(), value.nonzero(), what=f"nonzero of {list(shape)}")
    assert_same(list(x.to("tpu").nonzero(as_tuple=True)), list(x.nonzero(as_tuple=True)), what="as a tuple")


def test_masks_that_broadcast_or_lie_in_views() -> None:
    """masked_select over transposed, expanded and sliced operands."""
    x = torch.arange(24.0).reshape(4, 6)
    mask = torch.arange(6) % 2 == 0
    cases: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        torch.masked_select,
        lambda t, m: torch.masked_select(t.t(), m.unsqueeze(1)),
        lambda t, m: torch.masked_select(t[1::2, 1:4], m[:3]),
        lambda t, m: torch.masked_select(t[0, 0], m),
    ]
    for case in cases:
        assert_same(case(x.to("tpu"), mask.to("tpu")), case(x, mask), what="masked_select")


def test_repeat_interleave() -> None:
    """With and without the size; negative repeats raise PyTorch's error."""
    repeats = torch.tensor([0, 2, 0, 3, 1, 0])
    x = torch.randn(6, 2)
    on_device = repeats.to("tpu")
    assert_same(torch.repeat_interleave(on_device), torch.repeat_interleave(repeats), what="indices")
    assert_same(torch.repeat_interleave(on_device, output_size=6), torch.repeat_interleave(repeats), what="sized")
    assert_same(torch.repeat_interleave(x.to("tpu"), on_device, 0), torch.repeat_interleave(x, repeats, 0), what="rows")
    with pytest.raises(RuntimeError, match="repeats can not be negative"):
        torch.repeat_interleave(torch.tensor([1, -1], device="tpu"))


def test_one_read_decides_the_size() -> None:
    """A nonzero is a counting launch and a sized one; the same count again compiles nothing."""
    from emutpu.backend.runtime import runtime

    first = torch.tensor([1, 0, 1, 0, 0], device="tpu")
    second = torch.tensor([0, 0, 0, 1, 1], device="tpu")
    assert first.nonzero().flatten().tolist() == [0, 2]
    before = runtime().cache.misses
    assert second.nonzero().flatten().tolist() == [3, 4]
    assert runtime().cache.misses == before


def test_out_overloads() -> None:
    """out= resizes to what was found."""
    x = torch.tensor([0, 1, 2], device="tpu")
    out = torch.empty(0, dtype=torch.int64, device="tpu")
    torch.nonzero(x, out=out)
    assert out.cpu().tolist() == [[1], [2]]
    torch.masked_select(x, x.ne(1), out=out)
    assert out.cpu().tolist() == [0, 2]


def test_one_hot() -> None:
    """A composite over scatters."""
    labels = torch.tensor([[0, 2], [1, 4]])
    one_hot = torch.nn.functional.one_hot
    assert_same(one_hot(labels.to("tpu")), one_hot(labels), what="one_hot")
    assert_same(one_hot(labels.to("tpu"), 6), one_hot(labels, 6), what="one_hot of 6")
