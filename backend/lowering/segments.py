"""Reductions of consecutive segments, and the padding of ragged batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._matrices import INDEX
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

_REDUCTIONS: dict[str, tuple[Callable[[Value, Value], Value], Number]] = {
    "sum": (Value.__add__, 0),
    "mean": (Value.__add__, 0),
    "prod": (Value.__mul__, 1),
    "max": (Value.maximum, -math.inf),
    "min": (Value.minimum, math.inf),
}


def _meta(data: torch.Tensor, reduce: str, **options: Any) -> torch.Tensor:
    lengths, offsets, axis = options["lengths"], options["offsets"], options["axis"]
    if options["indices"] is not None:
        raise RuntimeError("segment_reduce(): indices based reduction is not supported yet.")
    if (lengths is None) == (offsets is None):
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    if reduce not in _REDUCTIONS:
        raise RuntimeError(f"unsupported reduction given! {reduce}")
    shape = lengths.shape if lengths is not None else (*offsets.shape[:-1], offsets.shape[-1] - 1)
    return data.new_empty((*shape, *data.shape[axis + 1 :]))


@lowering(
    "segment_reduce(Tensor data, str reduce, *, Tensor? lengths=None, Tensor? indices=None, Tensor? offsets=None, "
    "int axis=0, bool unsafe=False, Scalar? initial=None) -> Tensor",
    meta=_meta,
)
def _segment_reduce(
    cx: Context,
    data: Value,
    reduce: str,
    lengths: Value | None,
    indices: None,
    offsets: Value | None,
    axis: int,
    unsafe: bool,
    initial: Value | None,
) -> Value:
    """Each segment of dimension ``axis``, over masks of who belongs where: [batch, segments, elements, rest]."""
    builder, shape = cx.builder, cx.output.size
    if not math.prod(shape):
        return builder.full(0, shape, data.dtype)
    work = data.convert(opmath(data.dtype))
    batch, extent, rest = math.prod(data.shape[:axis]), data.shape[axis], math.prod(data.shape[axis + 1 :])
    starts, ends = _bounds(lengths, offsets, batch)
    segments = starts.shape[1]
    combine, neutral = _REDUCTIONS[reduce]
    places = builder.iota((batch, segments, extent), 2, INDEX)
    inside = (places >= starts.reshape((batch, segments, 1))) & (places < ends.reshape((batch, segments, 1)))
    spread = builder.select(
        inside.reshape((batch, segments, extent, 1)), work.reshape((batch, 1, extent, rest)), neutral
    )
    start = builder.full(neutral, (), work.dtype)
    made = builder.reduce_many([spread], [start], combine, [2])[0]
    count = (ends - starts).reshape((batch, segments, 1)).convert(work.dtype)
    if initial is not None:
        made = combine(made, initial.convert(work.dtype).broadcast(made.shape))
    if reduce == "mean":
        empty = count.eq(0) if initial is not None else builder.full(False, count.shape, torch.bool)
        mean = made / count
        made = builder.select(empty, made, mean)
    return made.reshape(shape).convert(data.dtype)


def _bounds(lengths: Value | None, offsets: Value | None, batch: int) -> tuple[Value, Value]:
    """Where segments start and end: int32 [batch, segments] each."""
    if offsets is not None:
        flat = offsets.convert(INDEX).reshape((batch, offsets.shape[-1]))
        count = offsets.shape[-1] - 1
        return flat.slice_dim(1, 0, count), flat.slice_dim(1, 1, count + 1)
    assert lengths is not None
    flat = lengths.convert(INDEX).reshape((batch, lengths.shape[-1]))
    builder, count = flat.builder, flat.shape[1]
    shape = (batch, count, count)
    before = builder.iota(shape, 2, INDEX) <= builder.iota(shape, 1, INDEX)
    ends = builder.select(before, flat.reshape((batch, 1, count)), 0).sum([2])
    return ends - flat, ends


# --------------------------------------------------------------------------------------------- ragged batches


@lowering(
    "_jagged_to_padded_dense_forward(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value=0.) "
    "-> Tensor"
)
def _jagged_to_padded(
    cx: Context, values: Value, offsets: Sequence[Value], max_lengths: Sequence[int], padding_value: float
) -> Value:
    """[total, *] by one list of offsets as [batch, longest, *]."""
    _one(offsets, "_jagged_to_padded_dense_forward")
    builder, shape = cx.builder, cx.output.size
    batch, longest = offsets[0].shape[0] - 1, max_lengths[0]
    rest = values.shape[1:]
    if not math.prod(shape) or not values.numel:
        return builder.full(padding_value, shape, values.dtype)
    starts, ends = _bounds(None, offsets[0], 1)
    places = starts.reshape((batch, 1)) + builder.iota((batch, longest), 1, INDEX)
    found = builder.gather(
        values,
        places.reshape((batch, longest, 1)),
        offset_dims=list(range(2, 2 + len(rest))),
        collapsed=[0],
        start_index_map=[0],
        slice_sizes=[1, *rest],
        shape=(batch, longest, *rest),
    )
    inside = (places < ends.reshape((batch, 1))).reshape((batch, longest, *[1] * len(rest)))
    return builder.select(inside, found, padding_value).reshape(shape)


def _to_jagged_meta(dense: torch.Tensor, offsets: Sequence[torch.Tensor], total_L: int | None) -> torch.Tensor:  # noqa: N803  # the schema's name
    if total_L is None:
        raise NotImplementedError("padded_dense_to_jagged_forward(): expected total_L to be given")
    return dense.new_empty((total_L, *dense.shape[2:]))


@lowering(
    "_padded_dense_to_jagged_forward(Tensor dense, Tensor[] offsets, SymInt? total_L=None) -> Tensor",
    meta=_to_jagged_meta,
)
def _padded_to_jagged(cx: Context, dense: Value, offsets: Sequence[Value], total: int | None) -> Value:
    """[batch, longest, *] back to [total, *]; what no row of the batch reaches is zero."""
    _one(offsets, "_padded_dense_to_jagged_forward")
    builder, shape = cx.builder, cx.output.size
    if not math.prod(shape) or not dense.numel:
        return builder.full(0, shape, dense.dtype)
    batch, longest, *rest = dense.shape
    starts, ends = _bounds(None, offsets[0], 1)
    places = builder.iota((shape[0], batch), 0, INDEX)
    owns = (places >= starts.reshape((1, batch))) & (places < ends.reshape((1, batch)))
    numbers = builder.iota(owns.shape, 1, INDEX)
    row = builder.select(owns, numbers, 0).sum([1])
    column = builder.select(owns, places - starts.reshape((1, batch)), 0).sum([1])
    found = builder.gather(
        dense,
        builder.concatenate([v.reshape((shape[0], 1)) for v in (row, column)], 1),
        offset_dims=list(range(1, 1 + len(rest))),
        collapsed=[0, 1],
        start_index_map=[0, 1],
        slice_sizes=[1, 1, *rest],
        shape=shape,
    )
    inside = (owns & (places - starts.reshape((1, batch)) < longest)).any([1])
    return builder.select(inside.reshape((shape[0], *[1] * len(rest))), found, 0)


def _one(offsets: Sequence[Value], op: str) -> None:
    if len(offsets) != 1:
        raise NotImplementedError(f"{op.lstrip('_')}(): more than one ragged dimension is not supported")
