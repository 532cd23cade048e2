"""Ops that only move data: concatenation, padding, flips, triangles, and the backwards of views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.along import side_by_side

__all__: list[str] = []

# ------------------------------------------------------------------------------------------------- joining


@lowering("cat(Tensor[] tensors, int dim=0) -> Tensor")
def _cat(cx: Context, tensors: Sequence[Value], dim: int) -> Value:
    dtype = cx.output.dtype
    # A 1-d tensor without elements fits anywhere, whatever the others' shapes.
    kept = [t for t in tensors if t.shape != (0,)] or [tensors[0]]
    return cx.builder.concatenate([t.convert(dtype) for t in kept], dim % max(1, kept[0].ndim))


@lowering("stack(Tensor[] tensors, int dim=0) -> Tensor")
def _stack(cx: Context, tensors: Sequence[Value], dim: int) -> Value:
    size, dtype = cx.output.size, cx.output.dtype
    at = dim % len(size)
    slab = (*size[:at], 1, *size[at + 1 :])
    return cx.builder.concatenate([t.convert(dtype).reshape(slab) for t in tensors], at)


@lowering("repeat(Tensor self, SymInt[] repeats) -> Tensor")
def _repeat(cx: Context, x: Value, repeats: Sequence[int]) -> Value:
    size = cx.output.size
    if 0 in size:
        return cx.builder.full(0, size, x.dtype)
    padded = (1,) * (len(size) - x.ndim) + x.shape
    # Only a dimension that has both an extent and a count needs two of its own.
    split: list[int] = []
    kept: list[int] = []
    for count, extent in zip(repeats, padded, strict=True):
        if count != 1 and extent != 1:
            split += [count, extent]
            kept.append(len(split) - 1)
        else:
            split.append(count * extent)
            kept.append(len(split) - 1)
    return x.reshape(padded).broadcast_in_dim(split, kept).reshape(size)


# -------------------------------------------------------------------------------------------- rearranging


@lowering("flip(Tensor self, int[] dims) -> Tensor")
def _flip(cx: Context, x: Value, dims: Sequence[int]) -> Value:
    return x.reverse(sorted({d % x.ndim for d in dims})) if x.ndim else x


@lowering("roll(Tensor self, SymInt[1] shifts, int[1] dims=[]) -> Tensor")
def _roll(cx: Context, x: Value, shifts: Sequence[int], dims: Sequence[int]) -> Value:
    if x.numel == 0:
        return x
    if not dims:
        return _rolled(x.reshape((x.numel,)), 0, shifts[0]).reshape(x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(x, dim % x.ndim, shift)
    return x


def _rolled(x: Value, dim: int, shift: int) -> Value:
    extent = x.shape[dim]
    cut = -shift % extent
    if cut == 0:
        return x
    return x.builder.concatenate([x.slice_dim(dim, cut, extent), x.slice_dim(dim, 0, cut)], dim)


@lowering("constant_pad_nd(Tensor self, SymInt[] pad, Scalar value=0) -> Tensor")
def _constant_pad(cx: Context, x: Value, pad: Sequence[int], value: Value | Number) -> Value:
    low, high = [0] * x.ndim, [0] * x.ndim
    for step in range(len(pad) // 2):
        low[x.ndim - 1 - step], high[x.ndim - 1 - step] = pad[2 * step], pad[2 * step + 1]
    return x.pad(low, high, value=cx.scalar(value, x.dtype))


def _triangle(keep: Callable[[Value, Value], Value]) -> Callable[[Context, Value, int], Value]:
    def emit(cx: Context, x: Value, diagonal: int) -> Value:
        if x.numel == 0:
            return x
        plane = x.shape[-2:]
        # One past the matrix is as good as further out, and fits the index type.
        offset = max(-plane[0], min(plane[1], diagonal))
        rows = cx.builder.iota(plane, 0, torch.int32) + offset
        columns = cx.builder.iota(plane, 1, torch.int32)
        return cx.builder.select(keep(columns, rows), x, 0)

    return emit


lowering("tril(Tensor self, SymInt diagonal=0) -> Tensor")(_triangle(lambda column, row: column <= row))
lowering("triu(Tensor self, SymInt diagonal=0) -> Tensor")(_triangle(lambda column, row: column >= row))


# -------------------------------------------------------------------------------- writing a part, functionally


@lowering(
    "slice_scatter(Tensor self, Tensor src, int dim=0, SymInt? start=None, SymInt? end=None, SymInt step=1) -> Tensor"
)
def _slice_scatter(
    cx: Context, x: Value, source: Value, dim: int, start: int | None, end: int | None, step: int
) -> Value:
    at = dim % x.ndim
    begin, _, _ = slice(start, end, step).indices(x.shape[at])
    taken = list(x.shape)
    taken[at] = len(range(*slice(start, end, step).indices(x.shape[at])))
    if 0 in taken:
        return x
    block = source.convert(x.dtype).broadcast(taken)
    if step == 1:
        return cx.builder.dynamic_update_slice(x, block, [begin if d == at else 0 for d in range(x.ndim)])
    low, high, gaps = _strided(x.shape, taken, at, begin, step)
    inside = cx.builder.full(True, taken, torch.bool).pad(low, high, gaps, False)
    return cx.builder.select(inside, block.pad(low, high, gaps), x)


@lowering("select_scatter(Tensor self, Tensor src, int dim, SymInt index) -> Tensor")
def _select_scatter(cx: Context, x: Value, source: Value, dim: int, index: int) -> Value:
    at = dim % x.ndim
    block = source.convert(x.dtype).reshape((*x.shape[:at], 1, *x.shape[at + 1 :]))
    start = [index % x.shape[at] if d == at else 0 for d in range(x.ndim)]
    return cx.builder.dynamic_update_slice(x, block, start)


def _strided(
    sizes: Sequence[int], block: Sequence[int], dim: int, begin: int, step: int
) -> tuple[list[int], list[int], list[int]]:
    """Low, high and interior padding that put ``block`` at ``begin, begin + step, …`` of dimension ``dim``."""
    low, high, gaps = [0] * len(sizes), [0] * len(sizes), [0] * len(sizes)
    low[dim], gaps[dim] = begin, step - 1
    high[dim] = sizes[dim] - (begin + (block[dim] - 1) * step + 1)
    return low, high, gaps


# ---------------------------------------------------------------------------------------- views' backwards


@lowering(
    "slice_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt start, SymInt end, SymInt step) -> Tensor"
)
def _slice_backward(cx: Context, grad: Value, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Value:
    return _placed(cx, grad, sizes, dim % len(sizes), start, step)


def _placed(cx: Context, block: Value, sizes: Sequence[int], dim: int, start: int, step: int) -> Value:
    """``block`` at ``start, start + step, …`` of dimension ``dim``, zeros elsewhere."""
    if block.numel == 0:
        return cx.builder.full(0, sizes, block.dtype)
    extent = sizes[dim]
    begin = max(0, min(extent, start + extent if start < 0 else start))
    low, high, gaps = _strided(sizes, block.shape, dim, begin, step)
    return block.pad(low, high, gaps)


@lowering("select_backward(Tensor grad_output, SymInt[] input_sizes, int dim, SymInt index) -> Tensor")
def _select_backward(cx: Context, grad: Value, sizes: Sequence[int], dim: int, index: int) -> Value:
    at = dim % len(sizes)
    return _placed(cx, grad.reshape((*sizes[:at], 1, *sizes[at + 1 :])), sizes, at, index, 1)


@lowering("unfold_backward(Tensor grad_in, SymInt[] input_sizes, int dim, int size, int step) -> Tensor")
def _unfold_backward(cx: Context, grad: Value, sizes: Sequence[int], dim: int, size: int, step: int) -> Value:
    if not sizes:
        return grad.sum(range(grad.ndim)).reshape(())
    at = dim % len(sizes)
    compute = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
    total: Value | None = None
    for first, offset in _rounds(size, step):
        # Offsets that lie a step or more apart never meet: they fill one another's gaps.
        part = grad.convert(compute).slice_dim(grad.ndim - 1, first, first + offset)
        placed = _interleaved(part, sizes, at, first, step)
        total = placed if total is None else total + placed
    return cx.builder.full(0, sizes, grad.dtype) if total is None else total.convert(grad.dtype)


def _rounds(size: int, step: int) -> list[tuple[int, int]]:
    return [(first, min(step, size - first)) for first in range(0, size, step)]


def _interleaved(part: Value, sizes: Sequence[int], dim: int, start: int, step: int) -> Value:
    """Windows' elements ``start … start + width`` (width at most ``step``) laid back side by side."""
    order = [*range(dim + 1), part.ndim - 1, *range(dim + 1, part.ndim - 1)]
    return side_by_side(part.transpose(order), dim, step, start, sizes[dim])


# ----------------------------------------------------------------------------------------------- shuffles


@lowering("pixel_shuffle(Tensor self, int upscale_factor) -> Tensor")
def _pixel_shuffle(cx: Context, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    n = math.prod(batch)
    split = x.reshape((n, channels // factor**2, factor, factor, height, width))
    return split.transpose([0, 1, 4, 2, 5, 3]).reshape(cx.output.size)


@lowering("pixel_unshuffle(Tensor self, int downscale_factor) -> Tensor")
def _pixel_unshuffle(cx: Context, x: Value, factor: int) -> Value:
    *batch, channels, height, width = x.shape
    n = math.prod(batch)
    split = x.reshape((n, channels, height // factor, factor, width // factor, factor))
    return split.transpose([0, 1, 3, 5, 2, 4]).reshape(cx.output.size)


@lowering("channel_shuffle(Tensor self, SymInt groups) -> Tensor")
def _channel_shuffle(cx: Context, x: Value, groups: int) -> Value:
    n, channels, *rest = x.shape
    split = x.reshape((n, groups, channels // groups, math.prod(rest)))
    return split.transpose([0, 2, 1, 3]).reshape(x.shape)
