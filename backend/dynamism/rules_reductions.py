"""Reductions, softmax, scans and sorts: padding is masked with what changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from emutpu.backend.dynamism.extents import Dim, canonical, extent_of, is_dynamic, true_of
from emutpu.backend.dynamism.rules import Call, Symbolic, Unsupported, rule
from emutpu.backend.dynamism.writer import Padded, greatest, least

__all__: list[str] = []

aten = torch.ops.aten
_ONE: Dim = canonical([])


def _reduced(dims: Sequence[Dim], axes: Sequence[int], keepdim: bool) -> list[Dim]:
    if keepdim:
        return [_ONE if axis in axes else dim for axis, dim in enumerate(dims)]
    return [dim for axis, dim in enumerate(dims) if axis not in axes]


def _neutral(call: Call, tensor: Padded) -> float | int | bool:
    """What an element may be without changing the reduction."""
    name = call.op._opname
    if name in ("prod", "all"):
        return True if tensor.dtype is torch.bool else 1
    if name in ("amax", "max", "argmax", "logsumexp"):
        return least(tensor.dtype)
    if name in ("amin", "min", "argmin"):
        return greatest(tensor.dtype)
    if name in ("linalg_vector_norm", "norm"):
        power = call.get("ord", call.get("p"))
        return float("inf") if power is not None and power < 0 else 0
    return False if tensor.dtype is torch.bool else 0


@rule(
    "sum.default",
    "sum.dim_IntList",
    "nansum.default",
    "prod.default",
    "prod.dim_int",
    "amax.default",
    "amin.default",
    "any.default",
    "any.dim",
    "any.dims",
    "all.default",
    "all.dim",
    "all.dims",
    "max.default",
    "min.default",
    "logsumexp.default",
    "linalg_vector_norm.default",
    "norm.Scalar",
    "norm.ScalarOpt_dim",
    "norm.ScalarOpt_dim_dtype",
    "count_nonzero.default",
    "count_nonzero.dim_IntList",
)
def _reduction(call: Call) -> Padded:
    tensor: Padded = call["self"]
    axes = call.axes(call.get("dim"), tensor)
    masked = call.writer.masked(tensor, axes, _neutral(call, tensor))
    return call.give(call.emit(self=masked), _reduced(tensor.dims, axes, call.get("keepdim", False)))


def _count(tensor: Padded, axes: Sequence[int]) -> sympy.Expr:
    return sympy.Mul(*(true_of(tensor.dims[axis]) for axis in axes))


@rule("mean.default", "mean.dim")
def _mean(call: Call) -> Padded:
    tensor: Padded = call["self"]
    writer, axes = call.writer, call.axes(call.get("dim"), tensor)
    keepdim, dtype = call.get("keepdim", False), call.promised.dtype
    if not any(is_dynamic(tensor.dims[axis]) for axis in axes):
        return call.give(call.emit(), _reduced(tensor.dims, axes, keepdim))
    total, divisor = _sum(call, tensor, axes, keepdim, dtype), writer.size(_count(tensor, axes))
    made = writer.call(aten._to_copy.default, writer.call(aten.div.Tensor, total, divisor), dtype=dtype)
    return call.give(made, _reduced(tensor.dims, axes, keepdim))


def _sum(call: Call, tensor: Padded, axes: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Any:
    """A sum in the precision in which such dtypes are accumulated."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    masked = call.writer.masked(tensor, axes, 0)
    return call.writer.call(aten.sum.dim_IntList, masked, list(axes), keepdim, dtype=wide)


