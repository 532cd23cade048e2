"""Ops over lists of tensors: one module for the whole list, each element as the single-tensor lowering does it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import LOWERINGS, Context, Emit, lowering

__all__: list[str] = []

_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round rsqrt "
    "sigmoid sign sin sinh sqrt tan tanh trunc"
)

# _foreach op -> the lowering of one element, and the overloads that exist.
_BINARY = {
    "add": ("add.Tensor", "List Scalar ScalarList Tensor"),
    "sub": ("sub.Tensor", "List Scalar ScalarList"),
    "mul": ("mul.Tensor", "List Scalar ScalarList Tensor"),
    "div": ("div.Tensor", "List Scalar ScalarList Tensor"),
    "maximum": ("maximum", "List Scalar ScalarList"),
    "minimum": ("minimum", "List Scalar ScalarList"),
    "clamp_min": ("maximum", "List Scalar ScalarList"),
    "clamp_max": ("minimum", "List Scalar ScalarList"),
    "pow": ("pow.Tensor_Tensor", "List Scalar ScalarList ScalarAndTensor"),
}


@functools.cache
def _schema(name: str) -> torch._C.FunctionSchema:
    return torch._C.parse_schema("aten::" + LOWERINGS[name].schema)


def _each(single: str) -> Emit:
    """Element by element through another op's lowering; what is not a list goes to every element."""

    def emit(cx: Context, *arguments: Any) -> list[Value]:
        parameters = _schema(single).arguments
        # A list of None stands for an argument that was left out.
        given = [*cx.arguments.values()][: len(parameters)]
        values = [*arguments][: len(parameters)]
        for parameter in parameters[len(given) :]:
            given.append(parameter.default_value)
            values.append(parameter.default_value)
        row = LOWERINGS[single]
        made: list[Value] = []
        for index, output in enumerate(cx.outputs):
            named = {p.name: _element(v, index) for p, v in zip(parameters, given, strict=True)}
            result = row.emit(Context(cx.builder, (output,), named), *(_element(v, index) for v in values))
            assert isinstance(result, Value)
            made.append(result)
        return made

    return emit


def _element(value: Any, index: int) -> Any:
    return value[index] if isinstance(value, list | tuple) else value


for _name in _UNARY.split():
    lowering(f"_foreach_{_name}(Tensor[] self) -> Tensor[]")(_each(_name))

_SECOND = {
    "List": "Tensor[] {other}",
    "Scalar": "Scalar {scalar}",
    "ScalarList": "Scalar[] {scalars}",
    "Tensor": "Tensor other",
}


def _binary_schema(name: str, overload: str) -> str:
    if overload == "ScalarAndTensor":
        return f"_foreach_{name}.{overload}(Scalar self, Tensor[] exponent) -> Tensor[]"
    words = {"other": "other", "scalar": "scalar", "scalars": "scalars"}
    if name == "pow":
        words = dict.fromkeys(words, "exponent")
    scaled = (name, overload) in (("add", "List"), ("add", "Tensor"), ("sub", "List"))
    alpha = ", *, Scalar alpha=1" if scaled else ""
    return f"_foreach_{name}.{overload}(Tensor[] self, {_SECOND[overload].format(**words)}{alpha}) -> Tensor[]"


for _name, (_single, _overloads) in _BINARY.items():
    for _overload in _overloads.split():
        lowering(_binary_schema(_name, _overload))(_each(_single))

for _name in ("addcmul", "addcdiv"):
    for _overload, _last in (("Scalar", "Scalar value=1"), ("ScalarList", "Scalar[] scalars")):
        lowering(
            f"_foreach_{_name}.{_overload}(Tensor[] self, Tensor[] tensor1, Tensor[] tensor2, {_last}) -> Tensor[]"
        )(_each(_name))

for _overload, _last in (("List", "Tensor[] weights"), ("Scalar", "Scalar weight"), ("ScalarList", "Scalar[] weight")):
    lowering(f"_foreach_lerp.{_overload}(Tensor[] self, Tensor[] tensors1, {_last}) -> Tensor[]")(
        _each("lerp.Tensor" if _overload == "List" else "lerp.Scalar")
    )

lowering("_foreach_clone(Tensor[] self, *, MemoryFormat? memory_format=None) -> Tensor[]")(_each("clone"))


@lowering("_foreach_zero_(Tensor(a!)[] self) -> ()")
def _zero(cx: Context, tensors: Sequence[Value]) -> list[Value]:
    return [cx.builder.full(0, x.shape, x.dtype) for x in tensors]


def _device_sources(made: Any) -> Callable[..., Any]:
    """Sources on the host are transferred one by one."""
    kernel: Callable[..., Any] = made.function

    def copy(self: Sequence[torch.Tensor], src: Sequence[torch.Tensor], non_blocking: bool = False) -> None:
        if all(s.device == t.device for t, s in zip(self, src, strict=False)):
            kernel(self, src)
            return
        for target, source in zip(self, src, strict=True):
            target.copy_(source)

    return copy


@lowering("_foreach_copy_(Tensor(a!)[] self, Tensor[] src, bool non_blocking=False) -> ()", around=_device_sources)
def _copy(cx: Context, tensors: Sequence[Value], sources: Sequence[Value], non_blocking: bool) -> list[Value]:
    return [source.convert(x.dtype).broadcast(x.shape) for x, source in zip(tensors, sources, strict=True)]


@lowering("_foreach_norm.Scalar(Tensor[] self, Scalar ord=2, ScalarType? dtype=None) -> Tensor[]", static="ord")
def _norms(cx: Context, tensors: Sequence[Value], order: Number, dtype: torch.dtype | None) -> list[Value]:
    made = []
    for x, output in zip(tensors, cx.outputs, strict=True):
        assert output is not None
        size = x.convert(opmath(dtype or x.dtype)).abs()
        made.append(_norm(size, float(order)).convert(output.dtype))  # type: ignore[arg-type]  # never complex
    return made


def _norm(size: Value, order: float) -> Value:
    """The vector norm of non-negative values."""
    dims = range(size.ndim)
    if math.isinf(order):
        return size.max(dims) if order > 0 else size.min(dims)
    if order == 0:
        return size.ne(0).convert(size.dtype).sum(dims)
    if order == 1:
        return size.sum(dims)
    if order == 2:
        return (size * size).sum(dims).sqrt()
    return size.pow(order).sum(dims).pow(1 / order)


@lowering("_foreach_max(Tensor[] self) -> Tensor[]")
def _maxima(cx: Context, tensors: Sequence[Value]) -> list[Value]:
    return [x.max(range(x.ndim)) for x in tensors]
