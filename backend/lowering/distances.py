"""Pairwise distances (``cdist``, ``pdist``) and their gradients."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []


def _differences(x: Value, y: Value, lead: tuple[int, ...]) -> Value:
    """All differences: x [..., P, M], y [..., R, M] → [..., P, R, M]."""
    rows, columns, width = x.shape[-2], y.shape[-2], x.shape[-1]
    left = x.broadcast((*lead, rows, width)).reshape((*lead, rows, 1, width))
    right = y.broadcast((*lead, columns, width)).reshape((*lead, 1, columns, width))
    return left - right


def _sign(x: Value) -> Value:
    return x.unary("stablehlo.sign")


@lowering("_cdist_forward(Tensor x1, Tensor x2, float p, int? compute_mode) -> Tensor")
def _cdist(cx: Context, x: Value, y: Value, p: float, compute_mode: int | None) -> Value:
    shape = cx.output.size
    if 0 in shape or not x.shape[-1]:
        return cx.builder.full(0, shape, x.dtype)
    return _norm(_differences(x, y, shape[:-2]), p)


def _norm(difference: Value, p: float) -> Value:
    """Of order ``p`` along the last dimension."""
    distance = difference.abs()
    last = [distance.ndim - 1]
    if p == 0:
        return distance.ne(0).convert(difference.dtype).sum(last)
    if p == 1:
        return distance.sum(last)
    if p == 2:
        return (distance * distance).sum(last).sqrt()
    if math.isinf(p):
        return distance.max(last)
    return distance.pow(p).sum(last).pow(1 / p)


@lowering("_cdist_backward(Tensor grad, Tensor x1, Tensor x2, float p, Tensor cdist) -> Tensor")
def _cdist_backward(cx: Context, grad: Value, x: Value, y: Value, p: float, distances: Value) -> Value:
    """Towards ``x1``. Where the distance is 0 there is no gradient."""
    builder, shape = cx.builder, cx.output.size
    if 0 in shape or not grad.numel or p == 0:
        return builder.full(0, shape, x.dtype)
    step = _differences(x, y, shape[:-2])
    slope = _slope(step, distances.reshape((*distances.shape, 1)), p)
    return (slope * grad.reshape((*grad.shape, 1))).sum([step.ndim - 2])


def _slope(step: Value, total: Value, p: float) -> Value:
    """The gradient of the norm ``total`` [..., 1] of ``step``; zero where the norm is."""
    builder = step.builder
    if p == 1:
        slope = _sign(step)
    elif p == 2:
        slope = step / total
    elif math.isinf(p):
        slope = _sign(step) * step.abs().eq(total).convert(step.dtype)
    else:
        slope = _sign(step) * (step.abs() / total).pow(p - 1)
    slope = builder.select(total.eq(0).broadcast(step.shape), 0, slope)
    return builder.select(step.eq(0), 0, slope) if p < 1 else slope


# ----------------------------------------------------------------------------- all pairs of rows of one matrix


def _pairs(x: Value) -> tuple[Value, Value]:
    """First and second rows of every pair i < j of [n, M]: [n (n - 1) / 2, M] each."""
    first, second = np.triu_indices(x.shape[0], 1)
    return _rows(x, first), _rows(x, second)


def _rows(x: Value, places: np.ndarray[Any, Any]) -> Value:
    width = x.shape[1]
    return x.builder.gather(
        x,
        x.builder.constant(places.reshape(-1, 1), torch.int32),
        offset_dims=[1],
        collapsed=[0],
        start_index_map=[0],
        slice_sizes=[1, width],
        shape=(len(places), width),
    )


@lowering("_pdist_forward(Tensor self, float p=2.) -> Tensor")
def _pdist(cx: Context, x: Value, p: float) -> Value:
    if not math.prod(cx.output.size) or not x.shape[1]:
        return cx.builder.full(0, cx.output.size, x.dtype)
    first, second = _pairs(x)
    return _norm(first - second, p)


@lowering("_pdist_backward(Tensor grad, Tensor self, float p, Tensor pdist) -> Tensor")
def _pdist_backward(cx: Context, grad: Value, x: Value, p: float, distances: Value) -> Value:
    """Both ends of every pair, summed over the pairs that a row is part of."""
    if not grad.numel or not x.numel or p == 0:
        return cx.builder.full(0, x.shape, x.dtype)
    first, second = _pairs(x)
    step = first - second
    slope = _slope(step, distances.reshape((*distances.shape, 1)), p) * grad.reshape((*grad.shape, 1))
    total = cx.builder.full(0, x.shape, x.dtype)
    for places, part in zip(np.triu_indices(x.shape[0], 1), (slope, -slope), strict=True):
        total = cx.builder.scatter(
            total,
            cx.builder.constant(places.reshape(-1, 1), torch.int32),
            part,
            update_window_dims=[1],
            inserted=[0],
            scatter_dims=[0],
            combine=lambda a, b: a + b,
        )
    return total
