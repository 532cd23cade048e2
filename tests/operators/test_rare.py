"""Ops that few programs call, against CPU PyTorch or, where the CPU has none, against their definition."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, check_forward, check_inplace, highest
from torch.nn.functional import ScalingType

from emutpu.backend.runtime import runtime

generator = torch.Generator().manual_seed(0)
X = torch.randn(2, 3, 4, 4, generator=generator)
aten = torch.ops.aten


def _both(function: Callable[..., Any], *tensors: torch.Tensor, tolerance: tuple[float, float] | None = None) -> None:
    with highest():
        actual = function(*(t.to("tpu") for t in tensors))
    assert_same(actual, function(*tensors), what="hand-written case", tolerance=tolerance)


def _gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        function(leaf).square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    return run


# ------------------------------------------------------------------------------------------- elementwise


def test_shifts_in_place() -> None:
    """``<<=`` and ``>>=`` by a tensor and by a number."""
    x = torch.arange(5) * 7
    _both(lambda t: t.clone().__ilshift__(2), x)
    _both(lambda t, s: t.clone().__irshift__(s), x, torch.arange(5))


def test_add_relu() -> None:
    """The sum, rectified; in place and with a factor."""
    _both(lambda a, b: torch._add_relu(a, b, alpha=2), X, X.flip(0))
    _both(lambda a, b: aten._add_relu_.Tensor(a.clone(), b), X, X.flip(0))
    _both(lambda a: torch._add_relu(a, 0.5), X)


def test_least_common_multiple() -> None:
    """Zeros, signs and every integer dtype."""
    for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8):
        check_forward("lcm", dtype, limit=3)
    check_inplace("lcm", torch.int64, limit=2)
    _both(torch.lcm, torch.tensor([4, 6, 0, -8, 7]), torch.tensor([6, 4, 5, 12, 0]))


@pytest.mark.parametrize("p", [0, 1, 1.5, 2, 3.5, float("inf")])
def test_pairwise_distances(p: float) -> None:
    """All pairs of rows, and their gradient; one row has no pair."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    _both(lambda t: F.pdist(t, p), x)
    _both(_gradient(lambda t: F.pdist(t, p)), x, tolerance=(1e-4, 2e-5))
    _both(lambda t: F.pdist(t, p), x[:1])


def test_polygamma_left_of_zero() -> None:
    """Higher derivatives at negative arguments, and their poles."""
    x = torch.tensor([-8.478, -3.3, -0.25, 0.3, 2.5, 0.0, -2.0])
    for order in (2, 3, 4):
        _both(lambda t, order=order: torch.polygamma(order, t), x, tolerance=(1e-4, 2e-5))


def test_complex_conjugate_into() -> None:
    """``out=`` of a composite op."""
    _both(lambda t: torch.conj_physical(t, out=torch.empty_like(t)), torch.complex(X, X))
    _both(lambda t: aten.adaptive_avg_pool2d.out(t, [2, 2], out=t.new_empty(0)), X)


def test_foreach_erfc() -> None:
    """The device has it for lists alone."""
    _both(lambda a, b: torch._foreach_erfc([a, b]), X, X * 2)
    with pytest.raises(NotImplementedError, match="erfc"):
        torch.erfc(X.to("tpu"))


# -------------------------------------------------------------------------------------- softmax and norms


