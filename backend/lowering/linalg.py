"""LU decomposition and what follows from it: solving, inverses, determinants. Pivots as LAPACK chooses them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend.hlo import Value
from emutpu.backend.lowering._matrices import (
    INDEX,
    Grid,
    adjoint,
    column,
    eye,
    loop,
    masked,
    mT,
    row,
    stacked,
    take,
    triangle,
    triangular_solve,
)
from emutpu.backend.lowering._registry import Context, lowering

__all__ = ["checked"]


# ---------------------------------------------------------------------------------------------- decomposition


def _magnitude(x: Value) -> Value:
    """|re| + |im|, by which LAPACK compares pivots."""
    builder = x.builder
    return builder.real(x).abs() + builder.imag(x).abs() if x.dtype.is_complex else x.abs()


def _pivot(a: Value, k: Value, rows: Value) -> Value:
    """The row, at or below ``k``, of the largest element of column ``k``, the first of equals: [batch]."""
    size = a.builder.select(rows >= k, _magnitude(column(a, k)), -1.0)
    largest = size.max([1], keepdim=True)
    first: Value = a.builder.select(size.eq(largest), rows, a.shape[1]).min([1])
    return a.builder.select(first.eq(a.shape[1]), k.broadcast(first.shape), first)  # a column with NaN has no largest


def _decompose(a: Value, pivot: bool) -> tuple[Value, Value, Value]:
    """LU in one matrix, pivots [batch, min(m, n)] counted from 1, and the first zero pivot (from 1; 0 for none)."""
    builder = a.builder
    batch, m, n = a.shape
    count = min(m, n)
    grid = Grid.of(builder, a.shape)
    rows = builder.iota((batch, m), 1, INDEX)

    def step(k: Value, a: Value, pivots: Value) -> list[Value]:
        chosen = _pivot(a, k, rows) if pivot else k.broadcast((batch,))
        place = chosen.reshape((batch, 1, 1))
        swapped_in = masked(grid.rows.eq(place.broadcast(a.shape)), a).sum([1])
        swapped_out = row(a, k)
        a = builder.select(
            grid.rows.eq(k),
            swapped_in.reshape((batch, 1, n)),
            builder.select(grid.rows.eq(place), swapped_out.reshape((batch, 1, n)), a),
        )
        divisor = column(swapped_in.reshape((batch, 1, n)), k)
        useful = (rows > k) & divisor.ne(0)
        factors = masked(useful, column(a, k) / divisor).reshape((batch, m, 1))
        rest = a - factors * masked(grid.columns > k, swapped_in.reshape((batch, 1, n)))
        a = builder.select(grid.columns.eq(k) & useful.reshape((batch, m, 1)), factors, rest)
        pivots = builder.dynamic_update_slice(pivots, (chosen + 1).reshape((batch, 1)), [builder.full(0, (), INDEX), k])
        return [a, pivots]

    pivots = builder.iota((batch, count), 1, INDEX) + 1
    if not a.numel:
        return a, pivots, builder.full(0, (batch,), INDEX)
    a, pivots = loop(builder, count, [a, pivots], step)
    return a, pivots, _first(_diagonal(a).eq(0))


def _diagonal(a: Value) -> Value:
    """[batch, min(m, n)]."""
    batch, m, n = a.shape
    count = min(m, n)
    grid = Grid.of(a.builder, a.shape)
    return masked(grid.rows.eq(grid.columns), a).sum([1]).slice([0, 0], [batch, count])


def _first(flags: Value) -> Value:
    """The place, from 1, of the first true flag of each row; 0 for none: int32 [batch]."""
    places = flags.builder.iota(flags.shape, 1, INDEX) + 1
    none = torch.iinfo(INDEX).max
    found = flags.builder.select(flags, places, none).min([1])
    return flags.builder.select(found.eq(none), 0, found)


def _permutation(pivots: Value, rows: int) -> Value:
    """Where each row of the permuted matrix came from: int32 [batch, rows]."""
    builder = pivots.builder
    batch, count = pivots.shape
    places = builder.iota((batch, rows), 1, INDEX)

    def step(k: Value, order: Value) -> list[Value]:
        zero = builder.full(0, (), INDEX)
        here = builder.dynamic_slice(order, [zero, k], [batch, 1])
        other = builder.dynamic_slice(pivots, [zero, k], [batch, 1]) - 1
        there = masked(places.eq(other), order).sum([1], keepdim=True)
        return [builder.select(places.eq(k), there, builder.select(places.eq(other), here, order))]

    return loop(builder, count if rows else 0, [places], step)[0]


def _inverse(order: Value) -> Value:
    """The inverse of a permutation of each row."""
    batch, count = order.shape
    builder = order.builder
    shape = (batch, count, count)
    grid = Grid.of(builder, shape)
    return masked(grid.columns.eq(order.reshape((batch, count, 1))), grid.rows).sum([1])


def _permutation_matrix(order: Value, dtype: torch.dtype) -> Value:
    """P with A = P L U."""
    batch, count = order.shape
    grid = Grid.of(order.builder, (batch, count, count))
    return grid.rows.eq(order.reshape((batch, 1, count))).convert(dtype)


def _solved(lu: Value, pivots: Value, b: Value, left: bool, adjoint_: bool) -> Value:
    """``A x = b``, ``x A = b``, or the same with A's adjoint, from A's decomposition. All of one batch size."""
    if not b.numel:
        return b
    order = _permutation(pivots, lu.shape[1])
    form = "ADJOINT" if adjoint_ else "NO_TRANSPOSE"
    upper = {"upper": True, "left": left, "transpose": form}
    lower = {"upper": False, "left": left, "unit": True, "transpose": form}
    first, second = (upper, lower) if left == adjoint_ else (lower, upper)
    if left != adjoint_:
        b = take(b, order) if left else mT(take(mT(b), order))
    x = triangular_solve(lu, triangular_solve(lu, b, **first), **second)  # type: ignore[arg-type]  # keywords of mixed types
    if left == adjoint_:
        x = take(x, _inverse(order)) if left else mT(take(mT(x), _inverse(order)))
    return x


def _shaped(cx: Context, *values: Value) -> list[Value]:
    """Stacks as the results' shapes and dtypes."""
    results = []
    for value, spec in zip(values, cx.outputs, strict=True):
        assert spec is not None
        results.append(value.reshape(spec.size).convert(spec.dtype))
    return results


