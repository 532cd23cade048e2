"""Elementwise ops: arithmetic, comparisons, activations, copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Kind

from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import Context, Emit, lowering, lowerings

__all__ = ["BOOL", "FLOAT", "SAME", "elementwise", "trunc"]

Body = Callable[..., Value]
FLOAT, SAME, BOOL = Kind.INT_TO_FLOAT, Kind.DEFAULT, Kind.ALWAYS_BOOL
_EXACT = Kind.NO_OPMATH


def elementwise(kind: Kind, body: Body, names: str, scalars: str = "") -> Emit:
    """A lowering that converts its operands to PyTorch's computation dtype, computes, and converts to the result's.

    ``names`` are the operands that take part in promotion, ``scalars`` parameters that are converted to the computation
    dtype as well; ``body`` gets them in this order, then whatever arguments are left, unchanged.
    """
    operands, parameters = names.split(), scalars.split()

    def emit(cx: Context, *arguments: Any) -> Value:
        given = dict(zip(cx.arguments, arguments, strict=True))
        compute = cx.common(*operands) if kind in (_EXACT, BOOL) else cx.promote(kind, *operands)
        converted = [
            cx.scalar(given[name], compute) if isinstance(given[name], Value) or name in operands else given[name]
            for name in (*operands, *parameters)
            if given[name] is not None
        ]
        rest = [value for name, value in given.items() if name not in operands and name not in parameters]
        return body(*converted, *rest).convert(cx.output.dtype)

    return emit


def _unary(kind: Kind, body: Body) -> Emit:
    return elementwise(kind, body, "self")


def _named(op: str) -> Body:
    return lambda x: x.unary(op)


def _rounded(body: Body) -> Emit:
    """Rounding: integers are their own result."""
    return _unary(SAME, lambda x: body(x) if x.dtype.is_floating_point else x)


def trunc(x: Value) -> Value:
    """Towards zero; keeps the sign of zero."""
    return x.builder.select(x < 0, x.unary("stablehlo.ceil"), x.floor())


def _sign(x: Value) -> Value:
    """PyTorch's sign: zero for NaN."""
    if x.dtype == torch.bool:
        return x
    return (x > 0).convert(x.dtype) - (x < 0).convert(x.dtype) if x.dtype.is_signed else (x > 0).convert(x.dtype)


def _sgn(x: Value) -> Value:
    if not x.dtype.is_complex:
        return _sign(x)
    size = x.abs()
    return x.builder.select(size.eq(0), 0, x / size.convert(x.dtype))


def _angle(x: Value) -> Value:
    builder = x.builder
    if x.dtype.is_complex:
        return atan2(builder.imag(x), builder.real(x))
    return builder.select(x.is_nan(), x, builder.select(x < 0, builder.full(math.pi, x.shape, x.dtype), 0.0))


def atan2(y: Value, x: Value) -> Value:
    """The angle of (x, y)."""
    return y.builder.binary("stablehlo.atan2", y, x)


def _signbit(x: Value) -> Value:
    if not x.dtype.is_floating_point:
        return x < 0 if x.dtype.is_signed else x.builder.full(False, x.shape, torch.bool)
    return x.builder.bitcast(x, x.shape, _BITS[x.dtype.itemsize]) < 0


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _inexact(test: Body) -> Emit:
    """A predicate that is False for every integer."""

    def body(x: Value) -> Value:
        if x.dtype.is_complex:
            return test(x.builder.real(x)) | test(x.builder.imag(x))
        return test(x) if x.dtype.is_floating_point else x.builder.full(False, x.shape, torch.bool)

    return _unary(BOOL, body)


def _log_to(base: float) -> Body:
    return lambda x: x.log() / math.log(base)


def _exp2(x: Value) -> Value:
    return x.builder.full(2, x.shape, x.dtype).pow(x)


def _conj(x: Value) -> Value:
    return x.builder.complex(x.builder.real(x), -x.builder.imag(x)) if x.dtype.is_complex else x


def _reciprocal(x: Value) -> Value:
    return 1 / x


