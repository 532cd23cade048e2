"""Losses: negative log-likelihood over vectors and images, binary cross-entropy, huber."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend import bounds
from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

_NONE, _MEAN = 0, 1  # at::Reduction


def _class_dim(x: Value) -> int:
    """Classes are dimension 1 of a batch, the only dimension of a single sample."""
    return min(1, x.ndim - 1)


def _picked(x: Value, target: Value) -> Value:
    """``x`` at each target's class, as one gather of scalars; NaN where there is no such class.

    A chip reads garbage for a class that does not exist; here it shows.
    """
    builder = x.builder
    dim = _class_dim(x)
    if x.numel == 0:
        return builder.full(float("nan"), target.shape, x.dtype)
    kept = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    at = target.convert(torch.int32).reshape(kept)
    found = builder.gather(
        x,
        at.reshape((*kept, 1)),
        offset_dims=[],
        collapsed=[dim],
        start_index_map=[dim],
        slice_sizes=[1] * x.ndim,
        shape=kept,
        batching=[d for d in range(x.ndim) if d != dim],
    )
    return builder.select((at >= 0) & (at < x.shape[dim]), found, float("nan")).reshape(target.shape)


def _weights(weight: Value | None, target: Value, ignore_index: int, dtype: torch.dtype) -> Value:
    """Each sample's weight: its class weight (1 without), 0 for ignored ones."""
    builder = target.builder
    kept = target.ne(ignore_index)
    if weight is None or weight.numel == 0:
        return kept.convert(dtype)
    found = builder.gather(
        weight.convert(dtype),
        target.convert(torch.int32).reshape((*target.shape, 1)),
        offset_dims=[],
        collapsed=[0],
        start_index_map=[0],
        slice_sizes=[1],
        shape=target.shape,
    )
    return builder.select(kept, found, 0)


