"""Reading and adding along one dimension at indices known on the host: what resampling and edge padding are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from emutpu.backend.hlo import Value

__all__ = ["margins", "put", "resampled", "side_by_side", "take"]

_Indices = np.ndarray[Any, Any]
_MOST_PIECES = 8


def _runs(indices: _Indices) -> list[tuple[int, int, int]]:
    """Maximal runs of a constant step in (1, -1, 0): (position, length, step)."""
    runs = []
    position = 0
    while position < len(indices):
        length = 1
        step = 1
        if position + 1 < len(indices):
            step = int(indices[position + 1] - indices[position])
            if step in (1, -1, 0):
                length = 2
                while (
                    position + length < len(indices)
                    and indices[position + length] - indices[position + length - 1] == step
                ):
                    length += 1
            else:
                step = 1
        runs.append((position, length, step))
        position += length
    return runs


def _repeats(indices: _Indices, n: int) -> int:
    """K if the indices are 0 … n-1, each k times; otherwise 0."""
    times = len(indices) // n if n else 0
    return times if times and np.array_equal(indices, np.repeat(np.arange(n), times)) else 0


def _replaced(shape: Sequence[int], dim: int, *extents: int) -> tuple[int, ...]:
    return (*shape[:dim], *extents, *shape[dim + 1 :])


def take(x: Value, dim: int, indices: _Indices) -> Value:
    """``x.index_select(dim, indices)``: slices when the indices are few runs, a broadcast for repeats, else a gather."""
    n = x.shape[dim]
    times = _repeats(indices, n)
    if times:
        wide = _replaced(x.shape, dim, n, times)
        return x.broadcast_in_dim(wide, [d for d in range(x.ndim + 1) if d != dim + 1]).reshape(
            _replaced(x.shape, dim, n * times)
        )
    runs = _runs(indices)
    if len(runs) > _MOST_PIECES:
        return _gather(x, dim, indices)
    pieces = []
    for position, length, step in runs:
        first = int(indices[position])
        if step == 1:
            pieces.append(x.slice_dim(dim, first, first + length))
        elif step == -1:
            pieces.append(x.slice_dim(dim, first - length + 1, first + 1).reverse([dim]))
        else:
            pieces.append(x.slice_dim(dim, first, first + 1).broadcast(_replaced(x.shape, dim, length)))
    return x.builder.concatenate(pieces, dim)


def _gather(x: Value, dim: int, indices: _Indices) -> Value:
    builder = x.builder
    return builder.gather(
        x,
        builder.constant(indices.reshape(-1, 1), torch.int32),
        offset_dims=[d for d in range(x.ndim) if d != dim],
        collapsed=[dim],
        start_index_map=[dim],
        slice_sizes=_replaced(x.shape, dim, 1),
        shape=_replaced(x.shape, dim, len(indices)),
        sorted_indices=bool((np.diff(indices) >= 0).all()),
    )


def put(x: Value, dim: int, indices: _Indices, n: int) -> Value:
    """The transpose of :func:`take`: add each element at its index of ``n`` zeros."""
    times = _repeats(indices, n)
    if times:
        return x.reshape(_replaced(x.shape, dim, n, times)).sum([dim + 1])
    runs = _runs(indices)
    if len(runs) > _MOST_PIECES:
        matrix = np.zeros((len(indices), n))
        np.add.at(matrix, (np.arange(len(indices)), indices), 1)
        return resampled(x, dim, matrix)
    total: Value | None = None
    for position, length, step in runs:
        piece = x.slice_dim(dim, position, position + length)
        first, count = int(indices[position]), length
        if step == -1:
            piece, first = piece.reverse([dim]), first - length + 1
        elif step == 0:
            piece, count = piece.sum([dim], keepdim=True), 1
        low, high = [0] * x.ndim, [0] * x.ndim
        low[dim], high[dim] = first, n - first - count
        padded = piece.pad(low, high)
        total = padded if total is None else total + padded
    assert total is not None
    return total


def resampled(x: Value, dim: int, matrix: _Indices) -> Value:
    """Contract ``dim`` with a constant matrix [n, m], at full float32 precision whatever the options say."""
    builder = x.builder
    precision, builder.precision = builder.precision, "HIGHEST"
    try:
        product = builder.dot_general(x, builder.constant(matrix, x.dtype), contract=([dim], [0]))
    finally:
        builder.precision = precision
    order = list(range(x.ndim - 1))
    order.insert(dim, x.ndim - 1)
    return product.transpose(order)


def side_by_side(blocks: Value, dim: int, step: int, start: int, size: int) -> Value:
    """Blocks (``dim``) of elements (the next dimension, at most ``step``) become one dimension of ``size``, ``step`` apart
    from ``start`` on, with zeros between; what lies outside is cut.
    """
    count, width = blocks.shape[dim : dim + 2]
    wide = blocks.pad(*margins(blocks.ndim, dim + 1, 0, step - width))
    flat = wide.reshape((*wide.shape[:dim], count * step, *wide.shape[dim + 2 :]))
    return flat.pad(*margins(flat.ndim, dim, start, size - start - count * step))


def margins(rank: int, dim: int, low: int, high: int) -> tuple[list[int], list[int]]:
    """Padding of one dimension; what is negative cuts."""
    below, above = [0] * rank, [0] * rank
    below[dim], above[dim] = low, high
    return below, above
