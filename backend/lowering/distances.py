"""Pairwise distances (``cdist``) and their gradient."""

from __future__ import annotations

import math

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
    distance = _differences(x, y, shape[:-2]).abs()
    last = [distance.ndim - 1]
    if p == 0:
        return distance.ne(0).convert(x.dtype).sum(last)
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
    weight = grad.reshape((*grad.shape, 1))
    total = distances.reshape((*distances.shape, 1))
    if p == 1:
        slope = _sign(step)
    elif p == 2:
        slope = step / total
    elif math.isinf(p):
        slope = _sign(step) * step.abs().eq(total).convert(step.dtype)
    else:
        slope = _sign(step) * (step.abs() / total).pow(p - 1)
    slope = builder.select(total.eq(0).broadcast(step.shape), 0, slope)
    if p < 1:
        slope = builder.select(step.eq(0), 0, slope)
    return (slope * weight).sum([step.ndim - 2])
