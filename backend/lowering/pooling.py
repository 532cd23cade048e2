"""Pooling windows: maxima with indices, averages, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value, lowest
from emutpu.backend.lowering._registry import Context, lowering

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


def _positions(x: Value, rank: int) -> Value:
    """The flat index of every element within its plane, i32."""
    builder = x.builder
    plane = x.shape[x.ndim - rank :]
    count = 1
    for n in plane:
        count *= n
    return builder.iota((count,), 0, torch.int32).reshape(plane).broadcast(x.shape)


def _max_pool(rank: int) -> Any:
    def emit(
        cx: Context,
        x: Value,
        kernel_size: Any,
        stride: Any,
        padding: Any,
        dilation: Any,
        ceil_mode: bool,
    ) -> tuple[Value, Value]:
        if not x.dtype.is_floating_point:
            name = str(x.dtype).removeprefix("torch.")
            raise NotImplementedError(f"max_pool{rank}d_with_indices(): not implemented for {name}")
        builder = cx.builder
        pool = _Pool(x.shape, cx.output.size, kernel_size, stride, padding, dilation, rank)
        if 0 in cx.output.size:
            return builder.full(0, cx.output.size, x.dtype), builder.full(0, cx.output.size, torch.int64)

        def later(a: Value, i: Value, b: Value, j: Value) -> list[Value]:
            """The larger one; of equal ones the first, of NaNs the last, as PyTorch's CPU loop leaves them."""
            a_nan, b_nan = a.is_nan(), b.is_nan()
            take = (b > a) | (b.eq(a) & (j < i)) | (b_nan & (~a_nan | (j > i)))
            take = take & (b_nan | ~a_nan)
            return [builder.select(take, b, a), builder.select(take, j, i)]

        start = [
            builder.full(lowest(x.dtype), (), x.dtype),
            builder.full(torch.iinfo(torch.int32).max, (), torch.int32),
        ]
        values, indices = pool.reduce([x, _positions(x, rank)], start, later)
        return values, indices.convert(torch.int64)

    return emit


def _max_pool_backward(rank: int) -> Any:
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
        return scatter_planes(cx, grad, indices, x.shape, rank)

    return emit


def scatter_planes(cx: Context, grad: Value, indices: Value, shape: Sequence[int], rank: int) -> Value:
    """Add every element of ``grad`` at its flat index within its plane of a tensor of zeros of ``shape``."""
    builder = cx.builder
    compute = opmath(grad.dtype)
    lead = len(shape) - rank
    planes = size = outputs = 1
    for d, n in enumerate(shape):
        planes, size = (planes * n, size) if d < lead else (planes, size * n)
    for n in grad.shape[lead:]:
        outputs *= n
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


for _rank in (2, 3):
    _ints = f"int[{_rank}]"
    lowering(
        f"max_pool{_rank}d_with_indices(Tensor self, {_ints} kernel_size, {_ints} stride=[], {_ints} padding=0, "
        f"{_ints} dilation=1, bool ceil_mode=False) -> (Tensor, Tensor)"
    )(_max_pool(_rank))
    lowering(
        f"max_pool{_rank}d_with_indices_backward(Tensor grad_output, Tensor self, {_ints} kernel_size, {_ints} stride, "
        f"{_ints} padding, {_ints} dilation, bool ceil_mode, Tensor indices) -> Tensor"
    )(_max_pool_backward(_rank))
