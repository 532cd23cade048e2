"""Products of groups of matrices, and of 8-bit floats with scales."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.matmul import contract

__all__: list[str] = []

_WHOLE, _ROWS = 0, 1  # torch.nn.functional.ScalingType: one scale for a matrix, one for each row (or column)


def _refuse_fast(op: str, use_fast_accum: bool) -> None:
    if use_fast_accum:
        raise NotImplementedError(f"{op}(): use_fast_accum=true is not supported yet")


# -------------------------------------------------------------------------------------------------- 8-bit floats


def _exact(x: Value, y: Value, over: tuple[Sequence[int], Sequence[int]]) -> Value:
    """8-bit floats are exact in bfloat16, so one pass of the matrix unit is; sums in float32."""
    return x.builder.dot_general(
        x.convert(torch.bfloat16), y.convert(torch.bfloat16), contract=over, accumulate=torch.float32
    )


def _scale(op: str, scale: Value, extent: int, dim: int) -> Value:
    """A scale as it multiplies the product [M, N]: of everything, or [M, 1] (``dim`` 0), [1, N] (``dim`` 1)."""
    if scale.numel == 1:
        return scale.reshape((1, 1)).convert(torch.float32)
    wanted = (extent, 1) if dim == 0 else (1, extent)
    if scale.shape not in (wanted, (extent,)):
        raise RuntimeError(
            f"{op}(): expected scale_{'ab'[dim]} to have one element or shape {list(wanted)}, got {list(scale.shape)}"
        )
    return scale.reshape(wanted).convert(torch.float32)


def _scaled(cx: Context, op: str, x: Value, y: Value, scales: tuple[Value, Value], bias: Value | None) -> Value:
    rows, columns = cx.output.size
    product = _exact(x, y, ((1,), (0,)))
    product = product * _scale(op, scales[0], rows, 0) * _scale(op, scales[1], columns, 1)
    return product if bias is None else product + bias.convert(torch.float32)


@lowering(
    "_scaled_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias=None, Tensor? scale_result=None, "
    "ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor"
)
def _scaled_mm(
    cx: Context,
    x: Value,
    y: Value,
    scale_a: Value,
    scale_b: Value,
    bias: Value | None,
    scale_result: Value | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> Value:
    _refuse_fast("scaled_mm", use_fast_accum)
    product = _scaled(cx, "scaled_mm", x, y, (scale_a, scale_b), bias)
    if scale_result is not None and cx.output.dtype.itemsize == 1:
        product = product * scale_result.reshape((1, 1)).convert(torch.float32)
    return product.convert(cx.output.dtype)


def _scaled_mm_v2_meta(self: torch.Tensor, mat2: torch.Tensor, **options: Any) -> torch.Tensor:
    return self.new_empty((self.shape[0], mat2.shape[1]), dtype=options["out_dtype"] or torch.bfloat16)


@lowering(
    "_scaled_mm_v2(Tensor self, Tensor mat2, Tensor[] scale_a, int[] recipe_a, int[] swizzle_a, Tensor[] scale_b, "
    "int[] recipe_b, int[] swizzle_b, Tensor? bias, ScalarType? out_dtype, int[] contraction_dim=[], "
    "bool use_fast_accum=False) -> Tensor",
    meta=_scaled_mm_v2_meta,
)
def _scaled_mm_v2(
    cx: Context,
    x: Value,
    y: Value,
    scale_a: Sequence[Value],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[Value],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: Value | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int],
    use_fast_accum: bool,
) -> Value:
    _refuse_fast("scaled_mm_v2", use_fast_accum)
    for recipe, swizzle in ((recipe_a, swizzle_a), (recipe_b, swizzle_b)):
        if list(recipe) not in ([_WHOLE], [_ROWS]) or any(swizzle):
            raise NotImplementedError("scaled_mm_v2(): only scales of whole tensors and of rows are supported")
    return _scaled(cx, "scaled_mm_v2", x, y, (scale_a[0], scale_b[0]), bias).convert(cx.output.dtype)


# -------------------------------------------------------------------------------------------------------- groups


def _members(cx: Context, offsets: Value, count: int) -> Value:
    """Whether row ``i`` of ``count`` belongs to group ``g``: [G, count]; ``offsets`` are where groups end."""
    builder = cx.builder
    groups = offsets.shape[0]
    ends = offsets.convert(torch.int32)
    starts = ends.pad([1], [-1])
    places = builder.iota((groups, count), 1, torch.int32)
    return (places >= starts.reshape((groups, 1))) & (places < ends.reshape((groups, 1)))


def _only(inside: Value, x: Value) -> Value:
    """``x`` where ``inside`` holds; zero elsewhere, whatever stands there."""
    return x.builder.select(inside, x, 0)


def _grouped(cx: Context, x: Value, y: Value, offsets: Value | None) -> Value:
    """Dense: every group multiplies all rows, and keeps its own. G times the arithmetic of a ragged product."""
    if offsets is None:  # [G, M, K] with [G, K, N]
        return contract(x, y, ((2,), (1,)), ((0,), (0,)))
    groups = offsets.shape[0]
    if x.ndim == 2 and y.ndim == 3:  # groups of rows: [M, K] with [G, K, N]
        inside = _members(cx, offsets, x.shape[0])
        spread = _only(inside.reshape((groups, x.shape[0], 1)), x.reshape((1, *x.shape)))
        return contract(spread, y, ((0, 2), (0, 1)))
    if x.ndim == 3:  # groups of columns: [G, M, K] with [K, N]
        inside = _members(cx, offsets, y.shape[1])
        spread = _only(inside.reshape((groups, 1, y.shape[1])), y.reshape((1, *y.shape)))
        return contract(x, spread, ((0, 2), (0, 1)))
    inside = _members(cx, offsets, x.shape[1])  # groups of the summed dimension: [G, M, N]
    spread = _only(inside.reshape((groups, 1, x.shape[1])), x.reshape((1, *x.shape)))
    return contract(spread, y, ((2,), (0,)))


def _grouped_meta(
    self: torch.Tensor,
    mat2: torch.Tensor,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    """The device's own check: any float, no alignment, int32 or int64 offsets."""
    if self.dim() not in (2, 3) or mat2.dim() not in (2, 3):
        raise RuntimeError(f"grouped_mm(): expected self and mat2 to be 2D or 3D, got {self.dim()}D and {mat2.dim()}D")
    if self.dtype != mat2.dtype:
        raise RuntimeError(
            f"grouped_mm(): expected self and mat2 to have the same dtype, got {self.dtype} and {mat2.dtype}"
        )
    if self.shape[-1] != mat2.shape[-2]:
        raise RuntimeError(
            f"grouped_mm(): expected the contracted dimensions to be equal, got {self.shape[-1]} and {mat2.shape[-2]}"
        )
    ragged = self.dim() == 2 or mat2.dim() == 2
    if ragged != (offs is not None):
        raise RuntimeError(f"grouped_mm(): expected offs to be {'given' if ragged else 'absent'} for these ranks")
    if offs is not None and (offs.dim() != 1 or offs.dtype not in (torch.int32, torch.int64)):
        raise RuntimeError("grouped_mm(): expected offs to be a 1D int32 or int64 tensor")
    groups = (offs.shape[0],) if offs is not None else (self.shape[0],)
    for tensor in (self, mat2):
        if tensor.dim() == 3 and tensor.shape[0] != groups[0]:
            raise RuntimeError(f"grouped_mm(): expected {groups[0]} groups, got {tensor.shape[0]}")
    lead = groups if self.dim() == mat2.dim() else ()
    return self.new_empty((*lead, self.shape[-2], mat2.shape[-1]), dtype=out_dtype or self.dtype)


