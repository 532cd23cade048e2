"""Sorting, scans, and what is found by comparing with every element: searches, histograms, membership."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Body, Number, Value, highest, lowest
from emutpu.backend.lowering._registry import Context, Emit, lowering, lowerings
from emutpu.backend.lowering.reductions import wrapped_dim

__all__ = ["scan", "sorted_with_indices"]


# ---------------------------------------------------------------------------------------------------------- sort


def sorted_with_indices(x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    """Stable sort along ``dim`` with int64 indices. A NaN counts as larger than every number."""
    builder = x.builder
    if x.ndim == 0:
        return x, builder.full(0, (), torch.int64)

    def before(a: Value, b: Value, i: Value, j: Value) -> Value:
        first = a > b if descending else a < b
        if x.dtype.is_floating_point:
            nan, number = (a, b) if descending else (b, a)
            first = first | (nan.is_nan() & number.eq(number))
        return first

    positions = builder.iota(x.shape, dim, torch.int32)
    values, indices = builder.sort([x, positions], dim, before)
    return values, indices.convert(torch.int64)


@lowering(
    "sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)"
)
def _sort_stable(cx: Context, x: Value, stable: bool | None, dim: int, descending: bool) -> tuple[Value, Value]:
    return sorted_with_indices(x, wrapped_dim(x, dim), descending)


@lowering("sort(Tensor self, int dim=-1, bool descending=False) -> (Tensor values, Tensor indices)")
def _sort(cx: Context, x: Value, dim: int, descending: bool) -> tuple[Value, Value]:
    return sorted_with_indices(x, wrapped_dim(x, dim), descending)


@lowering(
    "topk(Tensor self, SymInt k, int dim=-1, bool largest=True, bool sorted=True) -> (Tensor values, Tensor indices)"
)
def _topk(cx: Context, x: Value, k: int, dim: int, largest: bool, ordered: bool) -> list[Value]:
    """A sort and a slice, which XLA turns into its own top-k; always in order."""
    dim = wrapped_dim(x, dim)
    return [
        v.slice_dim(dim, 0, k) if v.ndim else v.reshape(cx.output.size) for v in sorted_with_indices(x, dim, largest)
    ]


# --------------------------------------------------------------------------------------------------------- scans


def scan(xs: list[Value], initial: list[Number], body: Body, dim: int) -> list[Value]:
    """Inclusive scan with an associative body, as a window over everything before: XLA makes a tree of it."""
    first = xs[0]
    if first.ndim == 0 or first.numel == 0:
        return xs
    builder, extent = first.builder, first.shape[dim]
    return builder.reduce_window(
        xs,
        [builder.full(value, (), x.dtype) for value, x in zip(initial, xs, strict=True)],
        body,
        window=[extent if d == dim else 1 for d in range(first.ndim)],
        strides=[1] * first.ndim,
        padding=[(extent - 1, 0) if d == dim else (0, 0) for d in range(first.ndim)],
    )


def _cumulative(body: Callable[[Value, Value], Value], initial: int) -> Emit:
    def emit(cx: Context, x: Value, dim: int, dtype: Any) -> Value:
        x = x.convert(cx.output.dtype)
        work = x.convert(opmath(x.dtype))
        return scan([work], [initial], body, wrapped_dim(x, dim))[0].convert(cx.output.dtype)

    return emit


lowerings(
    "(Tensor self, int dim, *, ScalarType? dtype=None) -> Tensor",
    {"cumsum": _cumulative(Value.__add__, 0), "cumprod": _cumulative(Value.__mul__, 1)},
)


def _cumulative_extremum(direction: str) -> Emit:
    def emit(cx: Context, x: Value, dim: int) -> list[Value]:
        """Later equals (and later NaNs) win, as on a CPU."""
        builder = cx.builder
        if x.ndim == 0:
            return [x, builder.full(0, (), torch.int64)]
        dim = wrapped_dim(x, dim)

        def better(value: Value, index: Value, other: Value, at: Value) -> list[Value]:
            wins, ties = builder.compare(direction, value, other), value.eq(other)
            if x.dtype.is_floating_point:
                wins = wins | (value.is_nan() & other.eq(other))
                ties = ties | (value.is_nan() & other.is_nan())
            keep = wins | (ties & (index > at))
            return [builder.select(keep, value, other), builder.select(keep, index, at)]

        start: list[Number] = [(lowest if direction == "GT" else highest)(x.dtype), -1]
        values, indices = scan([x, builder.iota(x.shape, dim, torch.int32)], start, better, dim)
        return [values, indices.convert(torch.int64)]

    return emit


lowerings(
    "(Tensor self, int dim) -> (Tensor values, Tensor indices)",
    {"cummax": _cumulative_extremum("GT"), "cummin": _cumulative_extremum("LT")},
)


@lowering("logcumsumexp(Tensor self, int dim) -> Tensor")
def _logcumsumexp(cx: Context, x: Value, dim: int) -> Value:
    work = x.convert(opmath(x.dtype))

    def joined(a: Value, b: Value) -> Value:
        high, low = a.maximum(b), a.minimum(b)
        apart = (low - high).exp().unary("stablehlo.log_plus_one") + high
        # Equal infinities have no difference.
        return cx.builder.select(a.eq(b) & a.abs().eq(math.inf), a, apart)

    return scan([work], [-math.inf], joined, wrapped_dim(x, dim))[0].convert(x.dtype)


lowering("_logcumsumexp(Tensor self, int dim) -> Tensor", meta=lambda self, dim: torch.empty_like(self))(_logcumsumexp)


# ------------------------------------------------------------------------------------------------------ searches


def _search(cx: Context, sequence: Value, x: Value, right: bool) -> Value:
    """How many elements of the sorted last dimension lie before each of ``x``: a comparison with all of them."""
    compute = torch.promote_types(sequence.dtype, x.dtype)
    sequence, x = sequence.convert(compute), x.convert(compute)
    wide = x.reshape((*x.shape, 1))
    if sequence.ndim > 1:
        sequence = sequence.reshape((*sequence.shape[:-1], 1, sequence.shape[-1]))
    behind = sequence > wide if right else sequence >= wide
    return (~behind).convert(torch.int32).sum([behind.ndim - 1]).convert(cx.output.dtype)


def _in_order(sequence: Value, sorter: Value) -> Value:
    """The sequence in the order that ``sorter`` gives, along the last dimension."""
    if sequence.numel == 0:
        return sequence
    return sequence.builder.gather(
        sequence,
        sorter.convert(torch.int32).reshape((*sorter.shape, 1)),
        offset_dims=[],
        collapsed=[sequence.ndim - 1],
        start_index_map=[sequence.ndim - 1],
        slice_sizes=[1] * sequence.ndim,
        shape=sequence.shape,
        batching=range(sequence.ndim - 1),
    )


def _searchsorted(
    cx: Context, sequence: Value, x: Value, out_int32: bool, right: bool, side: str | None, sorter: Value | None
) -> Value:
    if sorter is not None:
        sequence = _in_order(sequence, sorter)
    if isinstance(cx.arguments["self"], int | float):
        x = cx.scalar(x, sequence.dtype if sequence.dtype.is_floating_point else x.dtype)
    return _search(cx, sequence, x, right or side == "right")


_SEARCH = "*, bool out_int32=False, bool right=False, str? side=None, Tensor? sorter=None) -> Tensor"
lowering("searchsorted.Tensor(Tensor sorted_sequence, Tensor self, " + _SEARCH)(_searchsorted)
lowering("searchsorted.Scalar(Tensor sorted_sequence, Scalar self, " + _SEARCH)(_searchsorted)


def _bucketize(cx: Context, x: Value, boundaries: Value, out_int32: bool, right: bool) -> Value:
    return _searchsorted(cx, boundaries, x, out_int32, right, None, None)


_BUCKETIZE = "Tensor boundaries, *, bool out_int32=False, bool right=False) -> Tensor"
lowering("bucketize.Tensor(Tensor self, " + _BUCKETIZE)(_bucketize)
lowering("bucketize.Scalar(Scalar self, " + _BUCKETIZE)(_bucketize)


# ----------------------------------------------------------------------------------------- histograms, membership

_DENSE_BINS = 1024


def _counted(indices: Value, weights: Value, bins: int) -> Value:
    """Sum of the weights at each of ``bins`` indices (int32); others count nowhere.

    A comparison with every bin where those are few: a scatter works through its updates one by one on a chip.
    """
    builder = indices.builder
    if bins <= _DENSE_BINS:
        here = indices.reshape((indices.numel, 1)).eq(builder.iota((1, bins), 1, torch.int32))
        return builder.select(here, weights.reshape((weights.numel, 1)), 0).sum([0])
    return builder.scatter(
        builder.full(0, (bins,), weights.dtype),
        indices.reshape((indices.numel, 1)),
        weights.reshape((weights.numel,)),
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        combine=Value.__add__,
    )


@lowering("histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor")
def _histc(cx: Context, x: Value, bins: int, low: Value | Number, high: Value | Number) -> Value:
    """Equal bounds mean the data's own; equal data, one unit around it."""
    builder = cx.builder
    work = x.convert(opmath(x.dtype)).reshape((x.numel,))
    if not work.dtype.is_floating_point:
        work = work.convert(torch.float64)
    start, stop = cx.scalar(low, work.dtype), cx.scalar(high, work.dtype)
    if x.numel:
        same = start.eq(stop)
        start, stop = builder.select(same, work.min([0]), start), builder.select(same, work.max([0]), stop)
    same = start.eq(stop)
    start, stop = builder.select(same, start - 1, start), builder.select(same, stop + 1, stop)
    inside = (work >= start) & (work <= stop)
    position = ((work - start) / (stop - start) * bins).convert(torch.int32).minimum(bins - 1)
    position = builder.select(inside, position, -1)
    ones = builder.full(1, position.shape, torch.float32 if x.dtype.itemsize < 8 else work.dtype)
    counts = _counted(position, ones, bins)
    # PyTorch refuses a range without bounds; nobody here has read it.
    bounded = (start - start).eq(0) & (stop - stop).eq(0)
    return builder.select(bounded, counts, math.nan).convert(cx.output.dtype)


