"""Views and what rearranges elements. A reshape that no grouping of dimensions can do becomes a gather."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from emutpu.backend.dynamism.extents import Dim, Factor, canonical, extent_of, is_dynamic, true_of
from emutpu.backend.dynamism.rules import Call, Symbolic, Unsupported, rule
from emutpu.backend.dynamism.writer import Padded, Writer

__all__ = ["flattened", "reshaped"]

aten = torch.ops.aten


def flattened(writer: Writer, tensor: Padded) -> Padded:
    """One dimension, all padding at its end."""
    total = sympy.expand(sympy.Mul(*map(true_of, tensor.dims)))
    return reshaped(writer, tensor, [total], prefix=True)


def reshaped(writer: Writer, tensor: Padded, shape: Sequence[sympy.Expr], *, prefix: bool = False) -> Padded:
    """The elements of a tensor in another shape; with ``prefix`` all padding is at the ends."""
    factors = [factor for dim in tensor.dims for factor in dim]
    dims = _regrouped(list(canonical(factors)), shape)
    wanted = [writer.bounds.prefix(extent) for extent in shape]
    if dims is not None and not (prefix and any(len(dim) > 1 for dim in dims)):
        extents = [extent_of(dim) for dim in dims]
        if extents == list(map(extent_of, wanted)):
            return Padded(writer.call(aten.reshape.default, tensor, extents), tuple(dims))
    flat = writer.call(aten.reshape.default, tensor, [-1])
    place = writer.linear(wanted or [canonical([])], canonical(factors))
    inside = writer.call(aten.clamp.default, place, 0, flat.meta["val"].shape[0] - 1)
    node = writer.call(aten.index_select.default, flat, 0, inside)
    return Padded(writer.call(aten.view.default, node, list(map(extent_of, wanted))), tuple(wanted))


def _regrouped(factors: list[Factor], shape: Sequence[sympy.Expr]) -> list[Dim] | None:
    """Factors that make up each dimension of ``shape`` in order; None where a factor would have to be cut."""
    left = list(factors)
    dims: list[Dim] = []
    for extent in shape:
        own: list[Factor] = []
        need = extent
        while need != 1:
            if not left:
                return None
            factor = left.pop(0)
            rest = _quotient(need, factor.true)
            if rest is not None:
                own.append(factor)
                need = rest
                continue
            tail = _quotient(factor.true, need)
            if tail is None or tail.free_symbols or factor.extent % int(tail):
                return None
            own.append(Factor(factor.extent // int(tail), need))
            left.insert(0, Factor(int(tail), tail))
            need = sympy.Integer(1)
        dims.append(canonical(own))
    return dims if not left else None


def _quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """A / b, if it is whole for every size."""
    if b == 0:
        return None
    quotient = sympy.cancel(a / b)
    if quotient.is_Integer:
        return quotient
    numerator, denominator = quotient.as_numer_denom()
    if denominator != 1 or not quotient.is_polynomial(*quotient.free_symbols):
        return None
    return numerator if all(c.is_Integer for c in sympy.Poly(numerator, *numerator.free_symbols).coeffs()) else None


@rule("view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default")
def _view(call: Call) -> Padded:
    made = reshaped(call.writer, call["self"], call.shape())
    return call.give(made.node, made.dims)


@rule("unsqueeze.default")
def _unsqueeze(call: Call) -> Padded:
    dims = list(call["self"].dims)
    dims.insert(call["dim"] % (len(dims) + 1), canonical([]))
    return call.give(call.emit(), dims)


@rule("squeeze.default", "squeeze.dim", "squeeze.dims")
def _squeeze(call: Call) -> Padded:
    tensor: Padded = call["self"]
    axes = call.axes(call.get("dim"), tensor) if "dim" in call.given else range(len(tensor.dims))
    gone = {axis for axis in axes if true_of(tensor.dims[axis]) == 1}
    node = call.writer.call(aten.squeeze.dims, tensor, sorted(gone))
    return call.give(node, [dim for axis, dim in enumerate(tensor.dims) if axis not in gone])


@rule("view_as_real.default", "view_as_complex.default")
def _view_of_pairs(call: Call) -> Padded:
    """The last dimension, of two, is one number's parts."""
    dims = call["self"].dims
    return call.give(call.emit(), [*dims, call.prefixes()[-1]] if call.op is aten.view_as_real.default else dims[:-1])


@rule("permute.default")
def _permute(call: Call) -> Padded:
    tensor: Padded = call["self"]
    return call.give(call.emit(), [tensor.dims[axis] for axis in call.axes(call["dims"], tensor)])


