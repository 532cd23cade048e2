"""Reductions: sums, products, extrema with and without indices, any and all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._prims_common import canonicalize_dim

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Body, Value
from emutpu.backend.lowering._registry import Context, Emit, lowering, lowerings

__all__ = ["extremum_with_index", "reduced_dims", "wrapped_dim"]


def wrapped_dim(x: Value, dim: int) -> int:
    """``dim`` counted from the front, 0 for a scalar. Raises IndexError in PyTorch's words: not every meta kernel looks."""
    return canonicalize_dim(x.ndim, dim)


def reduced_dims(x: Value, dim: int | Sequence[int] | None) -> list[int]:
    """The dimensions to reduce, non-negative and sorted: every one for None and for an empty list."""
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.ndim))
    dims = sorted(wrapped_dim(x, d) for d in ([dim] if isinstance(dim, int) else dim))
    return dims if x.ndim else []


def _count(x: Value, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)


# --------------------------------------------------------------------------------------------- sums and products


def _accumulated(cx: Context, x: Value, dim: Any, keepdim: bool, op: str, initial: int) -> Value:
    """Reduce in the result's dtype, 16-bit floats in float32, as PyTorch's CPU kernels do."""
    x = x.convert(cx.output.dtype)
    x = x.convert(opmath(x.dtype))
    if x.dtype == torch.bool:
        raise AssertionError("sums and products of bool have an integer result")
    return cx.builder.reduce(x, op, initial, reduced_dims(x, dim), keepdim)


@lowering("sum(Tensor self, *, ScalarType? dtype=None) -> Tensor")
def _sum(cx: Context, x: Value, dtype: Any) -> Value:
    return _accumulated(cx, x, None, False, "stablehlo.add", 0).convert(cx.output.dtype)


@lowering("sum.dim_IntList(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor")
def _sum_dim(cx: Context, x: Value, dim: Any, keepdim: bool, dtype: Any) -> Value:
    return _accumulated(cx, x, dim, keepdim, "stablehlo.add", 0).convert(cx.output.dtype)


def _average(cx: Context, x: Value, dim: Any, keepdim: bool) -> Value:
    total = _accumulated(cx, x, dim, keepdim, "stablehlo.add", 0)
    return (total / _count(x, reduced_dims(x, dim))).convert(cx.output.dtype)


@lowering("mean(Tensor self, *, ScalarType? dtype=None) -> Tensor")
def _mean(cx: Context, x: Value, dtype: Any) -> Value:
    return _average(cx, x, None, False)


@lowering("mean.dim(Tensor self, int[1]? dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor")
def _mean_dim(cx: Context, x: Value, dim: Any, keepdim: bool, dtype: Any) -> Value:
    return _average(cx, x, dim, keepdim)


@lowering("prod(Tensor self, *, ScalarType? dtype=None) -> Tensor")
def _prod(cx: Context, x: Value, dtype: Any) -> Value:
    return _accumulated(cx, x, None, False, "stablehlo.multiply", 1).convert(cx.output.dtype)


@lowering("prod.dim_int(Tensor self, int dim, bool keepdim=False, *, ScalarType? dtype=None) -> Tensor")
def _prod_dim(cx: Context, x: Value, dim: int, keepdim: bool, dtype: Any) -> Value:
    return _accumulated(cx, x, dim, keepdim, "stablehlo.multiply", 1).convert(cx.output.dtype)


# ------------------------------------------------------------------------------------------------------- extrema


