"""Softmax, its logarithm, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.reductions import reduced_dims

__all__: list[str] = []


def _shifted(x: Value, dim: int) -> tuple[Value, list[int]]:
    """``x`` in computation precision minus its maximum along ``dim``."""
    x = x.convert(opmath(x.dtype))
    dims = reduced_dims(x, dim)
    return x - x.max(dims, keepdim=True), dims


def _softmax_of(x: Value, dim: int) -> Value:
    shifted, dims = _shifted(x, dim)
    exponentials = shifted.exp()
    return exponentials / exponentials.sum(dims, keepdim=True)


@lowering("_softmax(Tensor self, int dim, bool half_to_float) -> Tensor")
def _softmax(cx: Context, x: Value, dim: int, half_to_float: bool) -> Value:
    return _softmax_of(x, dim).convert(cx.output.dtype)


@lowering("_log_softmax(Tensor self, int dim, bool half_to_float) -> Tensor")
def _log_softmax(cx: Context, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted, dims = _shifted(x, dim)
    return (shifted - shifted.exp().sum(dims, keepdim=True).log()).convert(cx.output.dtype)


@lowering("_safe_softmax(Tensor self, int dim, ScalarType? dtype=None) -> Tensor")
def _safe_softmax(cx: Context, x: Value, dim: int, dtype: Any) -> Value:
    """Rows of -inf give zeros instead of NaN."""
    x = x.convert(cx.output.dtype)
    masked = x.eq(float("-inf")).all(reduced_dims(x, dim), keepdim=True)
    return cx.builder.select(masked, 0, _softmax_of(x, dim)).convert(cx.output.dtype)


@lowering("_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor")
def _softmax_backward(cx: Context, grad: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    compute = opmath(torch.promote_types(grad.dtype, output.dtype))
    grad, output = grad.convert(compute), output.convert(compute)
    weighted = grad * output
    return (weighted - output * weighted.sum(reduced_dims(grad, dim), keepdim=True)).convert(cx.output.dtype)


@lowering("_log_softmax_backward_data(Tensor grad_output, Tensor output, int dim, ScalarType input_dtype) -> Tensor")
def _log_softmax_backward(cx: Context, grad: Value, output: Value, dim: int, input_dtype: Any) -> Value:
    compute = opmath(torch.promote_types(grad.dtype, output.dtype))
    grad, output = grad.convert(compute), output.convert(compute)
    return (grad - output.exp() * grad.sum(reduced_dims(grad, dim), keepdim=True)).convert(cx.output.dtype)


# --------------------------------------------------------------------------------------------------- with a mask

_SQUARE, _PADDING = 0, 1  # what a mask stands for: [L, L] over the last two dimensions, [B, L] over first and last


def _masked_meta(self: torch.Tensor, mask: torch.Tensor, dim: int | None, mask_type: int | None) -> torch.Tensor:
    if mask.dtype != torch.bool:
        raise RuntimeError("Mask should be a boolean tensor")
    return torch.empty_like(self)


def _spread(mask: Value, shape: Sequence[int], mask_type: int | None) -> Value:
    """The mask over every element. True leaves an element out."""
    if mask_type == _PADDING and mask.shape != tuple(shape):
        mask = mask.reshape((shape[0], *[1] * (len(shape) - 2), shape[-1]))
    return mask.broadcast(shape)


@lowering("_masked_softmax(Tensor self, Tensor mask, int? dim=None, int? mask_type=None) -> Tensor", meta=_masked_meta)
def _masked_softmax(cx: Context, x: Value, mask: Value, dim: int | None, mask_type: int | None) -> Value:
    """Softmax over what the mask leaves; NaN where it leaves nothing, as on a CPU."""
    builder = cx.builder
    if not x.numel:
        return x
    out = _spread(mask, x.shape, mask_type)
    dims = reduced_dims(x, -1 if dim is None else dim)
    kept = builder.select(out, float("-inf"), x.convert(opmath(x.dtype)))
    peak = kept.max(dims, keepdim=True)
    exponentials = builder.select(out, 0, (kept - peak).exp())
    total = exponentials.sum(dims, keepdim=True)
    return (exponentials / total).convert(x.dtype)


@lowering(
    "_masked_softmax_backward(Tensor grad_output, Tensor output, Tensor mask, int? dim=None) -> Tensor",
    meta=lambda grad_output, output, mask, dim: torch.empty_like(grad_output),
)
def _masked_softmax_backward(cx: Context, grad: Value, output: Value, mask: Value, dim: int | None) -> Value:
    if not grad.numel:
        return grad
    compute = opmath(grad.dtype)
    out = _spread(mask, grad.shape, None)
    weighted = cx.builder.select(out, 0, grad.convert(compute) * output.convert(compute))
    dims = reduced_dims(grad, -1 if dim is None else dim)
    slope = weighted - output.convert(compute) * weighted.sum(dims, keepdim=True)
    return cx.builder.select(out, 0, slope).convert(cx.output.dtype)
