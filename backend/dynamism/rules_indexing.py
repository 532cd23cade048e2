"""Gathers and scatters: indices that are padding point at a place that exists, and what they would write changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dynamism.extents import Dim, canonical, extent_of, is_dynamic, true_of
from emutpu.backend.dynamism.rules import Call, Unsupported, rule
from emutpu.backend.dynamism.rules_pointwise import aligned
from emutpu.backend.dynamism.writer import Padded, Writer

__all__: list[str] = []

aten = torch.ops.aten


@rule("embedding.default")
def _embedding(call: Call) -> Padded:
    weight: Padded = call["weight"]
    call.refuse_along(weight, range(len(weight.dims)), "looks up in a table of dynamic size")
    indices: Padded = call["indices"]
    return call.give(call.emit(indices=call.writer.clean(indices)), (*indices.dims, weight.dims[1]))


@rule("embedding_dense_backward.default")
def _embedding_backward(call: Call) -> Padded:
    if call["scale_grad_by_freq"]:
        raise Unsupported("scale_grad_by_freq counts padding")
    writer, indices = call.writer, call["indices"]
    (grad, wide), _ = aligned(
        call, [call["grad_output"], Padded(indices.node, (*indices.dims, canonical([])))], len(call["grad_output"].dims)
    )
    indices = Padded(wide.node, wide.dims[:-1])
    node = call.emit(grad_output=writer.masked(grad, range(len(grad.dims) - 1), 0), indices=writer.clean(indices))
    return call.give(node, call.prefixes())


def _prefixes(writer: Writer, tensor: Padded) -> Padded:
    for axis in tensor.axes():
        tensor = writer.prefixed(tensor, axis)
    return tensor


@rule("index_select.default")
def _index_select(call: Call) -> Padded:
    writer, tensor, index = call.writer, call["self"], call["index"]
    axis = call.axis(call["dim"], tensor)
    tensor, index = writer.prefixed(tensor, axis), writer.clean(index)
    node = call.emit(self=tensor, index=index)
    return call.give(node, [*tensor.dims[:axis], *(index.dims or (canonical([]),)), *tensor.dims[axis + 1 :]])


@rule("gather.default")
def _gather(call: Call) -> Padded:
    writer = call.writer
    tensor, index = _prefixes(writer, call["self"]), writer.clean(_prefixes(writer, call["index"]))
    return call.give(call.emit(self=tensor, index=index), index.dims)


def _first_instead(writer: Writer, tensor: Padded, axes: Sequence[int]) -> Padded:
    """Padding replaced by the first element along each axis: to write something twice is to write it once."""
    for axis in axes:
        if not is_dynamic(tensor.dims[axis]):
            continue
        if writer.bounds.lower(true_of(tensor.dims[axis])) < 1:
            raise Unsupported("a scatter from a dimension that may be empty")
        first = writer.call(aten.slice.Tensor, tensor, axis, 0, 1)
        mask = writer.mask_of(tensor.dims, [axis])
        tensor = Padded(writer.call(aten.where.self, mask, tensor, first), tensor.dims)
    return tensor


@rule("scatter_add.default")
def _scatter_add(call: Call) -> Padded:
    writer = call.writer
    tensor, index, source = (_prefixes(writer, call[name]) for name in ("self", "index", "src"))
    source = _cut(writer, source, index)
    return call.give(call.emit(self=tensor, index=writer.clean(index), src=writer.clean(source)), tensor.dims)


def _cut(writer: Writer, source: Padded, index: Padded) -> Padded:
    """The part of a source that an index of fewer elements reads."""
    if source.dims == index.dims:
        return source
    node = source.node
    for axis, dim in enumerate(index.dims):
        extent = index.node.meta["val"].shape[axis]
        if node.meta["val"].shape[axis] > extent:
            node = writer.call(aten.slice.Tensor, node, axis, 0, extent)
        _ = dim
    return Padded(node, index.dims)


@rule("scatter.src", "scatter.value")
def _scatter(call: Call) -> Padded:
    writer = call.writer
    tensor, index = _prefixes(writer, call["self"]), _prefixes(writer, call["index"])
    axis = call.axis(call["dim"], tensor)
    others = [d for d in index.axes() if d != axis]
    for d in others:
        if index.dims[d] != tensor.dims[d]:
            raise Unsupported(f"a scatter whose dimension {d} is not that of the target")
    # Along the other dimensions padding writes into padding.
    ready = _first_instead(writer, writer.masked(index, others, 0), [axis])
    if call.op._overloadname == "value":
        return call.give(call.emit(self=tensor, index=ready), tensor.dims)
    source = _first_instead(writer, _cut(writer, _prefixes(writer, call["src"]), index), [axis])
    return call.give(call.emit(self=tensor, index=ready, src=source), tensor.dims)


def _indices(call: Call, tensor: Padded) -> tuple[Padded, list[Padded | None], tuple[Dim, ...], bool, int]:
    """Target, indices that wrap by true sizes, their common dimensions, whether they are neighbours, where the first is."""
    writer = call.writer
    given: list[Padded | None] = list(call["indices"])
    places = [axis for axis, index in enumerate(given) if index is not None]
    if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in given):
        raise Unsupported("a mask selects a number of elements that only the device knows")
    rank = max(len(index.dims) for index in given if index is not None)
    indices, dims = aligned(call, [index for index in given if index is not None], rank)
    ready = list(given)
    for axis, index in zip(places, indices, strict=True):
        if is_dynamic(tensor.dims[axis]):
            tensor = writer.prefixed(tensor, axis)
            size = writer.size(true_of(tensor.dims[axis]))
            negative = writer.call(aten.lt.Scalar, index, 0)
            wrapped = writer.call(aten.where.self, negative, writer.call(aten.add.Tensor, index, size), index)
            index = Padded(wrapped, index.dims)
        ready[axis] = writer.clean(index)
    neighbours = places == list(range(places[0], places[-1] + 1))
    return tensor, ready, dims, neighbours, places[0]


def _indexed(tensor: Padded, indices: Sequence[Any], dims: Sequence[Dim], neighbours: bool, first: int) -> list[Dim]:
    """The dimensions of ``tensor[indices]``: those of the indices lie where they were, or in front."""
    kept = [dim for axis, dim in enumerate(tensor.dims) if axis >= len(indices) or indices[axis] is None]
    at = first if neighbours else 0
    return [*kept[:at], *dims, *kept[at:]]


@rule("index.Tensor")
def _index(call: Call) -> Padded:
    tensor, indices, dims, neighbours, first = _indices(call, call["self"])
    node = call.emit(self=tensor, indices=indices)
    return call.give(node, _indexed(tensor, indices, dims, neighbours, first))


@rule("index_put.default", "_unsafe_index_put.default")
def _index_put(call: Call) -> Padded:
    writer = call.writer
    tensor, indices, dims, neighbours, first = _indices(call, call["self"])
    shape = _indexed(tensor, indices, dims, neighbours, first)
    values: Padded = call["values"]
    at = first if neighbours else 0
    moving = [axis for axis in range(at, at + len(dims)) if is_dynamic(shape[axis])]
    offset = len(shape) - len(values.dims)
    for axis in range(offset, len(shape)):
        own = values.dims[axis - offset]
        if true_of(own) != 1 and own != shape[axis]:
            raise Unsupported("values whose padding lies otherwise than the indices'")
    if not moving:
        return call.give(call.emit(self=tensor, indices=indices), tensor.dims)
    extents = [int(e) for e in (_extents(shape))]
    whole = Padded(writer.call(aten.expand.default, values, extents), tuple(shape))
    if call["accumulate"]:
        return call.give(call.emit(self=tensor, indices=indices, values=writer.masked(whole, moving, 0)), tensor.dims)
    inner = [axis - at for axis in moving]
    common = [int(e) for e in _extents(dims)]
    repeated: list[Padded | None] = []
    for given, ready in zip(call["indices"], indices, strict=True):
        if given is None or ready is None:
            repeated.append(None)
            continue
        wide = Padded(writer.call(aten.expand.default, ready, common), tuple(dims))
        repeated.append(_first_instead(writer, wide, inner))
    node = call.emit(self=tensor, indices=repeated, values=_first_instead(writer, whole, moving))
    return call.give(node, tensor.dims)


def _extents(dims: Sequence[Dim]) -> list[int]:
    return [extent_of(dim) for dim in dims]


@rule("index_add.default")
def _index_add(call: Call) -> Padded:
    writer, tensor, index, source = call.writer, call["self"], call["index"], call["source"]
    axis = call.axis(call["dim"], tensor)
    tensor, source = writer.prefixed(tensor, axis), writer.prefixed(source, axis)
    (tensor_like, _), _ = ([tensor, source], None)
    for d in range(len(tensor.dims)):
        if d != axis and tensor.dims[d] != source.dims[d]:
            raise Unsupported("a source whose padding lies otherwise")
    node = call.emit(self=tensor_like, index=writer.clean(index), source=writer.masked(source, [axis], 0))
    return call.give(node, tensor.dims)


@rule("masked_scatter.default")
def _masked_scatter(call: Call) -> Padded:
    """Elements of ``source`` one after the other: padding takes none."""
    (tensor, mask), dims = _chosen(call, call["self"])
    source: Padded = call["source"]
    _refuse_gaps(source.dims)
    source = call.writer.prefixed(source, 0) if source.dims else source
    return call.give(call.emit(self=tensor, mask=mask, source=source), dims)


@rule("masked_scatter_backward.default")
def _masked_scatter_backward(call: Call) -> Padded:
    """The elements of the gradient that were taken, one after the other. Behind them lies what a source had too much."""
    (grad, mask), _ = _chosen(call, call["grad_output"])
    found = call.prefixes()
    _refuse_gaps(found)
    return call.give(call.emit(grad_output=grad, mask=mask, sizes=_extents(found)), found)


def _chosen(call: Call, tensor: Padded) -> tuple[tuple[Padded, Padded], tuple[Dim, ...]]:
    """A tensor and the call's mask, which chooses no padding, and the dimensions that they share."""
    rank = max(len(tensor.dims), len(call["mask"].dims))
    (tensor, mask), dims = aligned(call, [tensor, call["mask"]], rank)
    whole = Padded(call.writer.call(aten.expand.default, mask, _extents(dims)), dims)
    return (tensor, call.writer.clean(whole, False)), dims


def _refuse_gaps(dims: Sequence[Dim]) -> None:
    if any(map(is_dynamic, dims[1:])):
        raise Unsupported("a source with padding between its elements")
