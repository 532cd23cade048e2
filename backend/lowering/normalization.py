"""Batch, layer and group normalisation with their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, OutputSpec, lowering

__all__: list[str] = []


def _moments(x: Value, dims: Sequence[int], *, keepdim: bool = True) -> tuple[Value, Value, Value, int]:
    """Mean, deviations from it, sum of their squares, and the count."""
    count = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / count
    deviations = x - mean
    return mean, deviations, (deviations * deviations).sum(dims, keepdim=True), count


def _affine(x: Value, weight: Value | None, bias: Value | None, shape: Sequence[int]) -> Value:
    """``x * weight + bias``, both reshaped to ``shape``."""
    if weight is not None:
        x = x * weight.convert(x.dtype).reshape(shape)
    if bias is not None:
        x = x + bias.convert(x.dtype).reshape(shape)
    return x


def _like(value: Value, spec: OutputSpec | None) -> Value | None:
    """The value as its result's spec wants it; None for a result that is not asked for."""
    return None if spec is None else value.convert(spec.dtype).reshape(spec.size)


# ----------------------------------------------------------------------------------------------------- batch norm


def _channels(x: Value) -> tuple[list[int], list[int]]:
    """The dimensions a batch norm reduces, and the shape of a per-channel value beside ``x``."""
    return [d for d in range(x.ndim) if d != 1], [n if d == 1 else 1 for d, n in enumerate(x.shape)]


def _running(old: Value | None, new: Value, momentum: Value | float) -> Value | None:
    if old is None:
        return None
    if isinstance(momentum, Value):
        momentum = momentum.convert(new.dtype)
    return (old.convert(new.dtype) * (1 - momentum) + new.reshape(old.shape) * momentum).convert(old.dtype)


def _batch_norm_training(
    cx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    momentum: Value | float,
    eps: float,
) -> list[Value | None]:
    """Output, mean, inverse deviation, then the new running statistics (those that exist)."""
    dims, shape = _channels(x)
    x = x.convert(opmath(x.dtype))
    mean, deviations, squares, count = _moments(x, dims)
    inverse = (squares / count + eps).rsqrt()
    output = _affine(deviations * inverse, weight, bias, shape)
    results = [_like(v, spec) for v, spec in zip((output, mean, inverse), cx.outputs[:3], strict=True)]
    updates = [_running(running_mean, mean, momentum), _running(running_var, squares / (count - 1), momentum)]
    return [*results, *(u for u in updates if u is not None)]


def _batch_norm_inference(
    cx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    eps: float,
) -> list[Value | None]:
    """Output, and the running mean and inverse deviation as the saved ones.

    PyTorch on a CPU saves empty tensors; the device, and PyTorch's meta kernels, per-channel ones.
    """
    _, shape = _channels(x)
    x = x.convert(opmath(x.dtype))
    mean = running_mean.convert(x.dtype).reshape(shape)
    inverse = (running_var.convert(x.dtype) + eps).rsqrt().reshape(shape)
    output = _affine((x - mean) * inverse, weight, bias, shape)
    return [_like(v, spec) for v, spec in zip((output, mean, inverse), cx.outputs, strict=True)]


