"""Contractions: one ``dot_general`` each. 16-bit floats accumulate in float32 and are rounded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import Context, lowering

__all__ = ["contract", "require_float"]

_Dims = Sequence[int]


def require_float(cx: Context, op: str) -> None:
    """Raise the device's NotImplementedError for integers and bools: its matrix unit takes floats."""
    dtype = cx.output.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise NotImplementedError(f"{op}(): not implemented for {str(dtype).removeprefix('torch.')}")


def contract(x: Value, y: Value, over: tuple[_Dims, _Dims], batch: tuple[_Dims, _Dims] = ((), ())) -> Value:
    """``dot_general`` in the accumulation dtype; an empty contraction is zeros."""
    return x.builder.dot_general(x, y, contract=over, batch=batch, accumulate=opmath(x.dtype))


def _scaled_sum(cx: Context, bias: Value, product: Value, beta: Value | Number, alpha: Value | Number) -> Value:
    """``beta * bias + alpha * product``, rounded once. A beta of 0 ignores the bias, NaN and all."""
    if isinstance(alpha, Value):
        product = product * alpha.convert(product.dtype)
    bias = bias.convert(product.dtype)
    if isinstance(beta, Value):
        factor = beta.convert(product.dtype)
        bias = cx.builder.select(factor.eq(0), 0, bias * factor)
    return (bias.broadcast(product.shape) + product).convert(cx.output.dtype)


@lowering("mm(Tensor self, Tensor mat2) -> Tensor", dots=True)
def _mm(cx: Context, x: Value, y: Value) -> Value:
    require_float(cx, "mm")
    return contract(x, y, ((1,), (0,))).convert(cx.output.dtype)


@lowering("bmm(Tensor self, Tensor mat2) -> Tensor", dots=True)
def _bmm(cx: Context, x: Value, y: Value) -> Value:
    require_float(cx, "bmm")
    return contract(x, y, ((2,), (1,)), ((0,), (0,))).convert(cx.output.dtype)


@lowering("addmm(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1) -> Tensor", dots=True)
def _addmm(cx: Context, bias: Value, x: Value, y: Value, beta: Value | Number, alpha: Value | Number) -> Value:
    require_float(cx, "addmm")
    return _scaled_sum(cx, bias, contract(x, y, ((1,), (0,))), beta, alpha)


@lowering(
    "_addmm_activation(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1, bool use_gelu=False)"
    " -> Tensor",
    dots=True,
)
def _addmm_activation(
    cx: Context, bias: Value, x: Value, y: Value, beta: Value | Number, alpha: Value | Number, use_gelu: bool
) -> Value:
    require_float(cx, "_addmm_activation")
    linear = _scaled_sum(cx, bias, contract(x, y, ((1,), (0,))), beta, alpha)
    if not use_gelu:
        return linear.maximum(0)
    compute = linear.convert(opmath(linear.dtype))
    gelu: Value = compute * ((compute * 0.5**0.5).unary("chlo.erf") + 1) * 0.5
    return gelu.convert(linear.dtype)


@lowering("baddbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor", dots=True)
def _baddbmm(cx: Context, bias: Value, x: Value, y: Value, beta: Value | Number, alpha: Value | Number) -> Value:
    require_float(cx, "baddbmm")
    return _scaled_sum(cx, bias, contract(x, y, ((2,), (1,)), ((0,), (0,))), beta, alpha)


@lowering("mv(Tensor self, Tensor vec) -> Tensor", dots=True)
def _mv(cx: Context, x: Value, y: Value) -> Value:
    # The device reaches mv through addmv, and says so.
    require_float(cx, "addmv")
    return contract(x, y, ((1,), (0,))).convert(cx.output.dtype)


@lowering("addmv(Tensor self, Tensor mat, Tensor vec, *, Scalar beta=1, Scalar alpha=1) -> Tensor", dots=True)
def _addmv(cx: Context, bias: Value, x: Value, y: Value, beta: Value | Number, alpha: Value | Number) -> Value:
    require_float(cx, "addmv")
    return _scaled_sum(cx, bias, contract(x, y, ((1,), (0,))), beta, alpha)


@lowering("dot(Tensor self, Tensor tensor) -> Tensor", dots=True)
def _dot(cx: Context, x: Value, y: Value) -> Value:
    require_float(cx, "dot")
    return contract(x, y, ((0,), (0,))).convert(cx.output.dtype)


@lowering("vdot(Tensor self, Tensor other) -> Tensor", dots=True)
def _vdot(cx: Context, x: Value, y: Value) -> Value:
    require_float(cx, "vdot")
    if x.dtype.is_complex:
        x = cx.builder.complex(cx.builder.real(x), -cx.builder.imag(x))
    return contract(x, y, ((0,), (0,))).convert(cx.output.dtype)


