"""Products, convolutions, normalisation and attention: what is summed over a padded dimension is masked with zeros."""

from __future__ import annotations

from typing import Any

import torch

from emutpu.backend.dynamism.extents import Dim, canonical, is_dynamic, true_of
from emutpu.backend.dynamism.rules import Call, Unsupported, rule
from emutpu.backend.dynamism.rules_pointwise import aligned
from emutpu.backend.dynamism.writer import Padded, Writer

__all__: list[str] = []

aten = torch.ops.aten


def _contracted(writer: Writer, a: Padded, b: Padded, axes: tuple[int, int]) -> tuple[Padded, Padded]:
    """Operands with zeros in the padding of the dimension that is summed over, both laid alike."""
    if a.dims[axes[0]] != b.dims[axes[1]]:
        a, b = writer.prefixed(a, axes[0]), writer.prefixed(b, axes[1])
    return writer.masked(a, [axes[0]], 0), writer.masked(b, [axes[1]], 0)


def _batched(writer: Writer, a: Padded, b: Padded) -> tuple[Padded, Padded]:
    if a.dims[0] != b.dims[0]:
        a, b = writer.prefixed(a, 0), writer.prefixed(b, 0)
    return a, b


_PRODUCTS = {  # op: names of the operands
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "addmv": ("mat", "vec"),
}


@rule("mm.default", "bmm.default", "mv.default", "dot.default", "addmm.default", "baddbmm.default", "addmv.default")
def _product(call: Call) -> Padded:
    first, second = _PRODUCTS[call.op._opname]
    a, b = call[first], call[second]
    writer = call.writer
    vector = len(b.dims) == 1
    a, b = _contracted(writer, a, b, (len(a.dims) - 1, 0 if vector else len(b.dims) - 2))
    if len(a.dims) == 3:
        a, b = _batched(writer, a, b)
    dims: tuple[Dim, ...] = (*a.dims[:-1], *(() if vector else b.dims[-1:]))
    replaced = {first: a, second: b}
    added = call.get("self") if first != "self" else None
    if added is not None:
        rank = len(dims)
        here = [(d, rank - len(added.dims) + d) for d in range(len(added.dims))]
        for own, axis in here:
            if true_of(added.dims[own]) != 1 and added.dims[own] != dims[axis]:
                raise Unsupported("an addend whose padding lies otherwise")
    return call.give(call.emit(**replaced), dims)


@rule("_grouped_mm.default")
def _grouped(call: Call) -> Padded:
    """Groups end where ``offs`` says, so that padding behind the last row that counts is in none."""
    a, b, writer = call["self"], call["mat2"], call.writer
    if call["bias"] is not None:
        raise Unsupported("groups with a bias")
    if len(a.dims) == 2 and len(b.dims) == 3:
        call.refuse_along(a, [1], "groups of rows that are dynamic")
        call.refuse_along(b, [0, 1, 2], "dynamic weights of groups")
        a = writer.prefixed(a, 0)
        return call.give(call.emit(self=a), (a.dims[0], b.dims[2]))
    if len(a.dims) == len(b.dims) == 2:
        call.refuse_along(a, [0], "a dynamic dimension beside that of the groups")
        call.refuse_along(b, [1], "a dynamic dimension beside that of the groups")
        a, b = writer.clean(writer.prefixed(a, 1)), writer.clean(writer.prefixed(b, 0))
        return call.give(call.emit(self=a, mat2=b), call.prefixes())
    raise Unsupported("groups of columns")


@rule("linear.default")
def _linear(call: Call) -> Padded:
    axes = len(call["input"].dims) - 1, len(call["weight"].dims) - 1
    x, weight = _contracted(call.writer, call["input"], call["weight"], axes)
    if call["bias"] is not None and call["bias"].dynamic:
        raise Unsupported("a bias with a dynamic dimension")
    return call.give(call.emit(input=x, weight=weight), (*x.dims[:-1], *weight.dims[:-1]))


