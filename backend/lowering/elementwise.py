"""Elementwise ops that few programs call; most of them the device has not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import LOWERINGS, Context, Emit, lowering, lowerings
from emutpu.backend.lowering.pointwise import FLOAT, SAME, elementwise, trunc

__all__: list[str] = []

Body = Callable[..., Value]
_UNARY = "(Tensor self) -> Tensor"
_PAIR = "(Tensor self, Tensor other) -> Tensor"


def _select(condition: Value, x: Value | Number, y: Value | Number) -> Value:
    return condition.builder.select(condition, x, y)


def _one(kind: Any, body: Body) -> Emit:
    return elementwise(kind, body, "self")


def _two(kind: Any, body: Body) -> Emit:
    return elementwise(kind, body, "self other")


# --------------------------------------------------------------------------------------- what the device has


for _side in ("l", "r"):
    for _overload, _type in (("Tensor", "Tensor"), ("Scalar", "Scalar")):
        lowering(f"__i{_side}shift__.{_overload}(Tensor(a!) self, {_type} other) -> Tensor(a!)")(
            LOWERINGS[f"__{_side}shift__.{_overload}"].emit
        )


def _add_relu(x: Value, y: Value, alpha: Value | Number) -> Value:
    return (x + (y * alpha if isinstance(alpha, Value) else y)).maximum(0)


def _add_relu_meta(self: torch.Tensor, other: Any, alpha: Any = 1) -> torch.Tensor:
    return torch.add(self, other, alpha=alpha)


_added = elementwise(SAME, _add_relu, "self other", "alpha")
lowering("_add_relu.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor")(_added)
lowering("_add_relu.Scalar(Tensor self, Scalar other, Scalar alpha=1) -> Tensor", meta=_add_relu_meta)(_added)


def _gcd(x: Value, y: Value) -> Value:
    """Euclid's algorithm on all elements at once."""
    builder = x.builder
    shape = torch.broadcast_shapes(x.shape, y.shape)
    x, y = x.broadcast(shape).abs(), y.broadcast(shape).abs()

    def rest(a: Value, b: Value) -> list[Value]:
        divisor = _select(b.eq(0), 1, b)
        remainder = builder.binary("stablehlo.remainder", a, divisor)
        return [_select(b.eq(0), a, b), _select(b.eq(0), 0, remainder)]

    return builder.while_loop([x, y], lambda a, b: b.ne(0).any(range(b.ndim)), rest)[0]


def _lcm(x: Value, y: Value) -> Value:
    common = _gcd(x, y)
    return _select(common.eq(0), 0, (x / _select(common.eq(0), 1, common) * y).abs())


lowering(f"lcm{_PAIR}")(_two(SAME, _lcm))
lowering(f"gcd{_PAIR}", beyond=True)(_two(SAME, _gcd))


# --------------------------------------------------------------------------------- what it has not: one operand


def _mish(x: Value) -> Value:
    return x * softplus(x).tanh()


def softplus(x: Value) -> Value:
    """log(1 + exp(x)), from the side that does not overflow."""
    return x.maximum(0) + (-x.abs()).exp().unary("stablehlo.log_plus_one")


def _sinc(x: Value) -> Value:
    turn = x * math.pi
    return _select(x.eq(0), 1, turn.unary("stablehlo.sine") / turn)


def _entropy(x: Value) -> Value:
    finite = _select(x.eq(0), 0, -x * x.log())
    return _select(x.is_nan(), x, _select(x < 0, -math.inf, finite))


_ERFCX_SWITCH = 2.0
_ERFCX_TERMS = 60


def _erfcx(x: Value) -> Value:
    """exp(x²) erfc(x): directly where that neither overflows nor cancels, then by its continued fraction."""
    far = _select(x > _ERFCX_SWITCH, x, _ERFCX_SWITCH)
    tail = far
    for k in range(_ERFCX_TERMS, 0, -1):
        tail = far + (k / 2) / tail
    near = x.minimum(_ERFCX_SWITCH)
    direct = (near * near).exp() * near.unary("chlo.erfc")
    return _select(x.is_nan(), x, _select(x > _ERFCX_SWITCH, (1 / math.sqrt(math.pi)) / tail, direct))