@rule("t.default", "transpose.int")
def _transpose(call: Call) -> Padded:
    tensor: Padded = call["self"]
    order = list(range(len(tensor.dims)))
    if len(order) > 1:
        a, b = call.get("dim0", 0) % len(order), call.get("dim1", 1) % len(order)
        order[a], order[b] = order[b], order[a]
    return call.give(call.emit(), [tensor.dims[axis] for axis in order])


@rule("expand.default")
def _expand(call: Call) -> Padded:
    tensor: Padded = call["self"]
    shape = call.shape()
    new = len(shape) - len(tensor.dims)
    dims: list[Dim] = []
    for axis, extent in enumerate(shape):
        own = tensor.dims[axis - new] if axis >= new else canonical([])
        dims.append(own if call.bounds.same(true_of(own), extent) else call.bounds.prefix(extent))
    return call.give(call.emit(size=list(map(extent_of, dims))), dims)


@rule("repeat.default")
def _repeat(call: Call) -> Padded:
    tensor: Padded = call["self"]
    times = [value.expr if isinstance(value, Symbolic) else sympy.Integer(value) for value in call["repeats"]]
    new = len(times) - len(tensor.dims)
    dims = []
    for axis, count in enumerate(times):
        own = tensor.dims[axis - new] if axis >= new else ()
        dims.append(canonical([Factor(call.bounds.upper(count), count), *own]))
    return call.give(call.emit(repeats=[call.bounds.upper(count) for count in times]), dims)


def _number(value: Any) -> sympy.Expr:
    return value.expr if isinstance(value, Symbolic) else sympy.Integer(value)


@rule("select.int")
def _select(call: Call) -> Padded:
    tensor: Padded = call["self"]
    writer, axis = call.writer, call.axis(call["dim"], tensor)
    index = call["index"]
    kept = [dim for d, dim in enumerate(tensor.dims) if d != axis]
    if isinstance(index, int) and (index >= 0 or not is_dynamic(tensor.dims[axis])):
        return call.give(call.emit(self=writer.prefixed(tensor, axis)), kept)
    place = _number(index)
    if not place.free_symbols and place < 0:
        place += true_of(tensor.dims[axis])
    at = writer.call(aten.view.default, writer.size(place), [1])
    one = writer.taken(writer.prefixed(tensor, axis), axis, at, canonical([]))
    return call.give(writer.call(aten.squeeze.dim, one, axis), kept)


@rule("select_backward.default")
def _select_backward(call: Call) -> Padded:
    grad, index = call["grad_output"], call["index"]
    shape = call.shape()
    axis = call["dim"] % len(shape)
    dims = list(grad.dims)
    dims.insert(axis, call.bounds.prefix(shape[axis]))
    place = _number(index)
    if not place.free_symbols and place < 0:
        place += shape[axis]
    return call.give(_spread(call, call.writer.call(aten.unsqueeze.default, grad, axis), dims, axis, place), dims)


def _spread(call: Call, node: Any, dims: Sequence[Dim], axis: int, place: sympy.Expr) -> Any:
    """``node``, of extent 1 along ``axis``, at one place of it among zeros."""
    writer = call.writer
    position = writer.along(writer.iota(extent_of(dims[axis])), axis, len(dims))
    here = writer.call(aten.eq.Tensor, position, writer.size(place))
    return writer.call(aten.where.self, here, node, writer.scalar(0, node.meta["val"].dtype))


@rule("select_scatter.default")
def _select_scatter(call: Call) -> Padded:
    tensor, source = call["self"], call["src"]
    writer, axis = call.writer, call.axis(call["dim"], tensor)
    tensor = writer.prefixed(tensor, axis)
    place = _number(call["index"])
    if not place.free_symbols and place < 0:
        place += true_of(tensor.dims[axis])
    if (*tensor.dims[:axis], *tensor.dims[axis + 1 :]) != source.dims:
        raise Unsupported("a source whose padding lies otherwise")
    position = writer.along(writer.iota(extent_of(tensor.dims[axis])), axis, len(tensor.dims))
    here = writer.call(aten.eq.Tensor, position, writer.size(place))
    new = writer.call(aten.unsqueeze.default, source, axis)
    return call.give(writer.call(aten.where.self, here, new, tensor), tensor.dims)


def _start(call: Call, extent: sympy.Expr) -> sympy.Expr:
    """Where a slice begins, counted from 0."""
    given = call["start"]
    start = _number(0 if given is None else given)
    if not start.free_symbols and start < 0:
        start = sympy.Max(0, extent + start)
    return start