@lowering(
    "_grouped_mm(Tensor self, Tensor mat2, Tensor? offs=None, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor",
    dots=True,
    meta=_grouped_meta,
)
def _grouped_mm(
    cx: Context, x: Value, y: Value, offs: Value | None, bias: Value | None, out_dtype: torch.dtype | None
) -> Value:
    product = _grouped(cx, x, y, offs)
    return (product if bias is None else product + bias.convert(product.dtype)).convert(cx.output.dtype)


@lowering(
    "_scaled_grouped_mm(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? offs=None, Tensor? bias=None, "
    "Tensor? scale_result=None, ScalarType? out_dtype=None, bool use_fast_accum=False) -> Tensor",
    meta=lambda self, mat2, offs, bias, out_dtype, **_: _grouped_meta(
        self, mat2, offs, bias, out_dtype or torch.bfloat16
    ),
)
def _scaled_grouped_mm(
    cx: Context,
    x: Value,
    y: Value,
    scale_a: Value,
    scale_b: Value,
    offs: Value | None,
    bias: Value | None,
    scale_result: Value | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> Value:
    """Scales of rows of ``self`` and of columns of ``mat2``: they multiply the operands, which float32 holds exactly."""
    _refuse_fast("scaled_grouped_mm", use_fast_accum)
    if (x.ndim, y.ndim) != (2, 3):
        raise NotImplementedError("scaled_grouped_mm(): only a 2D self and a 3D mat2 are supported")
    groups, _, columns = y.shape
    product = _grouped(cx, x.convert(torch.bfloat16), y.convert(torch.bfloat16), offs)
    product = product * scale_a.convert(torch.float32).reshape((x.shape[0], 1))
    assert offs is not None
    inside = _members(cx, offs, x.shape[0])
    of_columns = scale_b.convert(torch.float32).reshape((groups, 1, columns))
    chosen = _only(inside.reshape((groups, x.shape[0], 1)), of_columns.broadcast((groups, x.shape[0], columns))).sum(
        [0]
    )
    product = product * chosen
    return (product if bias is None else product + bias.convert(product.dtype)).convert(cx.output.dtype)
