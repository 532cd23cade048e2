"""Interpolation to another size, one dimension after the other: nearest, linear, cubic, antialiased; and edge padding.

PyTorch computes source positions in float32 (float64 for float64 images); so do the host-side tables here, so that the
same source elements are chosen. Forward passes read at most four taps; gradients and antialiasing are contractions with
a constant matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, Emit, lowering
from emutpu.backend.lowering.along import margins, put, resampled, side_by_side, take

__all__: list[str] = []

_Array = np.ndarray[Any, Any]
Taps = list[tuple[_Array, _Array]]
"""Per tap: the source index and the weight of every output position."""


def _float(dtype: torch.dtype) -> type[np.floating[Any]]:
    return np.float64 if dtype == torch.float64 else np.float32


def _ratio(n: int, m: int, align: bool, scale: float | None, kind: Any) -> Any:
    if align:
        return kind(n - 1) / kind(m - 1) if m > 1 else kind(0)
    return kind(1.0 / scale) if scale is not None and scale > 0 else kind(n) / kind(m)


def _nearest(n: int, m: int, align: bool, scale: float | None, kind: Any) -> Taps:
    where = np.arange(m)
    if n != m:
        ratio = _ratio(n, m, False, scale, np.float32)
        where = where // 2 if m == 2 * n else np.minimum(np.floor(where.astype(np.float32) * ratio), n - 1)
    return [(where.astype(np.int64), np.ones(m))]


def _nearest_exact(n: int, m: int, align: bool, scale: float | None, kind: Any) -> Taps:
    ratio = _ratio(n, m, False, scale, np.float32)
    where = np.minimum(np.floor((np.arange(m, dtype=np.float32) + np.float32(0.5)) * ratio), n - 1)
    return [(where.astype(np.int64), np.ones(m))]


def _source(n: int, m: int, align: bool, scale: float | None, kind: Any) -> _Array:
    ratio = _ratio(n, m, align, scale, kind)
    positions = np.arange(m, dtype=kind)
    source: _Array = ratio * positions if align else ratio * (positions + kind(0.5)) - kind(0.5)
    return source


def _linear(n: int, m: int, align: bool, scale: float | None, kind: Any) -> Taps:
    if n == m:
        return [(np.arange(m), np.ones(m))]
    source = np.maximum(_source(n, m, align, scale, kind), kind(0))
    below = np.minimum(np.floor(source).astype(np.int64), n - 1)
    above = np.minimum(below + 1, n - 1)
    weight = np.clip(source - below.astype(kind), 0, 1)
    return [(below, 1 - weight), (above, weight)]


def _cubic_weights(t: _Array, a: float) -> list[_Array]:
    def near(x: _Array) -> _Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: _Array) -> _Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(n: int, m: int, align: bool, scale: float | None, kind: Any) -> Taps:
    source = _source(n, m, align, scale, kind)
    below = np.minimum(np.floor(source).astype(np.int64), n - 1)
    weights = _cubic_weights(np.clip(source - below.astype(kind), 0, 1), -0.75)
    return [(np.clip(below + k - 1, 0, n - 1), w) for k, w in enumerate(weights)]


def _matrix(taps: Taps, n: int) -> _Array:
    """Taps as a matrix [n, m]."""
    matrix = np.zeros((n, len(taps[0][0])))
    for indices, weights in taps:
        np.add.at(matrix, (indices, np.arange(len(indices))), weights)
    return matrix


def _triangle(x: _Array) -> _Array:
    weight: _Array = np.maximum(1 - np.abs(x), 0)
    return weight


def _keys(x: _Array) -> _Array:
    x, a = np.abs(x), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _antialias(kernel: Callable[[_Array], _Array], width: int) -> Callable[..., _Array]:
    def matrix(n: int, m: int, align: bool, scale: float | None, kind: Any) -> _Array:
        ratio = _ratio(n, m, align, scale, kind)
        support = kind(width * 0.5) * max(ratio, kind(1))
        inverse = kind(1) / ratio if ratio >= 1 else kind(1)
        made = np.zeros((n, m))
        for i in range(m):
            center = ratio * kind(i + 0.5)
            first = max(int(center - support + kind(0.5)), 0)
            last = min(int(center + support + kind(0.5)), n)
            weights = kernel((np.arange(first, last) - center + kind(0.5)) * inverse)
            made[first:last, i] = weights / weights.sum()
        return made

    return matrix


def _computed(dtype: torch.dtype) -> torch.dtype:
    return opmath(dtype) if dtype.is_floating_point else torch.float32


def _pixels(x: Value, dtype: torch.dtype) -> Value:
    """Images of bytes hold bytes after every dimension, as on the CPU: rounded, and cut where a cubic overshoots."""
    return x if dtype.is_floating_point else (x + 0.5).unary("stablehlo.floor").maximum(0).minimum(255)


def _interpolate(taps: Callable[..., Taps], rank: int, aligned: bool) -> Emit:
    def emit(cx: Context, x: Value, output_size: Sequence[int], *options: Any) -> Value:
        align, scales = _options(options, rank, aligned)
        if 0 in cx.output.size:
            return cx.builder.full(0, cx.output.size, x.dtype)
        exact = taps in (_nearest, _nearest_exact)
        compute = x.dtype if exact else _computed(x.dtype)
        result = x.convert(compute)
        for k in reversed(range(rank)):
            dim = x.ndim - rank + k
            result = _tapped(result, dim, taps(x.shape[dim], output_size[k], align, scales[k], _float(compute)))
            result = result if exact else _pixels(result, x.dtype)
        return result.convert(x.dtype)

    return emit


def _tapped(x: Value, dim: int, taps: Taps) -> Value:
    total: Value | None = None
    for indices, weights in taps:
        read = take(x, dim, indices)
        if len(taps) > 1:
            shape = (len(weights), *[1] * (x.ndim - dim - 1))
            read = read * x.builder.constant(weights.reshape(shape), x.dtype)
        total = read if total is None else total + read
    assert total is not None
    return total


def _options(options: Sequence[Any], rank: int, aligned: bool) -> tuple[bool, Sequence[float | None]]:
    return (options[0], options[1:]) if aligned else (False, options)


def _interpolate_backward(taps: Callable[..., Taps], rank: int, aligned: bool) -> Emit:
    def emit(cx: Context, grad: Value, output_size: Sequence[int], input_size: Sequence[int], *options: Any) -> Value:
        align, scales = _options(options, rank, aligned)
        if 0 in input_size or not grad.numel:
            return cx.builder.full(0, input_size, grad.dtype)
        result = grad.convert(opmath(grad.dtype))
        for k in range(rank):
            dim = grad.ndim - rank + k
            n = input_size[dim]
            found = taps(n, output_size[k], align, scales[k], _float(result.dtype))
            if len(found) == 1:
                result = put(result, dim, found[0][0], n)
            else:
                result = resampled(result, dim, _matrix(found, n).T)
        return result.convert(grad.dtype)

    return emit


def _antialiased(matrix: Callable[..., _Array]) -> Emit:
    def emit(cx: Context, x: Value, output_size: Sequence[int], align: bool, *scales: Any) -> Value:
        if 0 in cx.output.size:
            return cx.builder.full(0, cx.output.size, x.dtype)
        result = x.convert(_computed(x.dtype))
        for k, dim in ((1, 3), (0, 2)):
            made = matrix(x.shape[dim], output_size[k], align, scales[k], _float(result.dtype))
            result = _pixels(resampled(result, dim, made), x.dtype)
        return result.convert(x.dtype)

    return emit


def _antialiased_backward(matrix: Callable[..., _Array]) -> Emit:
    def emit(
        cx: Context, grad: Value, output_size: Sequence[int], input_size: Sequence[int], align: bool, *scales: Any
    ) -> Value:
        if 0 in input_size or not grad.numel:
            return cx.builder.full(0, input_size, grad.dtype)
        result = grad.convert(opmath(grad.dtype))
        for k, dim in ((0, 2), (1, 3)):
            made = matrix(input_size[dim], output_size[k], align, scales[k], _float(result.dtype))
            result = resampled(result, dim, made.T)
        return result.convert(grad.dtype)

    return emit


def _schemas(name: str, rank: int, aligned: bool) -> tuple[str, str]:
    scales = {1: "float? scales=None", 2: "float? scales_h=None, float? scales_w=None"}.get(
        rank, "float? scales_d=None, float? scales_h=None, float? scales_w=None"
    )
    tail = ("bool align_corners, " if aligned else "") + scales
    forward = f"{name}(Tensor self, SymInt[{rank}] output_size, {tail}) -> Tensor"
    sizes = f"SymInt[{rank}] output_size, SymInt[{rank + 2}] input_size"
    return forward, f"{name}_backward(Tensor grad_output, {sizes}, {tail}) -> Tensor"


def _sized(name: str) -> Callable[..., Any]:
    """PyTorch's meta kernels of nearest neighbours fail for images without elements, which its other kernels take."""

    def meta(**given: Any) -> Any:
        image, size = given["self"], given["output_size"]
        if not image.numel() and 0 not in image.shape[1:] and image.dim() == len(size) + 2 and all(n > 0 for n in size):
            return image.new_empty((*image.shape[:2], *size))
        return getattr(torch.ops.aten, name)(**given)

    return meta


