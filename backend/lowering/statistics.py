"""Reductions built from several others: variances, norms, log-sum-exp, counts, medians and modes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import Context, Emit, lowering, lowerings
from emutpu.backend.lowering.reductions import extremum_with_index, reduced_dims, wrapped_dim
from emutpu.backend.lowering.sorting import sorted_with_indices

__all__ = ["vector_norm"]


def _count(x: Value, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


# ----------------------------------------------------------------------------------------------------- variances


def _variance(cx: Context, x: Value, dim: Any, correction: Value | Number | None, keepdim: bool) -> tuple[Value, Value]:
    """Variance and mean, in computation precision; the divisor never falls below zero."""
    x = x.convert(opmath(x.dtype))
    dims = reduced_dims(x, dim)
    count = _count(x, dims)
    mean = x.sum(dims, keepdim=True) / count
    deviations = x - mean
    if x.dtype.is_complex:
        real, imaginary = cx.builder.real(deviations), cx.builder.imag(deviations)
        squares = real * real + imaginary * imaginary
    else:
        squares = deviations * deviations
    taken = cx.scalar(1 if correction is None else correction, squares.dtype)
    divisor = (cx.builder.full(count, (), squares.dtype) - taken).maximum(0)
    total = squares.sum(dims, keepdim)
    return total / divisor, mean if keepdim else mean.reshape(total.shape)


def _variances(*, root: bool, with_mean: bool) -> Emit:
    def emit(cx: Context, x: Value, dim: Any, correction: Value | None, keepdim: bool) -> Value | list[Value]:
        variance, mean = _variance(cx, x, dim, correction, keepdim)
        spread = (variance.sqrt() if root else variance).convert(cx.output.dtype)
        return [spread, mean.convert(x.dtype)] if with_mean else spread

    return emit


_VARIANCE = "(Tensor self, int[1]? dim=None, *, Scalar? correction=None, bool keepdim=False) -> "
lowerings(
    _VARIANCE + "Tensor",
    {
        "var.correction": _variances(root=False, with_mean=False),
        "std.correction": _variances(root=True, with_mean=False),
    },
)
lowering("var_mean.correction" + _VARIANCE + "(Tensor, Tensor)")(_variances(root=False, with_mean=True))
lowering("std_mean.correction" + _VARIANCE + "(Tensor, Tensor)", beyond=True)(_variances(root=True, with_mean=True))


# --------------------------------------------------------------------------------------------------------- norms


def vector_norm(x: Value, order: Number, dims: Sequence[int], keepdim: bool) -> Value:
    """``(sum |x|^order)^(1/order)`` with the usual limits at 0 and the infinities, in the dtype of ``|x|``."""
    magnitudes = x.abs()
    if not isinstance(order, int | float):
        raise RuntimeError(f"linalg.vector_norm: expected a real order, got {order}")
    if order == math.inf:
        return magnitudes.max(dims, keepdim)
    if order == -math.inf:
        return magnitudes.min(dims, keepdim)
    if order == 0:
        return magnitudes.ne(0).convert(magnitudes.dtype).sum(dims, keepdim)
    if order == 1:
        return magnitudes.sum(dims, keepdim)
    if order == 2:
        return (magnitudes * magnitudes).sum(dims, keepdim).sqrt()
    return magnitudes.pow(order).sum(dims, keepdim).pow(1 / order)


def _norm(cx: Context, x: Value, order: Number | None, dim: Any, keepdim: bool, dtype: torch.dtype | None) -> Value:
    compute = opmath(dtype or (x.dtype if x.dtype.is_complex else cx.output.dtype))
    x = x.convert(compute)
    return vector_norm(x, 2 if order is None else order, reduced_dims(x, dim), keepdim).convert(cx.output.dtype)


lowering(
    "linalg_vector_norm(Tensor self, Scalar ord=2, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None)"
    " -> Tensor",
    static="ord",
)(_norm)


@lowering("norm.Scalar(Tensor self, Scalar p=2) -> Tensor", static="p")
def _norm_scalar(cx: Context, x: Value, p: Number) -> Value:
    return _norm(cx, x, p, None, False, None)


@lowering("norm.ScalarOpt_dim(Tensor self, Scalar? p, int[1] dim, bool keepdim=False) -> Tensor", static="p")
def _norm_dim(cx: Context, x: Value, p: Number | None, dim: Any, keepdim: bool) -> Value:
    return _norm(cx, x, p, dim, keepdim, None)


@lowering("norm.ScalarOpt_dtype(Tensor self, Scalar? p, *, ScalarType dtype) -> Tensor", static="p")
def _norm_dtype(cx: Context, x: Value, p: Number | None, dtype: torch.dtype) -> Value:
    return _norm(cx, x, p, None, False, dtype)


lowering(
    "norm.ScalarOpt_dim_dtype(Tensor self, Scalar? p, int[1] dim, bool keepdim, *, ScalarType dtype) -> Tensor",
    static="p",
)(_norm)


@lowering("renorm(Tensor self, Scalar p, int dim, Scalar maxnorm) -> Tensor", static="p", beyond=True)
def _renorm(cx: Context, x: Value, p: Number, dim: int, maxnorm: Value) -> Value:
    work = x.convert(opmath(x.dtype))
    others = [d for d in range(x.ndim) if d != wrapped_dim(x, dim)]
    norms = vector_norm(work, p, others, keepdim=True)
    limit = cx.scalar(maxnorm, norms.dtype)
    scale = cx.builder.select(norms > limit, limit / (norms + 1e-7), 1)
    return (work * scale.convert(work.dtype)).convert(x.dtype)


@lowering("_weight_norm_interface(Tensor v, Tensor g, int dim=0) -> (Tensor, Tensor)")
def _weight_norm(cx: Context, v: Value, g: Value, dim: int) -> list[Value]:
    x = v.convert(opmath(v.dtype))
    norms = vector_norm(x, 2, [d for d in range(v.ndim) if d != wrapped_dim(v, dim)], keepdim=True)
    weight = x * (g.convert(x.dtype) / norms)
    specs = [spec for spec in cx.outputs if spec is not None]
    return [value.convert(spec.dtype).reshape(spec.size) for value, spec in zip((weight, norms), specs, strict=True)]


@lowering(
    "_weight_norm_interface_backward(Tensor grad_w, Tensor saved_v, Tensor saved_g, Tensor saved_norms, int dim)"
    " -> (Tensor, Tensor)",
    beyond=True,
)
def _weight_norm_backward(cx: Context, grad: Value, v: Value, g: Value, norms: Value, dim: int) -> list[Value]:
    compute = opmath(v.dtype)
    grad, x, gain, length = (value.convert(compute) for value in (grad, v, g, norms))
    projected = (grad * x).sum([d for d in range(v.ndim) if d != wrapped_dim(v, dim)], keepdim=True)
    grad_g = projected / length
    grad_v = gain / length * (grad - x * (projected / (length * length)))
    return [grad_v.convert(v.dtype), grad_g.convert(g.dtype)]


# ----------------------------------------------------------------------------------------- log-sum-exp and counts


@lowering("logsumexp(Tensor self, int[1] dim, bool keepdim=False) -> Tensor")
def _logsumexp(cx: Context, x: Value, dim: Any, keepdim: bool) -> Value:
    x = x.convert(opmath(cx.output.dtype))
    dims = reduced_dims(x, dim)
    if x.dtype.is_complex:
        return x.exp().sum(dims, keepdim).log().convert(cx.output.dtype)
    peak = x.max(dims, keepdim=True)
    peak = cx.builder.select(peak.abs().eq(math.inf), 0, peak)
    total = (x - peak).exp().sum(dims, keepdim).log()
    return (total + peak.reshape(total.shape)).convert(cx.output.dtype)


@lowering("count_nonzero(Tensor self, int? dim=None) -> Tensor")
def _count_nonzero(cx: Context, x: Value, dim: Any) -> Value:
    return x.ne(0).convert(torch.int64).sum(reduced_dims(x, dim))


lowering("count_nonzero.dim_IntList(Tensor self, int[] dim) -> Tensor")(_count_nonzero)


@lowering("nansum(Tensor self, int[1]? dim=None, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor", beyond=True)
def _nansum(cx: Context, x: Value, dim: Any, keepdim: bool, dtype: Any) -> Value:
    if x.dtype.is_floating_point:
        x = cx.builder.select(x.is_nan(), 0, x)
    x = x.convert(cx.output.dtype).convert(opmath(cx.output.dtype))
    return x.sum(reduced_dims(x, dim), keepdim).convert(cx.output.dtype)


# ------------------------------------------------------------------------------------------- medians and modes


def _at(x: Value, indices: Value, dim: int) -> Value:
    """``x`` at one index (kept dimension of extent 1) along ``dim``, by a masked sum: no gather."""
    here = x.builder.iota(x.shape, dim, torch.int32).eq(indices.convert(torch.int32))
    if x.dtype == torch.bool:
        return (here & x).any([dim], keepdim=True)
    return x.builder.select(here, x, 0).sum([dim], keepdim=True)


def _flat(x: Value) -> Value:
    return x.reshape((x.numel,))


def _kth(cx: Context, x: Value, dim: int, keepdim: bool, *, k: int | None, nans: bool) -> list[Value]:
    """The k-th smallest (None: the lower median) along ``dim`` and its index; ``nans`` says whether a NaN wins."""
    if x.ndim == 0:
        return [x, cx.builder.full(0, (), torch.int64)]
    dim = wrapped_dim(x, dim)
    values, indices = sorted_with_indices(x, dim, descending=False)
    shape = tuple(1 if d == dim else n for d, n in enumerate(x.shape))
    position = cx.builder.full((k - 1) if k is not None else (x.shape[dim] - 1) // 2, shape, torch.int32)
    if k is None and x.dtype.is_floating_point:
        numbers = (~x.is_nan()).convert(torch.int32).sum([dim], keepdim=True)
        if nans:
            position = cx.builder.select(numbers < x.shape[dim], numbers, position)
        else:
            position = cx.builder.binary("stablehlo.divide", (numbers - 1).maximum(0), 2)
    picked = [_at(values, position, dim), _at(indices, position, dim)]
    return [v if keepdim else v.reshape([n for d, n in enumerate(x.shape) if d != dim]) for v in picked]


def _median(*, nans: bool) -> tuple[Emit, Emit]:
    def whole(cx: Context, x: Value) -> Value:
        return _kth(cx, _flat(x), 0, False, k=None, nans=nans)[0]

    def along(cx: Context, x: Value, dim: int, keepdim: bool) -> list[Value]:
        return _kth(cx, x, dim, keepdim, k=None, nans=nans)

    return whole, along


_ALONG = "(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)"
for _name, _nans in (("median", True), ("nanmedian", False)):
    _whole, _along = _median(nans=_nans)
    lowering(_name + "(Tensor self) -> Tensor", beyond=True)(_whole)
    lowering(_name + ".dim" + _ALONG, beyond=True)(_along)


@lowering(
    "kthvalue(Tensor self, SymInt k, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)", beyond=True
)
def _kthvalue(cx: Context, x: Value, k: int, dim: int, keepdim: bool) -> list[Value]:
    return _kth(cx, x, dim, keepdim, k=k, nans=True)


@lowering("mode(Tensor self, int dim=-1, bool keepdim=False) -> (Tensor values, Tensor indices)", beyond=True)
def _mode(cx: Context, x: Value, dim: int, keepdim: bool) -> list[Value]:
    """The most frequent value, the smallest among equals, and its last index."""
    if x.ndim == 0:
        return [x, cx.builder.full(0, (), torch.int64)]
    dim = wrapped_dim(x, dim)
    values, indices = sorted_with_indices(x, dim, descending=False)
    wide = (*x.shape[:dim], x.shape[dim], 1, *x.shape[dim + 1 :])
    other = (*x.shape[:dim], 1, x.shape[dim], *x.shape[dim + 1 :])
    frequency = values.reshape(wide).eq(values.reshape(other)).convert(torch.int32).sum([dim + 1])
    _, first = extremum_with_index(frequency, dim, "GT", keepdim=True)
    run = _at(frequency, first, dim).convert(torch.int64)
    picked = [_at(values, first, dim), _at(indices, first + run - 1, dim)]
    return [v if keepdim else v.reshape([n for d, n in enumerate(x.shape) if d != dim]) for v in picked]
