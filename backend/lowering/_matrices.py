"""Stacks of matrices, [batch, rows, columns]: what the decompositions share. All of it elementwise or a loop over
columns, in full precision, so that every client can run it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from emutpu.backend.hlo import Builder, Value

__all__ = [
    "Grid",
    "adjoint",
    "column",
    "conjugate",
    "eye",
    "loop",
    "mT",
    "masked",
    "row",
    "stacked",
    "take",
    "triangle",
    "triangular_solve",
]

INDEX = torch.int32


@dataclasses.dataclass(frozen=True, slots=True)
class Grid:
    """Row and column numbers of a stack of matrices, int32 of its shape."""

    rows: Value
    columns: Value

    @staticmethod
    def of(builder: Builder, shape: Sequence[int]) -> Grid:
        return Grid(builder.iota(shape, 1, INDEX), builder.iota(shape, 2, INDEX))


def stacked(x: Value) -> Value:
    """[*, m, n] as [batch, m, n]."""
    return x.reshape((math.prod(x.shape[:-2]), *x.shape[-2:]))


def masked(condition: Value, x: Value) -> Value:
    """``x`` where the condition holds, else zero, whatever stands there."""
    return x.builder.select(condition, x, 0)


def conjugate(x: Value) -> Value:
    return x.builder.complex(x.builder.real(x), -x.builder.imag(x)) if x.dtype.is_complex else x


def mT(x: Value) -> Value:  # noqa: N802  # PyTorch's name for it
    return x.transpose([0, 2, 1])


def adjoint(x: Value) -> Value:
    return conjugate(mT(x))


def eye(builder: Builder, shape: Sequence[int], dtype: torch.dtype) -> Value:
    """Ones on the diagonal of a stack of matrices of ``shape``."""
    grid = Grid.of(builder, shape)
    return grid.rows.eq(grid.columns).convert(dtype)


def column(a: Value, k: Value) -> Value:
    """Column ``k`` (a 0-d int32) of each matrix: [batch, m]."""
    zero = a.builder.full(0, (), INDEX)
    return a.builder.dynamic_slice(a, [zero, zero, k], [*a.shape[:2], 1]).reshape(a.shape[:2])


def row(a: Value, k: Value) -> Value:
    """Row ``k`` of each matrix: [batch, n]."""
    zero = a.builder.full(0, (), INDEX)
    shape = (a.shape[0], a.shape[2])
    return a.builder.dynamic_slice(a, [zero, k, zero], [shape[0], 1, shape[1]]).reshape(shape)


def take(x: Value, places: Value) -> Value:
    """``x[b, places[b, i]]``: rows of each matrix, or elements of each vector, by number."""
    builder = x.builder
    rest = x.shape[2:]
    return builder.gather(
        x,
        places.reshape((*places.shape, 1)),
        offset_dims=list(range(2, x.ndim)),
        collapsed=[1],
        start_index_map=[1],
        slice_sizes=[1, 1, *rest],
        shape=(x.shape[0], places.shape[1], *rest),
        batching=[0],
    )


def loop(builder: Builder, count: int, state: Sequence[Value], body: Callable[..., Sequence[Value]]) -> list[Value]:
    """``state = body(k, *state)`` for k = 0, 1, …, count - 1."""
    if count <= 0:
        return list(state)
    last = builder.while_loop(
        [builder.full(0, (), INDEX), *state],
        lambda k, *_: k < count,
        lambda k, *now: [k + 1, *body(k, *now)],
    )
    return last[1:]


def triangle(a: Value, shape: Sequence[int], *, upper: bool, unit: bool = False) -> Value:
    """The upper or strictly lower triangle, cropped to ``shape``; with ``unit``, ones on the diagonal of the lower."""
    a = a.slice([0, 0, 0], shape)
    grid = Grid.of(a.builder, a.shape)
    if upper:
        return masked(grid.rows <= grid.columns, a)
    below = masked(grid.rows > grid.columns, a)
    return below + eye(a.builder, a.shape, a.dtype) if unit else below


def triangular_solve(
    a: Value, b: Value, *, upper: bool, left: bool = True, unit: bool = False, transpose: str = "NO_TRANSPOSE"
) -> Value:
    """``op(a) x = b`` or ``x op(a) = b``, with ``op`` NO_TRANSPOSE, TRANSPOSE or ADJOINT. Only one triangle is read."""
    if not b.numel:
        return b
    return b.builder.emit(
        "stablehlo.triangular_solve",
        [a, b],
        b.shape,
        b.dtype,
        left_side=str(left).lower(),
        lower=str(not upper).lower(),
        unit_diagonal=str(unit).lower(),
        transpose_a=f"#stablehlo<transpose {transpose}>",
    )