lowerings(
    "(Tensor self) -> Tensor",
    {
        "exp": _unary(FLOAT, Value.exp),
        "exp2": _unary(FLOAT, _exp2),
        "expm1": _unary(FLOAT, _named("stablehlo.exponential_minus_one")),
        "log": _unary(FLOAT, Value.log),
        "log2": _unary(FLOAT, _log_to(2)),
        "log10": _unary(FLOAT, _log_to(10)),
        "log1p": _unary(FLOAT, _named("stablehlo.log_plus_one")),
        "sin": _unary(FLOAT, _named("stablehlo.sine")),
        "cos": _unary(FLOAT, _named("stablehlo.cosine")),
        "tan": _unary(FLOAT, _named("stablehlo.tan")),
        "asin": _unary(FLOAT, _named("chlo.asin")),
        "acos": _unary(FLOAT, _named("chlo.acos")),
        "atan": _unary(FLOAT, _named("chlo.atan")),
        "sinh": _unary(FLOAT, _named("chlo.sinh")),
        "cosh": _unary(FLOAT, _named("chlo.cosh")),
        "tanh": _unary(FLOAT, Value.tanh),
        "asinh": _unary(FLOAT, _named("chlo.asinh")),
        "acosh": _unary(FLOAT, _named("chlo.acosh")),
        "atanh": _unary(FLOAT, _named("chlo.atanh")),
        "sigmoid": _unary(FLOAT, Value.logistic),
        "sqrt": _unary(FLOAT, Value.sqrt),
        "rsqrt": _unary(FLOAT, Value.rsqrt),
        "erf": _unary(FLOAT, _named("chlo.erf")),
        "erfinv": _unary(FLOAT, _named("chlo.erf_inv")),
        "lgamma": _unary(FLOAT, _named("chlo.lgamma")),
        "reciprocal": _unary(FLOAT, _reciprocal),
        "neg": _unary(SAME, Value.__neg__),
        "abs": _unary(Kind.COMPLEX_TO_FLOAT, Value.abs),
        "relu": _unary(SAME, lambda x: x.maximum(0)),
        "sign": _unary(SAME, _sign),
        "sgn": _unary(SAME, _sgn),
        "angle": _unary(Kind.INT_TO_FLOAT, _angle),
        "floor": _rounded(Value.floor),
        "ceil": _rounded(_named("stablehlo.ceil")),
        "round": _rounded(_named("stablehlo.round_nearest_even")),
        "trunc": _rounded(trunc),
        "frac": _rounded(lambda x: x - trunc(x)),
        "_conj_physical": _unary(SAME, _conj),
        "logical_not": _unary(BOOL, lambda x: ~x.convert(torch.bool)),
        "bitwise_not": _unary(SAME, Value.__invert__),
        "signbit": _unary(BOOL, _signbit),
        "isnan": _inexact(Value.is_nan),
        "isinf": _inexact(lambda x: x.abs().eq(math.inf)),
        "isposinf": _inexact(lambda x: x.eq(math.inf)),
        "isneginf": _inexact(lambda x: x.eq(-math.inf)),
    },
)


def _digamma(x: Value) -> Value:
    """With PyTorch's pole at zero: infinity, of the opposite sign."""
    builder = x.builder
    pole = builder.select(_signbit(x), builder.full(math.inf, x.shape, x.dtype), -math.inf)
    return builder.select(x.eq(0), pole, x.unary("chlo.digamma"))


def _polygamma(x: Value, n: int) -> Value:
    """The first derivative of digamma by reflection for arguments below a half; higher ones through zeta."""
    builder = x.builder
    if n == 0:
        return _digamma(x)
    if n > 1:
        return _hurwitz(n + 1, x) * (math.gamma(n + 1) * (1 if n % 2 else -1))
    left = x < 0.5
    value = builder.binary("chlo.polygamma", builder.full(1, x.shape, x.dtype), builder.select(left, 1 - x, x))
    sine = (x * math.pi).unary("stablehlo.sine")
    return builder.select(left, math.pi**2 / (sine * sine) - value, value)


_TERMS = 4096  # what is left out of a sum of inverse cubes then is below float32's rounding