def _log_ndtr(x: Value) -> Value:
    """Log of the normal distribution's cumulative function, through erfcx in the lower tail."""
    t = x * math.sqrt(0.5)
    lower = (_erfcx(-(t.minimum(-1.0))) / 2.0).log() - t * t
    upper = (-(t.maximum(-1.0)).unary("chlo.erfc") / 2.0).unary("stablehlo.log_plus_one")
    return _select(x < -math.sqrt(2), lower, upper)


# Cephes: Chebyshev series of exp(-|x|) I(x), on [0, 8] of x and on [8, inf) of the value times sqrt(x).
_I0_NEAR = (
    -1.30002500998624804212e-8,
    6.04699502254191894932e-8,
    -2.67079385394061173391e-7,
    1.11738753912010371815e-6,
    -4.41673835845875056359e-6,
    1.64484480707288970893e-5,
    -5.75419501008210370398e-5,
    1.88502885095841655729e-4,
    -5.76375574538582365885e-4,
    1.63947561694133579842e-3,
    -4.32430999505057594430e-3,
    1.05464603945949983183e-2,
    -2.37374148058994688156e-2,
    4.93052842396707084878e-2,
    -9.49010970480476444210e-2,
    1.71620901522208775349e-1,
    -3.04682672343198398683e-1,
    6.76795274409476084995e-1,
)
_I0_FAR = (
    3.39623202570838634515e-9,
    2.26666899049817806459e-8,
    2.04891858946906374183e-7,
    2.89137052083475648297e-6,
    6.88975834691682398426e-5,
    3.36911647825569408990e-3,
    8.04490411014108831608e-1,
)


def _chebyshev(x: Value, coefficients: tuple[float, ...]) -> Value:
    zero = x * 0.0
    b0, b1, b2 = zero, zero, zero
    for coefficient in coefficients:
        b0, b1, b2 = x * b0 - b1 + coefficient, b0, b1
    return (b0 - b2) * 0.5


def _i0e(x: Value) -> Value:
    size = x.abs()
    near = _chebyshev(size.minimum(8.0) * 0.5 - 2.0, _I0_NEAR)
    large = size.maximum(8.0)
    return _select(size <= 8.0, near, _chebyshev(32.0 / large - 2.0, _I0_FAR) / large.sqrt())


def _i1e(x: Value) -> Value:
    return x.unary("chlo.bessel_i1e")


def _hardshrink(x: Value, threshold: Value | Number) -> Value:
    return _select((x >= _minus(threshold)) & (x <= threshold), 0, x)


def _softshrink(x: Value, threshold: Value | Number) -> Value:
    below = _minus(threshold)
    moved = _select(x > threshold, x - threshold, _select(x < below, x + threshold, x * 0))
    return _select(x.is_nan(), x, moved)


def _minus(threshold: Value | Number) -> Value | Number:
    return -threshold


lowerings(
    _UNARY,
    {
        "erfc": _one(FLOAT, lambda x: x.unary("chlo.erfc")),
        "i0": _one(FLOAT, lambda x: x.abs().exp() * _i0e(x)),
        "mish": _one(SAME, _mish),
        "sinc": _one(FLOAT, _sinc),
        "special_entr": _one(FLOAT, _entropy),
        "special_erfcx": _one(FLOAT, _erfcx),
        "special_i0e": _one(FLOAT, _i0e),
        "special_i1": _one(FLOAT, lambda x: x.abs().exp() * _i1e(x)),
        "special_i1e": _one(FLOAT, _i1e),
        "special_log_ndtr": _one(FLOAT, _log_ndtr),
    },
    beyond=True,
)
lowerings(
    "(Tensor self, Scalar lambd=0.5) -> Tensor",
    {
        "hardshrink": elementwise(SAME, _hardshrink, "self", "lambd"),
        "softshrink": elementwise(SAME, _softshrink, "self", "lambd"),
    },
    beyond=True,
)


