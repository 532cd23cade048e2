"""The launches behind ops with data-dependent sizes (:mod:`emutpu.backend.data_dependent`)."""

from __future__ import annotations

import torch

from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.indexing import positions_type

__all__: list[str] = []


def _count_meta(self: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="meta")


@lowering("nonzero(Tensor self) -> Tensor", meta=_count_meta, dispatched=False)
def _count_nonzero(cx: Context, x: Value) -> Value:
    """How many elements are not zero."""
    return x.convert(torch.bool).convert(torch.int64).sum(range(x.ndim))


def first_positions(keep: Value, count: int) -> Value:
    """The first ``count`` positions at which the 1-d mask ``keep`` is true, rising."""
    builder, n = keep.builder, keep.numel
    dtype = positions_type(n + 1)
    key = builder.select(keep, builder.iota((n,), 0, dtype), n)
    return builder.sort([key], 0, lambda a, b: a < b, stable=False)[0].slice([0], [count])


@lowering("nonzero_static(Tensor self, *, SymInt size, int fill_value=-1) -> Tensor", dispatched=False)
def _nonzero(cx: Context, x: Value, size: int, fill_value: int) -> Value:
    if 0 in cx.output.size:
        return cx.builder.full(0, cx.output.size, torch.int64)
    rest = first_positions(x.convert(torch.bool).reshape((x.numel,)), size)
    columns: list[Value] = []
    for extent in reversed(x.shape):
        quotient = rest / extent
        columns.append((rest - quotient * extent).reshape((size, 1)))
        rest = quotient
    return cx.builder.concatenate(columns[::-1], 1).convert(torch.int64)