_LACKING = {"upsample_linear1d_backward", "upsample_trilinear3d", "upsample_trilinear3d_backward"}
for _name, _rank, _aligned, _taps in [
    *((f"upsample_nearest{r}d", r, False, _nearest) for r in (1, 2, 3)),
    *((f"_upsample_nearest_exact{r}d", r, False, _nearest_exact) for r in (1, 2, 3)),
    ("upsample_linear1d", 1, True, _linear),
    ("upsample_bilinear2d", 2, True, _linear),
    ("upsample_trilinear3d", 3, True, _linear),
    ("upsample_bicubic2d", 2, True, _cubic),
]:
    _forward, _backward = _schemas(_name, _rank, _aligned)
    lowering(_forward, beyond=_name in _LACKING, meta=_sized(_name))(_interpolate(_taps, _rank, _aligned))
    lowering(_backward, beyond=f"{_name}_backward" in _LACKING)(_interpolate_backward(_taps, _rank, _aligned))
for _name, _made in (
    ("_upsample_bilinear2d_aa", _antialias(_triangle, 2)),
    ("_upsample_bicubic2d_aa", _antialias(_keys, 4)),
):
    _forward, _backward = _schemas(_name, 2, True)
    lowering(_forward, beyond=True)(_antialiased(_made))
    lowering(_backward, beyond=True)(_antialiased_backward(_made))


