"""Activations, the pointwise losses, and the backward of both."""

from __future__ import annotations

import math

from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import Context, lowering, lowerings
from emutpu.backend.lowering.pointwise import FLOAT, SAME, elementwise

__all__: list[str] = []

_GRADIENT = "(Tensor grad_output, Tensor self) -> Tensor"
_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBE = 0.044715


def _select(condition: Value, x: Value | Number, y: Value | Number) -> Value:
    return condition.builder.select(condition, x, y)


# ----------------------------------------------------------------------------------------------- gelu, silu


def _cdf(x: Value) -> Value:
    return 0.5 * (1 + (x * _SQRT_HALF).unary("chlo.erf"))


def _gelu(x: Value, approximate: str) -> Value:
    if approximate == "none":
        return x * _cdf(x)
    return 0.5 * x * (1 + (_TANH_SCALE * (x + _TANH_CUBE * (x * x * x))).tanh())


def _gelu_backward(grad: Value, x: Value, approximate: str) -> Value:
    if approximate == "none":
        density = (-0.5 * (x * x)).exp() * (1 / math.sqrt(2 * math.pi))
        return grad * (_cdf(x) + x * density)
    square = x * x
    inner = (_TANH_SCALE * (x + _TANH_CUBE * (square * x))).tanh()
    slope = (1 - inner * inner) * (_TANH_SCALE * (1 + 3 * _TANH_CUBE * square))
    return grad * (0.5 * (1 + inner) + 0.5 * x * slope)


def _silu_backward(grad: Value, x: Value) -> Value:
    s = x.logistic()
    return grad * s * (1 + x * (1 - s))


lowering('gelu(Tensor self, *, str approximate="none") -> Tensor')(elementwise(SAME, _gelu, "self"))
lowering('gelu_backward(Tensor grad_output, Tensor self, *, str approximate="none") -> Tensor')(
    elementwise(SAME, _gelu_backward, "grad_output self")
)
lowerings(
    "(Tensor self) -> Tensor",
    {
        "silu": elementwise(SAME, lambda x: x * x.logistic(), "self"),
        "hardsigmoid": elementwise(FLOAT, lambda x: _six(x) / 6, "self"),
        "hardswish": elementwise(FLOAT, lambda x: x * _six(x) / 6, "self"),
    },
)


def _six(x: Value) -> Value:
    return (x + 3).maximum(0).minimum(6)


def _hardswish_backward(grad: Value, x: Value) -> Value:
    return _select(x <= -3, 0, _select(x < 3, grad * (x / 3 + 0.5), grad))


lowerings(
    _GRADIENT,
    {
        "silu_backward": elementwise(SAME, _silu_backward, "grad_output self"),
        "hardsigmoid_backward": elementwise(
            SAME, lambda g, x: _select((x > -3) & (x < 3), g / 6, 0), "grad_output self"
        ),
        "hardswish_backward": elementwise(SAME, _hardswish_backward, "grad_output self"),
    },
)


def _conjugate(x: Value) -> Value:
    return x.builder.complex(x.builder.real(x), -x.builder.imag(x)) if x.dtype.is_complex else x


lowerings(
    "(Tensor grad_output, Tensor output) -> Tensor",
    {
        "sigmoid_backward": elementwise(SAME, lambda g, y: g * _conjugate((1 - y) * y), "grad_output output"),
        "tanh_backward": elementwise(SAME, lambda g, y: g * _conjugate(1 - y * y), "grad_output output"),
    },
)


# ------------------------------------------------------------------------------------------ piecewise linear


lowering("threshold(Tensor self, Scalar threshold, Scalar value) -> Tensor")(
    elementwise(SAME, lambda x, t, v: _select(x <= t, v, x), "self", "threshold value")
)
lowering("threshold_backward(Tensor grad_output, Tensor self, Scalar threshold) -> Tensor")(
    elementwise(SAME, lambda g, x, t: _select(x <= t, 0, g), "grad_output self", "threshold")
)
lowering("hardtanh(Tensor self, Scalar min_val=-1, Scalar max_val=1) -> Tensor")(
    elementwise(SAME, lambda x, low, high: x.maximum(low).minimum(high), "self", "min_val max_val")
)
lowering("hardtanh_backward(Tensor grad_output, Tensor self, Scalar min_val, Scalar max_val) -> Tensor")(
    elementwise(
        SAME,
        lambda g, x, low, high: _select((x <= low) | (x >= high), 0, g),
        "grad_output self",
        "min_val max_val",
    )
)
lowering("leaky_relu(Tensor self, Scalar negative_slope=0.01) -> Tensor")(
    elementwise(SAME, lambda x, slope: _select(x > 0, x, x * slope), "self", "negative_slope")
)
lowering("leaky_relu_backward(Tensor grad_output, Tensor self, Scalar negative_slope, bool self_is_result) -> Tensor")(
    elementwise(SAME, lambda g, x, slope, _: _select(x > 0, g, g * slope), "grad_output self", "negative_slope")
)
lowerings(
    "(Tensor grad_output, Tensor self, Scalar lambd) -> Tensor",
    {
        "softshrink_backward": elementwise(
            SAME, lambda g, x, edge: _select((x >= -edge) & (x <= edge), 0, g), "grad_output self", "lambd"
        )
    },
)
lowering("hardshrink_backward(Tensor grad_out, Tensor self, Scalar lambd) -> Tensor")(
    elementwise(SAME, lambda g, x, edge: _select((x >= -edge) & (x <= edge), 0, g), "grad_out self", "lambd")
)
lowering("_prelu_kernel(Tensor self, Tensor weight) -> Tensor")(
    elementwise(SAME, lambda x, w: _select(x > 0, x, w * x), "self weight")
)