def _hurwitz(order: int, x: Value) -> Value:
    """The Hurwitz zeta function of whole ``order``, 3 or more: below zero the terms up to it, then XLA's own from there.

    At whole numbers up to zero, the poles, infinity.
    """
    builder = x.builder
    real = builder.full(order, x.shape, x.dtype)
    steps = builder.select(x <= 0, x.floor(), 0)
    pole = (x <= 0) & x.eq(steps)
    start = builder.select(pole, 1, x - steps)
    count = (-steps).minimum(float(_TERMS))
    largest = builder.select(pole, 0, count).max(range(x.ndim)) if x.numel else builder.full(0, (), x.dtype)

    def term(k: Value, total: Value) -> list[Value]:
        distance = (start - k).abs()
        inverse = distance.pow(builder.full(-order, x.shape, x.dtype))
        signed = -inverse if order % 2 else inverse
        return [k + 1, total + builder.select(k.broadcast(x.shape) <= count, signed, 0)]

    first = builder.full(1, (), x.dtype)
    total = builder.while_loop([first, builder.full(0, x.shape, x.dtype)], lambda k, _: k <= largest, term)[1]
    return builder.select(pole, math.inf, builder.binary("chlo.zeta", real, start) + total)


lowering("digamma(Tensor self) -> Tensor")(_unary(FLOAT, _digamma))
lowering("polygamma(int n, Tensor self) -> Tensor")(elementwise(FLOAT, _polygamma, "self"))


@lowering("round.decimals(Tensor self, *, int decimals) -> Tensor")
def _round_decimals(cx: Context, x: Value, decimals: int) -> Value:
    if not x.dtype.is_floating_point:
        return x
    wide = x.convert(cx.promote(SAME, "self"))
    scale = 10.0 ** abs(decimals)
    moved = wide * scale if decimals >= 0 else wide / scale
    nearest = moved.unary("stablehlo.round_nearest_even")
    return (nearest / scale if decimals >= 0 else nearest * scale).convert(x.dtype)


@lowering("nan_to_num(Tensor self, float? nan=None, float? posinf=None, float? neginf=None) -> Tensor")
def _nan_to_num(cx: Context, x: Value, nan: float | None, posinf: float | None, neginf: float | None) -> Value:
    builder = cx.builder
    if x.dtype.is_complex:
        real, imaginary = (_without_nan(part, nan, posinf, neginf) for part in (builder.real(x), builder.imag(x)))
        return builder.complex(real, imaginary)
    return _without_nan(x, nan, posinf, neginf)


def _without_nan(x: Value, nan: float | None, posinf: float | None, neginf: float | None) -> Value:
    builder = x.builder
    if not x.dtype.is_floating_point:
        return x
    limits = torch.finfo(x.dtype)
    finite = builder.select(x.is_nan(), 0.0 if nan is None else nan, x)
    finite = builder.select(x.eq(math.inf), limits.max if posinf is None else posinf, finite)
    return builder.select(x.eq(-math.inf), limits.min if neginf is None else neginf, finite)


# ------------------------------------------------------------------------------------------- two operands


lowering("conj_physical_(Tensor(a!) self) -> Tensor(a!)")(_unary(SAME, _conj))


def _scaled(body: Body) -> Body:
    """``add`` and ``sub``: the second operand times alpha."""
    return lambda x, y, alpha=1: body(x, y * alpha if isinstance(alpha, Value) else y)


def _add(x: Value, y: Value) -> Value:
    return x | y if x.dtype == torch.bool else x + y


def _mul(x: Value, y: Value) -> Value:
    return x & y if x.dtype == torch.bool else x * y


def _reversed_sub(x: Value, y: Value, alpha: Value | Number = 1) -> Value:
    return y - (x * alpha if isinstance(alpha, Value) else x)


def remainder(x: Value, y: Value) -> Value:
    """PyTorch's (Python's) remainder: the sign of the divisor."""
    rest = fmod(x, y)
    if not x.dtype.is_signed:
        return rest
    return x.builder.select(rest.ne(0) & (rest < 0).ne(y < 0), rest + y, rest)


def fmod(x: Value, y: Value) -> Value:
    """C's fmod: the sign of the dividend."""
    return x.builder.binary("stablehlo.remainder", x, y)


def floor_divide(x: Value, y: Value) -> Value:
    """Python's floor division, computed for floats as PyTorch computes it (through fmod, so that it is exact)."""
    builder = x.builder
    rest = fmod(x, y)
    if not x.dtype.is_floating_point:
        quotient = x / y
        if not x.dtype.is_signed:
            return quotient
        return builder.select(rest.ne(0) & (rest < 0).ne(y < 0), quotient - 1, quotient)
    quotient = (x - rest) / y
    quotient = builder.select(rest.ne(0) & (rest < 0).ne(y < 0), quotient - 1, quotient)
    nearest = quotient.floor()
    nearest = builder.select(quotient - nearest > 0.5, nearest + 1, nearest)
    zero = builder.select(_signbit(x / y), -0.0, builder.full(0, nearest.shape, x.dtype))
    return builder.select(y.eq(0), x / y, builder.select(quotient.eq(0), zero, nearest))