# ------------------------------------------------------------------------------------------------- edge padding


def _edges(n: int, low: int, high: int, reflect: bool) -> _Array:
    """The source index of every position after padding; negative amounts crop."""
    where = np.arange(n + low + high) - low
    if not reflect:
        return np.clip(where, 0, n - 1)
    where = np.where(where < 0, -where, where)
    return np.where(where >= n, 2 * (n - 1) - where, where)


def _pad(rank: int, reflect: bool) -> Emit:
    def emit(cx: Context, x: Value, padding: Sequence[int]) -> Value:
        result = x
        for k in range(rank):
            dim, (low, high) = x.ndim - 1 - k, padding[2 * k : 2 * k + 2]
            if low or high:
                result = take(result, dim, _edges(x.shape[dim], low, high, reflect))
        return result

    return emit


def _pad_backward(rank: int, reflect: bool) -> Emit:
    def emit(cx: Context, grad: Value, x: Value, padding: Sequence[int]) -> Value:
        if not grad.numel:
            return cx.builder.full(0, x.shape, grad.dtype)
        result = grad.convert(opmath(grad.dtype))
        for k in range(rank):
            dim, (low, high) = x.ndim - 1 - k, padding[2 * k : 2 * k + 2]
            if low or high:
                result = put(result, dim, _edges(x.shape[dim], low, high, reflect), x.shape[dim])
        return result.convert(grad.dtype)

    return emit


for _name, _reflect in (("reflection", True), ("replication", False)):
    for _rank in (1, 2, 3):
        _padding = f"SymInt[{2 * _rank}] padding"
        lowering(f"{_name}_pad{_rank}d(Tensor self, {_padding}) -> Tensor")(_pad(_rank, _reflect))
        lowering(f"{_name}_pad{_rank}d_backward(Tensor grad_output, Tensor self, {_padding}) -> Tensor")(
            _pad_backward(_rank, _reflect)
        )