def _classes_checked(made: Any) -> Callable[..., Any]:
    """With bounds checks on, refuse targets that are no class, ignored ones apart."""
    function = made.function
    names = [a.name for a in made.op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if bounds.enabled():
            given = dict(zip(names, args, strict=False)) | kwargs
            scores, target = given["self"], given["target"].detach().cpu()
            dim = min(1, scores.dim() - 1)
            bounds.check(made.name, target[target != given["ignore_index"]], scores.shape[dim], dim, wraps=False)
        return function(*args, **kwargs)

    return kernel


def _nll_meta(name: str) -> Callable[..., Any]:
    """PyTorch's meta kernel, for the target dtypes of its CPU kernels, with their kind of error."""
    op = getattr(torch.ops.aten, name)

    def meta(target: torch.Tensor, **others: Any) -> Any:
        if target.dtype not in (torch.int64, torch.uint8):
            raise RuntimeError(f"expected target dtype to be Long or Byte, but got {target.dtype}")
        try:
            return op(target=target.to(torch.int64), **others)
        except AssertionError as error:
            raise RuntimeError(str(error)) from None

    return meta


def _nll_forward(
    cx: Context, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> list[Value]:
    compute = opmath(x.dtype)
    target = target.convert(torch.int64)  # bytes hold neither -100 nor every class
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
    target = target.convert(torch.int64)
    scale = -grad.convert(compute) * _weights(weight, target, ignore_index, compute)
    if reduction == _MEAN:
        scale = scale / total_weight.convert(compute)
    column = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    here = builder.iota(x.shape, dim, target.dtype).eq(target.reshape(column))
    kept = target.ne(ignore_index).reshape(column)
    return builder.select(here & kept, scale.reshape(column), 0).convert(cx.output.dtype)


_FORWARD = (
    "(Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index)"
    " -> (Tensor output, Tensor total_weight)"
)
_BACKWARD = (
    "(Tensor grad_output, Tensor self, Tensor target, Tensor? weight, int reduction, SymInt ignore_index,"
    " Tensor total_weight) -> Tensor"
)
for _name in ("nll_loss", "nll_loss2d"):
    _forward, _backward = f"{_name}_forward", f"{_name}_backward"
    lowering(_forward + _FORWARD, meta=_nll_meta(_forward), around=_classes_checked)(_nll_forward)
    lowering(_backward + _BACKWARD, meta=_nll_meta(_backward))(_nll_backward)


# ------------------------------------------------------------------------------------------ elementwise, reduced


def _reduced(cx: Context, losses: Value, reduction: int) -> Value:
    if reduction != _NONE:
        count = losses.numel
        losses = losses.sum(range(losses.ndim))
        if reduction == _MEAN:
            losses = losses / count if count else losses * math.nan
    return losses.convert(cx.output.dtype)


def _wide(*values: Value | None) -> list[Any]:
    """Floating-point operands in one computation dtype."""
    dtype = torch.float32
    for value in values:
        if value is not None and value.dtype == torch.float64:
            dtype = torch.float64
    return [None if v is None else v.convert(dtype) for v in values]


def _room_of_every_error(arguments: dict[str, Any]) -> int:
    """The device reduces into the storage of the unreduced result, and reads a reduced loss through a view of it."""
    count = math.prod(torch.broadcast_shapes(arguments["self"].shape, arguments["target"].shape))
    return count if arguments["reduction"] and count > 1 else 0


@lowering("mse_loss(Tensor self, Tensor target, int reduction=1) -> Tensor", room=_room_of_every_error)
def _mse(cx: Context, x: Value, target: Value, reduction: int) -> Value:
    x, target = _wide(x, target)
    error = x - target
    return _reduced(cx, error * error, reduction)


@lowering("mse_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction) -> Tensor")
def _mse_backward(cx: Context, grad: Value, x: Value, target: Value, reduction: int) -> Value:
    if not cx.output.dtype.is_floating_point:
        factor = 2 // max(1, x.numel) if reduction == _MEAN else 2  # the CPU's, rounded to an integer first
        return ((x - target) * grad * factor).convert(cx.output.dtype)
    grad, x, target = _wide(grad, x, target)
    slope = 2 * (x - target) * grad
    return (slope / max(1, slope.numel) if reduction == _MEAN else slope).convert(cx.output.dtype)


@lowering("binary_cross_entropy(Tensor self, Tensor target, Tensor? weight=None, int reduction=1) -> Tensor")
def _binary_cross_entropy(cx: Context, x: Value, target: Value, weight: Value | None, reduction: int) -> Value:
    """The logarithms are cut at -100, so that 0 times infinity does not arise."""
    x, target, weight = _wide(x, target, weight)
    losses = (target - 1) * (-x).unary("stablehlo.log_plus_one").maximum(-100) - target * x.log().maximum(-100)
    return _reduced(cx, losses if weight is None else losses * weight, reduction)


@lowering(
    "binary_cross_entropy_backward(Tensor grad_output, Tensor self, Tensor target, Tensor? weight=None, "
    "int reduction=1) -> Tensor"
)
def _binary_cross_entropy_backward(
    cx: Context, grad: Value, x: Value, target: Value, weight: Value | None, reduction: int
) -> Value:
    grad, x, target, weight = _wide(grad, x, target, weight)
    slope = grad * (x - target) / ((1 - x) * x).maximum(1e-12)
    if weight is not None:
        slope = slope * weight
    return (slope / x.numel if reduction == _MEAN else slope).convert(cx.output.dtype)


@lowering(
    "binary_cross_entropy_with_logits(Tensor self, Tensor target, Tensor? weight=None, Tensor? pos_weight=None, "
    "int reduction=1) -> Tensor"
)
def _binary_cross_entropy_with_logits(
    cx: Context, x: Value, target: Value, weight: Value | None, pos_weight: Value | None, reduction: int
) -> Value:
    x, target, weight, pos_weight = _wide(x, target, weight, pos_weight)
    log_sigmoid = x.minimum(0) - (-x.abs()).exp().unary("stablehlo.log_plus_one")
    factor = None if pos_weight is None else (pos_weight - 1) * target + 1
    losses = (1 - target) * x - (log_sigmoid if factor is None else log_sigmoid * factor)
    return _reduced(cx, losses if weight is None else losses * weight, reduction)


def _huber(cx: Context, x: Value, target: Value, reduction: int, delta: float) -> Value:
    x, target = _wide(x, target)
    error = (x - target).abs()
    losses = cx.builder.select(error <= delta, error * error * 0.5, (error - 0.5 * delta) * delta)
    return _reduced(cx, losses, reduction)


lowering("huber_loss(Tensor self, Tensor target, int reduction=1, float delta=1.) -> Tensor", beyond=True)(_huber)


@lowering("smooth_l1_loss(Tensor self, Tensor target, int reduction=1, float beta=1.) -> Tensor", beyond=True)
def _smooth_l1(cx: Context, x: Value, target: Value, reduction: int, beta: float) -> Value:
    x, target = _wide(x, target)
    error = (x - target).abs()
    if beta:
        error = cx.builder.select(error < beta, error * error * (0.5 / beta), error - 0.5 * beta)
    return _reduced(cx, error, reduction)


@lowering("huber_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction, float delta) -> Tensor")
def _huber_backward(cx: Context, grad: Value, x: Value, target: Value, reduction: int, delta: float) -> Value:
    grad, x, target = _wide(grad, x, target)
    error = x - target
    slope = error.maximum(-delta).minimum(delta)
    return (grad * slope * (1 / x.numel if reduction == _MEAN else 1)).convert(cx.output.dtype)


@lowering(
    "smooth_l1_loss_backward(Tensor grad_output, Tensor self, Tensor target, int reduction, float beta) -> Tensor"
)
def _smooth_l1_backward(cx: Context, grad: Value, x: Value, target: Value, reduction: int, beta: float) -> Value:
    grad, x, target = _wide(grad, x, target)
    error = x - target
    slope = (error / beta).maximum(-1).minimum(1) if beta else error.unary("stablehlo.sign")
    return (grad * slope * (1 / x.numel if reduction == _MEAN else 1)).convert(cx.output.dtype)