@lowering("_prelu_kernel_backward(Tensor grad_output, Tensor self, Tensor weight) -> (Tensor, Tensor)")
def _prelu_backward(cx: Context, grad: Value, x: Value, weight: Value) -> tuple[Value, Value]:
    positive = x > 0
    return _select(positive, grad, weight * grad), _select(positive, 0, x * grad)


# ----------------------------------------------------------------------------------------------- exponential


def _elu(x: Value, alpha: Value | Number, scale: Value | Number, input_scale: Value | Number) -> Value:
    negative = (x * input_scale).unary("stablehlo.exponential_minus_one") * alpha * scale
    return _select(x < 0, negative, x * scale)


def _elu_backward(grad: Value, x: Value, alpha: Value, scale: Value, input_scale: Value, is_result: bool) -> Value:
    negative = x + alpha * scale if is_result else (x * input_scale).exp() * alpha * scale
    return _select(x <= 0, grad * input_scale * negative, grad * scale)


lowering("elu(Tensor self, Scalar alpha=1, Scalar scale=1, Scalar input_scale=1) -> Tensor")(
    elementwise(SAME, _elu, "self", "alpha scale input_scale")
)
lowering(
    "elu_backward(Tensor grad_output, Scalar alpha, Scalar scale, Scalar input_scale, bool is_result, "
    "Tensor self_or_result) -> Tensor"
)(elementwise(SAME, _elu_backward, "grad_output self_or_result", "alpha scale input_scale"))


def _log1p_exp(x: Value) -> Value:
    return x.exp().unary("stablehlo.log_plus_one")


def _softplus(x: Value, beta: Value | Number, threshold: Value | Number) -> Value:
    scaled = x * beta
    return _select(scaled > threshold, x, _log1p_exp(scaled) / beta)


def _softplus_backward(grad: Value, x: Value, beta: Value | Number, threshold: Value | Number) -> Value:
    scaled = x * beta
    return _select(scaled > threshold, grad, grad * scaled.logistic())


lowering("softplus(Tensor self, Scalar beta=1, Scalar threshold=20) -> Tensor")(
    elementwise(SAME, _softplus, "self", "beta threshold")
)
lowering("softplus_backward(Tensor grad_output, Tensor self, Scalar beta, Scalar threshold) -> Tensor")(
    elementwise(SAME, _softplus_backward, "grad_output self", "beta threshold")
)


@lowering("log_sigmoid_forward(Tensor self) -> (Tensor output, Tensor buffer)")
def _log_sigmoid(cx: Context, x: Value) -> tuple[Value, Value]:
    wide = x.convert(cx.promote(SAME, "self"))
    decayed = (-wide.abs()).exp()
    output = wide.minimum(0) - decayed.unary("stablehlo.log_plus_one")
    buffer = cx.outputs[1]
    assert buffer is not None
    saved = decayed if buffer.size == x.shape else cx.builder.full(0, buffer.size, decayed.dtype)
    return output.convert(x.dtype), saved.convert(buffer.dtype)


lowering("log_sigmoid_backward(Tensor grad_output, Tensor self, Tensor buffer) -> Tensor")(
    elementwise(SAME, lambda g, x, _: g * (-x).logistic(), "grad_output self")
)


def _logit(x: Value, eps: float | None) -> Value:
    z = x if eps is None else x.maximum(eps).minimum(1 - eps)
    return (z / (1 - z)).log()


def _logit_backward(grad: Value, x: Value, eps: float | None) -> Value:
    inside = (x >= (eps or 0.0)) & (x <= 1 - (eps or 0.0))
    outside: Value | Number = 0 if eps is not None else math.nan
    return _select(inside, grad / (x * (1 - x)), outside)


lowering("logit(Tensor self, float? eps=None) -> Tensor")(elementwise(FLOAT, _logit, "self"))
lowering("logit_backward(Tensor grad_output, Tensor self, float? eps=None) -> Tensor")(
    elementwise(SAME, _logit_backward, "grad_output self")
)


# ------------------------------------------------------------------------------------------------------- glu


def _halves(x: Value, dim: int) -> tuple[Value, Value]:
    dim %= x.ndim
    half = x.shape[dim] // 2
    return x.slice_dim(dim, 0, half), x.slice_dim(dim, half, 2 * half)


@lowering("glu(Tensor self, int dim=-1) -> Tensor")
def _glu(cx: Context, x: Value, dim: int) -> Value:
    value, gate = _halves(x.convert(cx.promote(SAME, "self")), dim)
    return (value * gate.logistic()).convert(x.dtype)


@lowering("glu_backward(Tensor grad_output, Tensor self, int dim) -> Tensor")
def _glu_backward(cx: Context, grad: Value, x: Value, dim: int) -> Value:
    compute = cx.promote(SAME, "self")
    value, gate = _halves(x.convert(compute), dim)
    opened = gate.logistic()
    grad = grad.convert(compute)
    parts = [grad * opened, grad * value * opened * (1 - opened)]
    return cx.builder.concatenate(parts, dim % x.ndim).convert(x.dtype)