# ------------------------------------------------------------------------------------------------- patches


class _Places(NamedTuple):
    """Where patches lie along one dimension: ``patches`` of them, of ``kernel`` places each that are ``wide`` apart."""

    kernel: int
    wide: int
    edge: int
    step: int
    patches: int


def _places(size: Sequence[int], kernel: Any, dilation: Any, padding: Any, stride: Any) -> list[_Places]:
    """Of each spatial dimension."""
    full = [list(v) if len(v) == 2 else list(v) * 2 for v in (kernel, dilation, padding, stride)]
    return [
        _Places(k, d, p, s, (n + 2 * p - d * (k - 1) - 1) // s + 1) for n, k, d, p, s in zip(size, *full, strict=True)
    ]


def _im2col(cx: Context, x: Value, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> Value:
    """One dimension after the other: as many slices as there are blocks of rows and of columns."""
    rows, columns = _places(x.shape[-2:], kernel_size, dilation, padding, stride)
    by_row = _apart(x, x.ndim - 2, rows)  # [..., kernel, patches, width]
    both = _apart(by_row, by_row.ndim - 1, columns)  # [..., kernel, patches, kernel, patches]
    lead = list(range(x.ndim - 2))
    at = len(lead)
    return both.transpose([*lead, at, at + 2, at + 1, at + 3]).reshape(cx.output.size)


def _apart(x: Value, dim: int, places: _Places) -> Value:
    """``dim`` becomes two: the place in a patch, and the patch."""
    return x.builder.concatenate([_block(x, dim, places, *block) for block in _blocks(places)], dim)


def _blocks(places: _Places) -> list[tuple[int, int]]:
    """First place and width of neighbours among a patch's places, few enough that patches do not meet in them: a Fourier
    transform's window of 1,920 places, 480 apart, is four blocks and not as many as it has places.
    """
    width = places.step if places.wide == 1 else 1
    return [(first, min(width, places.kernel - first)) for first in range(0, places.kernel, width)]


def _block(x: Value, dim: int, places: _Places, first: int, width: int) -> Value:
    """These places of all patches, which lie side by side."""
    low = places.edge - first * places.wide
    long = x.pad(*margins(x.ndim, dim, low, places.patches * places.step - low - x.shape[dim]))
    apart = long.reshape((*x.shape[:dim], places.patches, places.step, *x.shape[dim + 1 :]))
    return _swapped(apart.slice_dim(dim + 1, 0, width), dim)


def _swapped(x: Value, dim: int) -> Value:
    """A dimension and the next exchanged."""
    return x.transpose([*range(dim), dim + 1, dim, *range(dim + 2, x.ndim)])


def _col2im(
    cx: Context, x: Value, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> Value:
    """The transpose of :func:`_im2col`, as separate in its dimensions."""
    rows, columns = _places(output_size, kernel_size, dilation, padding, stride)
    lead = cx.output.size[:-2]
    values = x.convert(opmath(x.dtype)).reshape((*lead, rows.kernel, columns.kernel, rows.patches, columns.patches))
    at = len(lead)
    by_row = values.transpose([*range(at), at, at + 2, at + 1, at + 3])
    wide = _together(by_row, at + 2, columns, output_size[1])
    return _together(wide, at, rows, output_size[0]).convert(x.dtype)


def _together(x: Value, dim: int, places: _Places, size: int) -> Value:
    """The place in a patch (``dim``) and the patch (the next) become one dimension of ``size``; what meets is added."""
    total: Value | None = None
    for first, width in _blocks(places):
        block = _swapped(x.slice_dim(dim, first, first + width), dim)
        placed = side_by_side(block, dim, places.step, first * places.wide - places.edge, size)
        total = placed if total is None else total + placed
    assert total is not None
    return total


_GEOMETRY = "int[2] kernel_size, int[2] dilation, int[2] padding, int[2] stride) -> Tensor"
lowering("im2col(Tensor self, " + _GEOMETRY)(_im2col)
lowering("col2im(Tensor self, SymInt[2] output_size, " + _GEOMETRY)(_col2im)