@rule("linear_backward.default")
def _linear_backward(call: Call) -> list[Any]:
    # linear_backward(self, grad_output, weight, output_mask): the weight's gradient sums over all leading dimensions.
    writer, x, grad = call.writer, call["self"], call["grad_output"]
    for axis in range(len(x.dims) - 1):
        if x.dims[axis] != grad.dims[axis]:
            x, grad = writer.prefixed(x, axis), writer.prefixed(grad, axis)
    weight: Padded = call["weight"]
    outer, rows = (
        len(x.dims) - 1,
        range(len(weight.dims) - 1),
    )  # the weight may be a single row without a dimension of rows
    if (x.dims[-1], *grad.dims[outer:]) != (weight.dims[-1], *weight.dims[:-1]):
        x = writer.prefixed(x, outer)
        for axis in range(len(weight.dims)):
            weight = writer.prefixed(weight, axis)
        for row in rows:
            grad = writer.prefixed(grad, outer + row)
    node = call.emit(self=writer.clean(x), grad_output=writer.clean(grad), weight=writer.masked(weight, rows, 0))
    return call.several(node, [x.dims, weight.dims, weight.dims[:-1]])


@rule("convolution.default")
def _convolution(call: Call) -> Padded:
    x, weight = call["input"], call["weight"]
    _refuse_weights(x, weight)
    for axis in range(2, len(x.dims)):
        x = call.writer.prefixed(x, axis)
    # Zeros behind the last element that counts are what the convolution's own padding would be, and what a transposed
    # one has nothing from.
    x = call.writer.masked(x, range(2, len(x.dims)), 0)
    return call.give(call.emit(input=x), (x.dims[0], *call.prefixes()[1:]))


def _refuse_weights(x: Padded, weight: Padded) -> None:
    if weight.dynamic or is_dynamic(x.dims[1]):
        raise Unsupported("a convolution with dynamic channels or a dynamic kernel")


@rule("convolution_backward.default")
def _convolution_backward(call: Call) -> list[Any]:
    writer, grad, x, weight = call.writer, call["grad_output"], call["input"], call["weight"]
    _refuse_weights(x, weight)
    if x.dims[0] != grad.dims[0]:
        x, grad = writer.prefixed(x, 0), writer.prefixed(grad, 0)
    for axis in range(2, len(x.dims)):
        x, grad = writer.prefixed(x, axis), writer.prefixed(grad, axis)
    node = call.emit(grad_output=writer.clean(grad), input=writer.clean(x))
    return call.several(node, [x.dims, weight.dims, grad.dims[1:2]])


@rule("native_layer_norm.default", "_fused_rms_norm.default")
def _norm(call: Call) -> list[Any]:
    x: Padded = call["input"]
    lead = len(x.dims) - len(call["normalized_shape"])
    call.refuse_along(x, range(lead, len(x.dims)), "normalises over a dynamic dimension")
    rest = (*x.dims[:lead], *[canonical([])] * (len(x.dims) - lead))
    return call.several(call.emit(), [x.dims, *[rest] * (len(call.promised) - 1)])


@rule("native_layer_norm_backward.default", "_fused_rms_norm_backward.default")
def _norm_backward(call: Call) -> list[Any]:
    writer, x = call.writer, call["input"]
    (grad, x), _ = aligned(call, [call["grad_out"], x], len(x.dims))
    lead = len(x.dims) - len(call["normalized_shape"])
    call.refuse_along(x, range(lead, len(x.dims)), "normalises over a dynamic dimension")
    replaced = {"grad_out": writer.clean(grad), "input": writer.clean(x)}
    for name in ("mean", "rstd"):
        if call.get(name) is not None:
            (statistic, _), _ = aligned(call, [call[name], x], len(x.dims))
            replaced[name] = writer.clean(statistic)
    weight = x.dims[lead:]
    return call.several(call.emit(**replaced), [x.dims, weight, weight][: len(call.promised)])


