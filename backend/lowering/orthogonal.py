"""QR by Householder reflections, and singular values and symmetric eigenproblems by Jacobi rotations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.hlo import Builder, Value
from emutpu.backend.lowering._matrices import (
    INDEX,
    Grid,
    adjoint,
    column,
    conjugate,
    eye,
    loop,
    masked,
    mT,
    stacked,
    take,
    triangle,
)
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

Meta = torch.Tensor
_SWEEPS = 40  # of Jacobi rotations; a well-conditioned matrix takes six to ten


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _square_sum(x: Value, dims: Sequence[int]) -> Value:
    """Of magnitudes, real."""
    size = x.abs()
    return (size * size).sum(dims)


def _dot(x: Value, y: Value, dims: Sequence[int]) -> Value:
    return (conjugate(x) * y).sum(dims)


# ---------------------------------------------------------------------------------------------- Householder


def _reflector(x: Value, k: Value, rows: Value) -> tuple[Value, Value, Value]:
    """LAPACK's larfg on column ``x`` [batch, m] from row ``k``: beta, tau [batch], v [batch, m] with v[k] = 1."""
    builder = x.builder
    real = _real(x.dtype)
    below = masked(rows > k, x)
    alpha = masked(rows.eq(k), x).sum([1])
    largest = builder.select(rows >= k, x.abs(), 0).max([1], keepdim=True)
    scale = builder.select(largest.eq(0), 1.0, largest)
    part = builder.select(rows >= k, x, 0).abs() / scale
    norm = ((part * part).sum([1]).sqrt()) * scale.reshape(alpha.shape)
    first = builder.real(alpha)
    beta = builder.select(first < 0, norm, -norm)
    done = below.abs().max([1]).eq(0)
    if x.dtype.is_complex:
        done &= builder.imag(alpha).eq(0)
    beta = builder.select(done, first, beta)
    safe = builder.select(done, 1.0, beta).convert(x.dtype)
    tau = builder.select(done, 0, (safe - alpha) / safe)
    divisor = builder.select(done, 1.0, builder.full(0, done.shape, real)).convert(x.dtype) + masked(
        ~done, alpha - beta.convert(x.dtype)
    )
    v = below / divisor.reshape((*divisor.shape, 1)) + rows.eq(k).convert(x.dtype)
    return beta, tau, v


def _reflected(c: Value, v: Value, tau: Value) -> Value:
    """``(1 - tau v v^H) c``."""
    batch, m = v.shape
    inner = _dot(v.reshape((batch, m, 1)), c, [1])
    return c - (tau.reshape((batch, 1)) * v).reshape((batch, m, 1)) * inner.reshape((batch, 1, c.shape[2]))


def _geqrf(a: Value) -> tuple[Value, Value]:
    """R above, the reflectors below the diagonal; tau [batch, min(m, n)]."""
    builder = a.builder
    batch, m, n = a.shape
    count = min(m, n)
    tau = builder.full(0, (batch, count), a.dtype)
    if not a.numel:
        return a, tau
    rows = builder.iota((batch, m), 1, INDEX)
    grid = Grid.of(builder, a.shape)

    def step(k: Value, a: Value, taus: Value) -> list[Value]:
        beta, tau, v = _reflector(column(a, k), k, rows)
        changed = _reflected(a, v, conjugate(tau))
        a = builder.select(grid.columns > k, changed, a)
        stored = builder.select(rows.eq(k), beta.convert(a.dtype).reshape((batch, 1)), v).reshape((batch, m, 1))
        a = builder.select(grid.columns.eq(k) & (grid.rows >= k), stored, a)
        taus = builder.dynamic_update_slice(taus, tau.reshape((batch, 1)), [builder.full(0, (), INDEX), k])
        return [a, taus]

    a, tau = loop(builder, count, [a, tau], step)
    return a, tau


def _multiply(a: Value, tau: Value, c: Value, *, transpose: bool = False) -> Value:
    """``Q c``, or ``Q^H c``, with Q the product of the reflectors stored in ``a`` [batch, m, at least len(tau)]."""
    builder = a.builder
    batch, m, _ = a.shape
    count = tau.shape[1]
    if not c.numel:
        return c
    rows = builder.iota((batch, m), 1, INDEX)

    def step(k: Value, c: Value) -> list[Value]:
        at = k if transpose else (k * -1) + (count - 1)
        v = masked(rows > at, column(a, at)) + rows.eq(at).convert(a.dtype)
        factor = builder.dynamic_slice(tau, [builder.full(0, (), INDEX), at], [batch, 1]).reshape((batch,))
        return [_reflected(c, v, conjugate(factor) if transpose else factor)]

    return loop(builder, count, [c], step)[0]