def _bincount_meta(self: torch.Tensor, weights: torch.Tensor | None, minlength: int) -> torch.Tensor:
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype == torch.float32 else torch.float64
    return torch.empty((minlength,), dtype=dtype, device="meta")


def _bincount_sized(made: Any) -> Callable[..., Any]:
    """Read the largest value: the result's size is in the data."""
    function = made.function

    def kernel(self: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
        if minlength < 0:
            raise RuntimeError("minlength should be >= 0")
        if self.dim() != 1 or self.is_floating_point() or self.is_complex() or self.dtype == torch.bool:
            raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
        if weights is not None and weights.shape != self.shape:
            raise RuntimeError("weights should be 1-d and have the same length as input")
        if not self.numel():
            return torch.zeros((minlength,), dtype=torch.int64, device=self.device)
        low, high = torch.stack(torch.aminmax(self)).tolist()
        if low < 0:
            raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
        return function(self, weights, max(high + 1, minlength))

    return kernel


@lowering(
    "bincount(Tensor self, Tensor? weights=None, SymInt minlength=0) -> Tensor",
    meta=_bincount_meta,
    around=_bincount_sized,
)
def _bincount(cx: Context, x: Value, weights: Value | None, minlength: int) -> Value:
    """Exactly ``minlength`` counts."""
    dtype = cx.output.dtype
    amounts = cx.builder.full(1, x.shape, dtype) if weights is None else weights.convert(dtype)
    return _counted(x.convert(torch.int32), amounts, minlength)


def _isin(cx: Context, elements: Value, tests: Value, assume_unique: bool, invert: bool) -> Value:
    compute = torch.promote_types(elements.dtype, tests.dtype)
    if isinstance(cx.arguments.get("test_element", cx.arguments.get("element")), int | float):
        tensor, scalar = (elements, tests) if "test_element" in cx.arguments else (tests, elements)
        if tensor.dtype.is_floating_point or not scalar.dtype.is_floating_point:
            compute = tensor.dtype
    wide = elements.convert(compute).reshape((*elements.shape, 1))
    found = wide.eq(tests.convert(compute).reshape((tests.numel,))).any([wide.ndim - 1])
    return ~found if invert else found


_ISIN = ", *, bool assume_unique=False, bool invert=False) -> Tensor"
lowering("isin.Tensor_Tensor(Tensor elements, Tensor test_elements" + _ISIN)(_isin)
lowering("isin.Tensor_Scalar(Tensor elements, Scalar test_element" + _ISIN)(_isin)
lowering("isin.Scalar_Tensor(Scalar element, Tensor test_elements" + _ISIN)(_isin)