# ------------------------------------------------------------------------------------------------- errors


def checked(name: str) -> Callable[[Any], Callable[..., Any]]:
    """Around the ``_ex`` ops: with ``check_errors``, wait for ``info`` and raise PyTorch's LinAlgError."""

    def around(made: Any) -> Callable[..., Any]:
        function = made.function

        def kernel(*args: Any, **kwargs: Any) -> Any:
            results = function(*args, **kwargs)
            if kwargs.get("check_errors"):
                torch.ops.aten._linalg_check_errors(results[-1], name, is_matrix=args[0].dim() == 2)
            return results

        return kernel

    return around


# ----------------------------------------------------------------------------------------------------- rows


@lowering(
    "linalg_lu_factor_ex(Tensor A, *, bool pivot=True, bool check_errors=False) -> (Tensor LU, Tensor pivots, Tensor info)",
    around=checked("torch.linalg.lu_factor_ex"),
)
def _lu_factor_ex(cx: Context, a: Value, pivot: bool, check_errors: bool) -> list[Value]:
    return _shaped(cx, *_decompose(stacked(a), pivot))


@lowering("linalg_lu(Tensor A, *, bool pivot=True) -> (Tensor P, Tensor L, Tensor U)")
def _lu(cx: Context, a: Value, pivot: bool) -> list[Value]:
    lu, pivots, _ = _decompose(stacked(a), pivot)
    return _unpacked(cx, lu, pivots if pivot else None)


def _unpacked(cx: Context, lu: Value, pivots: Value | None, data: bool = True) -> list[Value]:
    """P, L and U; what is not wanted, or has no elements, in the size that PyTorch gives it."""
    batch, m, n = lu.shape
    k = min(m, n)
    sizes = [spec.size for spec in cx.outputs if spec is not None]
    made: list[Value | None] = [None, None, None]
    if pivots is not None and 0 not in sizes[0]:
        made[0] = _permutation_matrix(_permutation(pivots, m), lu.dtype)
    if data:
        made[1] = triangle(lu, (batch, m, k), upper=False, unit=True)
        made[2] = triangle(lu, (batch, k, n), upper=True)
    return [
        cx.builder.full(0, size, lu.dtype) if value is None else value.reshape(size)
        for value, size in zip(made, sizes, strict=True)
    ]


@lowering(
    "lu_unpack(Tensor LU_data, Tensor LU_pivots, bool unpack_data=True, bool unpack_pivots=True) -> "
    "(Tensor P, Tensor L, Tensor U)"
)
def _lu_unpack(cx: Context, lu: Value, pivots: Value, unpack_data: bool, unpack_pivots: bool) -> list[Value]:
    lu = stacked(lu)
    flat = pivots.reshape((lu.shape[0], pivots.shape[-1])) if unpack_pivots else None
    return _unpacked(cx, lu, flat, unpack_data)


