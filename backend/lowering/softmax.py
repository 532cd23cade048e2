"""Softmax, its logarithm, and their gradients."""

from __future__ import annotations

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