@lowering("addr(Tensor self, Tensor vec1, Tensor vec2, *, Scalar beta=1, Scalar alpha=1) -> Tensor")
def _addr(cx: Context, bias: Value, x: Value, y: Value, beta: Value | Number, alpha: Value | Number) -> Value:
    compute = opmath(cx.output.dtype)
    column, row = x.convert(compute).reshape((*x.shape, 1)), y.convert(compute)
    if compute != torch.bool:
        return _scaled_sum(cx, bias, column * row, beta, alpha)
    product = column & row
    for scale, name in ((alpha, "alpha"), (beta, "beta")):
        if isinstance(scale, Value) and name == "alpha":
            product = product & scale.convert(torch.bool)
        elif isinstance(scale, Value):
            bias = bias & scale.convert(torch.bool)
    return bias.broadcast(product.shape) | product


@lowering(
    "addbmm(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1) -> Tensor",
    dots=True,
    beyond=True,
)
def _addbmm(cx: Context, bias: Value, x: Value, y: Value, beta: Value | Number, alpha: Value | Number) -> Value:
    require_float(cx, "addbmm")
    # The batch is contracted as well: [M, B, K] with [B, K, N].
    return _scaled_sum(cx, bias, contract(x, y, ((0, 2), (0, 1))), beta, alpha)


# ------------------------------------------------------------------------- with the result's dtype given


@lowering("mm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor", dots=True)
def _mm_dtype(cx: Context, x: Value, y: Value, out_dtype: torch.dtype) -> Value:
    return _mm(cx, x, y)


@lowering("bmm.dtype(Tensor self, Tensor mat2, ScalarType out_dtype) -> Tensor", dots=True)
def _bmm_dtype(cx: Context, x: Value, y: Value, out_dtype: torch.dtype) -> Value:
    return _bmm(cx, x, y)


_DTYPE = "ScalarType out_dtype, *, Scalar beta=1, Scalar alpha=1) -> Tensor"


@lowering("addmm.dtype(Tensor self, Tensor mat1, Tensor mat2, " + _DTYPE, dots=True)
def _addmm_dtype(
    cx: Context,
    bias: Value,
    x: Value,
    y: Value,
    out_dtype: torch.dtype,
    beta: Value | Number,
    alpha: Value | Number,
) -> Value:
    return _addmm(cx, bias, x, y, beta, alpha)


@lowering("baddbmm.dtype(Tensor self, Tensor batch1, Tensor batch2, " + _DTYPE, dots=True)
def _baddbmm_dtype(
    cx: Context,
    bias: Value,
    x: Value,
    y: Value,
    out_dtype: torch.dtype,
    beta: Value | Number,
    alpha: Value | Number,
) -> Value:
    return _baddbmm(cx, bias, x, y, beta, alpha)


def _linear_backward_meta(
    self: torch.Tensor, grad_output: torch.Tensor, weight: torch.Tensor, output_mask: Sequence[bool]
) -> list[torch.Tensor | None]:
    wanted = (self, weight, grad_output.new_empty(weight.shape[:-1]))
    return [torch.empty_like(t) if mask else None for t, mask in zip(wanted, output_mask, strict=True)]


@lowering(
    "linear_backward(Tensor self, Tensor grad_output, Tensor weight, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
    dots=True,
    meta=_linear_backward_meta,
)
def _linear_backward(
    cx: Context, x: Value, grad: Value, weight: Value, output_mask: Sequence[bool]
) -> list[Value | None]:
    """Towards the input [*, I], the weight [O, I] and the bias [O] from ``grad`` [*, O]. O may be no dimension at all."""
    outer = list(range(x.ndim - 1))
    rows = list(range(weight.ndim - 1))
    makers: tuple[Callable[[], Value], ...] = (
        lambda: contract(grad, weight, ([len(outer) + row for row in rows], rows)),
        lambda: contract(grad, x, (outer, outer)),
        lambda: grad.convert(opmath(grad.dtype)).sum(outer),
    )
    return [None if spec is None else make().convert(spec.dtype) for make, spec in zip(makers, cx.outputs, strict=True)]


# ------------------------------------------------------------------------------------- triangular systems


@lowering(
    "linalg_solve_triangular(Tensor self, Tensor B, *, bool upper, bool left=True, bool unitriangular=False) -> Tensor",
    dots=True,
)
def _solve_triangular(cx: Context, a: Value, b: Value, upper: bool, left: bool, unitriangular: bool) -> Value:
    shape = cx.output.size
    if 0 in shape:
        return cx.builder.full(0, shape, b.dtype)
    extent = a.shape[-1]
    return cx.builder.emit(
        "stablehlo.triangular_solve",
        [a.broadcast((*shape[:-2], extent, extent)), b.broadcast(shape)],
        shape,
        b.dtype,
        left_side=str(left).lower(),
        lower=str(not upper).lower(),
        unit_diagonal=str(unitriangular).lower(),
        transpose_a="#stablehlo<transpose NO_TRANSPOSE>",
    )


@lowering("linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor", dots=True)
def _linear(cx: Context, x: Value, weight: Value, bias: Value | None) -> Value:
    require_float(cx, "linear")
    product = contract(x, weight, ((x.ndim - 1,), (weight.ndim - 1,)))
    if bias is not None:
        product = product + bias.convert(product.dtype).broadcast(product.shape)
    return product.convert(cx.output.dtype)