def _unless_training(made: Any) -> Callable[..., Any]:
    """In evaluation nothing is written: launch the overload that only reads the running statistics."""
    function = made.function

    def kernel(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Any:
        if training:
            return function(x, weight, bias, running_mean, running_var, True, momentum, eps)
        if running_mean is None or running_var is None:
            raise RuntimeError("running_mean and running_var must be defined in evaluation mode")
        from emutpu.backend.registration import kernel as kernel_of

        reading = kernel_of("_native_batch_norm_legit_no_training").function
        return reading(x, weight, bias, running_mean, running_var, momentum, eps)

    return kernel


@lowering(
    "native_batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var, "
    "bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)",
    mutates=("running_mean", "running_var"),
    dynamic="momentum",
    around=_unless_training,
)
def _native_batch_norm(
    cx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    training: bool,
    momentum: Value | float,
    eps: float,
) -> list[Value | None]:
    return _batch_norm_training(cx, x, weight, bias, running_mean, running_var, momentum, eps)


lowering(
    "_native_batch_norm_legit(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, "
    "Tensor(b!) running_var, bool training, float momentum, float eps) -> (Tensor, Tensor, Tensor)",
    dynamic="momentum",
    around=_unless_training,
)(_native_batch_norm)


@lowering(
    "_native_batch_norm_legit.no_stats(Tensor input, Tensor? weight, Tensor? bias, bool training, float momentum, "
    "float eps) -> (Tensor, Tensor, Tensor)",
    dynamic="momentum",
)
def _native_batch_norm_no_stats(
    cx: Context, x: Value, weight: Value | None, bias: Value | None, training: bool, momentum: Value | float, eps: float
) -> list[Value | None]:
    return _batch_norm_training(cx, x, weight, bias, None, None, momentum, eps)


@lowering(
    "_native_batch_norm_legit_no_training(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, "
    "Tensor running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor)",
    dynamic="momentum",
)
def _native_batch_norm_no_training(
    cx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Value | float,
    eps: float,
) -> list[Value | None]:
    return _batch_norm_inference(cx, x, weight, bias, running_mean, running_var, eps)


@lowering(
    "_batch_norm_with_update(Tensor input, Tensor? weight, Tensor? bias, Tensor(a!) running_mean, "
    "Tensor(b!) running_var, float momentum, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    dynamic="momentum",
    beyond=True,
)
def _batch_norm_with_update(
    cx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: Value | float,
    eps: float,
) -> list[Value | None]:
    results = _batch_norm_training(cx, x, weight, bias, running_mean, running_var, momentum, eps)
    return [*results[:3], cx.builder.full(0, (0,), torch.uint8), *results[3:]]


@lowering(
    "native_batch_norm_backward(Tensor grad_out, Tensor input, Tensor? weight, Tensor? running_mean, "
    "Tensor? running_var, Tensor? save_mean, Tensor? save_invstd, bool train, float eps, bool[3] output_mask) "
    "-> (Tensor, Tensor, Tensor)"
)
def _native_batch_norm_backward(
    cx: Context,
    grad: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    save_mean: Value | None,
    save_invstd: Value | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> list[Value | None]:
    dims, shape = _channels(x)
    compute = opmath(x.dtype)
    grad, x = grad.convert(compute), x.convert(compute)
    if train:
        assert save_mean is not None
        assert save_invstd is not None
        mean, inverse = save_mean.convert(compute).reshape(shape), save_invstd.convert(compute).reshape(shape)
    else:
        assert running_mean is not None
        assert running_var is not None
        mean = running_mean.convert(compute).reshape(shape)
        inverse = (running_var.convert(compute) + eps).rsqrt().reshape(shape)
    normalized = (x - mean) * inverse
    grad_bias = grad.sum(dims, keepdim=True)
    grad_weight = (grad * normalized).sum(dims, keepdim=True)
    scale = inverse if weight is None else inverse * weight.convert(compute).reshape(shape)
    if train:
        count = math.prod(x.shape[d] for d in dims)
        grad = grad - grad_bias / count - normalized * (grad_weight / count)
    return [_like(v, spec) for v, spec in zip((grad * scale, grad_weight, grad_bias), cx.outputs, strict=True)]


# ----------------------------------------------------------------------------------------------------- layer norm


@lowering(
    "native_layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor, Tensor, Tensor)"
)
def _native_layer_norm(
    cx: Context, x: Value, normalized_shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> list[Value | None]:
    x = x.convert(opmath(x.dtype))
    dims = range(x.ndim - len(normalized_shape), x.ndim)
    mean, deviations, squares, count = _moments(x, dims)
    inverse = (squares / count + eps).rsqrt()
    output = _affine(deviations * inverse, weight, bias, normalized_shape)
    return [_like(v, spec) for v, spec in zip((output, mean, inverse), cx.outputs, strict=True)]


@lowering(
    "native_layer_norm_backward(Tensor grad_out, Tensor input, SymInt[] normalized_shape, Tensor mean, Tensor rstd, "
    "Tensor? weight, Tensor? bias, bool[3] output_mask) -> (Tensor, Tensor, Tensor)"
)
def _native_layer_norm_backward(
    cx: Context,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    output_mask: Sequence[bool],
) -> list[Value | None]:
    compute = opmath(x.dtype)
    grad, x, mean, rstd = (v.convert(compute) for v in (grad, x, mean, rstd))
    inner = range(x.ndim - len(normalized_shape), x.ndim)
    outer = range(x.ndim - len(normalized_shape))
    normalized = (x - mean) * rstd
    weighted = _affine(grad, weight, None, normalized_shape)
    count = math.prod(normalized_shape)
    center = weighted.sum(inner, keepdim=True) / count
    slope = (weighted * normalized).sum(inner, keepdim=True) / count
    grad_input = (weighted - center - normalized * slope) * rstd
    grads = (grad_input, (grad * normalized).sum(outer), grad.sum(outer))
    return [_like(v, spec) for v, spec in zip(grads, cx.outputs, strict=True)]


# ------------------------------------------------------------------------------------------------------- rms norm


@lowering(
    "_fused_rms_norm_backward(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight, "
    "bool[2] output_mask) -> (Tensor, Tensor)"
)
def _fused_rms_norm_backward(
    cx: Context,
    grad: Value,
    x: Value,
    normalized_shape: Sequence[int],
    rstd: Value,
    weight: Value | None,
    output_mask: Sequence[bool],
) -> list[Value | None]:
    compute = opmath(x.dtype)
    grad, x, rstd = (v.convert(compute) for v in (grad, x, rstd))
    inner = range(x.ndim - len(normalized_shape), x.ndim)
    outer = range(x.ndim - len(normalized_shape))
    normalized = x * rstd
    weighted = _affine(grad, weight, None, normalized_shape)
    slope = (weighted * normalized).sum(inner, keepdim=True) / math.prod(normalized_shape)
    grads = ((weighted - normalized * slope) * rstd, (grad * normalized).sum(outer))
    return [_like(v, spec) for v, spec in zip(grads, cx.outputs, strict=True)]


# ----------------------------------------------------------------------------------------------------- group norm


def _grouped(x: Value, n: int, c: int, hxw: int, group: int) -> Value:
    """[N, groups, channels of a group, spatial], in computation precision."""
    return x.convert(opmath(x.dtype)).reshape((n, group, c // group, hxw))


@lowering(
    "native_group_norm(Tensor input, Tensor? weight, Tensor? bias, SymInt N, SymInt C, SymInt HxW, int group, "
    "float eps) -> (Tensor, Tensor, Tensor)"
)
def _native_group_norm(
    cx: Context,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> list[Value | None]:
    mean, deviations, squares, count = _moments(_grouped(x, n, c, hxw, group), (2, 3))
    inverse = (squares / count + eps).rsqrt()
    output = _affine(deviations * inverse, weight, bias, (1, group, c // group, 1))
    return [_like(v, spec) for v, spec in zip((output, mean, inverse), cx.outputs, strict=True)]


def _group_norm_backward_meta(**given: Any) -> Any:
    """PyTorch's divides by the size of an image, which may be 0."""
    if given["HxW"]:
        return torch.ops.aten.native_group_norm_backward(**given)
    x, mask = given["input"], given["output_mask"]
    parameters = [x.new_empty(given["C"]) if wanted else None for wanted in mask[1:]]
    return (torch.empty_like(x) if mask[0] else None, *parameters)


@lowering(
    "native_group_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, SymInt N, "
    "SymInt C, SymInt HxW, int group, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    meta=_group_norm_backward_meta,
)
def _native_group_norm_backward(
    cx: Context,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    weight: Value | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> list[Value | None]:
    x, grad = _grouped(x, n, c, hxw, group), _grouped(grad, n, c, hxw, group)
    compute = x.dtype
    mean = mean.convert(compute).reshape((n, group, 1, 1))
    rstd = rstd.convert(compute).reshape((n, group, 1, 1))
    normalized = (x - mean) * rstd
    weighted = _affine(grad, weight, None, (1, group, c // group, 1))
    count = max(1, c // group * hxw)
    center = weighted.sum((2, 3), keepdim=True) / count
    slope = (weighted * normalized).sum((2, 3), keepdim=True) / count
    grad_input = (weighted - center - normalized * slope) * rstd
    grads = (grad_input, (grad * normalized).sum((0, 3)), grad.sum((0, 3)))
    return [_like(v, spec) for v, spec in zip(grads, cx.outputs, strict=True)]