def _refuse_steps(call: Call) -> None:
    if call["step"] != 1:
        raise Unsupported("a slice of a dynamic dimension with a step other than 1")


@rule("slice.Tensor")
def _slice(call: Call) -> Padded:
    tensor: Padded = call["self"]
    writer, axis = call.writer, call.axis(call["dim"], tensor)
    wanted = call.prefixes()[axis]
    if not is_dynamic(tensor.dims[axis]) and not is_dynamic(wanted) and isinstance(call["start"], int | None):
        start = 0 if call["start"] is None else call["start"]
        ends = extent_of(tensor.dims[axis])
        stop = call["end"] if isinstance(call["end"], int) else ends
        node = writer.call(aten.slice.Tensor, tensor, axis, start, stop, call["step"])
        return call.give(node, [*tensor.dims[:axis], wanted, *tensor.dims[axis + 1 :]])
    if call.bounds.same(true_of(tensor.dims[axis]), true_of(wanted)):
        return call.give(tensor.node, tensor.dims)
    _refuse_steps(call)
    tensor = writer.prefixed(tensor, axis)
    part = _part(writer, tensor, axis, _start(call, true_of(tensor.dims[axis])), wanted)
    return call.give(part.node, part.dims)


def _shifted(call: Call, tensor: Padded, axis: int, start: sympy.Expr, extent: int) -> tuple[Any, Any]:
    """``tensor`` moved up by ``start`` along an axis of ``extent``, and where its elements then are, to be broadcast."""
    writer, rank = call.writer, len(tensor.dims)
    length = writer.size(true_of(tensor.dims[axis]))
    index = writer.call(aten.sub.Tensor, writer.iota(extent), writer.size(start))
    inside = writer.call(
        aten.logical_and.default, writer.call(aten.ge.Scalar, index, 0), writer.call(aten.lt.Tensor, index, length)
    )
    clamped = writer.call(aten.clamp.default, index, 0, max(extent_of(tensor.dims[axis]) - 1, 0))
    return writer.call(aten.index_select.default, tensor, axis, clamped), writer.along(inside, axis, rank)


@rule("slice_backward.default")
def _slice_backward(call: Call) -> Padded:
    grad: Padded = call["grad_output"]
    writer, shape = call.writer, call.shape()
    axis = call["dim"] % len(shape)
    wanted = call.bounds.prefix(shape[axis])
    if call.bounds.same(true_of(grad.dims[axis]), shape[axis]):
        return call.give(grad.node, grad.dims)
    dims = [*grad.dims[:axis], wanted, *grad.dims[axis + 1 :]]
    if not is_dynamic(grad.dims[axis]) and not is_dynamic(wanted):
        end = call["end"] if isinstance(call["end"], int) else int(shape[axis])
        return call.give(call.emit(input_sizes=list(map(extent_of, dims)), end=end), dims)
    _refuse_steps(call)
    grad = writer.prefixed(grad, axis)
    moved, inside = _shifted(call, grad, axis, _start(call, shape[axis]), extent_of(wanted))
    return call.give(writer.call(aten.where.self, inside, moved, writer.scalar(0, grad.dtype)), dims)


@rule("slice_scatter.default")
def _slice_scatter(call: Call) -> Padded:
    tensor, source = call["self"], call["src"]
    writer, axis = call.writer, call.axis(call["dim"], tensor)
    static = not is_dynamic(tensor.dims[axis]) and not is_dynamic(source.dims[axis])
    if not static:
        _refuse_steps(call)
        tensor, source = writer.prefixed(tensor, axis), writer.prefixed(source, axis)
    if tensor.dims[:axis] + tensor.dims[axis + 1 :] != source.dims[:axis] + source.dims[axis + 1 :]:
        raise Unsupported("a source whose padding lies otherwise")
    if static:
        return call.give(call.emit(), tensor.dims)
    start = _start(call, true_of(tensor.dims[axis]))
    moved, inside = _shifted(call, source, axis, start, extent_of(tensor.dims[axis]))
    return call.give(writer.call(aten.where.self, inside, moved, tensor), tensor.dims)