def _trunc_divide(x: Value, y: Value) -> Value:
    return trunc(x / y) if x.dtype.is_floating_point else x / y


def _divided(cx: Context, x: Value, y: Value, rounding_mode: str | None) -> Value:
    kind, body = _ROUNDINGS[rounding_mode]
    compute = cx.promote(kind, "self", "other")
    return body(cx.scalar(x, compute), cx.scalar(y, compute)).convert(cx.output.dtype)


_ROUNDINGS: dict[str | None, tuple[Kind, Body]] = {
    None: (FLOAT, Value.__truediv__),
    "floor": (SAME, floor_divide),
    "trunc": (SAME, _trunc_divide),
}


def _fmax(x: Value, y: Value) -> Value:
    builder = x.builder
    return builder.select(x.is_nan(), y, builder.select(y.is_nan(), x, x.maximum(y)))


def _fmin(x: Value, y: Value) -> Value:
    builder = x.builder
    return builder.select(x.is_nan(), y, builder.select(y.is_nan(), x, x.minimum(y)))


def _xlogy(x: Value, y: Value) -> Value:
    builder = x.builder
    return builder.select(y.is_nan(), y, builder.select(x.eq(0), 0, x * y.log()))


def _power(x: Value, y: Value) -> Value:
    if x.dtype == torch.bool:
        return x | ~y
    if x.dtype.is_complex:
        return _complex_power(x, y)
    if x.dtype.is_floating_point or not x.dtype.is_signed:
        return x.pow(y)
    # XLA leaves negative integer exponents open; PyTorch gives what rounding towards zero gives.
    builder = x.builder
    odd = (y & 1).ne(0)
    inverse = builder.select(x.eq(1) | (x.eq(-1) & ~odd), builder.full(1, (), x.dtype), 0)
    inverse = builder.select(x.eq(-1) & odd, -1, inverse)
    return builder.select(y < 0, inverse, x.pow(y.maximum(0)))


def _complex_power(x: Value, y: Value) -> Value:
    builder = x.builder
    power = builder.select(x.eq(0) & y.ne(0), 0, x.pow(y))
    return builder.select(y.eq(0), builder.full(1, (), x.dtype), power)


def _shift(op: str) -> Body:
    """Shifts by less than nothing or by the width: zero, or all sign bits."""

    def body(x: Value, y: Value) -> Value:
        bits = x.dtype.itemsize * 8
        outside = (y < 0) | (y >= bits) if y.dtype.is_signed else y >= bits
        shifted = x.builder.binary(op, x, y)
        if op.endswith("arithmetic"):
            return x.builder.select(outside, x.builder.binary(op, x, x.builder.full(bits - 1, (), x.dtype)), shifted)
        return x.builder.select(outside, 0, shifted)

    return body


def _shift_right(x: Value, y: Value) -> Value:
    kind = "arithmetic" if x.dtype.is_signed else "logical"
    return _shift(f"stablehlo.shift_right_{kind}")(x, y)


_shift_left = _shift("stablehlo.shift_left")


def _logical(body: Body) -> Emit:
    def emit(cx: Context, x: Value, y: Value) -> Value:
        return body(x.convert(torch.bool), y.convert(torch.bool)).convert(cx.output.dtype)

    return emit


def _binary(kind: Kind, body: Body) -> Emit:
    return elementwise(kind, body, "self other")


_PAIR = "(Tensor self, Tensor other) -> Tensor"
_PAIR_SCALAR = "(Tensor self, Scalar other) -> Tensor"
_PAIR_SWAPPED = "(Scalar self, Tensor other) -> Tensor"
_COMPARISONS: dict[str, Body] = {
    "eq": Value.eq,
    "ne": Value.ne,
    "lt": Value.__lt__,
    "le": Value.__le__,
    "gt": Value.__gt__,
    "ge": Value.__ge__,
}
_BITWISE: dict[str, Body] = {"and": Value.__and__, "or": Value.__or__, "xor": Value.__xor__}

for _name, _body in (("add", _add), ("sub", Value.__sub__)):
    _emit = elementwise(SAME, _scaled(_body), "self other", "alpha")
    lowering(f"{_name}.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor")(_emit)
    lowering(f"{_name}.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor")(_emit)
