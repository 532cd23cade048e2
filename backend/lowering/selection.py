"""The launches behind ops with data-dependent sizes (:mod:`emutpu.backend.data_dependent`), and masked scatters.

None of these rows but the masked scatters is dispatched: the counting ones leave the count where it can be read, the
others take the size as an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from emutpu.backend import data_dependent
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.indexing import Advanced, positions_type
from emutpu.backend.lowering.sorting import scan, sorted_with_indices

__all__: list[str] = []


def prefix_sums(x: Value) -> Value:
    """Inclusive sums of a 1-d value, in its dtype."""
    return scan([x], [0], Value.__add__, 0)[0]


def first_positions(keep: Value, count: int) -> Value:
    """The first ``count`` positions at which the 1-d mask ``keep`` is true, rising; then the extent."""
    builder, n = keep.builder, keep.numel
    dtype = positions_type(n + 1)
    key = builder.select(keep, builder.iota((n,), 0, dtype), n)
    return builder.sort([key], 0, lambda a, b: a < b, stable=False)[0].slice([0], [count])


# ---------------------------------------------------------------------------------------------------- nonzero


def _scalar_meta(self: torch.Tensor) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="meta")


@lowering("nonzero(Tensor self) -> Tensor", meta=_scalar_meta, dispatched=False)
def _count_nonzero(cx: Context, x: Value) -> Value:
    """How many elements are not zero."""
    return x.convert(torch.bool).convert(torch.int64).sum(range(x.ndim))


def _bool_meta(*arguments: object) -> torch.Tensor:
    return torch.empty((), dtype=torch.bool, device="meta")


@lowering("equal(Tensor self, Tensor other) -> bool", meta=lambda self, other: _bool_meta(), dispatched=False)
def _equal(cx: Context, x: Value, y: Value) -> Value:
    """Whether all elements are equal: a bool on the device."""
    return x.eq(y).all(range(x.ndim))


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


# ----------------------------------------------------------------------------------------------------- unique


def _groups(fresh: Value) -> tuple[Value, Value]:
    """From the mask of elements that open a group: each element's group, and where the groups start.

    The starts are int64[n + 2]: padded with n, the last one is the number of groups.
    """
    builder, n = fresh.builder, fresh.numel
    groups = prefix_sums(fresh.convert(positions_type(n + 1))) - 1
    starts = first_positions(fresh, n).convert(torch.int64)
    count = fresh.convert(torch.int64).sum([0]).reshape((1,))
    return groups, builder.concatenate([starts, builder.full(n, (1,), torch.int64), count], 0)


def _opens(rows: Value) -> Value:
    """Where a row of [n, …] differs from the one before; the first always does."""
    n = rows.shape[0]
    differs = rows.slice_dim(0, 1, n).ne(rows.slice_dim(0, 0, n - 1))
    changed = differs.any(range(1, rows.ndim)) if rows.ndim > 1 else differs
    return changed.builder.concatenate([changed.builder.full(True, (1,), torch.bool), changed], 0)


def _restored(groups: Value, order: Value) -> Value:
    """Groups of sorted elements, back in the elements' own order, int64."""
    into = Advanced.of(groups.shape, [order])
    return into.write(groups, groups, unique=True).convert(torch.int64)