@pytest.mark.parametrize(("kind", "shape"), [(0, (4, 4)), (1, (2, 4)), (2, (2, 3, 4, 4))])
def test_masked_softmax(kind: int, shape: tuple[int, ...]) -> None:
    """The three kinds of mask, a row without anything left among them, and the gradient."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5
    mask[0] = True
    _both(lambda x, m: torch._masked_softmax(x, m, 3, kind), X, mask)
    mask[0] = False
    _both(lambda x, m: torch._masked_softmax(x, m, 3, kind), X, mask)
    if kind == 2:
        _both(lambda x, m: aten._masked_softmax_backward(x, torch._masked_softmax(x, m, 3, 2), m, 3), X, mask)
        _both(lambda x, m: torch._masked_softmax(x.bfloat16(), m, 1, 2), X, mask)


def test_rms_norm_backward() -> None:
    """The fused gradient equals that of the composition."""
    x, weight, grad = X[0, :, 0], X[0, 0, 1], X[1, :, 0]
    leaf, gain = x.clone().requires_grad_(), weight.clone().requires_grad_()
    F.rms_norm(leaf, (4,), gain, 1e-5).backward(grad)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    given = [t.to("tpu") for t in (grad, x, scale, weight)]
    actual = aten._fused_rms_norm_backward(given[0], given[1], [4], given[2], given[3], [True, True])
    assert_same(list(actual), [leaf.grad, gain.grad], what="rms_norm")


def test_linear_backward() -> None:
    """Three gradients in one launch, and only those that are asked for."""
    x, weight, grad = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(2, 3, 5)
    leaves = [t.clone().requires_grad_() for t in (x, weight, torch.zeros(5))]
    F.linear(*leaves).backward(grad)
    with highest():
        given = [t.to("tpu") for t in (x, grad, weight)]
        assert_same(
            list(aten.linear_backward(*given, [True] * 3)), [t.grad for t in leaves], what="", tolerance=(1e-4, 1e-4)
        )
        assert aten.linear_backward(*given, [False, True, False])[0] is None


def test_batch_norm_without_momentum() -> None:
    """A cumulative average changes its momentum every step: an input, not another module."""
    norm = torch.nn.BatchNorm1d(4, momentum=None).to("tpu")
    reference = torch.nn.BatchNorm1d(4, momentum=None)
    # The count of batches is read, and with it DEFER_AND_FUSE computes the step before: its first one with the second.
    new = 2 if torch.tpu.eager_mode is torch.tpu.EagerMode.DEFER_AND_FUSE else 1
    for step in range(5):
        misses = runtime().cache.misses
        x = torch.randn(3, 4)
        norm(x.to("tpu"))
        reference(x)
        assert step < new or runtime().cache.misses == misses
    assert_same(norm.running_var, reference.running_var, what="running_var")


# ------------------------------------------------------------------------------------- segments, quantisation


@pytest.mark.parametrize("initial", [None, 1.5])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "prod"])
def test_segments(reduce: str, initial: float | None) -> None:
    """By lengths and by offsets, empty segments among them."""
    data, lengths = torch.randn(7, 3), torch.tensor([2, 0, 4, 1])
    _both(lambda d, n: torch.segment_reduce(d, reduce, lengths=n, axis=0, initial=initial), data, lengths)
    offsets = torch.tensor([[0, 2, 3, 7], [0, 1, 1, 7]])
    data = torch.randn(2, 7, 3)
    _both(lambda d, o: torch.segment_reduce(d, reduce, offsets=o, axis=1, unsafe=True, initial=initial), data, offsets)


def test_ragged_batches() -> None:
    """To padded rows and back."""
    values, offsets = torch.randn(7, 2), torch.tensor([0, 2, 3, 7])
    _both(lambda v, o: aten._jagged_to_padded_dense_forward(v, [o], [4], -1.0), values, offsets)
    _both(lambda v, o: aten._padded_dense_to_jagged_forward(v, [o], 7), torch.randn(3, 4, 2), offsets)


def test_fake_quantization() -> None:
    """Rounding to a grid, its mask, and the gradient; another scale is the same module."""
    _both(lambda t: aten.fake_quantize_per_tensor_affine_cachemask(t, 0.1, 3, -5, 10), X)
    _both(_gradient(lambda t: torch.fake_quantize_per_tensor_affine(t, 0.1, 3, -5, 10)), X)
    misses = runtime().cache.misses
    aten.fake_quantize_per_tensor_affine_cachemask(X.to("tpu"), 0.2, 3, -5, 10)
    assert runtime().cache.misses == misses


def test_fused_dropout() -> None:
    """``p`` is the chance to stay; kept elements grow by its inverse."""
    kept, mask = torch._fused_dropout(torch.ones(4000, device="tpu"), 0.25)
    assert mask.dtype == torch.uint8
    assert set(kept.tolist()) == {0.0, 4.0}
    assert torch.equal(kept.cpu().ne(0), mask.cpu().bool())
    assert abs(mask.float().mean().item() - 0.25) < 0.05


# ---------------------------------------------------------------------------------------------- assertions


def test_assertions() -> None:
    """Raised at the op, with the caller's message and the line."""
    torch._assert_async(torch.tensor(True, device="tpu"))
    with pytest.raises(RuntimeError, match=r"got zero\n  issued at .*test_rare"):
        torch._assert_async(torch.tensor(0, device="tpu"))
    with pytest.raises(RuntimeError, match="out of range"):
        torch._assert_async(torch.tensor(False, device="tpu"), "out of range")