@lowering(
    "linalg_lu_solve(Tensor LU, Tensor pivots, Tensor B, *, bool left=True, bool adjoint=False) -> Tensor",
)
def _lu_solve(cx: Context, lu: Value, pivots: Value, b: Value, left: bool, adjoint: bool) -> Value:
    shape = cx.output.size
    batch = shape[:-2]
    lu = lu.broadcast((*batch, *lu.shape[-2:]))
    pivots = pivots.broadcast((*batch, pivots.shape[-1]))
    flat = pivots.reshape((math.prod(batch), pivots.shape[-1]))
    return _solved(stacked(lu), flat, stacked(b.broadcast(shape)), left, adjoint).reshape(shape)


def _transposed(cx: Context, a: Value) -> bool:
    """For determinants PyTorch decomposes the transpose of a contiguous real matrix; its gradient formulas rely on it."""
    return bool(cx.arguments["A"].is_contiguous()) and not a.dtype.is_complex


@lowering(
    "_linalg_solve_ex(Tensor A, Tensor B, *, bool left=True, bool check_errors=False) -> "
    "(Tensor result, Tensor LU, Tensor pivots, Tensor info)",
    around=checked("torch.linalg.solve_ex"),
)
def _solve_ex(cx: Context, a: Value, b: Value, left: bool, check_errors: bool) -> list[Value]:
    lu, pivots, info = _decompose(stacked(a), True)
    vector = b.ndim == 1 or (a.ndim - 1 == b.ndim and b.shape == a.shape[:-1])
    shape = cx.output.size
    if vector:
        b, shape = b.reshape((*b.shape, 1)), (*shape, 1)
    x = _batched_solve(a.shape[:-2], lu, pivots, b.broadcast(shape), left)
    return _shaped(cx, x, lu, pivots, info)


def _batched_solve(batch: tuple[int, ...], lu: Value, pivots: Value, b: Value, left: bool) -> Value:
    """As ``_solved``, with the decompositions' batch broadcast to ``b``'s."""
    outer, count = b.shape[:-2], pivots.shape[1]
    lu = lu.reshape((*batch, *lu.shape[1:])).broadcast((*outer, *lu.shape[1:]))
    pivots = pivots.reshape((*batch, count)).broadcast((*outer, count))
    return _solved(stacked(lu), pivots.reshape((math.prod(outer), count)), stacked(b), left, False)


@lowering(
    "linalg_inv_ex(Tensor A, *, bool check_errors=False) -> (Tensor inverse, Tensor info)",
    around=checked("torch.linalg.inv_ex"),
)
def _inv_ex(cx: Context, a: Value, check_errors: bool) -> list[Value]:
    flat = stacked(a)
    lu, pivots, info = _decompose(flat, True)
    return _shaped(cx, _solved(lu, pivots, eye(cx.builder, flat.shape, flat.dtype), True, False), info)


def _swaps_sign(pivots: Value, dtype: torch.dtype) -> Value:
    """-1 for an odd number of row exchanges: [batch]."""
    places = pivots.builder.iota(pivots.shape, 1, INDEX) + 1
    odd = (pivots.ne(places).convert(INDEX).sum([1]) & 1).ne(0)
    return pivots.builder.select(odd, -1.0, pivots.builder.full(1, odd.shape, dtype.to_real())).convert(dtype)


@lowering("_linalg_det(Tensor A) -> (Tensor result, Tensor LU, Tensor pivots)", beyond=True)
def _det(cx: Context, a: Value) -> list[Value]:
    flat = mT(stacked(a)) if _transposed(cx, a) else stacked(a)
    lu, pivots, _ = _decompose(flat, True)
    return _shaped(cx, _diagonal(lu).prod([1]) * _swaps_sign(pivots, a.dtype), lu, pivots)


@lowering(
    "_linalg_slogdet(Tensor A) -> (Tensor sign, Tensor logabsdet, Tensor LU, Tensor pivots)",
    beyond=True,
)
def _slogdet(cx: Context, a: Value) -> list[Value]:
    flat = mT(stacked(a)) if _transposed(cx, a) else stacked(a)
    lu, pivots, _ = _decompose(flat, True)
    diagonal = _diagonal(lu)
    size = diagonal.abs()
    zero = size.eq(0)
    signs = cx.builder.select(zero, 0, diagonal / cx.builder.select(zero, 1.0, size).convert(a.dtype))
    return _shaped(cx, signs.prod([1]) * _swaps_sign(pivots, a.dtype), size.log().sum([1]), lu, pivots)


# --------------------------------------------------------------------------------------------- Cholesky


