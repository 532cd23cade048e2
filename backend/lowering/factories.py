"""Factories: constants, ranges, identities, index triangles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

_FORMAT = "MemoryFormat? memory_format=None"
_OPTIONS = "ScalarType? dtype=None, Layout? layout=None, Device? device=None, bool? pin_memory=None"


def _zeros(cx: Context, *arguments: Any) -> Value:
    return cx.builder.full(0, cx.output.size, cx.output.dtype)


def _ones(cx: Context, *arguments: Any) -> Value:
    return cx.builder.full(1, cx.output.size, cx.output.dtype)


# The dispatcher's kernels of these are in :mod:`emutpu.backend.metadata`: they may be the first op of a program.
lowering(f"zeros(SymInt[] size, *, {_OPTIONS}) -> Tensor", dispatched=False)(_zeros)
lowering(f"ones(SymInt[] size, *, {_OPTIONS}) -> Tensor", dispatched=False)(_ones)
lowering(f"zeros_like(Tensor self, *, {_OPTIONS}, {_FORMAT}) -> Tensor", shapes="self", dispatched=False)(_zeros)
lowering(f"ones_like(Tensor self, *, {_OPTIONS}, {_FORMAT}) -> Tensor", shapes="self", dispatched=False)(_ones)


@lowering(
    f"full(SymInt[] size, Scalar fill_value, *, {_OPTIONS}) -> Tensor", dispatched=False, typed=("fill_value", "dtype")
)
def _full(cx: Context, size: Sequence[int], value: Value, *options: Any) -> Value:
    return cx.scalar(value, cx.output.dtype).broadcast(cx.output.size)


def _ramp(cx: Context, start: float, step: float) -> Value:
    """``start + step * i``, in the precision PyTorch's device kernels use: integers exactly, floats in opmath."""
    (count,), dtype = cx.output.size, cx.output.dtype
    builder = cx.builder
    if not dtype.is_floating_point or (float(start).is_integer() and float(step).is_integer()):
        index = builder.iota((count,), 0, torch.int32 if _narrow(start, step, count) else torch.int64)
        first, by = int(start), int(step)
        value = index if by == 1 else index * by
        return (value if first == 0 else value + first).convert(dtype)
    index = builder.iota((count,), 0, opmath(dtype))
    return (index * float(step) + float(start)).convert(dtype)


def _narrow(start: float, step: float, count: int) -> bool:
    return count < 2**31 and max(abs(int(start)), abs(int(start) + int(step) * count)) < 2**31


@lowering(f"arange(Scalar end, *, {_OPTIONS}) -> Tensor", static="end")
def _arange(cx: Context, end: float, *options: Any) -> Value:
    return _ramp(cx, 0, 1)


@lowering(f"arange.start(Scalar start, Scalar end, *, {_OPTIONS}) -> Tensor", static="start end")
def _arange_start(cx: Context, start: float, end: float, *options: Any) -> Value:
    return _ramp(cx, start, 1)


@lowering(
    f"arange.start_step(Scalar start, Scalar end, Scalar step=1, *, {_OPTIONS}) -> Tensor", static="start end step"
)
def _arange_step(cx: Context, start: float, end: float, step: float, *options: Any) -> Value:
    return _ramp(cx, start, step)


@lowering(f"range(Scalar start, Scalar end, *, {_OPTIONS}) -> Tensor", static="start end")
def _range(cx: Context, start: float, end: float, *options: Any) -> Value:
    return _ramp(cx, start, 1)


@lowering(f"range.step(Scalar start, Scalar end, Scalar step=1, *, {_OPTIONS}) -> Tensor", static="start end step")
def _range_step(cx: Context, start: float, end: float, step: float, *options: Any) -> Value:
    return _ramp(cx, start, step)


@lowering(f"linspace(Scalar start, Scalar end, int steps, *, {_OPTIONS}) -> Tensor")
def _linspace(cx: Context, start: Value, end: Value, steps: int, *options: Any) -> Value:
    """From the nearer end, so that both ends are exact."""
    dtype = cx.output.dtype
    builder = cx.builder
    if steps <= 1:
        return cx.scalar(start, dtype).broadcast((steps,))
    compute = opmath(dtype) if dtype.is_floating_point or dtype.is_complex else torch.float32
    first, last = (cx.scalar(v.convert(dtype), compute) for v in (start, end))
    step = (last - first) / (steps - 1)
    index = builder.iota((steps,), 0, torch.int32)
    forward = first + step * index.convert(compute)
    backward = last - step * (steps - 1 - index).convert(compute)
    return builder.select(index < steps // 2, forward, backward).convert(dtype)


def _identity(cx: Context, *arguments: Any) -> Value:
    rows, columns = cx.output.size
    builder = cx.builder
    row, column = (builder.iota((rows, columns), d, torch.int32) for d in (0, 1))
    return row.eq(column).convert(cx.output.dtype)


lowering(f"eye(SymInt n, *, {_OPTIONS}) -> Tensor")(_identity)
lowering(f"eye.m(SymInt n, SymInt m, *, {_OPTIONS}) -> Tensor")(_identity)


@lowering(f"tril_indices(int row, int col, int offset=0, *, {_OPTIONS.replace('=None', '=4', 1)}) -> Tensor")
def _tril_indices(cx: Context, row: int, col: int, offset: int, *options: Any) -> Value:
    """Known from the arguments alone: a constant."""
    data = torch.tril_indices(row, col, offset, dtype=torch.int64, device="cpu")
    return cx.builder.constant(data.numpy(), cx.output.dtype)


@lowering(
    f"triu_indices(int row, int col, int offset=0, *, {_OPTIONS.replace('=None', '=4', 1)}) -> Tensor", beyond=True
)
def _triu_indices(cx: Context, row: int, col: int, offset: int, *options: Any) -> Value:
    """As ``tril_indices``."""
    data = torch.triu_indices(row, col, offset, dtype=torch.int64, device="cpu")
    return cx.builder.constant(data.numpy(), cx.output.dtype)
