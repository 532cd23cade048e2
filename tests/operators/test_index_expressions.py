"""Index expressions as people write them: slices, integers, tensors and masks mixed, read, written and added to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

DEVICE = torch.device("tpu")


def _slices(extent: int) -> st.SearchStrategy[slice]:
    ends = st.one_of(st.none(), st.integers(-extent, extent))
    return st.builds(slice, ends, ends, st.sampled_from([None, 1, 2, 3]))


@st.composite
def expressions(draw: st.DrawFn) -> tuple[torch.Tensor, tuple[Any, ...], bool]:
    """A tensor, an index expression for it, and whether some place may be hit twice."""
    rank = draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    batch = draw(st.sampled_from([(), (1,), (3,), (2, 1), (2, 3)]))
    index: list[Any] = []
    masked = repeats = False
    dim = 0
    while dim < rank and (not index or draw(st.booleans()) or dim == 0):
        kind = draw(st.sampled_from(["slice", "integer", "tensor", "mask", "none"]))
        if kind == "slice":
            index.append(draw(_slices(shape[dim])))
        elif kind == "integer":
            index.append(draw(st.integers(-shape[dim], shape[dim] - 1)))
        elif kind == "none":
            index.append(None)
            continue
        elif kind == "tensor" or masked:
            count = torch.Size(batch).numel()
            places = st.lists(st.integers(-shape[dim], shape[dim] - 1), min_size=count, max_size=count)
            dtype = draw(st.sampled_from([torch.int64, torch.int32]))
            index.append(torch.tensor(draw(places), dtype=dtype).reshape(batch))
            repeats = True
        else:
            masked = True
            wide = draw(st.integers(1, rank - dim))
            extents = shape[dim : dim + wide]
            count = torch.Size(extents).numel()
            chosen = draw(st.lists(st.booleans(), min_size=count, max_size=count))
            index.append(torch.tensor(chosen, dtype=torch.bool).reshape(extents))
            dim += wide - 1
        dim += 1
        if sum(i is None for i in index) > 2:
            break
    return x, tuple(index), repeats


def _to_device(index: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(i.to(DEVICE) if isinstance(i, torch.Tensor) else i for i in index)


def _result(x: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor | None:
    try:
        return x[index]
    except (IndexError, RuntimeError):
        return None  # a mask and a tensor whose counts do not broadcast


@settings(max_examples=60, deadline=None, derandomize=True)
@given(expressions())
def test_reads_and_writes_equal_cpu(case: tuple[torch.Tensor, tuple[Any, ...], bool]) -> None:
    """``x[i]``, ``x[i] = number``, ``x[i] = tensor``, ``x[i] += 1`` and the gradient of ``x[i]``."""
    x, index, repeats = case
    expected = _result(x, index)
    on_device, device_index = x.to(DEVICE), _to_device(index)
    if expected is None:
        with pytest.raises((IndexError, RuntimeError)):
            on_device[device_index]
        return
    assert_same(on_device[device_index], expected, what=f"x[{index}]")
    for value in (7.0, torch.arange(float(expected.numel())).reshape(expected.shape)):
        if isinstance(value, torch.Tensor) and repeats:
            continue  # which of several values stays is not defined
        want, got = x.clone(), x.to(DEVICE)
        want[index] = value
        got[device_index] = value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        assert_same(got, want, what=f"x[{index}] = …")
    want, got = x.clone(), x.to(DEVICE)
    want[index] += 1
    got[device_index] += 1
    assert_same(got, want, what=f"x[{index}] += 1")
    if not any(isinstance(i, torch.Tensor) for i in index):
        return
    leaf, device_leaf = x.clone().requires_grad_(), x.to(DEVICE).requires_grad_()
    weight = torch.arange(1.0, expected.numel() + 1).reshape(expected.shape)
    (leaf[index] * weight).sum().backward()
    (device_leaf[device_index] * weight.to(DEVICE)).sum().backward()
    assert_same(device_leaf.grad, leaf.grad, what=f"gradient of x[{index}]")


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.integers(1, 4),
    st.lists(st.integers(-4, 3), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
def test_accumulating_adds_every_repeat(width: int, places: list[int], dtype: torch.dtype) -> None:
    """``index_put_(accumulate=True)`` with repeated places."""
    x = torch.ones(4, width).to(dtype)
    index = torch.tensor(places)
    values = (torch.arange(len(places) * width) % 5).reshape(len(places), width).to(dtype)
    expected = x.clone().index_put_((index,), values, accumulate=True)
    actual = x.to(DEVICE).index_put_((index.to(DEVICE),), values.to(DEVICE), accumulate=True)
    assert_same(actual, expected, what=f"index_put_ at {places}")


# ------------------------------------------------------------------------------------------- masks and wrong indices


def test_mask_of_another_shape_raises() -> None:
    """PyTorch's own IndexError."""
    with pytest.raises(IndexError, match=r"The shape of the mask \[3\] at index 0 does not match"):
        torch.ones(2, 3, device=DEVICE)[torch.tensor([True, False, True], device=DEVICE)]