def _cholesky(a: Value, upper: bool) -> tuple[Value, Value]:
    """The factor and, where a leading minor is not positive, its order: [batch]."""
    builder = a.builder
    batch = a.shape[0]
    if not a.numel:
        return a, builder.full(0, (batch,), INDEX)
    lower = adjoint(a) if upper else a
    factor = builder.emit("stablehlo.cholesky", [lower], a.shape, a.dtype, lower="true")
    grid = Grid.of(builder, a.shape)
    info = _first(_leading_failures(lower))
    factor = masked(grid.rows >= grid.columns, factor)
    return adjoint(factor) if upper else factor, info


def _leading_failures(a: Value) -> Value:
    """Which pivots of the factorisation are not positive: bool [batch, n], by the outer-product form."""
    builder = a.builder
    batch, n, _ = a.shape
    grid = Grid.of(builder, a.shape)
    real = a.dtype.to_real() if a.dtype.is_complex else a.dtype

    def step(k: Value, rest: Value, pivots: Value) -> list[Value]:
        below = masked(builder.iota((batch, n), 1, INDEX) >= k, column(rest, k))
        pivot = builder.real(column(below.reshape((batch, 1, n)), k))
        outer = below.reshape((batch, n, 1)) * conj_row(below)
        rest = rest - masked(grid.rows > k, outer / pivot.convert(a.dtype).reshape((batch, 1, 1)))
        pivots = builder.dynamic_update_slice(pivots, pivot, [builder.full(0, (), INDEX), k])
        return [rest, pivots]

    def conj_row(x: Value) -> Value:
        return adjoint(x.reshape((batch, n, 1)))

    pivots = loop(builder, n, [a, builder.full(0, (batch, n), real)], step)[1]
    return ~(pivots > 0)


@lowering(
    "linalg_cholesky_ex(Tensor self, *, bool upper=False, bool check_errors=False) -> (Tensor L, Tensor info)",
    beyond=True,
    around=checked("torch.linalg.cholesky_ex"),
)
def _cholesky_ex(cx: Context, a: Value, upper: bool, check_errors: bool) -> list[Value]:
    return _shaped(cx, *_cholesky(stacked(a), upper))


def _raising(made: Any) -> Callable[..., Any]:
    """``cholesky`` itself always raises: it goes through the form with ``info``."""

    def kernel(self: torch.Tensor, upper: bool = False) -> torch.Tensor:
        factor, info = torch.ops.aten.linalg_cholesky_ex(self, upper=upper)
        torch.ops.aten._linalg_check_errors(info, "cholesky", is_matrix=self.dim() == 2)
        return factor  # type: ignore[no-any-return]  # untyped op

    return kernel


@lowering("cholesky(Tensor self, bool upper=False) -> Tensor", beyond=True, around=_raising)
def _cholesky_alone(cx: Context, a: Value, upper: bool) -> Value:
    return _cholesky(stacked(a), upper)[0].reshape(a.shape)


def _from_factor(b: Value, factor: Value, upper: bool) -> Value:
    """``A x = b`` from A's Cholesky factor."""
    forms = ("ADJOINT", "NO_TRANSPOSE") if upper else ("NO_TRANSPOSE", "ADJOINT")
    for form in forms:
        b = triangular_solve(factor, b, upper=upper, transpose=form)
    return b


@lowering("cholesky_inverse(Tensor self, bool upper=False) -> Tensor", beyond=True)
def _cholesky_inverse(cx: Context, factor: Value, upper: bool) -> Value:
    flat = stacked(factor)
    return _from_factor(eye(cx.builder, flat.shape, flat.dtype), flat, upper).reshape(factor.shape)


@lowering("_cholesky_solve_helper(Tensor self, Tensor A, bool upper) -> Tensor", beyond=True)
def _cholesky_solve(cx: Context, b: Value, factor: Value, upper: bool) -> Value:
    return _from_factor(stacked(b), stacked(factor), upper).reshape(b.shape)


@lowering(
    "triangular_solve(Tensor self, Tensor A, bool upper=True, bool transpose=False, bool unitriangular=False) -> "
    "(Tensor solution, Tensor cloned_coefficient)",
    beyond=True,
)
def _triangular_solve(
    cx: Context, b: Value, a: Value, upper: bool, transpose: bool, unitriangular: bool
) -> list[Value]:
    specs = [spec for spec in cx.outputs if spec is not None]
    b, a = b.broadcast(specs[0].size), a.broadcast(specs[1].size)
    form = "TRANSPOSE" if transpose else "NO_TRANSPOSE"
    x = triangular_solve(stacked(a), stacked(b), upper=upper, unit=unitriangular, transpose=form)
    return [x.reshape(b.shape), a]