def _qr(a: Value, columns: int) -> tuple[Value, Value]:
    """Q with that many columns, and all of R."""
    batch, m, _ = a.shape
    packed, tau = _geqrf(a)
    q = _multiply(packed, tau, eye(a.builder, (batch, m, columns), a.dtype))
    return q, packed


def _geqrf_meta(self: Meta) -> Any:
    packed = self.new_empty(self.mT.shape).mT
    return packed, self.new_empty((*self.shape[:-2], min(self.shape[-2:])))


@lowering("geqrf(Tensor self) -> (Tensor a, Tensor tau)", meta=_geqrf_meta)
def _geqrf_row(cx: Context, a: Value) -> list[Value]:
    packed, tau = _geqrf(stacked(a))
    return [packed.reshape(a.shape), tau.reshape((*a.shape[:-2], tau.shape[1]))]


@lowering('linalg_qr(Tensor A, str mode="reduced") -> (Tensor Q, Tensor R)')
def _linalg_qr(cx: Context, a: Value, mode: str) -> list[Value]:
    flat = stacked(a)
    _, m, n = flat.shape
    q_spec, r_spec = cx.outputs
    assert q_spec is not None
    assert r_spec is not None
    if mode == "r":
        q, packed = cx.builder.full(0, q_spec.size, a.dtype), _geqrf(flat)[0]
    else:
        q, packed = _qr(flat, m if mode == "complete" else min(m, n))
    r = triangle(packed, (flat.shape[0], r_spec.size[-2], n), upper=True)
    return [q.reshape(q_spec.size), r.reshape(r_spec.size)]


@lowering("linalg_householder_product(Tensor input, Tensor tau) -> Tensor", beyond=True)
def _householder_product(cx: Context, a: Value, tau: Value) -> Value:
    flat = stacked(a)
    factors = tau.reshape((flat.shape[0], tau.shape[-1]))
    return _multiply(flat, factors, eye(cx.builder, flat.shape, flat.dtype)).reshape(a.shape)


@lowering(
    "ormqr(Tensor self, Tensor input2, Tensor input3, bool left=True, bool transpose=False) -> Tensor", beyond=True
)
def _ormqr(cx: Context, a: Value, tau: Value, c: Value, left: bool, transpose: bool) -> Value:
    flat, other = stacked(a), stacked(c)
    factors = tau.reshape((flat.shape[0], tau.shape[-1]))
    if left:
        return _multiply(flat, factors, other, transpose=transpose).reshape(c.shape)
    # c Q = (Q^H c^H)^H
    return adjoint(_multiply(flat, factors, adjoint(other), transpose=not transpose)).reshape(c.shape)


# ------------------------------------------------------------------------------------------------- Jacobi


def _rotation(p: Value, q: Value) -> tuple[Value, Value, Value, Value]:
    """Cosine, sine, the phase to take from ``q``, and whether columns [batch, m, pairs] are worth turning."""
    builder = p.builder
    real = _real(p.dtype)
    alpha, beta, inner = _square_sum(p, [1]), _square_sum(q, [1]), _dot(p, q, [1])
    size = inner.abs()
    tolerance = torch.finfo(real).eps * 2 * math.sqrt(max(p.shape[1], 1))
    wanted = size > alpha.sqrt() * beta.sqrt() * tolerance
    safe = builder.select(wanted, size, 1.0)
    phase = builder.select(wanted, inner / safe.convert(p.dtype), builder.full(1, inner.shape, p.dtype))
    zeta = (beta - alpha) / (safe * 2.0)
    # The smaller root; a zeta whose square overflows turns by nothing.
    tangent = builder.select(zeta < 0, -1.0, builder.full(1, zeta.shape, real)) / (
        zeta.abs() + (zeta * zeta + 1.0).sqrt()
    )
    tangent = builder.select(wanted, tangent, 0.0)
    cosine = (tangent * tangent + 1.0).rsqrt()
    return cosine, cosine * tangent, phase, wanted


def _turn(top: Value, bottom: Value, rows: int) -> tuple[Value, Value, Value]:
    """Make each pair of columns orthogonal in its first ``rows`` rows; the rows below turn with them."""
    batch, height, pairs = top.shape
    first = [(0, 0, 0), (batch, rows, pairs)]
    cosine, sine, phase, wanted = _rotation(top.slice(*first), bottom.slice(*first))
    across = (batch, 1, pairs)
    cosine, sine = (v.convert(top.dtype).reshape(across) for v in (cosine, sine))
    aligned = bottom * conjugate(phase).reshape(across)
    del height
    return cosine * top - sine * aligned, sine * top + cosine * aligned, wanted


