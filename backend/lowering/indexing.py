"""Reading and writing by index tensors: gathers and scatters.

Indices travel as int32 where every extent fits. Out-of-range ones are the device's affair: a gather clamps them, a
scatter drops the update; with bounds checks on, :mod:`emutpu.backend.bounds` raises before the launch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend import bounds, data_dependent
from emutpu.backend.dtypes import opmath
from emutpu.backend.errors import user_line
from emutpu.backend.hlo import Number, Value, broadcast_shapes, highest, lowest
from emutpu.backend.lowering._registry import Context, lowering

__all__ = ["Advanced", "positions_type", "scattered"]

Combine = Callable[[Value, Value], Value]


def _replace(old: Value, new: Value) -> Value:
    return new


def _add(old: Value, new: Value) -> Value:
    return old | new if old.dtype == torch.bool else old + new


def _multiply(old: Value, new: Value) -> Value:
    return old & new if old.dtype == torch.bool else old * new


def positions_type(*extents: int) -> torch.dtype:
    """The dtype for positions in arrays of these extents."""
    return torch.int32 if math.prod(max(1, n) for n in extents) < 2**31 else torch.int64


# ----------------------------------------------------------------------------------------- advanced indexing


@dataclasses.dataclass(frozen=True, slots=True)
class Advanced:
    """``x[indices]`` in StableHLO's terms.

    ``dims`` the indexed dimensions; ``starts`` their index vectors in the last dimension; ``windows`` the result's
    dimensions that come from the rest of ``x``; ``size`` the result's shape.
    """

    shape: tuple[int, ...]
    dims: list[int]
    starts: Value
    windows: list[int]
    size: tuple[int, ...]

    @staticmethod
    def of(shape: tuple[int, ...], indices: Sequence[Value | None]) -> Advanced:
        dims = [d for d, index in enumerate(indices) if index is not None]
        given = [index for index in indices if index is not None]
        batch = broadcast_shapes(*(index.shape for index in given))
        # Neighbouring indices put their dimensions in their own place, scattered ones in front.
        at = dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0
        rest = [n for d, n in enumerate(shape) if d not in dims]
        size = (*rest[:at], *batch, *rest[at:])
        windows = [p for p in range(len(size)) if not at <= p < at + len(batch)]
        dtype = positions_type(*(shape[d] for d in dims))
        columns = [
            _wrapped(index.convert(dtype), shape[d]).broadcast(batch) for index, d in zip(given, dims, strict=True)
        ]
        starts = columns[0].builder.concatenate([c.reshape((*batch, 1)) for c in columns], len(batch))
        return Advanced(shape, dims, starts, windows, size)

    def read(self, x: Value) -> Value:
        if math.prod(self.size) == 0:
            return x.builder.full(0, self.size, x.dtype)
        return x.builder.gather(
            x,
            self.starts,
            offset_dims=self.windows,
            collapsed=self.dims,
            start_index_map=self.dims,
            slice_sizes=[1 if d in self.dims else n for d, n in enumerate(self.shape)],
            shape=self.size,
        )

    def write(self, x: Value, update: Value, combine: Combine = _replace, unique: bool = False) -> Value:
        if math.prod(self.size) == 0:
            return x
        return x.builder.scatter(
            x,
            self.starts,
            update.broadcast(self.size),
            update_window_dims=self.windows,
            inserted=self.dims,
            scatter_dims=self.dims,
            combine=combine,
            unique=unique,
        )


def _wrapped(index: Value, extent: int) -> Value:
    return index.builder.select(index < 0, index + extent, index)


def scattered(indexed: Advanced, x: Value, update: Value, combine: Combine) -> Value:
    """``write`` with a sum or product, done in float32 for 16-bit floats."""
    wide = opmath(x.dtype)
    return indexed.write(x.convert(wide), update.convert(wide), combine).convert(x.dtype)


@lowering("index.Tensor(Tensor self, Tensor?[] indices) -> Tensor", around=data_dependent.without_masks)
def _index(cx: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    return Advanced.of(x.shape, indices).read(x)


@lowering(
    "index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False) -> Tensor",
    around=data_dependent.without_masks,
)
def _index_put(cx: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool) -> Value:
    indexed = Advanced.of(x.shape, indices)
    update = values.convert(x.dtype).reshape(_without_leading_ones(values.shape, len(indexed.size)))
    return scattered(indexed, x, update, _add) if accumulate else indexed.write(x, update)


def _without_leading_ones(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    extra = max(0, len(shape) - rank)
    return shape[extra:] if all(n == 1 for n in shape[:extra]) else shape


# ------------------------------------------------------------------------------------------ along one dimension


def _along(x: Value, dim: int, index: Value) -> tuple[Value, Advanced]:
    """``x`` with at least one dimension, and ``x[:, …, index]`` for a 1-d index at ``dim``."""
    whole = x if x.ndim else x.reshape((1,))
    flat = index.reshape((index.numel,))
    at = dim % whole.ndim
    return whole, Advanced.of(whole.shape, [*[None] * at, flat])


@lowering("index_select(Tensor self, int dim, Tensor index) -> Tensor", around=bounds.checked("index", "dim"))
def _index_select(cx: Context, x: Value, dim: int, index: Value) -> Value:
    whole, indexed = _along(x, dim, index)
    return indexed.read(whole).reshape(cx.output.size)


@lowering(
    "index_add(Tensor self, int dim, Tensor index, Tensor source, *, Scalar alpha=1) -> Tensor",
    around=bounds.checked("index", "dim"),
)
def _index_add(cx: Context, x: Value, dim: int, index: Value, source: Value, alpha: Value | Number) -> Value:
    whole, indexed = _along(x, dim, index)
    update = source.convert(opmath(x.dtype))
    if isinstance(alpha, Value):
        update = _multiply(update, alpha.convert(update.dtype))
    return scattered(indexed, whole, update.reshape(indexed.size), _add).reshape(x.shape)


def _index_copy_meta(self: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    given = source.shape[dim] if source.dim() else 1
    if source.dim() and index.numel() != given:
        # PyTorch's meta kernel raises a RuntimeError, its CPU kernel this.
        raise IndexError(
            f"index_copy_(): Number of indices ({index.numel()}) should be equal to source.size(dim) ({given})\n"
            f"  issued at {user_line()}"
        )
    copied: torch.Tensor = torch.ops.aten.index_copy.default(self, dim, index, source)
    return copied


@lowering(
    "index_copy(Tensor self, int dim, Tensor index, Tensor source) -> Tensor",
    around=bounds.checked("index", "dim"),
    meta=_index_copy_meta,
)
def _index_copy(cx: Context, x: Value, dim: int, index: Value, source: Value) -> Value:
    whole, indexed = _along(x, dim, index)
    return indexed.write(whole, source.reshape(indexed.size)).reshape(x.shape)


def _index_fill(cx: Context, x: Value, dim: int, index: Value, value: Value | Number) -> Value:
    whole, indexed = _along(x, dim, index)
    return indexed.write(whole, cx.scalar(value, x.dtype)).reshape(x.shape)


for _kind, _type in (("int_Scalar", "Scalar"), ("int_Tensor", "Tensor")):
    lowering(
        f"index_fill.{_kind}(Tensor self, int dim, Tensor index, {_type} value) -> Tensor",
        around=bounds.checked("index", "dim", wraps=True),
    )(_index_fill)


@lowering("take(Tensor self, Tensor index) -> Tensor", around=bounds.checked("index", wraps=True))
def _take(cx: Context, x: Value, index: Value) -> Value:
    return Advanced.of((x.numel,), [index]).read(x.reshape((x.numel,)))


@lowering(
    "put(Tensor self, Tensor index, Tensor source, bool accumulate=False) -> Tensor",
    around=bounds.checked("index", wraps=True),
)
def _put(cx: Context, x: Value, index: Value, source: Value, accumulate: bool) -> Value:
    flat = x.reshape((x.numel,))
    indexed = Advanced.of(flat.shape, [index])
    update = source.reshape(index.shape)
    written = scattered(indexed, flat, update, _add) if accumulate else indexed.write(flat, update)
    return written.reshape(x.shape)


# ------------------------------------------------------------------------------- gather and scatter, elementwise


@lowering(
    "gather(Tensor self, int dim, Tensor index, *, bool sparse_grad=False) -> Tensor",
    around=bounds.checked("index", "dim"),
)
def _gather(cx: Context, x: Value, dim: int, index: Value, sparse_grad: bool) -> Value:
    if index.numel == 0:
        return cx.builder.full(0, index.shape, x.dtype)
    x, at = (x, dim % x.ndim) if x.ndim else (x.reshape((1,)), 0)
    picked = index.reshape(index.shape or (1,))
    others = [d for d in range(x.ndim) if d != at]
    block = x.slice([0] * x.ndim, [x.shape[d] if d == at else picked.shape[d] for d in range(x.ndim)])
    gathered = cx.builder.gather(
        block,
        picked.convert(positions_type(x.shape[at])).reshape((*picked.shape, 1)),
        offset_dims=[],
        collapsed=[at],
        start_index_map=[at],
        slice_sizes=[1] * x.ndim,
        shape=picked.shape,
        batching=others,
    )
    return gathered.reshape(index.shape)


def _scatter_along(x: Value, dim: int, index: Value, source: Value, combine: Combine) -> Value:
    """``x`` with ``source`` (at least the index's shape) joined in at ``index`` along ``dim``."""
    if index.numel == 0:
        return x
    builder = x.builder
    whole, at = (x, dim % x.ndim) if x.ndim else (x.reshape((1,)), 0)
    places = index.reshape(index.shape or (1,))
    update = source.reshape(source.shape or (1,))
    update = update.broadcast(places.shape) if update.numel == 1 else update.slice([0] * update.ndim, places.shape)
    reach = [whole.shape[d] if d == at else places.shape[d] for d in range(whole.ndim)]
    block = whole.slice([0] * whole.ndim, reach)
    written = builder.scatter(
        block,
        places.convert(positions_type(whole.shape[at])).reshape((*places.shape, 1)),
        update,
        update_window_dims=[],
        inserted=[at],
        scatter_dims=[at],
        combine=combine,
        batching=[d for d in range(whole.ndim) if d != at],
    )
    if written.shape != whole.shape:
        written = builder.dynamic_update_slice(whole, written, [0] * whole.ndim)
    return written.reshape(x.shape)


def _wide_scatter(x: Value, dim: int, index: Value, source: Value, combine: Combine) -> Value:
    wide = opmath(x.dtype)
    return _scatter_along(x.convert(wide), dim, index, source.convert(wide), combine).convert(x.dtype)


_ALONG: dict[str, Any] = {"around": bounds.checked("index", "dim")}
_JOIN: dict[str, Combine] = {"add": _add, "multiply": _multiply}


@lowering("scatter.src(Tensor self, int dim, Tensor index, Tensor src) -> Tensor", **_ALONG)
def _scatter_source(cx: Context, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _scatter_along(x, dim, index, source, _replace)


@lowering("scatter.value(Tensor self, int dim, Tensor index, Scalar value) -> Tensor", **_ALONG)
def _scatter_value(cx: Context, x: Value, dim: int, index: Value, value: Value) -> Value:
    return _scatter_along(x, dim, index, value.convert(x.dtype), _replace)


@lowering("scatter_add(Tensor self, int dim, Tensor index, Tensor src) -> Tensor", **_ALONG)
def _scatter_add(cx: Context, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _wide_scatter(x, dim, index, source, _add)


@lowering("scatter.reduce(Tensor self, int dim, Tensor index, Tensor src, *, str reduce) -> Tensor", **_ALONG)
def _scatter_join(cx: Context, x: Value, dim: int, index: Value, source: Value, reduce: str) -> Value:
    return _wide_scatter(x, dim, index, source, _JOIN[reduce])


@lowering("scatter.value_reduce(Tensor self, int dim, Tensor index, Scalar value, *, str reduce) -> Tensor", **_ALONG)
def _scatter_join_value(cx: Context, x: Value, dim: int, index: Value, value: Value, reduce: str) -> Value:
    return _wide_scatter(x, dim, index, value, _JOIN[reduce])


_REDUCTIONS: dict[str, tuple[Combine, Callable[[torch.dtype], Number]]] = {
    "sum": (_add, lambda dtype: 0),
    "mean": (_add, lambda dtype: 0),
    "prod": (_multiply, lambda dtype: 1),
    "amax": (lambda a, b: a.maximum(b), lowest),
    "amin": (lambda a, b: a.minimum(b), highest),
}


@lowering(
    "scatter_reduce.two(Tensor self, int dim, Tensor index, Tensor src, str reduce, *, bool include_self=True) -> Tensor",
    **_ALONG,
)
def _scatter_reduce(
    cx: Context, x: Value, dim: int, index: Value, source: Value, reduce: str, include_self: bool
) -> Value:
    wide = opmath(x.dtype)
    combine, identity = _REDUCTIONS[reduce]
    start, source = x.convert(wide), source.convert(wide)
    hits = _hits(cx, x.shape, dim, index) if reduce == "mean" or not include_self else None
    if hits is not None and not include_self:
        start = cx.builder.select(hits.ne(0), cx.builder.full(identity(wide), x.shape, wide), start)
    joined = _scatter_along(start, dim, index, source, combine)
    if reduce == "mean" and hits is not None:
        joined = _divided(joined, (hits + 1 if include_self else hits.maximum(1)).convert(wide))
    return joined.convert(x.dtype)


def _hits(cx: Context, shape: tuple[int, ...], dim: int, index: Value) -> Value:
    zeros, one = cx.builder.full(0, shape, torch.int32), cx.builder.full(1, (), torch.int32)
    return _scatter_along(zeros, dim, index, one, _add)


def _divided(total: Value, count: Value) -> Value:
    """A mean; integers round down, as PyTorch's."""
    quotient = total / count
    if total.dtype.is_floating_point or total.dtype.is_complex:
        return quotient
    remainder = total - quotient * count
    return total.builder.select(remainder < 0, quotient - 1, quotient) if total.dtype.is_signed else quotient


@lowering(
    "index_reduce(Tensor self, int dim, Tensor index, Tensor source, str reduce, *, bool include_self=True) -> Tensor",
    **_ALONG,
)
def _index_reduce(
    cx: Context, x: Value, dim: int, index: Value, source: Value, reduce: str, include_self: bool
) -> Value:
    whole, indexed = _along(x, dim, index)
    wide = opmath(x.dtype)
    combine, identity = _REDUCTIONS[reduce]
    start = whole.convert(wide)
    hits = indexed.write(cx.builder.full(0, whole.shape, torch.int32), cx.builder.full(1, (), torch.int32), _add)
    if not include_self:
        start = cx.builder.select(hits.ne(0), cx.builder.full(identity(wide), whole.shape, wide), start)
    joined = indexed.write(start, source.convert(wide).reshape(indexed.size), combine)
    if reduce == "mean":
        joined = _divided(joined, (hits + 1 if include_self else hits.maximum(1)).convert(wide))
    return joined.convert(x.dtype).reshape(x.shape)


# ------------------------------------------------------------------------------------------------------ masks


def _filled(cx: Context, x: Value, mask: Value, value: Value | Number) -> Value:
    fill = cx.scalar(value, x.dtype)
    return cx.builder.select(mask.convert(torch.bool), fill, x).broadcast(broadcast_shapes(mask.shape, x.shape))


lowering("masked_fill.Scalar(Tensor self, Tensor mask, Scalar value) -> Tensor")(_filled)
lowering("masked_fill.Tensor(Tensor self, Tensor mask, Tensor value) -> Tensor")(_filled)
