"""``grid_sample``: images read at positions that a tensor gives, and the gradients in the image and in the positions.

Each spatial dimension contributes *taps*: a source index, whether it lies in the image, its weight, and the weight's
derivative in the grid. A sample is the sum over all combinations of taps, the last grid component being the first
spatial dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)
_CUBIC = -0.75


@dataclasses.dataclass(frozen=True, slots=True)
class _Tap:
    index: Value
    inside: Value
    weight: Value
    slope: Value


def _flipped(x: Value, slope: Value, low: float, high: float) -> tuple[Value, Value]:
    """Reflect into [low, high] about its ends, and the slope with it."""
    builder = x.builder
    width = high - low
    if width == 0:
        return x * 0, slope * 0
    shifted = x - low
    negative = shifted < 0
    distance = shifted.abs()
    turns = (distance / width).floor()
    rest = distance - turns * width
    odd = (turns * 0.5 - (turns * 0.5).floor()) > 0.25
    where = builder.select(odd, (-rest) + width, rest) + low
    return where, builder.select(odd ^ negative, -slope, slope)


def _bounded(x: Value, slope: Value, n: int, padding: int, align: bool) -> tuple[Value, Value]:
    """A position after border or reflection padding, and d position / d grid."""
    if padding == _REFLECTION:
        x, slope = _flipped(x, slope, 0.0, n - 1.0) if align else _flipped(x, slope, -0.5, n - 0.5)
    if padding in (_BORDER, _REFLECTION):
        outside = (x <= 0) | (x >= n - 1)
        x = x.maximum(0).minimum(n - 1)
        slope = x.builder.select(outside, 0, slope)
    return x, slope


def _tap(x: Value, weight: Value, slope: Value, n: int) -> _Tap:
    inside = (x >= 0) & (x <= n - 1)
    return _Tap(x.maximum(0).minimum(n - 1).convert(torch.int32), inside, weight, slope)


def _cubic(t: Value) -> tuple[list[Value], list[Value]]:
    """The four weights of a cubic convolution and their derivatives in ``t``."""
    a = _CUBIC

    def near(x: Value) -> Value:
        return ((x * (a + 2)) - (a + 3)) * x * x + 1

    def far(x: Value) -> Value:
        return ((x * a - 5 * a) * x + 8 * a) * x - 4 * a

    def near_slope(x: Value) -> Value:
        return (x * (3 * (a + 2)) - 2 * (a + 3)) * x

    def far_slope(x: Value) -> Value:
        return (x * (3 * a) - 10 * a) * x + 8 * a

    u = 1 - t
    weights = [far(t + 1), near(t), near(u), far(u + 1)]
    return weights, [far_slope(t + 1), near_slope(t), -near_slope(u), -far_slope(u + 1)]


def _taps(grid: Value, n: int, mode: int, padding: int, align: bool) -> list[_Tap]:
    """The taps of one dimension of extent ``n``, from its grid component [N, …] in [-1, 1]."""
    scale = (n - 1) / 2 if align else n / 2
    x = (grid + 1) * scale if align else ((grid + 1) * n - 1) * 0.5
    slope = grid.builder.full(scale, grid.shape, grid.dtype)
    if mode == _BICUBIC:
        base = x.floor()
        weights, slopes = _cubic(x - base)
        positions = [_bounded(base + (k - 1), slope, n, padding, align)[0] for k in range(4)]
        return [_tap(p, w, s * slope, n) for p, w, s in zip(positions, weights, slopes, strict=True)]
    x, slope = _bounded(x, slope, n, padding, align)
    if mode == _NEAREST:
        one = grid.builder.full(1, grid.shape, grid.dtype)
        return [_tap(x.unary("stablehlo.round_nearest_even"), one, slope * 0, n)]
    base = x.floor()
    part = x - base
    return [_tap(base, 1 - part, -slope, n), _tap(base + 1, part, slope, n)]


def _components(image: Value, grid: Value, mode: int, padding: int, align: bool) -> list[list[_Tap]]:
    """Taps per spatial dimension of the image; the grid's last component is x, the last spatial dimension."""
    rank = image.ndim - 2
    wide = grid.convert(opmath(grid.dtype))
    found = []
    for d in range(rank):
        component = wide.slice_dim(grid.ndim - 1, rank - 1 - d, rank - d).reshape(grid.shape[:-1])
        found.append(_taps(component, image.shape[2 + d], mode, padding, align))
    return found