def _round_robin(top: Value, bottom: Value) -> tuple[Value, Value]:
    """The next pairing of the tournament; the first column stays where it is."""
    pairs = top.shape[2]
    if pairs == 1:
        return top, bottom
    join = top.builder.concatenate
    new_top = join([top.slice_dim(2, 0, 1), bottom.slice_dim(2, 0, 1), top.slice_dim(2, 1, pairs - 1)], 2)
    new_bottom = join([bottom.slice_dim(2, 1, pairs), top.slice_dim(2, pairs - 1, pairs)], 2)
    return new_top, new_bottom


def _orthogonalised(w: Value, rows: int) -> Value:
    """Turn the columns of ``w`` until their first ``rows`` rows are orthogonal. An even number of columns."""
    builder = w.builder
    columns = w.shape[2]
    half = columns // 2
    rounds = columns - 1

    def going(step: Value, busy: Value, turned: Value, *_: Value) -> Value:
        return (step < _SWEEPS * rounds) & busy

    def body(step: Value, busy: Value, turned: Value, top: Value, bottom: Value) -> list[Value]:
        top, bottom, wanted = _turn(top, bottom, rows)
        top, bottom = _round_robin(top, bottom)
        turned |= wanted.any([0, 1])
        ended = (step + 1 - (step + 1) / rounds * rounds).eq(0)  # a sweep is over
        busy = builder.select(ended, turned, busy)
        return [step + 1, busy, turned & ~ended, top, bottom]

    flags = [builder.full(True, (), torch.bool), builder.full(False, (), torch.bool)]
    halves = [w.slice_dim(2, 0, half), w.slice_dim(2, half, columns)]
    return builder.concatenate(builder.while_loop([builder.full(0, (), INDEX), *flags, *halves], going, body)[3:], 2)


def _jacobi(a: Value) -> tuple[Value, Value]:
    """``a v`` with orthogonal columns, and the unitary ``v``; one more column than ``a`` has when that is odd."""
    builder = a.builder
    batch, m, n = a.shape
    even = n + n % 2
    w = builder.concatenate([a.pad([0, 0, 0], [0, 0, even - n]), eye(builder, (batch, even, even), a.dtype)], 1)
    w = _orthogonalised(w, m)
    return w.slice([0, 0, 0], [batch, m, even]), w.slice([0, m, 0], [batch, m + even, even])


def _ordered(key: Value, *matrices: Value) -> list[Value]:
    """Columns of each matrix by ascending ``key`` [batch, columns]; NaN last."""
    builder = key.builder
    places = builder.iota(key.shape, 1, INDEX)
    _, order = builder.sort([key, places], 1, lambda a, b, *_: (a < b) | (b.is_nan() & ~a.is_nan()))
    return [mT(take(mT(x), order)) for x in matrices]


def _unit_scale(a: Value) -> tuple[Value, Value]:
    """``a`` with its largest element 1, and that element: [batch, 1]."""
    largest = a.abs().max([1, 2]).reshape((a.shape[0], 1))
    scale = a.builder.select(largest.eq(0) | ~(largest < math.inf), 1.0, largest)
    return a / scale.convert(a.dtype).reshape((a.shape[0], 1, 1)), scale


def _tall_svd(a: Value) -> tuple[Value, Value, Value]:
    """``a v`` [batch, m, n] sorted, singular values [batch, n] descending, ``v`` [batch, n, n], for m >= n."""
    builder = a.builder
    batch, m, n = a.shape
    a, scale = _unit_scale(a)
    av, v = _jacobi(a)
    sizes = _square_sum(av, [1]).sqrt()
    key = -sizes
    if n % 2:  # the column that was added goes last
        padding = v.slice([0, n, 0], [batch, n + 1, n + 1]).reshape((batch, n + 1)).ne(0)
        key = builder.select(padding, math.inf, key)
    av, v = _ordered(key, av, v)
    av, v = av.slice([0, 0, 0], [batch, m, n]), v.slice([0, 0, 0], [batch, n, n])
    return av, _square_sum(av, [1]).sqrt() * scale, v


