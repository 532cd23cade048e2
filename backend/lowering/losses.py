"""Losses that pick by class index: negative log-likelihood, over vectors and images."""

from __future__ import annotations

import math

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering, lowerings

__all__: list[str] = []

_NONE, _MEAN = 0, 1  # at::Reduction


def _class_dim(x: Value) -> int:
    """Classes are dimension 1 of a batch, the only dimension of a single sample."""
    return min(1, x.ndim - 1)


def _picked(x: Value, target: Value) -> Value:
    """``x`` at each target's class, as one gather of scalars; NaN where there is no such class.

    On a chip an out-of-range class reads garbage; here it shows.
    """
    builder = x.builder
    dim = _class_dim(x)
    target = target.convert(torch.int32)
    indices = [
        target if d == dim else builder.iota(target.shape, d if d < dim else d - 1, torch.int32) for d in range(x.ndim)
    ]
    starts = builder.concatenate([i.reshape((*i.shape, 1)) for i in indices], target.ndim)
    found = builder.gather(
        x,
        starts,
        offset_dims=[],
        collapsed=range(x.ndim),
        start_index_map=range(x.ndim),
        slice_sizes=[1] * x.ndim,
        shape=target.shape,
    )
    valid = (target >= 0) & (target < x.shape[dim])
    return builder.select(valid, found, float("nan"))


def _weights(weight: Value | None, target: Value, ignore_index: int, dtype: torch.dtype) -> Value:
    """Each sample's weight: its class weight (1 without), 0 for ignored ones."""
    builder = target.builder
    kept = target.ne(ignore_index)
    if weight is None:
        return kept.convert(dtype)
    column = target.reshape((*target.shape, 1))
    found = builder.gather(
        weight.convert(dtype),
        column,
        offset_dims=[],
        collapsed=[0],
        start_index_map=[0],
        slice_sizes=[1],
        shape=target.shape,
    )
    return builder.select(kept, found, 0)


def _nll_forward(
    cx: Context, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> list[Value]:
    compute = opmath(x.dtype)
    weights = _weights(weight, target, ignore_index, compute)
    kept = target.ne(ignore_index)
    safe = cx.builder.select(kept, target, 0)
    losses = cx.builder.select(kept, -_picked(x, safe).convert(compute) * weights, 0)
    everything = range(target.ndim)
    if reduction == _NONE:
        total = cx.builder.full(0, (), compute)
    else:
        total = weights.sum(everything)
        losses = losses.sum(everything)
        if reduction == _MEAN:
            losses = losses / total
    return [losses.convert(x.dtype), total.convert(x.dtype)]


def _nll_backward(
    cx: Context,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total_weight: Value,
) -> Value:
    """A select against the class number: the gradient is as large as the input anyway, and a scatter is slow."""
    builder = cx.builder
    compute = opmath(x.dtype)
    dim = _class_dim(x)
    scale = -grad.convert(compute) * _weights(weight, target, ignore_index, compute)
    if reduction == _MEAN:
        scale = scale / total_weight.convert(compute)
    column = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    here = builder.iota(x.shape, dim, target.dtype).eq(target.reshape(column))
    kept = target.ne(ignore_index).reshape(column)
    return builder.select(here & kept, scale.reshape(column), 0).convert(cx.output.dtype)


lowerings(
    "(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index)"
    " -> (Tensor output, Tensor total_weight)",
    {"nll_loss_forward": _nll_forward, "nll_loss2d_forward": _nll_forward},
)
lowerings(
    "(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index,"
    " Tensor total_weight) -> Tensor",
    {"nll_loss_backward": _nll_backward, "nll_loss2d_backward": _nll_backward},
)
