"""Every family of rules against CPU PyTorch: one bound, sizes below it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bounded import Bounded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._higher_order_ops.scan import scan

Make = Callable[[int, torch.Generator], Sequence[torch.Tensor]]


def floats(*shape: int | None) -> Make:
    """One tensor of normal numbers; None is the size."""
    return lambda size, g: [torch.randn([size if n is None else n for n in shape], generator=g)]


def both(*makes: Make) -> Make:
    """Several tensors."""
    return lambda size, g: [tensor for make in makes for tensor in make(size, g)]


def integers(high: int | None, *shape: int | None) -> Make:
    """One tensor of indices below ``high`` (None: the size)."""
    return lambda size, g: [
        torch.randint(0, size if high is None else high, [size if n is None else n for n in shape], generator=g)
    ]


def permutation(size: int, g: torch.Generator) -> Sequence[torch.Tensor]:
    """All indices, in some order."""
    return [torch.randperm(size, generator=g)]


def _ends(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Where the rows of each expert end, once they are sorted by expert."""
    return torch.histc(experts.float(), count, min=0, max=count - 1).cumsum(0, dtype=torch.int32)


def _filled(x: torch.Tensor, chosen: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``x`` with elements of ``source``, in their order, where another tensor is positive."""
    return (x * 2).masked_scatter(chosen > 0, source) * 3


X = floats(3, None)
Y = floats(2, None, 4)
SQUARE = floats(2, None, None)

# name: (function, arguments, dynamic dimension of each)
SMOOTH: dict[str, tuple[Callable[..., Any], Make, list[int | tuple[int, ...] | None]]] = {
    "pointwise": (lambda x: (x.exp() * 2 - x.sigmoid()).clamp(-1, 3), X, [1]),
    "broadcast": (lambda x, y: x + y.unsqueeze(1) * 2, both(floats(None), floats(3)), [0, None]),
    "size as a number": (lambda x: x * x.shape[1] + x.shape[1] / 2, X, [1]),
    "sum": (lambda x: (x.exp().sum(), x.exp().sum(1), x.sum(0), x.exp().sum(1, keepdim=True)), X, [1]),
    "mean": (lambda x: (x.mean(), (x + 1).mean(1), x.mean(0), (x - 2).mean(-1, keepdim=True)), X, [1]),
    "prod": (lambda x: ((x + 2).prod(1), x.prod(0)), X, [1]),
    "extremes": (lambda x: ((x - 9).amax(1), (x + 9).amin(1), (x - 9).max(1)[0], (x + 9).min(1)[0], (x - 9).max()), X, [1]),
    "variance": (lambda x: (x.var(1), x.std(1, correction=0), x.exp().var(), *torch.var_mean(x, 1, keepdim=True)), X, [1]),
    "norms": (lambda x: ((x + 1).norm(dim=1), x.exp().norm(p=3), x.norm(p=float("inf"), dim=1)), X, [1]),
    "logsumexp": (lambda x: (x - 5).logsumexp(1), X, [1]),
    "softmax": (lambda x: ((x - 9).softmax(1), (x - 9).log_softmax(1), x.softmax(0)), X, [1]),
    "cumsum": (lambda x: (x.cumsum(1), x.cumsum(0), x.logcumsumexp(1)), X, [1]),
    "cumulative extremes": (lambda x: (x.cummax(1)[0], x.cummin(1)[0]), X, [1]),
    "written with a step": (lambda x, y: torch.slice_scatter(x, y * 2, 1, 1, 6, 2), both(floats(None, 6), floats(None, 3)), [0, 0]),
    "groups of rows": (lambda x, w, n: F.grouped_mm(x, w, offs=_ends(n, 3)), both(floats(None, 4), floats(3, 4, 8), integers(3, None)), [0, None, 0]),
    "sort": (lambda x: (x.sort(1)[0], (x - 9).sort(1, descending=True)[0], x.topk(2, 1)[0], (x + 9).topk(2, 1, largest=False)[0]), X, [1]),
    "views": (
        lambda y: (y.transpose(1, 2) * 2, y.reshape(-1).exp(), y.flatten(0, 1).sum(0), y.view(2, -1).softmax(1), y.unsqueeze(1).squeeze(0)),
        Y,
        [1],
    ),
    "runs": (lambda y: (y.flatten(0, 1).softmax(0), y.permute(1, 0, 2).flatten(0, 1).cumsum(0), y.flatten(0, 1)[1:]), Y, [1]),
    "regroup": (lambda y: y.transpose(1, 2).reshape(-1, y.shape[1]).mean(1), Y, [1]),
    "views of what was computed": (lambda x: ((x + 1)[1:], (x * 2)[:, 0], (x * 3).T, (x * 4)[:, -1]), X, [1]),
    "views of an argument": (lambda y: (y.flatten(0, 1)[1:], y[:, 1], y.transpose(0, 1)[-1], y.exp()), Y, [1]),
    "reshape across": (lambda y: (torch.arange(2 * y.shape[1], device=y.device).view(2, y.shape[1], 1) * y).flatten(0, 1), Y, [1]),
    "expand": (lambda x, y: y.expand(3, x.shape[1]) * x, both(X, floats(3, 1)), [1, None]),
    "repeat": (lambda x: (x.repeat(2, 1).sum(1), x.repeat(1, 2).softmax(1)), X, [1]),
    "select": (lambda x: (x[:, 0], x[:, -1], x[:, 1] * 2), X, [1]),
    "slice": (lambda x: (x[:, 1:], x[:, :-1] * 2, x[:, -2:], x[1:].sum(1)), X, [1]),
    "pad": (lambda x: (F.pad(x, (2, 1)).cumsum(1), F.pad(x, (1, 0, 1, 0), value=3.0)), X, [1]),
    "cat": (lambda x, y: (torch.cat([x, y, x * 2], 1).softmax(1), torch.cat([x, x], 0).sum(1)), both(X, floats(3, 2)), [1, None]),
    "parts": (lambda x: (*(x * 2).split([1, x.shape[1] - 1], 1), *(x + 1).split([1, x.shape[1] - 3, 2], 1), x.split(2)[1].sum(1)), X, [1]),
    "stack": (lambda x: (torch.stack([x, -x]).sum(2), torch.stack([x, x * 2], -1)), X, [1]),
    "flip and roll": (lambda x: (x.flip(1).cumsum(1), x.roll(1, 1), x.roll(-1, 0), x.flip(0)), X, [1]),
    "triangles": (lambda x: (x.tril().sum(2), x.triu(1).sum(1)), SQUARE, [(1, 2)]),
    "matmul": (lambda x, w: ((x + 2) @ w, (x + 1) @ x.T, x.exp().T @ (x - 3)), both(X, floats(None, 4)), [1, 0]),
    "batched matmul": (lambda y: ((y + 1).transpose(1, 2) @ (y - 1), y @ y.transpose(1, 2)), Y, [1]),
    "batch is dynamic": (lambda y: y.transpose(0, 1) @ torch.ones(4, 3, device=y.device), Y, [1]),
    "vectors": (lambda x, v: (x @ (v + 1), (v + 1) @ v.exp()), both(X, floats(None)), [1, 0]),
    "linear": (lambda y, w, b: F.linear(y, w, b).relu(), both(Y, floats(5, 4), floats(5)), [1, None, None]),
    "linear to a number": (lambda y, w: F.linear(y, w).relu(), both(Y, floats(4)), [1, None]),
    "linear to a number over it": (lambda x, w: F.linear(x.exp(), w + 1), both(X, floats(None)), [1, 0]),
    "linear over it": (lambda x, w: F.linear(x.exp(), w + 1), both(X, floats(5, None)), [1, 1]),
    "einsum": (lambda y: torch.einsum("bsd,bte->bde", y.exp(), y), Y, [1]),
    "layer norm": (lambda y, w, b: F.layer_norm(y, [4], w, b), both(Y, floats(4), floats(4)), [1, None, None]),
    "rms norm": (lambda y, w: F.rms_norm(y, [4], w), both(Y, floats(4)), [1, None]),
    "batch norm": (lambda y, w, b: F.batch_norm(y, None, None, w, b, training=True), both(floats(2, 4, None), floats(4), floats(4)), [2, None, None]),
    "group norm": (lambda y: F.group_norm(y.transpose(1, 2), 2), Y, [1]),
    "convolution": (lambda y, w, b: F.conv1d((y + 1).transpose(1, 2), w, b, padding=1), both(Y, floats(5, 4, 3), floats(5)), [1, None, None]),
    "strided convolution": (lambda y, w: F.conv1d((y + 1).transpose(1, 2), w, stride=2, padding=2), both(Y, floats(5, 4, 3)), [1, None]),
    "transposed convolution": (lambda y, w, b: F.conv_transpose1d((y + 1).transpose(1, 2), w, b, stride=2, padding=1, output_padding=1), both(Y, floats(4, 6, 3), floats(6)), [1, None, None]),
    "transposed convolution of a batch": (lambda y, w, b: F.conv_transpose1d((y + 1).transpose(0, 1), w, b), both(Y, floats(2, 3, 3), floats(3)), [1, None, None]),
    "embedding": (lambda w, i: F.embedding(i, w).cumsum(1), both(floats(9, 4), integers(9, 2, None)), [None, 1]),
    "index select": (lambda x, i: x.index_select(1, i), both(X, integers(None, 5)), [1, None]),
    "indices are dynamic": (lambda x, i: (x[:, i], x[i % 3]), both(floats(3, 9), integers(9, None)), [None, 0]),
    "both are dynamic": (lambda x, i: (x[:, i], x[:, -1 - i]), both(X, permutation), [1, 0]),
    "gather": (lambda x, i: x.gather(1, i), both(X, integers(None, 3, None)), [1, 1]),
    "scatter add": (lambda x, i: torch.zeros(3, 9, device=x.device).scatter_add(1, i, x), both(X, integers(9, 3, None)), [1, 1]),
    "scatter": (lambda x, i: torch.zeros_like(x).scatter(1, i.expand(3, -1), x), both(X, permutation), [1, 0]),
    "index put": (lambda x, i: (x * 1).index_put((i[:2],), x[0].new_ones(())), both(floats(None, 3), permutation), [0, 0]),
    "index put all": (lambda x, i: torch.zeros_like(x).index_put((i,), x * 2), both(floats(None, 3), permutation), [0, 0]),
    "index add": (lambda x, i: torch.zeros(9, 3, device=x.device).index_add(0, i, x), both(floats(None, 3), integers(9, None)), [0, 0]),
    "masks": (lambda x, y: x.masked_fill(y > 0, -3.0).softmax(1) + torch.where(y > 0, x, y), both(X, X), [1, 1]),
    "losses": (
        lambda x, t: (F.cross_entropy(x.T, t), F.cross_entropy(x.T, t, ignore_index=1, reduction="sum"), F.mse_loss(x, x.exp()), F.smooth_l1_loss(x, -x), F.binary_cross_entropy_with_logits(x, x.sigmoid())),
        both(X, integers(3, None)),
        [1, 0],
    ),
    "scan": (lambda x, w: scan(lambda c, v: ((c[0] * w.sigmoid() + v, c[1] + 1), (c[0] * v).sin()), (x[0] * 0, w * 1), x * 1), both(floats(None, 3), floats(3)), [0, None]),
    "scan from the end": (lambda x, w: scan(lambda c, v: (c * w.tanh() + v, c * 2), w * 1, x * 1, reverse=True), both(floats(None, 3), floats(3)), [0, None]),
    "recurrent batch": (lambda x, h, w, v, b: torch.lstm(x, (h * 1, h * 2), [w, v, b, b + 1], True, 1, 0.0, False, False, False), both(floats(3, None, 4), floats(1, None, 3), floats(12, 4), floats(12, 3), floats(12)), [1, 1, None, None, None]),
    "parts of an argument": (lambda x, w: torch.stack([(part @ w).sin() for part in x.unbind(0)]), both(floats(2, None, 4), floats(4, 3)), [1, None]),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k.exp()), both(floats(2, 2, 5, 4), floats(2, 2, None, 4)), [None, 2]),
    "causal attention": (lambda q: F.scaled_dot_product_attention(q, q.exp(), q + 1, is_causal=True), floats(2, 2, None, 4), [2]),
    "attention with a bias": (lambda q, m: F.scaled_dot_product_attention(q, q.exp(), q + 1, attn_mask=m), both(floats(2, 2, None, 4), floats(2, 1, None, None)), [2, (2, 3)]),
    "attention by hand": (lambda y: ((y @ y.transpose(1, 2)) / 2).softmax(-1) @ y, Y, [1]),
    "pooling": (lambda x: (F.avg_pool2d(x * 1, 2), F.max_pool2d(x * 1, 3, 2, 1), F.adaptive_avg_pool2d(x * 1, 3), F.avg_pool1d(x[:, 0] * 1, 2)), floats(None, 2, 6, 6), [0]),
    "averages along it": (lambda x: (F.avg_pool1d(x * 1, 3, 2, 1), F.avg_pool1d(x * 1, 2), F.avg_pool2d(x * 1, 3, 2, 1, count_include_pad=False), F.avg_pool2d(x * 1, 2, divisor_override=3)), floats(2, 6, None), [2]),
    "extremes along it": (lambda x: (F.max_pool2d(x * 1, 2), F.max_pool2d(x.transpose(1, 2) - 9, 3, 2, 1), F.max_pool2d(x * 1, 2, 1, dilation=2)), floats(2, 6, None), [2]),
    "volumes along it": (lambda x: (F.avg_pool3d(x * 1, 2), F.max_pool3d(x - 9, 2)), floats(1, 4, None, 3), [2]),
    "adaptive pooling": (lambda x: (F.adaptive_avg_pool1d(x + 1, 1), F.adaptive_avg_pool2d(x * 1, (4, 3)), F.adaptive_max_pool1d(x - 9, 1), F.adaptive_max_pool2d(x - 9, (4, 3))), floats(2, 6, None), [2]),
    "resampling": (lambda x: (F.interpolate(x * 1, scale_factor=2, mode="bilinear"), F.interpolate(x * 1, scale_factor=2), F.pad(x * 1, (1, 1, 1, 1), mode="reflect")), floats(None, 2, 4, 4), [0]),
    "windows": (lambda x: ((x * 1).unfold(2, 2, 2) * 2, (x * 1).diagonal(0, 2, 3) * 2, F.unfold(x * 1, 2)), floats(None, 2, 4, 4), [0]),
    "windows along it": (lambda x: ((x * 1).unfold(1, 2, 1) * 2, x.exp().unfold(1, 2, 3).sum(2)), X, [1]),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x.exp()) * torch.polar(x[..., 0], x[..., 1])), floats(2, None, 2), [1]),
    "elements for places": (_filled, both(X, floats(3, None), floats(36)), [1, 1, None]),
    "elements from runs": (lambda x, m, y: _filled(x, m, y.exp().reshape(-1)), both(floats(2, None), floats(2, None), floats(2, None)), [1, 1, 1]),
    "elements from it": (lambda x, m, y: _filled(x, m, y.exp()), both(floats(None, 2), floats(None, 1), floats(None, 3)), [0, 0, 0]),
    "arange": (lambda x: (x * torch.arange(x.shape[1], device=x.device), torch.arange(1, 2 * x.shape[1], 2, device=x.device).float()), X, [1]),
    "factories": (lambda x: (torch.zeros(x.shape[1], 2, device=x.device), torch.full_like(x, 2.0).sum(), x.new_ones(x.shape[1]).sum() * x.sum()), X, [1]),
}  # fmt: skip

WHOLE: dict[str, tuple[Callable[..., Any], Make, list[int | tuple[int, ...] | None]]] = {
    "places": (lambda x: (x.argmax(1), (x + 9).argmin(1), x.argmax(), (x - 9).max(1)[1], x.argmax(0)), X, [1]),
    "order": (lambda x: (x.argsort(dim=1, stable=True), (x - 9).sort(1, descending=True)[1], (x + 9).topk(2, 1)[1]), X, [1]),
    "as many as the size says": (lambda x: ((x + 9).topk(x.shape[1], 1), (x - 9).topk(x.shape[1] - 1, 1, largest=False)), X, [1]),
    "as many of others": (lambda x, y: (y + 9).topk(x.shape[1] - 1, 1), both(X, floats(3, 12)), [1, None]),
    "search": (lambda x, v: (torch.searchsorted(x.sort(1)[0], v), torch.searchsorted(x.sort(1)[0], v * 0 + 99, right=True, out_int32=True)), both(X, floats(3, 4)), [1, None]),
    "places of extremes": (lambda x: (F.max_pool2d(x, 3, 2, 1, return_indices=True), F.adaptive_max_pool2d(x * 1, (2, 3), return_indices=True)), floats(2, 6, None), [2]),
    "filled with it": (lambda x: (torch.full_like(x, x.shape[1]), x.new_full((2,), x.shape[1] + 1)), X, [1]),
    "histogram": (lambda x, i: (torch.histc(x, 5, min=-1, max=1), torch.histc(i.float(), 4, min=0, max=3)), both(X, integers(4, 3, None)), [1, 1]),
    "whether any": (lambda x: ((x > -9).all(), (x > 9).any(1), (x > 0).sum(1), x.count_nonzero()), X, [1]),
    "integers": (lambda i: (i.sum(1), i.amax(1), (i - 20).amax(1), i.amin(), i.cumsum(1), i.sort(1)[0], i.prod(1)), integers(5, 3, None), [1]),
    "not a number": (lambda x: (x.sort(1)[0], x.amax(1), x.sort(1, descending=True)[0], x.argmax(1)), lambda s, g: [torch.randn(3, s, generator=g).index_fill(1, torch.tensor([1]), float("nan"))], [1]),
    "infinite": (lambda x: (x.sort(1)[1], x.amax(1), x.cumsum(1)), lambda s, g: [torch.full((3, s), -float("inf"))], [1]),
    "shapes": (lambda x: (x.shape[1] * 2, x[:, 1:].shape[1], x * 2), X, [1]),
    "one hot": (lambda i: F.one_hot(i, 5), integers(5, None), [0]),
    "bf16": (lambda x: (x.mean(1), x.sum(), x.softmax(1), x.amax(1)), lambda s, g: [torch.randint(-3, 3, (3, s), generator=g).bfloat16() / 4], [1]),
}  # fmt: skip

# PyTorch assumes of a dimension that its extent is not 1: some functions ask that of `size - 1` too.
LEAST = {"prod": 3, "slice": 3, "as many as the size says": 3, "as many of others": 3} | dict.fromkeys(
    (
        "windows along it",
        "parts",
        "averages along it",
        "extremes along it",
        "volumes along it",
        "adaptive pooling",
        "places of extremes",
    ),
    5,
)


def checks(name: str, *, gradients: bool) -> Bounded:
    """The compiled function of a case."""
    function, make, dims = (SMOOTH if gradients else WHOLE)[name]
    return Bounded(function, make, dims, gradients=gradients, least=LEAST.get(name, 2))


@pytest.mark.parametrize("name", SMOOTH)
def test_values_and_gradients(name: str) -> None:
    """Values and gradients equal the CPU's at every size, from one pair of executables."""
    case = checks(name, gradients=True)
    _over_sizes(case)
    assert len(case.graphs) <= 2


@pytest.mark.parametrize("name", WHOLE)
def test_values(name: str) -> None:
    """Results without gradients equal the CPU's at every size, from one executable."""
    case = checks(name, gradients=False)
    _over_sizes(case)
    assert len(case.graphs) == 1


def _over_sizes(case: Bounded) -> None:
    @settings(max_examples=6, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.integers(case.least, case.most), st.integers(0, 99))
    def run(size: int, seed: int) -> None:
        case.check(size, seed)

    case.check(5)
    run()
    case.check(case.most)
    case.check(case.least)