def test_one_value_through_a_mask_reads_no_count() -> None:
    """``x[mask] = v`` is a masked fill: nothing waits for the device."""
    from emutpu.backend.kernels import op_counts

    x, mask = torch.arange(6.0, device=DEVICE), torch.tensor([True, False] * 3, device=DEVICE)
    before = op_counts().get("aten.nonzero", 0)
    x[mask] = -1
    assert x.cpu().tolist() == [-1, 1, -1, 3, -1, 5]
    assert op_counts().get("aten.nonzero", 0) == before


def test_two_masks_are_refused_as_on_the_device() -> None:
    """The device's index() takes one bool tensor at most."""
    mask = torch.tensor([True, False], device=DEVICE)
    with pytest.raises(NotImplementedError, match=r"index\(\)"):
        torch.ones(2, 2, device=DEVICE)[mask, mask]


def test_bytes_are_masks() -> None:
    """uint8 indices select as bool ones do."""
    x = torch.arange(4.0)
    mask = torch.tensor([1, 0, 1, 0], dtype=torch.uint8)
    with pytest.warns(UserWarning, match="indexing with dtype torch.uint8 is now deprecated"):
        expected = x[mask]
    with pytest.warns(UserWarning, match="indexing with dtype torch.uint8 is now deprecated"):
        actual = x.to(DEVICE)[mask.to(DEVICE)]
    assert_same(actual, expected, what="uint8 mask")


CHECKED = {
    "index": lambda x, i: x[i],
    "index_put": lambda x, i: x.index_put((i,), torch.ones(1, 3, device=DEVICE)),
    "index_put_": lambda x, i: x.index_put_((i,), torch.ones(1, 3, device=DEVICE)),
    "index_select": lambda x, i: x.index_select(0, i),
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(1, 3, device=DEVICE)),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(1, 3, device=DEVICE)),
    "index_fill": lambda x, i: x.index_fill(0, i, 1),
    "gather": lambda x, i: x.gather(0, i.reshape(1, 1)),
    "scatter": lambda x, i: x.scatter(0, i.reshape(1, 1), 1.0),
    "scatter_add_": lambda x, i: x.scatter_add_(0, i.reshape(1, 1), torch.ones(1, 1, device=DEVICE)),
    "take": lambda x, i: x.take(i + 5),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
}


@pytest.mark.parametrize("name", CHECKED)
def test_out_of_range_raises_with_bounds_checks(name: str) -> None:
    """An IndexError that names the op, the index and the line."""
    from emutpu.backend import options

    x, index = torch.ones(2, 3, device=DEVICE), torch.tensor([4], device=DEVICE)
    with options.override(bounds_checks=True):
        CHECKED[name](x, torch.tensor([1], device=DEVICE)) if name != "take" else x.take(index)
        with pytest.raises(IndexError, match=rf"^{name}\(\): index \d is out of bounds .*\n.*test_index_expressions"):
            CHECKED[name](x, index)


def test_out_of_range_is_unchecked_by_default() -> None:
    """As on the device: gathers clamp, scatters drop, and nothing raises."""
    x, index = torch.arange(3.0, device=DEVICE), torch.tensor([7], device=DEVICE)
    assert x[index].cpu().tolist() == [2.0]
    assert x.index_put((index,), torch.tensor(9.0, device=DEVICE)).cpu().tolist() == [0.0, 1.0, 2.0]


def test_indices_that_the_host_knows_are_always_checked() -> None:
    """A CPU tensor of indices costs nothing to look at."""
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        torch.arange(3.0, device=DEVICE)[torch.tensor([7])]


# ------------------------------------------------------------------------------------------------- field cases


def test_two_dimensional_mask_on_trailing_dimensions() -> None:
    """torch_tpu#4160: raised a broadcast error."""
    x = torch.arange(24.0).view(2, 3, 2, 2)
    mask = torch.tensor([[True, False], [False, True]])
    assert_same(x.to(DEVICE)[:, :, mask.to(DEVICE)], x[:, :, mask], what="x[:, :, mask]")