# ------------------------------------------------------------------------------------- groups, 8-bit floats


def _pieces(offsets: torch.Tensor) -> list[slice]:
    ends = [0, *offsets.tolist()]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_products(dtype: torch.dtype) -> None:
    """Groups of rows, of columns and of the summed dimension, a group of nothing among them; a plain batch."""
    rows, weights = torch.randn(6, 8).to(dtype), torch.randn(3, 8, 5).to(dtype)
    batch, columns, tall = torch.randn(3, 4, 8).to(dtype), torch.randn(8, 6).to(dtype), torch.randn(6, 5).to(dtype)
    offsets = torch.tensor([1, 1, 6], dtype=torch.int32)
    cut = _pieces(offsets)
    cases = [
        (rows, weights, torch.cat([rows[s].float() @ weights[g].float() for g, s in enumerate(cut)])),
        (batch, columns, torch.cat([batch[g].float() @ columns[:, s].float() for g, s in enumerate(cut)], 1)),
        (rows.mT, tall, torch.stack([rows.mT[:, s].float() @ tall[s].float() for s in cut])),
        (batch, weights, batch.float() @ weights.float()),
    ]
    with highest():
        for at, (x, y, expected) in enumerate(cases):
            ends = None if at == 3 else offsets.to("tpu")
            assert_same(F.grouped_mm(x.to("tpu"), y.to("tpu"), offs=ends), expected.to(dtype), what=f"case {at}")


def test_grouped_gradients() -> None:
    """Of both operands, which are grouped products themselves."""
    rows, weights = torch.randn(6, 8), torch.randn(3, 8, 5)
    offsets = torch.tensor([1, 4, 6], dtype=torch.int32)
    leaves = [t.to("tpu").requires_grad_() for t in (rows, weights)]
    plain = [t.clone().requires_grad_() for t in (rows, weights)]
    with highest():
        F.grouped_mm(*leaves, offs=offsets.to("tpu")).square().sum().backward()
    sum((plain[0][s] @ plain[1][g]).square().sum() for g, s in enumerate(_pieces(offsets))).backward()
    assert_same([t.grad for t in leaves], [t.grad for t in plain], what="gradients", tolerance=(1e-4, 1e-4))


def test_scaled_products() -> None:
    """8-bit floats with a scale of the whole and with scales of rows, to the last bit of float32's sums."""
    x, y = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(32, 16).to(torch.float8_e4m3fn)
    exact = x.float() @ y.float()
    left, right = x.to("tpu"), y.t().contiguous().to("tpu").t()
    half = torch.tensor(0.5, device="tpu")
    whole = torch._scaled_mm(left, right, half, half, out_dtype=torch.float32)
    assert_same(whole, exact * 0.25, what="whole")
    rows, columns = torch.rand(16, 1), torch.rand(1, 16)
    scaled = torch._scaled_mm(left, right, rows.to("tpu"), columns.to("tpu"), out_dtype=torch.bfloat16)
    assert_same(scaled, (exact * rows * columns).bfloat16(), what="rows")
    kind = ScalingType.TensorWise
    assert_same(F.scaled_mm(left, right, half, kind, half, kind, output_dtype=torch.float32), exact * 0.25, what="v2")
    with pytest.raises(NotImplementedError, match="use_fast_accum=true is not supported yet"):
        torch._scaled_mm(left, right, half, half, use_fast_accum=True)


def test_attention_under_its_other_name() -> None:
    """What programs for CUDA call, with its gradient."""
    tensors = [torch.randn(1, 2, 8, 16) for _ in range(3)]

    def run(device: str) -> list[torch.Tensor]:
        leaves = [t.to(device).requires_grad_() if device == "tpu" else t.clone().requires_grad_() for t in tensors]
        fused = aten._scaled_dot_product_cudnn_attention
        result = fused(*leaves, None, True)[0] if device == "tpu" else F.scaled_dot_product_attention(*leaves)
        result.sum().backward()
        return [result.detach(), *(t.grad for t in leaves)]

    with highest():
        assert_same(run("tpu"), run("cpu"), what="attention", tolerance=(1e-4, 1e-4))


def test_running_extremes_into() -> None:
    """``_cummax_helper`` writes into what is there."""

    def run(x: torch.Tensor) -> list[torch.Tensor]:
        values, places = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.int64)
        torch._cummax_helper(x, values, places, 3)
        return [values, places]

    _both(run, X)
    _both(lambda x: aten._logcumsumexp(x, 1), X)
