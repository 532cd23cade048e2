"""Pooling windows: maxima with indices, averages, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from emutpu.backend.dtypes import dtype_name, opmath
from emutpu.backend.hlo import Value, lowest
from emutpu.backend.lowering._registry import Context, Emit, lowering

__all__: list[str] = []


def _full(value: Sequence[int], rank: int) -> list[int]:
    return list(value) if len(value) == rank else list(value) * rank


class _Pool:
    """A pooling geometry over the last ``rank`` dimensions of ``x``, written out for all of its dimensions."""

    def __init__(
        self, size: Sequence[int], out: Sequence[int], kernel: Any, stride: Any, padding: Any, dilation: Any, rank: int
    ) -> None:
        lead = len(size) - rank
        self.rank = rank
        self.kernel = [1] * lead + _full(kernel, rank)
        self.stride = [1] * lead + (_full(stride, rank) if len(stride) else self.kernel[lead:])
        self.dilation = [1] * lead + _full(dilation, rank)
        low = [0] * lead + _full(padding, rank)
        self.padding = []
        for n, m, k, s, d, p in zip(size, out, self.kernel, self.stride, self.dilation, low, strict=True):
            # ceil_mode lets the last window hang over the far edge.
            self.padding.append((p, max(0, (m - 1) * s + (k - 1) * d + 1 - n - p)))

    def reduce(self, xs: Sequence[Value], initial: Sequence[Value], body: Any) -> list[Value]:
        return xs[0].builder.reduce_window(
            xs,
            initial,
            body,
            window=self.kernel,
            strides=self.stride,
            padding=self.padding,
            window_dilation=self.dilation,
        )

    def scatter_to_maxima(self, x: Value, grad: Value) -> Value:
        """Each window's ``grad`` added at its maximum in ``x``: the choice that the forward pass made."""
        compute = opmath(x.dtype)
        return x.builder.select_and_scatter(
            x.convert(compute),
            grad.convert(compute),
            keep=lambda held, new: ~((new > held) | new.is_nan()),
            window=self.kernel,
            strides=self.stride,
            padding=self.padding,
        )


def _positions(x: Value, rank: int) -> Value:
    """The flat index of every element within its plane, i32."""
    builder = x.builder
    plane = x.shape[x.ndim - rank :]
    return builder.iota((math.prod(plane),), 0, torch.int32).reshape(plane).broadcast(x.shape)


def _require_float(op: str, x: Value) -> None:
    if not x.dtype.is_floating_point:
        raise NotImplementedError(f"{op}(): not implemented for {dtype_name(x.dtype)}")


def _larger(a: Value, i: Value, b: Value, j: Value) -> list[Value]:
    """The larger one; of equal ones the first, of NaNs the last, as PyTorch's CPU loop leaves them."""
    builder = a.builder
    a_nan, b_nan = a.is_nan(), b.is_nan()
    greater = (b > a) | (b.eq(a) & (j < i))
    take = builder.select(b_nan, ~a_nan | (j > i), greater & ~a_nan)
    return [builder.select(take, b, a), builder.select(take, j, i)]


def _start(x: Value) -> list[Value]:
    builder = x.builder
    return [
        builder.full(lowest(x.dtype), (), x.dtype),
        builder.full(torch.iinfo(torch.int32).max, (), torch.int32),
    ]


def _max_pool(rank: int) -> Emit:
    def emit(
        cx: Context, x: Value, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
    ) -> tuple[Value, Value]:
        _require_float(f"max_pool{rank}d_with_indices", x)
        out = cx.output.size
        if 0 in out:
            return cx.builder.full(0, out, x.dtype), cx.builder.full(0, out, torch.int64)
        pool = _Pool(x.shape, out, kernel_size, stride, padding, dilation, rank)
        values, indices = pool.reduce([x, _positions(x, rank)], _start(x), _larger)
        return values, indices.convert(torch.int64)

    return emit


def _max_pool_backward(rank: int) -> Emit:
    def emit(
        cx: Context,
        grad: Value,
        x: Value,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
        indices: Value,
    ) -> Value:
        pool = _Pool(x.shape, grad.shape, kernel_size, stride, padding, dilation, rank)
        if not grad.numel or any(d != 1 for d in pool.dilation):
            return scatter_planes(cx, grad, indices, x.shape, rank)
        return pool.scatter_to_maxima(x, grad).convert(grad.dtype)

    return emit


def scatter_planes(cx: Context, grad: Value, indices: Value, shape: Sequence[int], rank: int) -> Value:
    """Add every element of ``grad`` at its flat index within its plane of a tensor of zeros of ``shape``."""
    builder = cx.builder
    compute = opmath(grad.dtype)
    lead = len(shape) - rank
    planes, size, outputs = math.prod(shape[:lead]), math.prod(shape[lead:]), math.prod(grad.shape[lead:])
    zeros = builder.full(0, (planes, size), compute)
    if not grad.numel or not zeros.numel:
        return zeros.reshape(shape).convert(grad.dtype)
    flat = indices.reshape((planes, outputs)).convert(torch.int32)
    where = builder.concatenate(
        [builder.iota((planes, outputs, 1), 0, torch.int32), flat.reshape((planes, outputs, 1))], 2
    )
    summed = builder.scatter(
        zeros,
        where,
        grad.convert(compute).reshape((planes, outputs)),
        update_window_dims=(),
        inserted=(0, 1),
        scatter_dims=(0, 1),
        combine=lambda old, new: old + new,
    )
    return summed.reshape(shape).convert(grad.dtype)


