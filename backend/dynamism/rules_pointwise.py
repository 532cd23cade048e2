"""Ops that work element by element: padding stays padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dynamism.extents import Dim, canonical, extent_of, is_dynamic, true_of
from emutpu.backend.dynamism.rules import Call, Symbolic, Unsupported, rule
from emutpu.backend.dynamism.writer import Padded

__all__ = ["aligned", "is_pointwise", "pointwise"]

# Pointwise ops without the tag.
_UNTAGGED = (
    "_to_copy.default",
    "clone.default",
    "detach.default",
    "alias.default",
    "lift_fresh_copy.default",
    "copy.default",
    "native_dropout.default",
    "native_dropout_backward.default",
    "gelu_backward.default",
    "threshold_backward.default",
    "silu_backward.default",
    "tanh_backward.default",
    "sigmoid_backward.default",
    "elu_backward.default",
    "hardtanh_backward.default",
    "leaky_relu_backward.default",
    "softplus_backward.default",
    "hardswish_backward.default",
    "hardsigmoid_backward.default",
    "mish_backward.default",
    "log_sigmoid_forward.default",
    "log_sigmoid_backward.default",
    "logit_backward.default",
    "zeros_like.default",
    "ones_like.default",
    "empty_like.default",
    "rand_like.default",
    "randn_like.default",
    "bernoulli.default",
    "bernoulli.p",
    "fill.Scalar",
    "fill.Tensor",
    "nan_to_num.default",
    "masked_fill.Scalar",
    "masked_fill.Tensor",
    "where.self",
    "where.ScalarOther",
    "where.ScalarSelf",
    "where.Scalar",
    "_conj.default",
    "conj_physical.default",
    "complex.default",
    "polar.default",
    "frexp.Tensor",
    "isin.Tensor_Scalar",
    "bitwise_not.default",
    "floor_divide.default",
    "rsub.Scalar",
    "rsub.Tensor",
    "__and__.Tensor",
    "__or__.Tensor",
)
# The overload that takes a tensor where this one takes a number.
_TENSOR_OVERLOADS = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor", "ScalarOther": "self", "ScalarSelf": "self"}


def is_pointwise(op: Any) -> bool:
    """Whether PyTorch says so of the op."""
    return torch.Tag.pointwise in op.tags


def aligned(call: Call, tensors: Sequence[Padded], rank: int) -> tuple[list[Padded], tuple[Dim, ...]]:
    """Operands that lie alike along every dimension they share, and the dimensions of what they broadcast to."""
    found = list(tensors)
    dims: list[Dim] = []
    for axis in range(rank):
        here = [(n, axis - rank + len(t.dims)) for n, t in enumerate(found) if axis - rank + len(t.dims) >= 0]
        long = [(n, d) for n, d in here if true_of(found[n].dims[d]) != 1]
        if len({found[n].dims[d] for n, d in long}) > 1:
            for n, d in long:
                found[n] = call.writer.prefixed(found[n], d)
            # Expressions of one extent may have bounds of their own: (s + 3) // 4 and s - 3 * s // 4.
            common = min((found[n].dims[d] for n, d in long), key=extent_of)
            for n, d in long:
                found[n] = call.writer.bounded(found[n], d, common)
        dims.append(found[long[0][0]].dims[long[0][1]] if long else canonical([]))
    return found, tuple(dims)


@rule(*_UNTAGGED)
def pointwise(call: Call) -> Any:
    """Each element of the result depends on those at its place."""
    call = _with_tensors(call)
    single = isinstance(call.promised, torch.Tensor)
    rank = len(call.promised.shape) if single else len(call.promised[0].shape)
    names = [name for name, value in call.given.items() if isinstance(value, Padded)]
    operands, dims = aligned(call, [call[name] for name in names], rank)
    node = call.emit(**dict(zip(names, operands, strict=True)))
    if single:
        return call.give(node, dims)
    return call.several(node, [dims] * len(call.promised))


def _with_tensors(call: Call) -> Call:
    """Sizes among the operands become 0-d tensors, which PyTorch's promotion treats as numbers of their kind."""
    symbolic = {name for name, value in call.given.items() if isinstance(value, Symbolic)}
    if not symbolic:
        return call
    op = call.op
    kinds = {argument.name: str(argument.type) for argument in op._schema.arguments}
    if any(kinds[name] != "Tensor" for name in symbolic):
        other = _TENSOR_OVERLOADS.get(op._overloadname)
        if other is None or other not in op._overloadpacket.overloads():
            raise Unsupported(f"its arguments {sorted(symbolic)} depend on a size")
        op = getattr(op._overloadpacket, other)
    values = [Padded(call.writer.size(v.expr), ()) if isinstance(v, Symbolic) else v for v in call.given.values()]
    arguments = op._schema.arguments
    given = {a.name: values[n] if n < len(values) else a.default_value for n, a in enumerate(arguments)}
    return Call(op, given, call.promised, call.writer, call.through)


@rule("cat.default")
def _cat(call: Call) -> Padded:
    tensors: list[Padded] = [t for t in call["tensors"] if not (len(t.dims) == 1 and true_of(t.dims[0]) == 0)]
    axis = call.axis(call["dim"], tensors[0])
    writer = call.writer
    tensors = _alike(call, tensors, axis)
    if not any(is_dynamic(t.dims[axis]) for t in tensors):
        dims = list(tensors[0].dims)
        dims[axis] = call.prefixes()[axis]
        return call.give(call.emit(tensors=tensors, dim=axis), dims)
    tensors = [writer.prefixed(tensor, axis) for tensor in tensors]
    joined = writer.call(torch.ops.aten.cat.default, tensors, axis)
    # The place of each element among the padded parts, one part after the other.
    dim = call.prefixes()[axis]
    wanted = writer.iota(dim[0].extent)
    place = wanted
    gap: torch.fx.Node | None = None
    end: Any = 0
    for tensor in tensors[:-1]:
        end = end + true_of(tensor.dims[axis])
        (factor,) = tensor.dims[axis] or (None,)
        padding = 0 if factor is None else factor.extent - factor.true
        if padding == 0:
            continue
        gap = writer.size(padding)
        behind = writer.call(torch.ops.aten.ge.Tensor, wanted, writer.size(end))
        shift = writer.call(torch.ops.aten.mul.Tensor, behind, gap)
        place = writer.call(torch.ops.aten.add.Tensor, place, shift)
    dims = list(tensors[0].dims)
    dims[axis] = call.bounds.prefix(sum(true_of(t.dims[axis]) for t in tensors))
    extent = joined.meta["val"].shape[axis]
    inside = writer.call(torch.ops.aten.clamp.default, place, 0, extent - 1)
    return call.give(writer.call(torch.ops.aten.index_select.default, joined, axis, inside), dims)


def _alike(call: Call, tensors: list[Padded], axis: int) -> list[Padded]:
    """Tensors that lie alike along every dimension but ``axis``."""
    for d in range(len(tensors[0].dims)):
        if d != axis and len({tensor.dims[d] for tensor in tensors}) > 1:
            tensors = [call.writer.prefixed(tensor, d) for tensor in tensors]
    return tensors


@rule("stack.default")
def _stack(call: Call) -> Padded:
    tensors = _alike(call, call["tensors"], -1)
    axis = call["dim"] % (len(tensors[0].dims) + 1)
    dims = list(tensors[0].dims)
    dims.insert(axis, call.prefixes()[axis])
    return call.give(call.emit(tensors=tensors, dim=axis), dims)
