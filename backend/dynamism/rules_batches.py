"""Ops that work on the last dimensions alone, one element of the leading ones like another: pooling, resampling, padding, cells."""

from __future__ import annotations

from typing import Any

import torch

from emutpu.backend.dynamism.extents import extent_of, is_dynamic
from emutpu.backend.dynamism.rules import Call, Symbolic, Unsupported, rule
from emutpu.backend.dynamism.rules_pooling import POOLS
from emutpu.backend.dynamism.writer import Padded

__all__: list[str] = []

# How many of the last dimensions an op works on.
_LAST = {
    1: "avg_pool1d.default adaptive_max_pool1d.default "
    "reflection_pad1d.default reflection_pad1d_backward.default replication_pad1d.default "
    "replication_pad1d_backward.default upsample_nearest1d.default upsample_nearest1d_backward.default "
    "upsample_linear1d.default upsample_linear1d_backward.default",
    2: "avg_pool2d.default avg_pool2d_backward.default max_pool2d_with_indices.default "
    "max_pool2d_with_indices_backward.default _adaptive_avg_pool2d.default _adaptive_avg_pool2d_backward.default "
    "adaptive_max_pool2d.default adaptive_max_pool2d_backward.default reflection_pad2d.default "
    "reflection_pad2d_backward.default replication_pad2d.default replication_pad2d_backward.default "
    "upsample_nearest2d.default upsample_nearest2d_backward.default upsample_bilinear2d.default "
    "upsample_bilinear2d_backward.default upsample_bicubic2d.default upsample_bicubic2d_backward.default "
    "_cdist_forward.default",
    3: "avg_pool3d.default avg_pool3d_backward.default max_pool3d_with_indices.default "
    "max_pool3d_with_indices_backward.default _adaptive_avg_pool3d.default _adaptive_avg_pool3d_backward.default "
    "upsample_nearest3d.default upsample_nearest3d_backward.default upsample_trilinear3d.default "
    "upsample_trilinear3d_backward.default",
}


def _batchwise(call: Call) -> Any:
    last = _COUNTS[str(call.op)]
    writer = call.writer
    names = [name for name, value in call.given.items() if isinstance(value, Padded)]
    operands: dict[str, Padded] = {name: call[name] for name in names}
    lead = len(operands[names[0]].dims) - last
    for name, tensor in operands.items():
        if len(tensor.dims) - last != lead:
            raise Unsupported("operands of different ranks")
        for axis in range(len(tensor.dims)):
            operands[name] = writer.prefixed(operands[name], axis)
    dims = operands[names[0]].dims[:lead]
    along = any(is_dynamic(dim) for tensor in operands.values() for dim in tensor.dims[lead:])
    if along and call.op._opname not in POOLS:
        raise Unsupported("works along a dynamic dimension")
    if any(tensor.dims[:lead] != dims for tensor in operands.values()):
        raise Unsupported("operands whose leading dimensions differ")
    if along:
        return POOLS[call.op._opname](call, operands, lead)
    sizes = {name: _extents(call, value) for name, value in call.given.items() if isinstance(value, list | tuple)}
    node = call.emit(**operands, **sizes)
    if isinstance(call.promised, torch.Tensor):
        return call.give(node, (*dims, *call.prefixes()[lead:]))
    return call.several(node, [(*dims, *call.prefixes(n)[lead:]) for n in range(len(call.promised))])


def _extents(call: Call, values: Any) -> list[Any]:
    """Sizes among the arguments, as the padded tensors have them."""
    return [call.bounds.upper(value.expr) if isinstance(value, Symbolic) else value for value in values]


_COUNTS = {f"aten.{name}": last for last, names in _LAST.items() for name in names.split()}
for _name in _COUNTS:
    rule(_name.removeprefix("aten."))(_batchwise)


@rule("diagonal.default")
def _diagonal(call: Call) -> Padded:
    tensor: Padded = call["self"]
    gone = [call.axis(call["dim1"], tensor), call.axis(call["dim2"], tensor)]
    call.refuse_along(tensor, gone, "takes the diagonal of a dynamic dimension")
    kept = [dim for axis, dim in enumerate(tensor.dims) if axis not in gone]
    return call.give(call.emit(), [*kept, call.prefixes()[-1]])


@rule("unfold.default")
def _unfold(call: Call) -> Padded:
    """Windows that count read nothing else: those over padding are the last."""
    tensor: Padded = call["self"]
    axis = call.axis(call["dimension"], tensor)
    tensor = call.writer.prefixed(tensor, axis)
    found = call.prefixes()
    dims = [*tensor.dims[:axis], found[axis], *tensor.dims[axis + 1 :], found[-1]]
    return call.give(call.emit(self=tensor), dims)


@rule("unfold_backward.default")
def _unfold_backward(call: Call) -> Padded:
    grad: Padded = call["grad_in"]
    dims = list(call.prefixes())
    axis = call["dim"] % len(dims)
    grad = call.writer.masked(call.writer.prefixed(grad, axis), [axis], 0)
    dims = [dim if at == axis else grad.dims[at] for at, dim in enumerate(dims)]
    return call.give(call.emit(grad_in=grad, input_sizes=list(map(extent_of, dims))), dims)


@rule("diagonal_backward.default")
def _diagonal_backward(call: Call) -> Padded:
    grad: Padded = call["grad_output"]
    dims = list(call.prefixes())
    gone = {dim % len(dims) for dim in (call["dim1"], call["dim2"])}
    kept = iter(grad.dims)
    dims = [dim if axis in gone else next(kept) for axis, dim in enumerate(dims)]
    return call.give(call.emit(input_sizes=list(map(extent_of, dims))), dims)


@rule("_thnn_fused_lstm_cell.default", "_thnn_fused_lstm_cell_backward_impl.default")
def _cells(call: Call) -> list[Any]:
    """Cells of an LSTM: [batch, …] each but the biases, whose gradients are sums over the batch. PyTorch has no fake GRU cell."""
    writer = call.writer
    operands = {name: value for name, value in call.given.items() if isinstance(value, Padded) and len(value.dims) == 2}
    for name, tensor in operands.items():
        call.refuse_along(tensor, [1], "a cell with dynamic features")
        operands[name] = writer.clean(writer.prefixed(tensor, 0))
    rows = next(iter(operands.values())).dims[0]
    results: list[Any] = []
    for number, value in enumerate(call.promised):
        shape = call.prefixes(number) if isinstance(value, torch.Tensor) else None
        results.append(shape if shape is None or len(shape) == 1 else (rows, shape[1]))
    return call.several(call.emit(**operands), results)