def _places(taps: tuple[_Tap, ...]) -> Value:
    """Index vectors (n, …spatial) of one combination of taps: [N, *out, 1 + rank]."""
    builder = taps[0].index.builder
    shape = taps[0].index.shape
    columns = [builder.iota(shape, 0, torch.int32), *(t.index for t in taps)]
    return builder.concatenate([c.reshape((*shape, 1)) for c in columns], len(shape))


def _read(image: Value, taps: tuple[_Tap, ...]) -> Value:
    """[N, C, *out]: the image at one combination of taps, 0 outside."""
    shape = taps[0].index.shape
    rank = image.ndim - 2
    values = image.builder.gather(
        image,
        _places(taps),
        offset_dims=[1],
        collapsed=[0, *range(2, 2 + rank)],
        start_index_map=[0, *range(2, 2 + rank)],
        slice_sizes=[1, image.shape[1], *[1] * rank],
        shape=(shape[0], image.shape[1], *shape[1:]),
    )
    return image.builder.select(_lifted(functools.reduce(operator.and_, (t.inside for t in taps))), values, 0)


def _lifted(x: Value) -> Value:
    """[N, *out] → [N, 1, *out]."""
    return x.reshape((x.shape[0], 1, *x.shape[1:]))


def _product(values: list[Value]) -> Value:
    return functools.reduce(operator.mul, values)


def _sample(cx: Context, image: Value, grid: Value, mode: int, padding: int, align: bool) -> Value:
    if not image.numel or 0 in cx.output.size:
        return cx.builder.full(0, cx.output.size, image.dtype)
    wide = image.convert(opmath(image.dtype))
    components = _components(image, grid, mode, padding, align)
    terms = [_read(wide, taps) * _lifted(_product([t.weight for t in taps])) for taps in itertools.product(*components)]
    return functools.reduce(operator.add, terms).convert(image.dtype)


def _meta(input: torch.Tensor, grid: torch.Tensor, output_mask: list[bool], **_: Any) -> tuple[Any, ...]:  # noqa: A002  # the schema's name
    return tuple(
        torch.empty(t.shape, dtype=t.dtype, device="meta") if wanted else None
        for t, wanted in zip((input, grid), output_mask, strict=True)
    )


def _sample_backward(
    cx: Context, grad: Value, image: Value, grid: Value, mode: int, padding: int, align: bool, mask: list[bool]
) -> list[Value | None]:
    builder = cx.builder
    wide, cotangent = image.convert(opmath(image.dtype)), grad.convert(opmath(grad.dtype))
    components = _components(image, grid, mode, padding, align)
    into_image = builder.full(0, wide.shape, wide.dtype)
    slopes: list[list[Value]] = [[] for _ in components]
    for taps in itertools.product(*components) if grad.numel and image.numel else ():
        weights = [t.weight for t in taps]
        if mask[0]:
            inside = _lifted(functools.reduce(operator.and_, (t.inside for t in taps)))
            share = builder.select(inside, cotangent * _lifted(_product(weights)), 0)
            into_image = _add_at(into_image, taps, share)
        if mask[1]:
            matched = (_read(wide, taps) * cotangent).sum([1])
            for d, tap in enumerate(taps):
                slopes[d].append(matched * _product([tap.slope, *weights[:d], *weights[d + 1 :]]))
    results: list[Value | None] = [into_image.convert(image.dtype) if mask[0] else None, None]
    if mask[1]:
        zero = builder.full(0, (*grid.shape[:-1],), opmath(grid.dtype))
        columns = [functools.reduce(operator.add, s, zero).reshape((*grid.shape[:-1], 1)) for s in reversed(slopes)]
        results[1] = builder.concatenate(columns, grid.ndim - 1).convert(grid.dtype)
    return results


def _add_at(image: Value, taps: tuple[_Tap, ...], share: Value) -> Value:
    rank = image.ndim - 2
    return image.builder.scatter(
        image,
        _places(taps),
        share,
        update_window_dims=[1],
        inserted=[0, *range(2, 2 + rank)],
        scatter_dims=[0, *range(2, 2 + rank)],
        combine=operator.add,
    )


for _rank in (2, 3):
    _options = "int interpolation_mode, int padding_mode, bool align_corners"
    lowering(f"grid_sampler_{_rank}d(Tensor input, Tensor grid, {_options}) -> Tensor")(_sample)
    lowering(
        f"grid_sampler_{_rank}d_backward(Tensor grad_output, Tensor input, Tensor grid, {_options}, "
        "bool[2] output_mask) -> (Tensor, Tensor)",
        meta=_meta,
    )(_sample_backward)
