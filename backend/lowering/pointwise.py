"""Elementwise ops: arithmetic, comparisons, activations, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Kind

from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import Context, Emit, lowering, lowerings

__all__ = ["elementwise"]

Body = Callable[..., Value]


def elementwise(kind: Kind, body: Body, *names: str) -> Emit:
    """A lowering that converts its operands to PyTorch's computation dtype, computes, and converts to the result's.

    ``names`` are the operands that take part in promotion; the rest reach ``body`` unchanged.
    """

    def emit(cx: Context, *arguments: Any) -> Value:
        given = dict(zip(cx.arguments, arguments, strict=True))
        compute = cx.promote(kind, *names)
        operands = [cx.scalar(given[name], compute) if given[name] is not None else None for name in names]
        rest = [value for name, value in given.items() if name not in names]
        result = body(*operands, *rest)
        return result.convert(cx.output.dtype)

    return emit


def _unary(kind: Kind, body: Body) -> Emit:
    return elementwise(kind, body, "self")


def _named(op: str) -> Body:
    return lambda x: x.unary(op)


_FLOAT, _SAME, _BOOL = Kind.INT_TO_FLOAT, Kind.DEFAULT, Kind.ALWAYS_BOOL

lowerings(
    "(Tensor self) -> Tensor",
    {
        "exp": _unary(_FLOAT, Value.exp),
        "expm1": _unary(_FLOAT, _named("stablehlo.exponential_minus_one")),
        "log": _unary(_FLOAT, Value.log),
        "log1p": _unary(_FLOAT, _named("stablehlo.log_plus_one")),
        "sin": _unary(_FLOAT, _named("stablehlo.sine")),
        "cos": _unary(_FLOAT, _named("stablehlo.cosine")),
        "tanh": _unary(_FLOAT, Value.tanh),
        "sigmoid": _unary(_FLOAT, Value.logistic),
        "sqrt": _unary(_FLOAT, Value.sqrt),
        "rsqrt": _unary(_FLOAT, Value.rsqrt),
        "erf": _unary(_FLOAT, _named("chlo.erf")),
        "neg": _unary(_SAME, Value.__neg__),
        "abs": _unary(Kind.COMPLEX_TO_FLOAT, Value.abs),
        "relu": _unary(_SAME, lambda x: x.maximum(0)),
        "reciprocal": _unary(_FLOAT, lambda x: 1 / x),
        "logical_not": _unary(_BOOL, lambda x: ~x.convert(torch.bool)),
        "bitwise_not": _unary(_SAME, Value.__invert__),
    },
)


def _scaled(body: Body) -> Body:
    """``add`` and ``sub``: the second operand times alpha."""

    def emit(x: Value, y: Value, alpha: Value | Number) -> Value:
        if not isinstance(alpha, Value):
            return body(x, y)
        return body(x, y * alpha.convert(y.dtype))

    return emit


_BINARY = "(Tensor self, Tensor other) -> Tensor"
_SCALED = "(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor"


def _binary(kind: Kind, body: Body) -> Emit:
    return elementwise(kind, body, "self", "other")


lowering("add.Tensor" + _SCALED)(_binary(_SAME, _scaled(lambda x, y: x | y if x.dtype == torch.bool else x + y)))
lowering("sub.Tensor" + _SCALED)(_binary(_SAME, _scaled(Value.__sub__)))
lowerings(
    _BINARY,
    {
        "mul.Tensor": _binary(_SAME, lambda x, y: x & y if x.dtype == torch.bool else x * y),
        "div.Tensor": _binary(_FLOAT, Value.__truediv__),
        "maximum": _binary(_SAME, Value.maximum),
        "minimum": _binary(_SAME, Value.minimum),
        "eq.Tensor": _binary(_BOOL, Value.eq),
        "ne.Tensor": _binary(_BOOL, Value.ne),
        "lt.Tensor": _binary(_BOOL, Value.__lt__),
        "le.Tensor": _binary(_BOOL, Value.__le__),
        "gt.Tensor": _binary(_BOOL, Value.__gt__),
        "ge.Tensor": _binary(_BOOL, Value.__ge__),
    },
)


# -------------------------------------------------------------------------------------------- copies and fills


@lowering("clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor")
def _clone(cx: Context, x: Value, memory_format: Any) -> Value:
    return x


@lowering("copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)", reads=False, dispatched=False)
def _copy_(cx: Context, x: None, src: Value, non_blocking: bool) -> Value:
    return src


@lowering("fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)", reads=False)
def _fill_scalar(cx: Context, x: None, value: Value) -> Value:
    return value


@lowering("fill_.Tensor(Tensor(a!) self, Tensor value) -> Tensor(a!)", reads=False)
def _fill_tensor(cx: Context, x: None, value: Value) -> Value:
    return value


@lowering("zero_(Tensor(a!) self) -> Tensor(a!)", reads=False)
def _zero(cx: Context, x: None) -> Value:
    return cx.builder.full(0, cx.output.size, cx.output.dtype)