_rsub = elementwise(SAME, _reversed_sub, "self other", "alpha")
lowering("rsub.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor")(_rsub)
lowering("rsub.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor")(_rsub)
lowering("div.Tensor_mode(Tensor self, Tensor other, *, str? rounding_mode) -> Tensor")(_divided)
lowering("div.Scalar_mode(Tensor self, Scalar other, *, str? rounding_mode) -> Tensor")(_divided)

_EITHER = {
    "mul": (".Tensor", _binary(SAME, _mul)),
    "div": (".Tensor", _binary(FLOAT, Value.__truediv__)),
    "floor_divide": ("", _binary(SAME, floor_divide)),
    "remainder": (".Tensor", _binary(SAME, remainder)),
    "fmod": (".Tensor", _binary(SAME, fmod)),
    **{name: (".Tensor", _binary(BOOL, body)) for name, body in _COMPARISONS.items()},
    **{f"bitwise_{name}": (".Tensor", _binary(SAME, body)) for name, body in _BITWISE.items()},
    "__lshift__": (".Tensor", _binary(SAME, _shift_left)),
    "__rshift__": (".Tensor", _binary(SAME, _shift_right)),
}
lowering("floor_divide_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)")(_binary(SAME, floor_divide))
lowerings(_PAIR, {name + overload: emit for name, (overload, emit) in _EITHER.items()})
for _name, (_, _emit) in _EITHER.items():
    lowering(f"{_name}.Scalar{_PAIR_SCALAR}", typed=("other", "self") if _name in _COMPARISONS else None)(_emit)
lowerings(
    _PAIR,
    {
        "maximum": _binary(SAME, Value.maximum),
        "minimum": _binary(SAME, Value.minimum),
        "fmax": _binary(SAME, _fmax),
        "fmin": _binary(SAME, _fmin),
        "atan2": _binary(FLOAT, atan2),
        "xlogy.Tensor": _binary(FLOAT, _xlogy),
        "logical_and": _logical(Value.__and__),
        "logical_or": _logical(Value.__or__),
        "logical_xor": _logical(Value.__xor__),
        "bitwise_left_shift.Tensor": _binary(SAME, _shift_left),
        "bitwise_right_shift.Tensor": _binary(SAME, _shift_right),
    },
)
lowerings(
    _PAIR_SCALAR,
    {
        "bitwise_left_shift.Tensor_Scalar": _binary(SAME, _shift_left),
        "bitwise_right_shift.Tensor_Scalar": _binary(SAME, _shift_right),
        "xlogy.Scalar_Other": _binary(FLOAT, _xlogy),
    },
)
lowerings(
    _PAIR_SWAPPED,
    {
        "remainder.Scalar_Tensor": _binary(SAME, remainder),
        "xlogy.Scalar_Self": _binary(FLOAT, _xlogy),
        "bitwise_left_shift.Scalar_Tensor": _binary(SAME, _shift_left),
        "bitwise_right_shift.Scalar_Tensor": _binary(SAME, _shift_right),
        **{f"bitwise_{name}.Scalar_Tensor": _binary(SAME, body) for name, body in _BITWISE.items()},
    },
)


def _no_negative_exponent(made: Any) -> Callable[..., Any]:
    """PyTorch's own check, on every call: the exponent's value is not part of the key."""
    kernel: Callable[..., Any] = made.function

    def checked(self: torch.Tensor, exponent: Number) -> Any:
        if isinstance(exponent, int) and exponent < 0 and not (self.is_floating_point() or self.is_complex()):
            raise RuntimeError("Integers to negative integer powers are not allowed.")
        return kernel(self, exponent)

    return checked


_pow = elementwise(SAME, _power, "self exponent")
lowering("pow.Tensor_Tensor(Tensor self, Tensor exponent) -> Tensor")(_pow)
lowering(
    "pow.Tensor_Scalar(Tensor self, Scalar exponent) -> Tensor",
    around=_no_negative_exponent,
    typed=("exponent", "self"),
)(_pow)
lowering("pow.Scalar(Scalar self, Tensor exponent) -> Tensor", typed=("self", "exponent"))(_pow)


@lowering("complex(Tensor real, Tensor imag) -> Tensor")
def _complex(cx: Context, real: Value, imag: Value) -> Value:
    shape = cx.output.size
    return cx.builder.complex(real.broadcast(shape), imag.broadcast(shape))


