"""Ops that make tensors of a given size."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from emutpu.backend.dynamism.extents import extent_of
from emutpu.backend.dynamism.rules import Call, Symbolic, rule
from emutpu.backend.dynamism.rules_views import _number
from emutpu.backend.dynamism.writer import Padded

__all__: list[str] = []

aten = torch.ops.aten


@rule(
    "zeros.default",
    "ones.default",
    "empty.memory_format",
    "rand.default",
    "randn.default",
    "new_zeros.default",
    "new_ones.default",
    "new_empty.default",
    "full.default",
    "new_full.default",
)
def _factory(call: Call) -> Padded:
    dims = call.prefixes()
    extents = [extent_of(dim) for dim in dims]
    value = call.get("fill_value")
    if isinstance(value, Symbolic):
        return call.give(call.writer.call(aten.expand.default, _sized(call, value), extents), dims)
    return call.give(call.emit(size=extents), dims)


@rule("full_like.default")
def _full_like(call: Call) -> Padded:
    value, tensor = call["fill_value"], call["self"]
    if isinstance(value, Symbolic):
        extents = [extent_of(dim) for dim in tensor.dims]
        return call.give(call.writer.call(aten.expand.default, _sized(call, value), extents), tensor.dims)
    return call.give(call.emit(), tensor.dims)


def _sized(call: Call, value: Symbolic) -> Any:
    """A number that depends on a size, as 0-d tensor of the result's type."""
    return call.writer.call(aten._to_copy.default, call.writer.size(value.expr), dtype=call.promised.dtype)


@rule("new_empty_strided.default", "empty_strided.default")
def _strided(call: Call) -> Padded:
    dims = call.prefixes()
    extents = [extent_of(dim) for dim in dims]
    value = call.promised
    return call.give(call.writer.call(aten.empty.memory_format, extents, dtype=value.dtype, device=value.device), dims)


@rule("scalar_tensor.default")
def _scalar(call: Call) -> Padded:
    value = call["s"]
    assert isinstance(value, Symbolic)
    return call.give(_sized(call, value), ())


@rule("arange.default", "arange.start", "arange.start_step")
def _arange(call: Call) -> Padded:
    writer, (dim,) = call.writer, call.prefixes()
    start, step = _number(call.get("start", 0)), _number(call.get("step", 1))
    node: Any = writer.iota(extent_of(dim))
    if step != 1:
        node = writer.call(aten.mul.Tensor, node, _operand(call, step))
    if start != 0:
        node = writer.call(aten.add.Tensor, node, _operand(call, start))
    return call.give(writer.call(aten._to_copy.default, node, dtype=call.promised.dtype), [dim])


def _operand(call: Call, number: sympy.Expr) -> Any:
    if number.free_symbols:
        return call.writer.size(number)
    return int(number) if number.is_Integer else float(number)