def test_multinomial_respects_the_seed() -> None:
    """torch_tpu#4142."""
    weights = torch.ones(50, device=DEVICE)
    torch.manual_seed(3)
    first = torch.multinomial(weights, 10).cpu()
    torch.manual_seed(3)
    assert torch.equal(first, torch.multinomial(weights, 10).cpu())


def test_as_strided_of_a_slice() -> None:
    """pytorch/xla#7859: offset None and 0 differ."""
    tail = torch.arange(1, 6, device=DEVICE)[2:]
    assert tail.as_strided((2,), (1,)).tolist() == [3, 4]
    assert tail.as_strided((4,), (1,), 0).tolist() == [1, 2, 3, 4]
    assert tail.unsqueeze(0).tolist() == [[3, 4, 5]]
    tail.as_strided_((2,), (2,), 0)
    assert tail.tolist() == [1, 3]


def test_overlapping_windows() -> None:
    """pytorch/xla#5835."""
    assert torch.arange(1, 6, device=DEVICE).as_strided((2, 3), (2, 1), 0).tolist() == [[1, 2, 3], [3, 4, 5]]


def test_indexing_keeps_uint8() -> None:
    """pytorch/xla#592."""
    x = torch.tensor([3, 1, 2], dtype=torch.uint8, device=DEVICE)
    assert x[torch.tensor([0, 2], device=DEVICE)].dtype == torch.uint8


def test_cat_promotes() -> None:
    """pytorch/xla#3608."""
    joined = torch.cat([torch.ones(2, dtype=torch.int64, device=DEVICE), torch.ones(2, device=DEVICE)])
    assert joined.dtype == torch.float32


def test_list_index_keeps_its_place() -> None:
    """pytorch/xla#606: came out transposed."""
    x = torch.arange(105.0).view(5, 7, 3)
    assert_same(x.to(DEVICE)[:, [0, 4, 2]], x[:, [0, 4, 2]], what="x[:, list]")


def test_index_copy_of_a_wrong_length() -> None:
    """pytorch/xla#6508: passed silently."""
    index = torch.tensor([0, 4, 2, 1], device=DEVICE)
    with pytest.raises(IndexError):
        torch.zeros(5, 3, device=DEVICE).index_copy_(0, index, torch.ones(3, 3, device=DEVICE))


def test_using_what_nonzero_found() -> None:
    """pytorch/xla#2602."""
    boxes = torch.tensor([[0.0, 0.0, 3.0, 2.0], [1.0, 1.0, 2.0, 2.0]], device=DEVICE)
    kept = ((boxes[:, 2] - boxes[:, 0]) >= 1.2).nonzero().squeeze(1)
    assert boxes[kept].tolist() == [[0.0, 0.0, 3.0, 2.0]]


def test_accumulate_with_repeats() -> None:
    """pytorch/pytorch#61034: only the last repeat was kept."""
    x = torch.ones(5, device=DEVICE)
    x.index_put_((torch.tensor([0, 4, 2, 2, 4], device=DEVICE),), torch.ones(5, device=DEVICE), accumulate=True)
    assert x.tolist() == [2, 1, 3, 1, 3]


def test_gradient_of_an_integer_twice() -> None:
    """TorchTPU 0.2.0 gets the gradient of ``x[:, i, :, i]`` wrong."""
    x = torch.randn(2, 3, 4, 3, generator=torch.Generator().manual_seed(0))
    leaf, device_leaf = x.clone().requires_grad_(), x.to(DEVICE).requires_grad_()
    for index in (1, torch.tensor([0, 2])):
        leaf.grad = device_leaf.grad = None
        leaf[:, index, :, index].pow(2).sum().backward()
        on_device = index.to(DEVICE) if isinstance(index, torch.Tensor) else index
        device_leaf[:, on_device, :, on_device].pow(2).sum().backward()
        assert_same(device_leaf.grad, leaf.grad, what="gradient of x[:, i, :, i]")


def test_writing_one_element() -> None:
    """tinygrad/tinygrad#10464 and torch-spyre/torch-spyre#2816."""
    weight = torch.zeros(2, 2, 1, 1, device=DEVICE)
    weight[0, 1, 0, 0] = 3
    assert weight.flatten().tolist() == [0, 3, 0, 0]
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], device=DEVICE)
    x[2].copy_(torch.tensor(1.0, device=DEVICE))
    assert x.tolist() == [1, 2, 1, 4]