@rule("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def _variance(call: Call) -> Any:
    tensor: Padded = call["self"]
    writer, axes, keepdim = call.writer, call.axes(call["dim"], tensor), call["keepdim"]
    results = _reduced(tensor.dims, axes, keepdim)
    pair = "mean" in call.op._opname
    if not any(is_dynamic(tensor.dims[axis]) for axis in axes):
        node = call.emit()
        return call.several(node, [results] * 2) if pair else call.give(node, results)
    if tensor.dtype.is_complex:
        raise Unsupported("the variance of complex numbers")
    count = writer.size(_count(tensor, axes))
    mean = writer.call(aten.div.Tensor, _sum(call, tensor, axes, True, tensor.dtype), count)
    from_mean = writer.masked(Padded(writer.call(aten.sub.Tensor, tensor, mean), tensor.dims), axes, 0)
    squares = Padded(writer.call(aten.mul.Tensor, from_mean, from_mean), tensor.dims)
    correction = call["correction"]
    left = writer.call(aten.sub.Tensor, count, 1 if correction is None else correction)
    divisor = writer.call(aten.clamp.default, left, 0)
    found = writer.call(aten.div.Tensor, _sum(call, squares, axes, keepdim, tensor.dtype), divisor)
    if call.op._opname.startswith("std"):
        found = writer.call(aten.sqrt.default, found)
    found = writer.call(aten._to_copy.default, found, dtype=tensor.dtype)
    if not pair:
        return call.give(found, results)
    if not keepdim:
        mean = writer.call(aten.squeeze.dims, mean, axes)
    mean = writer.call(aten._to_copy.default, mean, dtype=tensor.dtype)
    return [call.give(found, results, 0), call.give(mean, results, 1)]


@rule("argmax.default", "argmin.default")
def _place(call: Call) -> Padded:
    tensor, dim = call["self"], call["dim"]
    if dim is None:
        from emutpu.backend.dynamism.rules_views import flattened

        flat = flattened(call.writer, tensor)
        masked = call.writer.masked(flat, [0], _neutral(call, tensor))
        dims = call.prefixes()
        return call.give(call.emit(self=masked, dim=None), dims) if not dims else _refuse_keepdim()
    axis = call.axis(dim, tensor)
    tensor = call.writer.prefixed(tensor, axis)
    masked = call.writer.masked(tensor, [axis], _neutral(call, tensor))
    return call.give(call.emit(self=masked), _reduced(tensor.dims, [axis], call["keepdim"]))


def _refuse_keepdim() -> Padded:
    raise Unsupported("keepdim without a dimension")


@rule("max.dim", "min.dim")
def _extreme(call: Call) -> list[Any]:
    tensor: Padded = call["self"]
    axis = call.axis(call["dim"], tensor)
    tensor = call.writer.prefixed(tensor, axis)
    masked = call.writer.masked(tensor, [axis], _neutral(call, tensor))
    return call.several(call.emit(self=masked), [_reduced(tensor.dims, [axis], call["keepdim"])] * 2)


@rule("_softmax.default", "_log_softmax.default", "_safe_softmax.default")
def _softmax(call: Call) -> Padded:
    tensor: Padded = call["self"]
    masked = call.writer.masked(tensor, [call.axis(call["dim"], tensor)], least(tensor.dtype))
    return call.give(call.emit(self=masked), tensor.dims)


@rule("_softmax_backward_data.default", "_log_softmax_backward_data.default")
def _softmax_backward(call: Call) -> Padded:
    from emutpu.backend.dynamism.rules_pointwise import aligned

    rank = len(call["output"].dims)
    (grad, output), dims = aligned(call, [call["grad_output"], call["output"]], rank)
    axes = [call["dim"] % rank]
    fill = 0.0 if call.op._opname == "_softmax_backward_data" else least(output.dtype)
    node = call.emit(grad_output=call.writer.masked(grad, axes, 0), output=call.writer.masked(output, axes, fill))
    return call.give(node, dims)


@rule("cumsum.default", "cumprod.default", "logcumsumexp.default", "cummax.default", "cummin.default")
def _scan(call: Call) -> Any:
    # Padding comes after everything that counts, and no element sees what comes after it.
    tensor: Padded = call["self"]
    if tensor.dims:
        tensor = call.writer.prefixed(tensor, call.axis(call["dim"], tensor))
    node = call.emit(self=tensor)
    if isinstance(call.promised, torch.Tensor):
        return call.give(node, tensor.dims)
    return call.several(node, [tensor.dims] * 2)


def _last(dtype: torch.dtype, *, descending: bool) -> float | int | bool:
    """What sorts behind everything, or beside it: PyTorch has NaN above all numbers."""
    if descending:
        return least(dtype)
    return float("nan") if dtype.is_floating_point else greatest(dtype)


@rule("sort.default", "sort.stable", "argsort.stable", "argsort.default")
def _sort(call: Call) -> Any:
    tensor: Padded = call["self"]
    writer, axis, descending = call.writer, call.axis(call["dim"], tensor), bool(call["descending"])
    tensor = writer.prefixed(tensor, axis)
    masked = writer.masked(tensor, [axis], _last(tensor.dtype, descending=descending))
    # Stable, because padding may equal elements before it.
    node = writer.call(aten.sort.stable, masked, stable=True, dim=axis, descending=descending)
    if isinstance(call.promised, torch.Tensor):
        return call.give(writer.item(node, 1), tensor.dims)
    return call.several(node, [tensor.dims] * 2)


@rule("topk.default")
def _topk(call: Call) -> list[Any]:
    """As many as the greatest k; those beyond a smaller one are padding."""
    tensor, k = call["self"], call["k"]
    writer, axis, descending = call.writer, call.axis(call["dim"], tensor), bool(call["largest"])
    tensor = writer.prefixed(tensor, axis)
    most = min(call.bounds.upper(k.expr), extent_of(tensor.dims[axis])) if isinstance(k, Symbolic) else k
    dims = [*tensor.dims[:axis], call.prefixes(0)[axis], *tensor.dims[axis + 1 :]]
    if not is_dynamic(tensor.dims[axis]):
        return call.several(call.emit(k=most, sorted=True), [dims] * 2)
    masked = writer.masked(tensor, [axis], _last(tensor.dtype, descending=descending))
    node = writer.call(aten.sort.stable, masked, stable=True, dim=axis, descending=descending)
    parts = [writer.call(aten.slice.Tensor, writer.item(node, number), axis, 0, most) for number in (0, 1)]
    return [call.give(part, dims, number) for number, part in enumerate(parts)]


@rule("histc.default")
def _histogram(call: Call) -> Padded:
    tensor, low, high = call["self"], call["min"], call["max"]
    fill = greatest(tensor.dtype)
    if not (isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high < fill):
        raise Unsupported("a histogram whose range is that of the values")
    return call.give(call.emit(self=call.writer.clean(tensor, fill)), call.prefixes())


@rule("searchsorted.Tensor")
def _places_in(call: Call) -> Padded:
    ordered, values = call["sorted_sequence"], call["self"]
    writer, last = call.writer, len(ordered.dims) - 1
    if call["sorter"] is not None:
        raise Unsupported("a search with a sorter")
    for axis in range(last):
        if ordered.dims[axis] != values.dims[axis]:
            ordered, values = writer.prefixed(ordered, axis), writer.prefixed(values, axis)
    dim = ordered.dims[last]
    ordered = writer.prefixed(ordered, last)
    node = call.emit(sorted_sequence=writer.masked(ordered, [last], greatest(ordered.dtype)), self=values)
    if is_dynamic(dim):  # what is as great as padding comes behind it
        node = writer.call(aten.minimum.default, node, writer.size(true_of(dim)))
        node = writer.call(aten._to_copy.default, node, dtype=call.promised.dtype)
    return call.give(node, values.dims)