def _unique_meta(self: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = self.numel()
    return self.new_empty((n,)), self.new_empty((n,), dtype=torch.int64), self.new_empty((n + 2,), dtype=torch.int64)


@lowering(
    "_unique2(Tensor self, bool sorted=True, bool return_inverse=False, bool return_counts=False)"
    " -> (Tensor, Tensor, Tensor)",
    meta=_unique_meta,
    dispatched=False,
)
def _sorted_groups(cx: Context, x: Value, ordered: bool, inverse: bool, counts: bool) -> tuple[Value, Value, Value]:
    """Sorted elements, each element's group, and :func:`_groups`'s starts."""
    values, order = sorted_with_indices(x.reshape((x.numel,)), 0, False)
    groups, starts = _groups(_opens(values))
    return values, _restored(groups, order), starts


def _along_meta(self: torch.Tensor, dim: int, **options: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = self.shape[dim]
    moved = (n, *(extent for d, extent in enumerate(self.shape) if d != dim))
    return self.new_empty(moved), self.new_empty((n,), dtype=torch.int64), self.new_empty((n + 2,), dtype=torch.int64)


def _rows(x: Value, dim: int) -> Value:
    return x.transpose([dim, *(d for d in range(x.ndim) if d != dim)])


@lowering(
    "unique_dim(Tensor self, int dim, bool sorted=True, bool return_inverse=False, bool return_counts=False)"
    " -> (Tensor, Tensor, Tensor)",
    meta=_along_meta,
    dispatched=False,
)
def _sorted_rows(
    cx: Context, x: Value, dim: int, ordered: bool, inverse: bool, counts: bool
) -> tuple[Value, Value, Value]:
    """The slices along ``dim`` in front and in lexicographic order, each slice's group, and the starts."""
    moved = _rows(x, dim)
    flat = moved.reshape((moved.shape[0], moved.numel // moved.shape[0]))
    order = _lexicographic(flat)
    rows = Advanced.of(moved.shape, [order]).read(moved)
    groups, starts = _groups(_opens(rows))
    return rows, _restored(groups, order), starts


def _lexicographic(rows: Value) -> Value:
    """The order of [n, k] rows: stable sorts by one column after the other, the last one first."""
    builder, (n, columns) = rows.builder, rows.shape

    def unfinished(step: Value, order: Value) -> Value:
        return step >= 0

    def by_column(step: Value, order: Value) -> list[Value]:
        zero = builder.full(0, (), torch.int32)
        column = builder.dynamic_slice(rows, [zero, step], (n, 1)).reshape((n,))
        _, moved = sorted_with_indices(Advanced.of((n,), [order]).read(column), 0, False)
        return [step - 1, Advanced.of((n,), [moved]).read(order)]

    start = [builder.full(columns - 1, (), torch.int32), builder.iota((n,), 0, torch.int32)]
    return builder.while_loop(start, unfinished, by_column)[1]


def _consecutive_meta(
    self: torch.Tensor, dim: int | None = None, **options: object
) -> tuple[None, torch.Tensor, torch.Tensor]:
    n = self.numel() if dim is None else self.shape[dim]
    return None, self.new_empty((n,), dtype=torch.int64), self.new_empty((n + 2,), dtype=torch.int64)


@lowering(
    "unique_consecutive(Tensor self, bool return_inverse=False, bool return_counts=False, int? dim=None)"
    " -> (Tensor, Tensor, Tensor)",
    meta=_consecutive_meta,
    dispatched=False,
)
def _runs(cx: Context, x: Value, inverse: bool, counts: bool, dim: int | None) -> tuple[None, Value, Value]:
    """Each element's (or slice's) run, and the starts."""
    groups, starts = _groups(_opens(x.reshape((x.numel,)) if dim is None else _rows(x, dim)))
    return None, groups.convert(torch.int64), starts


# ---------------------------------------------------------------------------------------------------- repeats


def _repeats_meta(repeats: torch.Tensor, output_size: int | None) -> torch.Tensor:
    return repeats.new_empty((2 if output_size is None else output_size,))


@lowering(
    "repeat_interleave.Tensor(Tensor repeats, *, SymInt? output_size=None) -> Tensor",
    meta=_repeats_meta,
    dispatched=False,
)
def _repeat_interleave(cx: Context, repeats: Value, size: int | None) -> Value:
    """Without a size: the sum and the least of the repeats. With it: 0, 0, …, 1, …, each as often as its repeats."""
    builder = cx.builder
    if size is None:
        parts = [repeats.sum([0]), repeats.min([0])]
        return builder.concatenate([p.reshape((1,)) for p in parts], 0)
    if size == 0:
        return builder.full(0, (0,), repeats.dtype)
    # An element's number is how many ends lie at or before it.
    ends = prefix_sums(repeats)
    zeros = builder.full(0, (size,), repeats.dtype)
    at_ends = Advanced.of((size,), [ends]).write(zeros, builder.full(1, ends.shape, repeats.dtype), lambda a, b: a + b)
    return prefix_sums(at_ends)


# --------------------------------------------------------------------------------------------- masked scatters


def _ranks(mask: Value) -> Value:
    """For each element of the flattened mask, how many true ones lie before it."""
    flat = mask.reshape((mask.numel,)).convert(positions_type(mask.numel))
    return prefix_sums(flat) - flat


@lowering(
    "masked_scatter(Tensor self, Tensor mask, Tensor source) -> Tensor", around=data_dependent.with_enough_elements
)
def _masked_scatter(cx: Context, x: Value, mask: Value, source: Value) -> Value:
    size = cx.output.size
    x, mask = x.broadcast(size), mask.broadcast(size)
    if source.numel == 0 or x.numel == 0:
        return x
    taken = Advanced.of((source.numel,), [_ranks(mask)]).read(source.reshape((source.numel,)))
    return cx.builder.select(mask.convert(torch.bool), taken.reshape(size), x)


@lowering("masked_scatter_backward(Tensor grad_output, Tensor mask, SymInt[] sizes) -> Tensor")
def _masked_scatter_backward(cx: Context, grad: Value, mask: Value, sizes: Sequence[int]) -> Value:
    size = cx.output.size
    zeros = cx.builder.full(0, (math.prod(size),), grad.dtype)
    if zeros.numel == 0 or grad.numel == 0:
        return zeros.reshape(size)
    mask = mask.broadcast(grad.shape)
    ranks = _ranks(mask)
    # A place past the end: the scatter drops what was not selected.
    places = cx.builder.select(mask.reshape(ranks.shape).convert(torch.bool), ranks, zeros.numel)
    written = Advanced.of(zeros.shape, [places]).write(zeros, grad.reshape((grad.numel,)))
    return written.reshape(size)