@lowering("frexp.Tensor(Tensor self) -> (Tensor mantissa, Tensor exponent)", beyond=True)
def _frexp(cx: Context, x: Value) -> list[Value]:
    """Mantissas in [0.5, 1) and exponents, from the bits; subnormal numbers are zero to XLA."""
    builder = cx.builder
    if x.dtype == torch.float64:
        raise NotImplementedError("frexp(): not implemented for float64")
    wide = x.convert(torch.float32)
    bits = builder.bitcast(wide, x.shape, torch.int32)
    biased = builder.binary("stablehlo.shift_right_logical", bits & 0x7F800000, builder.full(23, (), torch.int32))
    special = wide.eq(0) | ~(wide.abs() < math.inf)
    mantissa = builder.bitcast((bits & ~0x7F800000) | (126 << 23), x.shape, torch.float32)
    exponent = _select(special, 0, biased - 126)
    return [_select(special, wide, mantissa).convert(x.dtype), exponent]


# --------------------------------------------------------------------------------- what it has not: two operands


def signbit(x: Value) -> Value:
    """True for negative numbers, negative zero among them."""
    return x.builder.bitcast(x, x.shape, {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]) < 0


def _copysign(x: Value, y: Value) -> Value:
    return _select(signbit(y), -(x.abs()), x.abs())


def _hypot(x: Value, y: Value) -> Value:
    high, low = x.abs().maximum(y.abs()), x.abs().minimum(y.abs())
    ratio = low / _select(high.eq(0), 1, high)
    size = high * (ratio * ratio + 1).sqrt()
    infinite = x.abs().eq(math.inf) | y.abs().eq(math.inf)
    return _select(infinite, math.inf, size)


def _heaviside(x: Value, values: Value) -> Value:
    return _select(x.eq(0), values, (x > 0).convert(values.dtype))


def _logaddexp(base: float) -> Body:
    scale = math.log(base)

    def body(x: Value, y: Value) -> Value:
        high = x.maximum(y)
        distance = -((x - y).abs())
        joined = high + (distance * scale).exp().unary("stablehlo.log_plus_one") / scale
        return _select(x.eq(y) & x.abs().eq(math.inf), x, joined)

    return body


def _nextafter(cx: Context, x: Value, y: Value) -> Value:
    """In the tensors' own dtype; bfloat16 and float16 step through their bits like the wider ones."""
    dtype = cx.output.dtype
    return cx.builder.binary("chlo.next_after", x.convert(dtype), y.convert(dtype))


def _xlog1py(x: Value, y: Value) -> Value:
    return _select(y.is_nan(), y, _select(x.eq(0), 0, x * y.unary("stablehlo.log_plus_one")))


def _zeta(x: Value, y: Value) -> Value:
    return x.builder.binary("chlo.zeta", x, y)


lowerings(
    _PAIR,
    {
        "copysign.Tensor": _two(FLOAT, _copysign),
        "hypot": _two(SAME, _hypot),
        "logaddexp": _two(SAME, _logaddexp(math.e)),
        "logaddexp2": _two(SAME, _logaddexp(2)),
        "nextafter": _nextafter,
        "special_xlog1py": _two(FLOAT, _xlog1py),
        "special_zeta": _two(FLOAT, _zeta),
    },
    beyond=True,
)
lowering("heaviside(Tensor self, Tensor values) -> Tensor", beyond=True)(elementwise(SAME, _heaviside, "self values"))


@lowering("linalg_cross(Tensor self, Tensor other, *, int dim=-1) -> Tensor", beyond=True)
def _cross(cx: Context, x: Value, y: Value, dim: int) -> Value:
    """The vector product of three-element vectors along ``dim``."""
    spec = cx.output
    axis = dim % len(spec.size)
    x, y = (v.convert(spec.dtype).broadcast(spec.size) for v in (x, y))

    def turned(v: Value, by: int) -> Value:
        pieces = [v.slice_dim(axis, by, 3), v.slice_dim(axis, 0, by)]
        return cx.builder.concatenate(pieces, axis)

    if 0 in spec.size:
        return x
    return turned(x, 1) * turned(y, 2) - turned(x, 2) * turned(y, 1)


