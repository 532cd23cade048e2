"""Embeddings: rows of a table by index, bags of them, and their gradients as sums scattered over the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend import bounds
from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.indexing import Advanced
from emutpu.backend.lowering.selection import prefix_sums

__all__: list[str] = []

_SUM, _MEAN, _MAX = range(3)


def _plus(old: Value, new: Value) -> Value:
    return old + new


def _dropped(index: Value, padding: int, rows: int) -> Value:
    """Indices with the padding one moved past the last row, where a scatter drops it."""
    if padding < 0:
        return index
    return index.builder.select(index.eq(padding), index.builder.full(rows, index.shape, index.dtype), index)


def _scatter_rows(rows: int, index: Value, update: Value) -> Value:
    """A [rows, …] table of zeros with ``update``'s rows added at ``index``."""
    zeros = update.builder.full(0, (rows, *update.shape[1:]), update.dtype)
    return Advanced.of(zeros.shape, [index]).write(zeros, update, _plus)


def _by_frequency(update: Value, index: Value, rows: int) -> Value:
    """Each row of ``update`` divided by how often its index occurs."""
    if update.numel == 0:
        return update
    counts = _scatter_rows(rows, index, update.builder.full(1, index.shape, update.dtype))
    own = Advanced.of((rows,), [index]).read(counts)
    return update / own.reshape((index.numel, *[1] * (update.ndim - 1)))