# Attention -----------------------------------------------------------------------------------------------


def _keys_masked(call: Call, key: Padded, bias: Padded | None, rank: int) -> Padded | None:
    """The bias with -inf where a key is padding."""
    writer = call.writer
    axis = rank - 1
    dim = key.dims[-2]
    if not is_dynamic(dim):
        return bias
    valid = writer.along(writer.valid(dim), axis, rank)
    forbidden = writer.scalar(float("-inf"), call["query"].dtype)
    if bias is None:
        allowed = writer.scalar(0, call["query"].dtype)
        return Padded(writer.call(aten.where.self, valid, allowed, forbidden), (*[canonical([])] * axis, dim))
    if bias.dtype is torch.bool:
        forbidden = writer.scalar(False, torch.bool)
    dims = (*bias.dims[:-1], dim)
    return Padded(writer.call(aten.where.self, valid, bias, forbidden), dims)


def _attention_operands(call: Call) -> tuple[Padded, Padded, Padded, Padded | None]:
    writer = call.writer
    query, key, value = call["query"], call["key"], call["value"]
    bias: Padded | None = call["attn_bias"]
    rank = len(query.dims)
    for tensor in (query, key, value):
        call.refuse_along(tensor, [rank - 1], "attention over a dynamic head size")
    query, key, value = (writer.prefixed(tensor, rank - 2) for tensor in (query, key, value))
    for axis in range(rank - 2):
        if is_dynamic(query.dims[axis]):
            query, key, value = (writer.prefixed(tensor, axis) for tensor in (query, key, value))
    if bias is not None:
        for axis in bias.axes():
            bias = writer.prefixed(bias, axis)
    # Keys that are padding weigh nothing, but 0 times a value that is no number would be none.
    key, value = writer.masked(key, [rank - 2], 0), writer.masked(value, [rank - 2], 0)
    return query, key, value, _keys_masked(call, key, bias, rank)


@rule("_scaled_dot_product_fused_attention_overrideable.default")
def _attention(call: Call) -> list[Any]:
    query, key, value, bias = _attention_operands(call)
    node = call.emit(query=query, key=key, value=value, attn_bias=bias)
    dims: list[Any] = [None] * len(call.promised)
    dims[0] = (*query.dims[:-1], value.dims[-1])
    dims[1] = query.dims[:-1]
    return call.several(node, dims)


@rule("_scaled_dot_product_fused_attention_overrideable_backward.default")
def _attention_backward(call: Call) -> list[Any]:
    writer = call.writer
    query, key, value, bias = _attention_operands(call)
    rank = len(query.dims)
    dims: list[Any] = [query.dims, key.dims, value.dims, None if bias is None else bias.dims]
    # Queries that are padding have no gradient, and everything that meets it must be a number.
    rows = {name: writer.prefixed(call[name], rank - 2) for name in ("grad_out", "out", "logsumexp")} | {"query": query}
    clean = {name: writer.masked(tensor, [rank - 2], 0) for name, tensor in rows.items()}
    if bias is not None:
        bias = writer.masked(bias, range(len(bias.dims) - 1), 0)
    wanted = list(call["grad_input_mask"])
    if call["attn_bias"] is None:
        wanted[3] = False
    if wanted[3]:  # which sums over everything that the bias is broadcast along
        clean = {name: writer.clean(tensor) for name, tensor in clean.items()}
        key, value = writer.clean(key), writer.clean(value)
    numbers = {name: writer.bounds.upper(_extent(call[name])) for name in ("max_q", "max_k")}
    node = call.emit(key=key, value=value, attn_bias=bias, grad_input_mask=wanted, **clean, **numbers)
    return call.several(node, dims)


def _extent(given: Any) -> Any:
    from emutpu.backend.dynamism.rules_views import _number

    return _number(given)
