"""How a strided view reads from, and writes into, the value of a cell.

A view is (size, stride, offset, dtype) over a storage whose value is dense. :func:`plan` finds a factorisation of the
storage in which every view dimension is a strided range of one factor; reading is then pad → reshape → slice → reshape
→ transpose → broadcast, and writing the inverse chain. Layouts without such a factorisation (overlapping windows and
the like) go through a gather or a scatter on the flat storage.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from emutpu.backend.cell import Layout, layout_of
from emutpu.backend.hlo import Value
from emutpu.backend.storage import contiguous_strides, physical_dims, storage_order

__all__ = ["View", "covering_layout", "overlaps", "partly_overlaps", "read", "write"]


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Sizes, strides and offset in elements of ``dtype``."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def core(self) -> list[int]:
        """Axes that move through the storage, by falling stride."""
        axes = [a for a in range(len(self.size)) if self.size[a] > 1 and self.stride[a] != 0]
        return sorted(axes, key=lambda a: -self.stride[a])


@dataclasses.dataclass(frozen=True, slots=True)
class _Plan:
    """``window`` elements from ``start`` (padded past the end if need be), split into ``factors``, then sliced."""

    start: int
    window: int
    factors: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    step: tuple[int, ...]


def covering_layout(view: View, nbytes: int) -> Layout | None:
    """The layout a cell takes when this view is written whole, or None when the view leaves part of it alone."""
    if view.offset or view.numel * view.dtype.itemsize != nbytes:
        return None
    dims = physical_dims(view.size, view.stride)
    return None if dims is None else layout_of(dims, view.dtype)


def overlaps(view: View) -> bool:
    """True when two elements of the view are the same element of the storage."""
    if view.numel <= 1:
        return False
    if any(n > 1 and s == 0 for n, s in zip(view.size, view.stride, strict=True)):
        return True
    reach = 0
    for axis in reversed(view.core):
        if view.stride[axis] <= reach:
            return _overlaps_exactly(view)
        reach += (view.size[axis] - 1) * view.stride[axis]
    return False


def partly_overlaps(a: View, b: View) -> bool:
    """True when two dense views of one storage share memory and are not the same view. As PyTorch, of others it says no."""
    if not a.numel or not b.numel or physical_dims(a.size, a.stride) is None or physical_dims(b.size, b.stride) is None:
        return False
    ranges = [(v.offset * v.dtype.itemsize, (v.offset + v.numel) * v.dtype.itemsize) for v in (a, b)]
    if ranges[0] == ranges[1]:
        return a.stride != b.stride
    return ranges[0][0] < ranges[1][1] and ranges[1][0] < ranges[0][1]


def _overlaps_exactly(view: View) -> bool:
    return len(np.unique(_positions(view))) != view.numel


def _positions(view: View) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    grid: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = np.full(view.size, view.offset, np.int64)
    for axis, (extent, stride) in enumerate(zip(view.size, view.stride, strict=True)):
        grid = grid + (np.arange(extent) * stride).reshape([-1 if a == axis else 1 for a in range(len(view.size))])
    return grid


# ------------------------------------------------------------------------------------------------- planning


@functools.lru_cache(maxsize=65536)
def _plan(dims: tuple[int, ...], view: View) -> _Plan | None:
    total = math.prod(dims)
    moves = [(view.size[a], view.stride[a]) for a in view.core]
    for start, window, bounds in _candidates(dims, total, moves, view.offset):
        plan = _match(start, window, bounds, moves, view.offset - start)
        if plan is not None:
            return plan
    return None


def _candidates(
    dims: tuple[int, ...], total: int, moves: Sequence[tuple[int, int]], offset: int
) -> Iterator[tuple[int, int, list[int]]]:
    """Windows of the storage and the strides to split them at, cheapest first."""
    base = [*contiguous_strides(dims), total]
    yield 0, total, sorted({1, *base})
    crossed = {b for b in base for n, s in moves if s < b < n * s}
    wanted = {s for _, s in moves}
    yield 0, total, sorted(({1, *base} - crossed) | wanted | {total})
    yield 0, total, sorted({1, total} | wanted)
    if moves:
        outer_size, outer_stride = moves[0]
        inner = sum((n - 1) * s for n, s in moves[1:]) + 1
        yield (
            offset,
            max((outer_size - 1) * outer_stride + inner, outer_size * outer_stride),
            sorted({1, outer_size * outer_stride} | wanted),
        )


def _match(start: int, window: int, bounds: list[int], moves: Sequence[tuple[int, int]], offset: int) -> _Plan | None:
    if bounds[-1] != window or any(outer % inner for inner, outer in itertools.pairwise(bounds)):
        return None
    factors = [outer // inner for inner, outer in itertools.pairwise(bounds)][::-1]
    strides = bounds[:-1][::-1]
    digits = []
    rest = offset
    for stride in strides:
        digits.append(rest // stride)
        rest %= stride
    begin, end, step = list(digits), [d + 1 for d in digits], [1] * len(factors)
    taken: set[int] = set()
    for extent, stride in moves:
        at = next(i for i, s in enumerate(strides) if s <= stride)
        by = stride // strides[at]
        last = digits[at] + (extent - 1) * by
        if stride % strides[at] or at in taken or last >= factors[at]:
            return None
        taken.add(at)
        end[at], step[at] = last + 1, by
    if any(d >= f for d, f in zip(digits, factors, strict=True)):
        return None
    return _Plan(start, window, tuple(factors), tuple(begin), tuple(end), tuple(step))


# ------------------------------------------------------------------------------------------------- reading


def read(base: Value, view: View) -> Value:
    """The view's value, with shape ``view.size``, from the cell's whole value."""
    builder = base.builder
    if view.numel == 0:
        return builder.full(0, view.size, view.dtype)
    if base.dtype != view.dtype:
        base = _reinterpret(base, view.dtype)
    if view.offset == 0 and view.numel == base.numel and view.stride == contiguous_strides(view.size):
        return base.reshape(view.size)
    plan = _plan(base.shape, view)
    if plan is None:
        return _gather(base, view)
    value = _window(base, plan).reshape(plan.factors).slice(plan.begin, plan.end, plan.step)
    core = view.core
    moved = value.reshape([view.size[a] for a in core])
    by_axis = moved.transpose([core.index(a) for a in sorted(core)])
    return by_axis.broadcast_in_dim(view.size, sorted(core)) if by_axis.shape != view.size else by_axis


def _window(base: Value, plan: _Plan) -> Value:
    if plan.start == 0 and plan.window == base.numel:
        return base
    flat = base.reshape((base.numel,))
    missing = plan.start + plan.window - base.numel
    if missing > 0:
        flat = flat.pad([0], [missing])
    return flat.slice([plan.start], [plan.start + plan.window])


def _gather(base: Value, view: View) -> Value:
    builder = base.builder
    dtype = torch.int32 if base.numel < 2**31 else torch.int64
    position = builder.full(view.offset, view.size, dtype)
    for axis, stride in enumerate(view.stride):
        if stride and view.size[axis] > 1:
            position = position + builder.iota(view.size, axis, dtype) * stride
    return builder.gather(
        base.reshape((base.numel,)),
        position.reshape((*view.size, 1)),
        offset_dims=[],
        collapsed=[0],
        start_index_map=[0],
        slice_sizes=[1],
        shape=view.size,
    )


def _reinterpret(base: Value, dtype: torch.dtype) -> Value:
    """The same bytes as a flat value of another dtype."""
    builder = base.builder
    flat = base.reshape((base.numel,))
    if flat.dtype == torch.bool:
        flat = flat.convert(torch.uint8)
    if flat.dtype.is_complex:
        parts = [builder.real(flat).reshape((flat.numel, 1)), builder.imag(flat).reshape((flat.numel, 1))]
        flat = builder.concatenate(parts, 1).reshape((flat.numel * 2,))
    if dtype == torch.bool:
        return _bitcast(flat, torch.uint8).ne(0)
    if dtype.is_complex:
        pairs = _bitcast(flat, dtype.to_real()).reshape((flat.numel * flat.dtype.itemsize // dtype.itemsize, 2))
        count = pairs.shape[0]
        real = pairs.slice_dim(1, 0, 1).reshape((count,))
        return builder.complex(real, pairs.slice_dim(1, 1, 2).reshape((count,)))
    return _bitcast(flat, dtype)


def _bitcast(flat: Value, dtype: torch.dtype) -> Value:
    if flat.dtype == dtype:
        return flat
    builder, old, new = flat.builder, flat.dtype.itemsize, dtype.itemsize
    if old == new:
        return builder.bitcast(flat, flat.shape, dtype)
    if old > new:
        ratio = old // new
        return builder.bitcast(flat, (flat.numel, ratio), dtype).reshape((flat.numel * ratio,))
    ratio = new // old
    whole = flat.numel // ratio
    return builder.bitcast(flat.slice([0], [whole * ratio]).reshape((whole, ratio)), (whole,), dtype)


# ------------------------------------------------------------------------------------------------- writing


def write(base: Value | None, layout: Layout, view: View, update: Value, nbytes: int) -> tuple[Value, Layout]:
    """The cell's new whole value and its layout after ``update`` (shape ``view.size``) is written through the view.

    ``base`` may be None when the view covers the cell.
    """
    covering = covering_layout(view, nbytes)
    if covering is not None:
        order = storage_order(view.size, view.stride)
        return update.transpose(order).reshape(covering.dims), covering
    if base is None:
        raise AssertionError("a partial write needs the old value")
    if view.numel == 0:
        return base, layout
    if base.dtype != view.dtype:
        return _write_reinterpreted(base, layout, view, update)
    return _write_dense(base, view, update), layout


def _write_reinterpreted(base: Value, layout: Layout, view: View, update: Value) -> tuple[Value, Layout]:
    written = _write_dense(_reinterpret(base, view.dtype), view, update)
    return _reinterpret(written, layout.dtype).reshape(layout.dims), layout


def _write_dense(base: Value, view: View, update: Value) -> Value:
    plan = _plan(base.shape, view)
    if plan is None:
        return _scatter(base, view, update)
    core = view.core
    axes = sorted(core)
    block = update.reshape([view.size[a] for a in axes]).transpose([axes.index(a) for a in core])
    extents = [-(-(e - b) // s) for b, e, s in zip(plan.begin, plan.end, plan.step, strict=True)]
    window = _window(base, plan)
    written = _place(window.reshape(plan.factors), block.reshape(extents), plan)
    return _unwindow(base, written, plan).reshape(base.shape)


def _place(target: Value, block: Value, plan: _Plan) -> Value:
    if block.shape == target.shape:
        return block
    if all(step == 1 for step in plan.step):
        return target.builder.dynamic_update_slice(target, block, plan.begin)
    high = [f - e for f, e in zip(plan.factors, plan.end, strict=True)]
    gaps = [s - 1 for s in plan.step]
    inside = target.builder.full(True, block.shape, torch.bool).pad(plan.begin, high, gaps, False)
    return target.builder.select(inside, block.pad(plan.begin, high, gaps), target)


def _unwindow(base: Value, written: Value, plan: _Plan) -> Value:
    if plan.start == 0 and plan.window == base.numel:
        return written
    flat = written.reshape((written.numel,))
    inside = min(plan.window, base.numel - plan.start)
    return base.builder.dynamic_update_slice(base.reshape((base.numel,)), flat.slice([0], [inside]), [plan.start])


def _scatter(base: Value, view: View, update: Value) -> Value:
    builder = base.builder
    positions = builder.constant(_positions(view).reshape(-1, 1), torch.int64)
    written = builder.scatter(
        base.reshape((base.numel,)),
        positions,
        update.reshape((update.numel,)),
        update_window_dims=[],
        inserted=[0],
        scatter_dims=[0],
        combine=lambda _old, new: new,
        unique=True,
    )
    return written.reshape(base.shape)