@lowering(
    "embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, bool sparse=False)"
    " -> Tensor",
    around=bounds.checked("indices", rows="weight"),
)
def _embedding(
    cx: Context, weight: Value, indices: Value, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Value:
    return Advanced.of(weight.shape, [indices]).read(weight)


@lowering(
    "embedding_dense_backward(Tensor grad_output, Tensor indices, SymInt num_weights, SymInt padding_idx, "
    "bool scale_grad_by_freq) -> Tensor"
)
def _embedding_backward(
    cx: Context, grad: Value, indices: Value, rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Value:
    flat = indices.reshape((indices.numel,))
    update = grad.convert(opmath(grad.dtype)).reshape((flat.numel, cx.output.size[-1]))
    if scale_grad_by_freq:
        update = _by_frequency(update, flat, rows)
    return _scatter_rows(rows, _dropped(flat, padding_idx, rows), update).convert(grad.dtype)


@lowering(
    "embedding_renorm_(Tensor(a!) self, Tensor indices, float max_norm, float norm_type) -> Tensor(a!)",
    around=bounds.checked("indices"),
)
def _embedding_renorm(cx: Context, weight: Value, indices: Value, max_norm: float, norm_type: float) -> Value:
    """Rows that are looked up, scaled down to ``max_norm``."""
    wide = weight.convert(opmath(weight.dtype))
    size = wide.abs()
    if norm_type == float("inf"):
        norm = size.max([1])
    elif norm_type == 2:
        norm = (size * size).sum([1]).sqrt()
    else:
        norm = size if norm_type == 1 else size.pow(norm_type)
        norm = norm.sum([1]) if norm_type == 1 else norm.sum([1]).pow(1 / norm_type)
    rows = weight.shape[0]
    flat = indices.reshape((indices.numel,))
    touched = _scatter_rows(rows, flat, cx.builder.full(1, flat.shape, torch.int32)).ne(0)
    scale = cx.builder.select(touched & (norm > max_norm), max_norm / (norm + 1e-7), 1.0)
    return (wide * scale.reshape((rows, 1))).convert(weight.dtype)


# ------------------------------------------------------------------------------------------------------- bags


def _bags(offsets: Value, count: int, bags: int) -> Value:
    """The bag of each of ``count`` indices: how many bags start at or before it, less one; int32."""
    starts = offsets.slice([0], [bags])
    ones = offsets.builder.full(1, starts.shape, torch.int32)
    return prefix_sums(_scatter_rows(count, starts, ones)) - 1


_FORWARD = (
    "(Tensor weight, Tensor indices, Tensor offsets, bool scale_grad_by_freq=False, int mode=0, bool sparse=False, "
    "Tensor? per_sample_weights=None, bool include_last_offset=False, int padding_idx=-1)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def _embedding_bag(
    cx: Context,
    weight: Value,
    indices: Value,
    offsets: Value,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample: Value | None,
    include_last_offset: bool,
    padding_idx: int,
) -> tuple[Value, Value, Value, Value]:
    """The bags' results, each index's bag, the bags' sizes without padding, and, for a maximum, its row."""
    builder, (count, bags) = cx.builder, (indices.numel, cx.output.size[0])
    kind = cx.outputs[3]
    assert kind is not None
    wide = opmath(weight.dtype)
    if count == 0:
        nothing = [builder.full(0, spec.size, spec.dtype) for spec in cx.outputs if spec is not None]
        return nothing[0], nothing[1], nothing[2], nothing[3]
    bag = _bags(offsets, count, bags)
    counted = builder.select(indices.eq(padding_idx), bags, bag) if padding_idx >= 0 else bag
    sizes = _scatter_rows(bags, counted, builder.full(1, (count,), torch.int32))
    rows = Advanced.of(weight.shape, [indices]).read(weight).convert(wide)
    if per_sample is not None:
        rows = rows * per_sample.convert(wide).reshape((count, 1))
    if mode == _MAX:
        result, largest = _maxima(rows, indices, counted, sizes)
    else:
        result, largest = _scatter_rows(bags, counted, rows), builder.full(0, kind.size, torch.int64)
    if mode == _MEAN:
        result = result / sizes.maximum(1).convert(wide).reshape((bags, 1))
    wanted = [spec.dtype for spec in cx.outputs if spec is not None]
    return (
        result.convert(cx.output.dtype),
        bag.convert(wanted[1]),
        sizes.pad([0], [offsets.numel - bags]).convert(wanted[2]),
        largest.convert(wanted[3]),
    )


def _maxima(rows: Value, indices: Value, bag: Value, sizes: Value) -> tuple[Value, Value]:
    """Each bag's largest elements and the table's rows they came from (the first among equals); zeros for empty bags."""
    builder, (count, width) = rows.builder, rows.shape
    size = (sizes.numel, width)
    into = Advanced.of(size, [bag])
    top = into.write(builder.full(-float("inf"), size, rows.dtype), rows, lambda a, b: a.maximum(b))
    own = into.read(top)
    positions = builder.iota((count, width), 0, torch.int32)
    candidates = builder.select(rows.eq(own) | rows.is_nan(), positions, count)
    first = into.write(builder.full(count, size, torch.int32), candidates, lambda a, b: a.minimum(b))
    filled = sizes.ne(0).reshape((sizes.numel, 1))
    source = Advanced.of(indices.shape, [first]).read(indices)
    return builder.select(filled, top, 0), builder.select(filled, source, 0)


lowering("_embedding_bag" + _FORWARD)(_embedding_bag)
lowering("_embedding_bag_forward_only" + _FORWARD)(_embedding_bag)


def _bag_backward(
    grad: Value,
    indices: Value,
    bag: Value,
    sizes: Value,
    largest: Value,
    rows: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample: Value | None,
    padding: int,
) -> Value:
    builder, wide = grad.builder, opmath(grad.dtype)
    sizes = sizes.slice([0], [grad.shape[0]])  # an offset more than bags where the last offset is the end
    work = grad.convert(wide)
    if indices.numel == 0:
        return builder.full(0, (rows, grad.shape[1]), grad.dtype)
    if mode == _MAX:
        column = builder.iota(grad.shape, 1, torch.int32)
        filled = sizes.ne(0).reshape((sizes.numel, 1))
        row = builder.select(filled, largest.convert(torch.int32), rows)
        table = builder.full(0, (rows, grad.shape[1]), wide)
        return Advanced.of(table.shape, [row, column]).write(table, work, _plus).convert(grad.dtype)
    if mode == _MEAN:
        work = work / sizes.maximum(1).convert(wide).reshape((sizes.numel, 1))
    update = Advanced.of(work.shape, [bag]).read(work)
    if per_sample is not None:
        update = update * per_sample.convert(wide).reshape((indices.numel, 1))
    if scale_grad_by_freq:
        update = _by_frequency(update, indices, rows)
    return _scatter_rows(rows, _dropped(indices, padding, rows), update).convert(grad.dtype)


@lowering(
    "_embedding_bag_dense_backward(Tensor grad, Tensor indices, Tensor offset2bag, Tensor bag_size, "
    "Tensor maximum_indices, SymInt num_weights, bool scale_grad_by_freq, int mode, Tensor? per_sample_weights, "
    "int padding_idx=-1) -> Tensor"
)
def _embedding_bag_dense_backward(cx: Context, *arguments: Any) -> Value:
    return _bag_backward(*arguments)


def _dense_only(made: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = made.function
    sparse_at = [a.name for a in made.op._schema.arguments].index("sparse")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if args[sparse_at]:
            raise NotImplementedError("embedding_bag_backward(): sparse gradients are not supported on TPU")
        return function(*args, **kwargs)

    return kernel


@lowering(
    "_embedding_bag_backward(Tensor grad, Tensor indices, Tensor offsets, Tensor offset2bag, Tensor bag_size, "
    "Tensor maximum_indices, SymInt num_weights, bool scale_grad_by_freq, int mode, bool sparse, "
    "Tensor? per_sample_weights, int padding_idx=-1) -> Tensor",
    around=_dense_only,
)
def _embedding_bag_backward(cx: Context, *arguments: Any) -> Value:
    grad, indices, _offsets, *rest = arguments
    bag, sizes, largest, rows, scale, mode, _sparse, per_sample, padding = rest
    return _bag_backward(grad, indices, bag, sizes, largest, rows, scale, mode, per_sample, padding)
