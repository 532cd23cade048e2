"""Pooling along a dynamic dimension: what windows hold of padding is masked, and divisors and places count true sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from emutpu.backend.dynamism.extents import Dim, extent_of, true_of
from emutpu.backend.dynamism.rules import Call, Symbolic, Unsupported
from emutpu.backend.dynamism.writer import Padded, Writer, least

__all__ = ["POOLS"]

aten = torch.ops.aten
_Operands: TypeAlias = Mapping[str, Padded]


def _count(writer: Writer, expr: sympy.Expr) -> fx.Node:
    """A size as 0-d int64, a constant one too."""
    return writer.size(expr) if expr.free_symbols else writer.scalar(int(expr), torch.int64)


def _each(value: Any, axes: int, default: Sequence[int] = ()) -> list[int]:
    """A parameter for each axis; one number stands for all, none for ``default``."""
    values = list(value) or list(default)
    return values * axes if len(values) == 1 else values


def _fitted(writer: Writer, tensor: Padded, extents: Sequence[int]) -> Padded:
    node = tensor.node
    for axis, extent in enumerate(extents):
        node = writer.fitted(node, axis, extent)
    return Padded(node, tensor.dims)


# Windows of a fixed size --------------------------------------------------------------------------------


def _divisors(call: Call, taken: Sequence[Dim], given: Sequence[Dim]) -> fx.Node:
    """How many elements the average of each window is over, to be broadcast; at least 1."""
    writer, axes = call.writer, len(taken)
    sizes = _each(call["kernel_size"], axes)
    steps, pads = _each(call["stride"], axes, sizes), _each(call["padding"], axes)
    found: fx.Node | None = None
    for axis in range(axes):
        length = _count(writer, true_of(taken[axis]))
        first = writer.call(aten.mul.Tensor, writer.iota(extent_of(given[axis])), steps[axis])
        first = writer.call(aten.sub.Tensor, first, pads[axis])
        behind = writer.call(aten.add.Tensor, first, sizes[axis])
        if call["count_include_pad"]:
            behind = writer.call(aten.minimum.default, behind, writer.call(aten.add.Tensor, length, pads[axis]))
        else:
            first = writer.call(aten.clamp.default, first, 0)
            behind = writer.call(aten.minimum.default, behind, length)
        own = writer.call(aten.clamp.default, writer.call(aten.sub.Tensor, behind, first), 1)
        own = writer.along(own, axis, axes)
        found = own if found is None else writer.call(aten.mul.Tensor, found, own)
    assert found is not None
    return found


def _average(call: Call, operands: _Operands, lead: int) -> Padded:
    writer, tensor = call.writer, operands["self"]
    tensor = writer.masked(tensor, range(lead, len(tensor.dims)), 0)
    dims = (*tensor.dims[:lead], *call.prefixes()[lead:])
    if call["divisor_override"] is not None:
        return call.give(call.emit(self=tensor), dims)
    total = _fitted(writer, Padded(call.emit(self=tensor, divisor_override=1), dims), list(map(extent_of, dims)))
    divisors = _divisors(call, tensor.dims[lead:], dims[lead:])
    return call.give(writer.call(aten.div.Tensor, total, divisors), dims)


def _average_backward(call: Call, operands: _Operands, lead: int) -> Padded:
    writer, tensor, grad = call.writer, operands["self"], operands["grad_output"]
    if call["divisor_override"] is None:
        divisors = _divisors(call, tensor.dims[lead:], grad.dims[lead:])
        grad = Padded(writer.call(aten.div.Tensor, grad, divisors), grad.dims)
    names = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
    grad = _as_given(call, grad, tensor, [call[name] for name in names])
    override = call["divisor_override"] or 1
    return call.give(call.emit(self=tensor, grad_output=grad, divisor_override=override), tensor.dims)


def _as_given(call: Call, grad: Padded, tensor: Padded, parameters: Sequence[Any]) -> Padded:
    """A gradient of zeros in its padding, as large as what the forward op gives of the padded operand."""
    writer = call.writer
    packet = getattr(aten, call.op._opname.removesuffix("_backward"))
    made = writer.fake(lambda: packet.default(tensor.node.meta["val"], *parameters))
    made = made[0] if isinstance(made, tuple) else made
    return _fitted(writer, writer.clean(grad), made.shape)


def _greatest(call: Call, operands: _Operands, lead: int) -> list[Padded]:
    writer, tensor = call.writer, operands["self"]
    masked = writer.masked(tensor, range(lead, len(tensor.dims)), least(tensor.dtype))
    node = call.emit(self=masked)
    dims = (*tensor.dims[:lead], *call.prefixes(0)[lead:])
    places = _places(writer, writer.item(node, 1), tensor.dims[lead:], padded=False)
    return [call.give(writer.item(node, 0), dims, 0), call.give(places, dims, 1)]


def _greatest_backward(call: Call, operands: _Operands, lead: int) -> Padded:
    writer, tensor = call.writer, operands["self"]
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
    parameters = [call[name] for name in names]
    grad = _as_given(call, operands["grad_output"], tensor, parameters)
    indices = _as_given(call, operands["indices"], tensor, parameters)
    indices = Padded(_places(writer, indices.node, tensor.dims[lead:], padded=True), indices.dims)
    # The lowering looks for the greatest elements anew.
    masked = writer.masked(tensor, range(lead, len(tensor.dims)), least(tensor.dtype))
    return call.give(call.emit(self=masked, grad_output=grad, indices=indices), tensor.dims)


def _places(writer: Writer, index: fx.Node, dims: Sequence[Dim], *, padded: bool) -> fx.Node:
    """Places among the elements that count as places among all, or (not ``padded``) the other way round."""
    true = [_count(writer, true_of(dim)) for dim in dims]
    whole = [writer.scalar(extent_of(dim), torch.int64) for dim in dims]
    source, target = (true, whole) if padded else (whole, true)
    found: fx.Node | None = None
    pace: fx.Node | None = None
    for axis in reversed(range(len(dims))):
        at = index
        if axis:
            at = writer.call(aten.remainder.Tensor, index, source[axis])
            index = writer.call(aten.floor_divide.default, index, source[axis])
        part = at if pace is None else writer.call(aten.mul.Tensor, at, pace)
        found = part if found is None else writer.call(aten.add.Tensor, found, part)
        pace = target[axis] if pace is None else writer.call(aten.mul.Tensor, pace, target[axis])
    assert found is not None
    return found


# Windows whose size follows from the operand's ---------------------------------------------------------


def _windows(writer: Writer, dims: Sequence[Dim], parts: Sequence[int]) -> fx.Node:
    """Which elements each window holds: bool [windows, elements], both row-major over all axes."""
    axes = len(dims)
    found: fx.Node | None = None
    for axis, (dim, count) in enumerate(zip(dims, parts, strict=True)):
        length, number = _count(writer, true_of(dim)), writer.iota(count)
        first = writer.call(aten.floor_divide.default, writer.call(aten.mul.Tensor, number, length), count)
        behind = writer.call(aten.mul.Tensor, writer.call(aten.add.Tensor, number, 1), length)
        behind = writer.call(aten.floor_divide.default, writer.call(aten.add.Tensor, behind, count - 1), count)
        position = writer.iota(extent_of(dim))
        own = writer.call(
            aten.logical_and.default,
            writer.call(aten.ge.Tensor, position, writer.along(first, 0, 2)),
            writer.call(aten.lt.Tensor, position, writer.along(behind, 0, 2)),
        )
        shape = [1] * (2 * axes)
        shape[axis], shape[axes + axis] = count, extent_of(dim)
        own = writer.call(aten.view.default, own, shape)
        found = own if found is None else writer.call(aten.logical_and.default, found, own)
    assert found is not None
    return writer.call(aten.reshape.default, found, [math.prod(parts), math.prod(map(extent_of, dims))])


def _flat(writer: Writer, tensor: Padded, lead: int, *, behind: bool) -> fx.Node:
    """The last dimensions as one, with one of extent 1 before or behind it."""
    extents = [int(extent) for extent in tensor.node.meta["val"].shape]
    tail = [math.prod(extents[lead:])]
    return writer.call(aten.reshape.default, tensor, [*extents[:lead], *([*tail, 1] if behind else [1, *tail])])


def _adaptive(call: Call, operands: _Operands, lead: int) -> Any:
    writer, tensor = call.writer, operands["self"]
    if any(isinstance(size, Symbolic) for size in call["output_size"]):
        raise Unsupported("an output size that depends on a size")
    single = isinstance(call.promised, torch.Tensor)
    dims = (*tensor.dims[:lead], *call.prefixes(None if single else 0)[lead:])
    parts = list(map(extent_of, dims[lead:]))
    shape = [*map(extent_of, tensor.dims[:lead]), *parts]
    inside, flat = _windows(writer, tensor.dims[lead:], parts), _flat(writer, tensor, lead, behind=False)
    if single:
        held = writer.call(aten.where.self, inside, flat, writer.scalar(0, tensor.dtype))
        total = writer.call(aten.sum.dim_IntList, held, [-1])
        mean = writer.call(aten.div.Tensor, total, writer.call(aten.sum.dim_IntList, inside, [-1]))
        return call.give(writer.call(aten.reshape.default, mean, shape), dims)
    held = writer.call(aten.where.self, inside, flat, writer.scalar(least(tensor.dtype), tensor.dtype))
    node = writer.call(aten.max.dim, held, -1)
    values, places = (writer.call(aten.reshape.default, writer.item(node, n), shape) for n in (0, 1))
    places = _places(writer, places, tensor.dims[lead:], padded=False)
    return [call.give(values, dims, 0), call.give(places, dims, 1)]


def _adaptive_average_backward(call: Call, operands: _Operands, lead: int) -> Padded:
    writer, tensor, grad = call.writer, operands["self"], operands["grad_output"]
    inside = _windows(writer, tensor.dims[lead:], list(map(extent_of, grad.dims[lead:])))
    share = writer.call(aten.sum.dim_IntList, inside, [-1], True)
    each = writer.call(aten.div.Tensor, _flat(writer, grad, lead, behind=True), share)
    held = writer.call(aten.where.self, inside, each, writer.scalar(0, grad.dtype))
    made = writer.call(aten.sum.dim_IntList, held, [-2])
    return call.give(writer.call(aten.reshape.default, made, list(map(extent_of, tensor.dims))), tensor.dims)


def _adaptive_greatest_backward(call: Call, operands: _Operands, lead: int) -> Padded:
    writer, tensor = call.writer, operands["self"]
    places = _places(writer, operands["indices"].node, tensor.dims[lead:], padded=True)
    index = _flat(writer, Padded(places, operands["indices"].dims), lead, behind=True)
    position = writer.iota(math.prod(map(extent_of, tensor.dims[lead:])))
    here = writer.call(aten.eq.Tensor, index, position)
    grad = _flat(writer, operands["grad_output"], lead, behind=True)
    held = writer.call(aten.where.self, here, grad, writer.scalar(0, tensor.dtype))
    made = writer.call(aten.sum.dim_IntList, held, [-2])
    return call.give(writer.call(aten.reshape.default, made, list(map(extent_of, tensor.dims))), tensor.dims)


# By the name of the op; given are its operands with all padding at the ends, and how many dimensions lead.
POOLS: Mapping[str, Callable[[Call, _Operands, int], Any]] = {
    "avg_pool2d": _average,
    "avg_pool3d": _average,
    "avg_pool2d_backward": _average_backward,
    "avg_pool3d_backward": _average_backward,
    "max_pool2d_with_indices": _greatest,
    "max_pool3d_with_indices": _greatest,
    "max_pool2d_with_indices_backward": _greatest_backward,
    "max_pool3d_with_indices_backward": _greatest_backward,
    "_adaptive_avg_pool2d": _adaptive,
    "_adaptive_avg_pool3d": _adaptive,
    "_adaptive_avg_pool2d_backward": _adaptive_average_backward,
    "_adaptive_avg_pool3d_backward": _adaptive_average_backward,
    "adaptive_max_pool2d": _adaptive,
    "adaptive_max_pool2d_backward": _adaptive_greatest_backward,
}