@lowering("polar(Tensor abs, Tensor angle) -> Tensor")
def _polar(cx: Context, size: Value, angle: Value) -> Value:
    real, imag = size * angle.unary("stablehlo.cosine"), size * angle.unary("stablehlo.sine")
    return cx.builder.complex(real, imag)


# ------------------------------------------------------------------------------------------- three operands


def _clamp(x: Value, low: Value | None, high: Value | None) -> Value:
    """NaN in any of the three gives NaN; ``high`` wins over ``low``."""
    above = x if low is None else x.maximum(low)
    return above if high is None else above.minimum(high)


def _clamped(cx: Context, x: Value, low: Value | None, high: Value | None) -> Value:
    compute = cx.promote(SAME, "self", "min", "max")
    bounds = [None if v is None else cx.scalar(v, compute) for v in (low, high)]
    return _clamp(x.convert(compute), *bounds).convert(cx.output.dtype)


lowering("clamp(Tensor self, Scalar? min=None, Scalar? max=None) -> Tensor")(_clamped)
lowering("clamp.Tensor(Tensor self, Tensor? min=None, Tensor? max=None) -> Tensor")(_clamped)
for _bound, _body in (("min", Value.maximum), ("max", Value.minimum)):
    _emit = elementwise(SAME, _body, f"self {_bound}")
    lowering(f"clamp_{_bound}(Tensor self, Scalar {_bound}) -> Tensor")(_emit)
    lowering(f"clamp_{_bound}.Tensor(Tensor self, Tensor {_bound}) -> Tensor")(_emit)


@lowering("where.self(Tensor condition, Tensor self, Tensor other) -> Tensor")
def _where(cx: Context, condition: Value, x: Value, y: Value) -> Value:
    dtype = cx.output.dtype
    return cx.builder.select(condition.convert(torch.bool), x.convert(dtype), y.convert(dtype))


def _lerp(x: Value, end: Value, weight: Value) -> Value:
    """From the nearer end, as PyTorch does: exact at both."""
    step = end - x
    return x.builder.select(weight.abs() < 0.5, x + weight * step, end - step * (1 - weight))


lowering("lerp.Scalar(Tensor self, Tensor end, Scalar weight) -> Tensor")(
    elementwise(SAME, _lerp, "self end", "weight")
)
lowering("lerp.Tensor(Tensor self, Tensor end, Tensor weight) -> Tensor")(elementwise(SAME, _lerp, "self end weight"))


def _fused(body: Body) -> Emit:
    def combined(x: Value, a: Value, b: Value, value: Value | Number) -> Value:
        return x + body(a * value if isinstance(value, Value) else a, b)

    return elementwise(SAME, combined, "self tensor1 tensor2", "value")


lowerings(
    "(Tensor self, Tensor tensor1, Tensor tensor2, *, Scalar value=1) -> Tensor",
    {"addcmul": _fused(Value.__mul__), "addcdiv": _fused(Value.__truediv__)},
)


# -------------------------------------------------------------------------------------------- copies and fills


@lowering("clone(Tensor self, *, MemoryFormat? memory_format=None) -> Tensor")
def _clone(cx: Context, x: Value, memory_format: Any) -> Value:
    return x


@lowering(
    "_to_copy(Tensor self, *, ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None, "
    "bool non_blocking=False, MemoryFormat? memory_format=None) -> Tensor",
    dispatched=False,
)
def _to_copy(cx: Context, x: Value, *options: Any) -> Value:
    return x.convert(cx.output.dtype)


@lowering("copy_(Tensor(a!) self, Tensor src, bool non_blocking=False) -> Tensor(a!)", reads=False, dispatched=False)
def _copy_(cx: Context, x: None, src: Value, non_blocking: bool) -> Value:
    return src


@lowering("fill_.Scalar(Tensor(a!) self, Scalar value) -> Tensor(a!)", reads=False, typed=("value", "self"))
def _fill_scalar(cx: Context, x: None, value: Value) -> Value:
    return value


@lowering("fill_.Tensor(Tensor(a!) self, Tensor value) -> Tensor(a!)", reads=False)
def _fill_tensor(cx: Context, x: None, value: Value) -> Value:
    return value


@lowering("zero_(Tensor(a!) self) -> Tensor(a!)", reads=False)
def _zero(cx: Context, x: None) -> Value:
    return cx.builder.full(0, cx.output.size, cx.output.dtype)