def _extremum(reduce: Body) -> Emit:
    def emit(cx: Context, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        return reduce(x, reduced_dims(x, dim), keepdim)  # type: ignore[return-value]  # one value

    return emit


lowerings(
    "(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor",
    {"amax": _extremum(Value.max), "amin": _extremum(Value.min)},
)


def _whole_extremum(name: str, reduce: Body) -> Emit:
    def emit(cx: Context, x: Value) -> Value:
        if x.numel == 0:
            # PyTorch's meta kernel does not look.
            raise RuntimeError(
                f"{name}(): Expected reduction dim to be specified for input.numel() == 0. "
                "Specify the reduction dim with the 'dim' argument."
            )
        if x.dtype.is_complex:
            raise NotImplementedError(f"\"{name}_all\" not implemented for 'ComplexFloat'")
        return reduce(x, reduced_dims(x, None), False)  # type: ignore[return-value]  # one value

    return emit


lowerings(
    "(Tensor self) -> Tensor", {"max": _whole_extremum("max", Value.max), "min": _whole_extremum("min", Value.min)}
)


@lowering("aminmax(Tensor self, *, int? dim=None, bool keepdim=False) -> (Tensor min, Tensor max)")
def _aminmax(cx: Context, x: Value, dim: int | None, keepdim: bool) -> list[Value]:
    dims = reduced_dims(x, dim)
    return [x.min(dims, keepdim).reshape(cx.output.size), x.max(dims, keepdim).reshape(cx.output.size)]


def extremum_with_index(x: Value, dim: int, direction: str, keepdim: bool) -> tuple[Value, Value]:
    """The extremum along ``dim`` and its first index (int64); a NaN beats every number. ``direction`` is GT or LT."""
    builder = x.builder
    if x.ndim == 0:
        return x, builder.full(0, (), torch.int64)
    from emutpu.backend.hlo import highest, lowest

    initial = (lowest if direction == "GT" else highest)(x.dtype)

    def better(value: Value, index: Value, other: Value, at: Value) -> list[Value]:
        wins = builder.compare(direction, value, other)
        ties = value.eq(other)
        if x.dtype.is_floating_point:
            wins = wins | (value.is_nan() & other.eq(other))
            ties = ties | (value.is_nan() & other.is_nan())
        keep = wins | (ties & (index < at))
        return [builder.select(keep, value, other), builder.select(keep, index, at)]

    positions = builder.iota(x.shape, dim, torch.int32)
    start = [builder.full(initial, (), x.dtype), builder.full(torch.iinfo(torch.int32).max, (), torch.int32)]
    values, indices = builder.reduce_many([x, positions], start, better, [dim], keepdim)
    return values, indices.convert(torch.int64)


def _with_index(direction: str) -> Emit:
    def emit(cx: Context, x: Value, dim: int, keepdim: bool) -> tuple[Value, Value]:
        return extremum_with_index(x, wrapped_dim(x, dim), direction, keepdim)

    return emit


lowerings(
    "(Tensor self, int dim, bool keepdim=False) -> (Tensor values, Tensor indices)",
    {"max.dim": _with_index("GT"), "min.dim": _with_index("LT")},
)


def _index_of(direction: str) -> Emit:
    def emit(cx: Context, x: Value, dim: int | None, keepdim: bool) -> Value:
        if dim is None:
            x, dim, keepdim = x.reshape((x.numel,)), 0, False
        return extremum_with_index(x, wrapped_dim(x, dim), direction, keepdim)[1].reshape(cx.output.size)

    return emit


lowerings(
    "(Tensor self, int? dim=None, bool keepdim=False) -> Tensor",
    {"argmax": _index_of("GT"), "argmin": _index_of("LT")},
)


# --------------------------------------------------------------------------------------------------- any and all


def _logical(reduce: Body, none_for_empty: bool = False) -> Emit:
    def emit(cx: Context, x: Value, dim: Any = None, keepdim: bool = False) -> Value:
        empty = none_for_empty and dim is not None and len(dim) == 0
        truths = x.convert(torch.bool)
        reduced = truths if empty else reduce(truths, reduced_dims(x, dim), keepdim)
        return reduced.convert(cx.output.dtype)  # type: ignore[union-attr]  # one value

    return emit


lowerings("(Tensor self) -> Tensor", {"any": _logical(Value.any), "all": _logical(Value.all)})
lowerings(
    "(Tensor self) -> Tensor",
    {"_is_any_true": _logical(Value.any), "_is_all_true": _logical(Value.all)},
    meta=lambda self: self.new_empty(()),
)
lowerings(
    "(Tensor self, int dim, bool keepdim=False) -> Tensor",
    {"any.dim": _logical(Value.any), "all.dim": _logical(Value.all)},
)
lowerings(
    "(Tensor self, int[]? dim=None, bool keepdim=False) -> Tensor",
    {"any.dims": _logical(Value.any, True), "all.dims": _logical(Value.all, True)},
)