@lowering("trace(Tensor self) -> Tensor", beyond=True)
def _trace(cx: Context, x: Value) -> Value:
    """The sum of the diagonal."""
    work = x.convert(opmath(cx.output.dtype))
    if not x.numel:
        return cx.builder.full(0, (), cx.output.dtype)
    rows, columns = (cx.builder.iota(x.shape, dim, torch.int32) for dim in range(2))
    return _select(rows.eq(columns), work, 0).sum([0, 1]).convert(cx.output.dtype)


# ------------------------------------------------------------------------------------------------ polynomials

# By name: the polynomial of degree 1, and the next from degree k: p(k+1) = next(x, k, p(k), p(k-1)).
_Next = Callable[[Value, Value, Value, Value], Value]
_Polynomial = tuple[Callable[[Value], Value], _Next]


def _twice(x: Value, k: Value, p: Value, q: Value) -> Value:
    return x * p * 2.0 - q


_POLYNOMIALS: dict[str, _Polynomial] = {
    "chebyshev_polynomial_t": (lambda x: x, _twice),
    "chebyshev_polynomial_u": (lambda x: x * 2.0, _twice),
    "chebyshev_polynomial_v": (lambda x: x * 2.0 - 1.0, _twice),
    "chebyshev_polynomial_w": (lambda x: x * 2.0 + 1.0, _twice),
    "hermite_polynomial_h": (lambda x: x * 2.0, lambda x, k, p, q: (x * p - q * k) * 2.0),
    "hermite_polynomial_he": (lambda x: x, lambda x, k, p, q: x * p - q * k),
    "laguerre_polynomial_l": (lambda x: 1.0 - x, lambda x, k, p, q: ((k * 2.0 + 1.0 - x) * p - q * k) / (k + 1.0)),
    "legendre_polynomial_p": (lambda x: x, lambda x, k, p, q: (x * p * (k * 2.0 + 1.0) - q * k) / (k + 1.0)),
}
_SHIFTED = tuple(name for name in _POLYNOMIALS if name.startswith("chebyshev"))


def _polynomial(definition: _Polynomial, *, shifted: bool = False) -> Body:
    """By its recurrence up to the largest degree; each element keeps the value of its own. Negative degrees give 0."""
    first, following = definition

    def body(x: Value, degree: Value) -> Value:
        builder = x.builder
        shape = torch.broadcast_shapes(x.shape, degree.shape)
        x, degree = (x * 2.0 - 1.0 if shifted else x).broadcast(shape), trunc(degree).broadcast(shape)
        one = builder.full(1, shape, x.dtype)
        if not x.numel:
            return one
        linear = first(x).broadcast(shape)
        found = _select(degree.eq(0), one, _select(degree.eq(1), linear, 0))

        def step(k: Value, p: Value, q: Value, found: Value) -> list[Value]:
            above = following(x, k, p, q)
            return [k + 1, above, p, _select(degree.eq((k + 1).broadcast(shape)), above, found)]

        start = [builder.full(1, (), x.dtype), linear, one, found]
        highest = degree.max(range(degree.ndim))
        return builder.while_loop(start, lambda k, *_: k < highest, step)[3]

    return body


for _name, _definition in _POLYNOMIALS.items():
    _row = elementwise(FLOAT, _polynomial(_definition), "x n")
    lowering(f"special_{_name}(Tensor x, Tensor n) -> Tensor", beyond=True)(_row)
for _name in _SHIFTED:
    _row = elementwise(FLOAT, _polynomial(_POLYNOMIALS[_name], shifted=True), "x n")
    lowering(f"special_shifted_{_name}(Tensor x, Tensor n) -> Tensor", beyond=True)(_row)