@rule("constant_pad_nd.default")
def _pad(call: Call) -> Padded:
    tensor: Padded = call["self"]
    writer, value = call.writer, call["value"]
    amounts, rank = call["pad"], len(tensor.dims)
    for pair in range(len(amounts) // 2):
        axis = rank - 1 - pair
        before, after = _number(amounts[2 * pair]), _number(amounts[2 * pair + 1])
        if before == 0 and after == 0:
            continue
        wanted = call.bounds.prefix(true_of(tensor.dims[axis]) + before + after)
        tensor = writer.prefixed(tensor, axis)
        moved, inside = _shifted(call, tensor, axis, before, extent_of(wanted))
        node = writer.call(aten.where.self, inside, moved, writer.scalar(value, tensor.dtype))
        tensor = Padded(node, (*tensor.dims[:axis], wanted, *tensor.dims[axis + 1 :]))
    return call.give(tensor.node, tensor.dims)


@rule("flip.default")
def _flip(call: Call) -> Padded:
    tensor: Padded = call["self"]
    writer = call.writer
    for axis in call.axes(call["dims"], tensor) if call["dims"] else []:
        dim = tensor.dims[axis]
        if not is_dynamic(dim):
            tensor = Padded(writer.call(aten.flip.default, tensor, [axis]), tensor.dims)
            continue
        tensor = writer.prefixed(tensor, axis)
        last = writer.size(true_of(dim) - 1)
        index = writer.call(aten.sub.Tensor, last, writer.iota(extent_of(tensor.dims[axis])))
        tensor = writer.taken(tensor, axis, index, tensor.dims[axis])
    return call.give(tensor.node, tensor.dims)


@rule("roll.default")
def _roll(call: Call) -> Padded:
    tensor: Padded = call["self"]
    writer = call.writer
    if not call["dims"]:
        raise Unsupported("a roll of all elements")
    for axis, shift in zip(call.axes(call["dims"], tensor), call["shifts"], strict=True):
        dim = tensor.dims[axis]
        if not is_dynamic(dim) and isinstance(shift, int):
            tensor = Padded(writer.call(aten.roll.default, tensor, [shift], [axis]), tensor.dims)
            continue
        tensor = writer.prefixed(tensor, axis)
        index = writer.call(aten.sub.Tensor, writer.iota(extent_of(dim)), writer.size(_number(shift)))
        index = writer.call(aten.remainder.Tensor, index, writer.size(true_of(dim)))
        tensor = writer.taken(tensor, axis, index, tensor.dims[axis])
    return call.give(tensor.node, tensor.dims)


@rule("tril.default", "triu.default")
def _triangle(call: Call) -> Padded:
    tensor: Padded = call["self"]
    for axis in (len(tensor.dims) - 2, len(tensor.dims) - 1):
        tensor = call.writer.prefixed(tensor, axis)
    return call.give(call.emit(self=tensor), tensor.dims)


@rule("split.Tensor", "split_with_sizes.default", "unsafe_split.Tensor", "unbind.int")
def _split(call: Call) -> list[Any]:
    tensor: Padded = call["self"]
    axis = call.axis(call["dim"], tensor)
    rest = (*tensor.dims[:axis], *tensor.dims[axis + 1 :])
    if call.op._opname == "unbind":
        call.refuse_along(tensor, [axis], "unbinds a dynamic dimension")
        return call.several(call.emit(), [rest] * len(call.promised))
    if is_dynamic(tensor.dims[axis]):
        return _parts(call, tensor, axis)
    extents = [call.bounds.prefix(sympy.Integer(part.shape[axis])) for part in call.promised]
    return call.several(call.emit(), [(*tensor.dims[:axis], extent, *tensor.dims[axis + 1 :]) for extent in extents])


def _parts(call: Call, tensor: Padded, axis: int) -> list[Padded]:
    """The parts of a dynamic dimension one after the other: how many there are is a guard of the graph."""
    writer = call.writer
    tensor = writer.prefixed(tensor, axis)
    found: list[Padded] = []
    start: sympy.Expr = sympy.Integer(0)
    for number in range(len(call.promised)):
        extent = call.shape(number)[axis]
        part = _part(writer, tensor, axis, start, writer.bounds.prefix(extent))
        found.append(call.give(part.node, part.dims, number))
        start = sympy.expand(start + extent)
    return found


def _part(writer: Writer, tensor: Padded, axis: int, start: sympy.Expr, wanted: Dim) -> Padded:
    """The elements of ``wanted`` from ``start`` on along an axis whose padding is at its end."""
    if start == 0:
        return Padded(tensor.node, (*tensor.dims[:axis], wanted, *tensor.dims[axis + 1 :]))
    index = writer.call(aten.add.Tensor, writer.iota(extent_of(wanted)), writer.size(start))
    return writer.taken(tensor, axis, index, wanted)