def _completed(av: Value, columns: int) -> Value:
    """Orthonormal columns along those of ``av``, and where they are zero or missing, orthogonal to the rest."""
    batch, _, n = av.shape
    builder = av.builder
    sizes = _square_sum(av, [1]).sqrt().reshape((batch, 1, n))
    unit = masked(sizes > 0, av / builder.select(sizes > 0, sizes, 1.0).convert(av.dtype))
    q, packed = _qr(unit, columns)
    grid = Grid.of(builder, packed.shape)
    diagonal = masked(grid.rows.eq(grid.columns), packed).sum([1])
    size = diagonal.abs()
    phase = builder.select(size > 0, diagonal / builder.select(size > 0, size, 1.0).convert(av.dtype), 0)
    phase = builder.select(size > 0, phase, builder.full(1, phase.shape, av.dtype))
    ones = builder.full(1, (batch, columns - n), av.dtype)
    return q * builder.concatenate([phase, ones], 1).reshape((batch, 1, columns))


def _svd(a: Value, full: bool, vectors: bool) -> tuple[Value | None, Value, Value | None]:
    """U, singular values, V^H."""
    _, m, n = a.shape
    wide = m < n
    av, sizes, v = _tall_svd(adjoint(a) if wide else a)
    if not vectors:
        return None, sizes, None
    u = _completed(av, max(m, n) if full else min(m, n))
    return (v, sizes, adjoint(u)) if wide else (u, sizes, adjoint(v))


@lowering(
    "_linalg_svd(Tensor A, bool full_matrices=False, bool compute_uv=True, *, str? driver=None) -> "
    "(Tensor U, Tensor S, Tensor Vh)"
)
def _linalg_svd(cx: Context, a: Value, full_matrices: bool, compute_uv: bool, driver: str | None) -> list[Value]:
    flat = stacked(a)
    if flat.numel:
        made = _svd(flat, full_matrices, compute_uv)
    else:
        made = _empty_svd(cx.builder, flat, full_matrices)
    return [
        cx.builder.full(0, spec.size, spec.dtype)
        if value is None or not math.prod(spec.size)
        else value.reshape(spec.size)
        for value, spec in zip(made, cx.outputs, strict=True)
        if spec is not None
    ]


def _empty_svd(builder: Builder, a: Value, full: bool) -> tuple[Value | None, Value, Value | None]:
    """Of no elements: identities, where there are any."""
    batch, m, n = a.shape
    none = builder.full(0, (batch, 0), _real(a.dtype))
    if not full:
        return None, none, None
    return eye(builder, (batch, m, m), a.dtype), none, eye(builder, (batch, n, n), a.dtype)


@lowering(
    '_linalg_eigh(Tensor A, str UPLO="L", bool compute_v=True) -> (Tensor eigenvalues, Tensor eigenvectors)',
    beyond=True,
)
def _linalg_eigh(cx: Context, a: Value, uplo: str, compute_v: bool) -> list[Value]:
    """One-sided rotations of the matrix made positive by a shift: its eigenvectors are its singular vectors."""
    builder = cx.builder
    values_spec, vectors_spec = cx.outputs
    assert values_spec is not None
    assert vectors_spec is not None
    if not a.numel:
        return [builder.full(0, s.size, s.dtype) for s in (values_spec, vectors_spec)]
    values, vectors = _symmetric(stacked(a), uplo.upper() == "U")
    if not compute_v:
        return [values.reshape(values_spec.size), builder.full(0, vectors_spec.size, vectors_spec.dtype)]
    return [values.reshape(values_spec.size), vectors.reshape(vectors_spec.size)]


def _symmetric(a: Value, upper: bool) -> tuple[Value, Value]:
    """Eigenvalues ascending and eigenvectors, from one triangle."""
    builder = a.builder
    batch, n, _ = a.shape
    real = _real(a.dtype)
    grid = Grid.of(builder, a.shape)
    strict = masked(grid.rows < grid.columns if upper else grid.rows > grid.columns, a)
    diagonal = builder.real(masked(grid.rows.eq(grid.columns), a)).convert(a.dtype)
    a, scale = _unit_scale(strict + adjoint(strict) + diagonal)
    shift = _square_sum(a, [1, 2]).sqrt().reshape((batch, 1, 1)).convert(a.dtype)
    av, v = _jacobi(a + eye(builder, a.shape, a.dtype) * shift)
    # v^H (a + shift) v is more exact than the norm of its column.
    rows = v.slice([0, 0, 0], [batch, n, v.shape[2]])
    values = builder.real(_dot(rows, av, [1])) - builder.real(shift).reshape((batch, 1))
    key = values
    if n % 2:
        padding = v.slice([0, n, 0], [batch, n + 1, n + 1]).reshape((batch, n + 1)).ne(0)
        key = builder.select(padding, math.inf, key)
    vectors, ordered = _ordered(key, rows, values.reshape((batch, 1, v.shape[2])))
    values = ordered.slice([0, 0, 0], [batch, 1, n]).reshape((batch, n)) * scale
    return values.convert(real), vectors.slice([0, 0, 0], [batch, n, n])