# ------------------------------------------------------------------------------------------------- averages


def _divisors(pool: _Pool, size: Sequence[int], out: Sequence[int], include_pad: bool) -> list[np.ndarray[Any, Any]]:
    """Per pooled dimension: how many elements each window counts."""
    counts = []
    for d in range(len(size) - pool.rank, len(size)):
        n, k, s, p = size[d], pool.kernel[d], pool.stride[d], pool.padding[d][0]
        start = np.arange(out[d]) * s - p
        stop = np.minimum(start + k, n + p)
        counts.append(stop - start if include_pad else np.minimum(stop, n) - np.maximum(start, 0))
    return counts


def _divided(
    total: Value, pool: _Pool, size: Sequence[int], out: Sequence[int], include_pad: bool, divisor: int | None
) -> Value:
    if divisor is not None:
        return total / divisor
    counts = _divisors(pool, size, out, include_pad)
    if all((c == c[0]).all() for c in counts):
        return total / math.prod(int(c[0]) for c in counts)
    product = counts[0]
    for c in counts[1:]:
        product = product[..., None] * c
    return total / total.builder.constant(product, total.dtype)


def _avg_pool(rank: int) -> Emit:
    def emit(
        cx: Context,
        x: Value,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        _require_float(f"avg_pool{rank}d", x)
        out, compute = cx.output.size, opmath(x.dtype)
        if 0 in out:
            return cx.builder.full(0, out, x.dtype)
        pool = _Pool(x.shape, out, kernel_size, stride, padding, [1], rank)
        total = pool.reduce([x.convert(compute)], [cx.builder.full(0, (), compute)], Value.__add__)[0]
        return _divided(total, pool, x.shape, out, count_include_pad, divisor_override).convert(x.dtype)

    return emit


def _avg_pool_backward(rank: int) -> Emit:
    def emit(
        cx: Context,
        grad: Value,
        x: Value,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        ceil_mode: bool,
        count_include_pad: bool,
        divisor_override: int | None,
    ) -> Value:
        builder, compute = cx.builder, opmath(grad.dtype)
        if not grad.numel or not x.numel:
            return builder.full(0, x.shape, grad.dtype)
        pool = _Pool(x.shape, grad.shape, kernel_size, stride, padding, [1], rank)
        share = _divided(grad.convert(compute), pool, x.shape, grad.shape, count_include_pad, divisor_override)
        # Every input element sums the windows that cover it: the grads, spread by the stride, under the same window.
        edges = []
        for n, m, k, s, (low, _) in zip(x.shape, grad.shape, pool.kernel, pool.stride, pool.padding, strict=True):
            first = k - 1 - low
            edges.append((first, n - 1 + k - first - ((m - 1) * s + 1)))
        summed = builder.reduce_window(
            [share],
            [builder.full(0, (), compute)],
            Value.__add__,
            window=pool.kernel,
            strides=[1] * x.ndim,
            padding=edges,
            base_dilation=pool.stride,
        )[0]
        return summed.convert(grad.dtype)

    return emit


# ------------------------------------------------------------------------------------------------- adaptive


def _segments(n: int, out: int) -> list[tuple[int, int]]:
    """PyTorch's adaptive windows over ``n`` elements: start and end of each of ``out``."""
    return [(i * n // out, -(-(i + 1) * n // out)) for i in range(out)]


def _reduce_segments(xs: list[Value], dim: int, out: int, reduce: Any) -> list[Value]:
    """Reduce each adaptive window of ``dim`` (``reduce(values, dim)`` drops it): a reshape when windows tile evenly."""
    first = xs[0]
    n = first.shape[dim]
    if n == out:
        return xs
    if n % out == 0:
        shape = (*first.shape[:dim], out, n // out, *first.shape[dim + 1 :])
        return list(reduce([x.reshape(shape) for x in xs], dim + 1))
    pieces = [reduce([x.slice_dim(dim, a, b) for x in xs], dim) for a, b in _segments(n, out)]
    kept = (*first.shape[:dim], 1, *first.shape[dim + 1 :])
    return [first.builder.concatenate([p[i].reshape(kept) for p in pieces], dim) for i in range(len(xs))]


def _adaptive_avg_pool(cx: Context, x: Value, output_size: Sequence[int]) -> Value:
    _require_float(f"adaptive_avg_pool{len(output_size)}d", x)
    out = cx.output.size
    if 0 in out:
        return cx.builder.full(0, out, x.dtype)
    result = x.convert(opmath(x.dtype))
    for dim in range(x.ndim - len(output_size), x.ndim):
        n, m = x.shape[dim], out[dim]
        lengths = np.array([b - a for a, b in _segments(n, m)])
        result = _reduce_segments([result], dim, m, lambda xs, d: [xs[0].sum([d])])[0]
        if n != m:
            lengths = lengths.reshape((m, *[1] * (x.ndim - dim - 1)))
            result = result / cx.builder.constant(lengths, result.dtype)
    return result.convert(x.dtype)


def _adaptive_avg_pool_backward(rank: int) -> Emit:
    def emit(cx: Context, grad: Value, x: Value) -> Value:
        if not grad.numel or not x.numel:
            return cx.builder.full(0, x.shape, grad.dtype)
        result = grad.convert(opmath(grad.dtype))
        for dim in range(x.ndim - rank, x.ndim):
            n, m = x.shape[dim], grad.shape[dim]
            lengths = np.array([b - a for a, b in _segments(n, m)]).reshape((m, *[1] * (x.ndim - dim - 1)))
            result = _spread_segments(result / cx.builder.constant(lengths, result.dtype), dim, n)
        return result.convert(grad.dtype)

    return emit


def _spread_segments(x: Value, dim: int, n: int) -> Value:
    """The transpose of the sum over adaptive windows: every element to all of its window's ``n`` positions."""
    m = x.shape[dim]
    if n == m:
        return x
    after = x.shape[dim + 1 :]
    if n % m == 0:
        wide = (*x.shape[:dim], m, n // m, *after)
        kept = [d for d in range(len(wide)) if d != dim + 1]
        return x.broadcast_in_dim(wide, kept).reshape((*x.shape[:dim], n, *after))
    total = None
    for i, (a, b) in enumerate(_segments(n, m)):
        piece = x.slice_dim(dim, i, i + 1).broadcast((*x.shape[:dim], b - a, *after))
        low, high = [0] * x.ndim, [0] * x.ndim
        low[dim], high[dim] = a, n - b
        padded = piece.pad(low, high)
        total = padded if total is None else total + padded
    assert total is not None
    return total


def _adaptive_max_pool(cx: Context, x: Value, output_size: Sequence[int]) -> tuple[Value, Value]:
    rank = len(output_size)
    _require_float(f"adaptive_max_pool{rank}d", x)
    if 0 in cx.output.size:
        return cx.builder.full(0, cx.output.size, x.dtype), cx.builder.full(0, cx.output.size, torch.int64)
    pair = [x, _positions(x, rank)]
    for dim in range(x.ndim - rank, x.ndim):
        pair = _reduce_segments(
            pair, dim, cx.output.size[dim], lambda xs, d: cx.builder.reduce_many(xs, _start(x), _larger, [d])
        )
    return pair[0], pair[1].convert(torch.int64)


def _adaptive_max_pool_backward(rank: int) -> Emit:
    return lambda cx, grad, x, indices: scatter_planes(cx, grad, indices, x.shape, rank)


for _rank in (2, 3):
    _ints, _symints = f"int[{_rank}]", f"SymInt[{_rank}]"
    _window = f"{_ints} kernel_size, {_ints} stride, {_ints} padding"
    _rest = "bool ceil_mode, bool count_include_pad, int? divisor_override"
    lowering(
        f"max_pool{_rank}d_with_indices(Tensor self, {_ints} kernel_size, {_ints} stride=[], {_ints} padding=0, "
        f"{_ints} dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)"
    )(_max_pool(_rank))
    lowering(
        f"max_pool{_rank}d_with_indices_backward(Tensor grad_output, Tensor self, {_window}, {_ints} dilation, "
        f"bool ceil_mode, Tensor indices) -> Tensor"
    )(_max_pool_backward(_rank))
    lowering(
        f"avg_pool{_rank}d(Tensor self, {_ints} kernel_size, {_ints} stride=[], {_ints} padding=0, "
        f"bool ceil_mode=False, bool count_include_pad=True, int? divisor_override=None) -> Tensor"
    )(_avg_pool(_rank))
    lowering(f"avg_pool{_rank}d_backward(Tensor grad_output, Tensor self, {_window}, {_rest}) -> Tensor")(
        _avg_pool_backward(_rank)
    )
    lowering(f"_adaptive_avg_pool{_rank}d(Tensor self, {_symints} output_size) -> Tensor")(_adaptive_avg_pool)
    lowering(f"_adaptive_avg_pool{_rank}d_backward(Tensor grad_output, Tensor self) -> Tensor")(
        _adaptive_avg_pool_backward(_rank)
    )
    lowering(f"adaptive_max_pool{_rank}d(Tensor self, {_ints} output_size) -> (Tensor, Tensor)", beyond=_rank == 3)(
        _adaptive_max_pool
    )
    lowering(
        f"adaptive_max_pool{_rank}d_backward(Tensor grad_output, Tensor self, Tensor indices) -> Tensor", beyond=True
    )(_adaptive_max_pool_backward(_rank))
