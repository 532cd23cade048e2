"""Fake quantisation: rounding to a grid of integers and back."""

from __future__ import annotations

from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []


def _meta(self: torch.Tensor, *_: Any, **__: Any) -> Any:
    return torch.empty_like(self), torch.empty_like(self, dtype=torch.bool)


def _quantized(x: Value, inverse: Value, zero_point: Value) -> Value:
    """The nearest integer of the grid, before it is clamped."""
    return (x * inverse).unary("stablehlo.round_nearest_even") + zero_point


@lowering(
    "fake_quantize_per_tensor_affine_cachemask(Tensor self, float scale, int zero_point, int quant_min, int quant_max) "
    "-> (Tensor output, Tensor mask)",
    meta=_meta,
    dynamic="scale",
)
def _per_tensor(cx: Context, x: Value, scale: Value, zero_point: int, quant_min: int, quant_max: int) -> list[Value]:
    """The rounded values, and where the gradient passes: inside the grid's range."""
    wide = x.convert(opmath(x.dtype))
    step = scale.convert(wide.dtype)
    offset = cx.builder.full(zero_point, (), wide.dtype)
    level = _quantized(wide, cx.builder.full(1, (), wide.dtype) / step, offset)
    inside = (level >= float(quant_min)) & (level <= float(quant_max))
    back = (level.maximum(float(quant_min)).minimum(float(quant_max)) - offset) * step
    return [back.convert(x.dtype), inside]
