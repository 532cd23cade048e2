"""Padded and true extents of dimensions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = [
    "UNBOUNDED",
    "Bounds",
    "Dim",
    "Factor",
    "canonical",
    "expression",
    "extent_of",
    "is_dynamic",
    "true_of",
]

UNBOUNDED = 1 << 40  # at least so great is the "bound" of a size that has none
_TRIED = 4096  # sizes that are tried one by one
_GUARDED = 256  # and those that every guard is asked about: a graph may have hundreds


def expression(extent: Any) -> sympy.Expr:
    """An extent, index or number of a symbolic graph as an expression over its symbols."""
    if isinstance(extent, torch.SymInt | torch.SymFloat | torch.SymBool):
        return extent.node.expr
    return sympy.sympify(extent)


@dataclasses.dataclass(frozen=True, slots=True)
class Factor:
    """A prefix of ``true`` elements out of ``extent``. It is static where the two are one number."""

    extent: int
    true: sympy.Expr

    @property
    def dynamic(self) -> bool:
        """Whether elements are padding for some size."""
        return bool(self.true.free_symbols)


def _has_functions(expr: sympy.Basic) -> bool:
    """Whether an expression is no polynomial: PyTorch's floor divisions, remainders, minima and maxima."""
    return bool(expr.has(sympy.core.function.Application))


def _allows(guard: sympy.Basic, symbol: sympy.Symbol, size: sympy.Integer) -> bool:
    try:
        return guard.xreplace({symbol: size}) is not sympy.false
    except ZeroDivisionError:
        return False


# Factors, major first: flattening [2, s] gives 2 · s elements in two runs, each with its own padding.
Dim: TypeAlias = tuple[Factor, ...]


def canonical(factors: Iterable[Factor]) -> Dim:
    """The same elements in as few factors as possible: () is an extent of 1, one factor is a prefix."""
    found: list[Factor] = []
    for factor in factors:
        if factor.extent == 1 and not factor.dynamic:
            continue
        if found and not factor.dynamic:
            last = found.pop()
            factor = Factor(last.extent * factor.extent, sympy.expand(last.true * factor.true))
        found.append(factor)
    return tuple(found)


def extent_of(dim: Dim) -> int:
    """How many elements a dimension has, padding included."""
    return math.prod(factor.extent for factor in dim)


def true_of(dim: Dim) -> sympy.Expr:
    """How many elements a dimension has without padding."""
    return sympy.expand(sympy.Mul(*(factor.true for factor in dim)))


def is_dynamic(dim: Dim) -> bool:
    """Whether a dimension has padding for some size."""
    return any(factor.dynamic for factor in dim)


class Bounds:
    """The least and the greatest value of each symbol, by which expressions are bounded.

    ``guards`` hold for every size that the graph is called with, though none of the bounds says so.
    """

    def __init__(
        self,
        lower: Mapping[sympy.Symbol, int],
        upper: Mapping[sympy.Symbol, int],
        guards: Iterable[sympy.Basic] = (),
    ) -> None:
        self.lowest = dict(lower)
        self.highest = dict(upper)
        self._ranges: dict[sympy.Symbol, ValueRanges[sympy.Expr]] = {
            symbol: ValueRanges(sympy.Integer(lower[symbol]), sympy.Integer(upper[symbol])) for symbol in upper
        }
        self._found: dict[sympy.Expr, tuple[int, int]] = {}
        self._settled: dict[sympy.Expr, sympy.Expr] = {}
        self._guards = [guard for guard in guards if _has_functions(guard)]
        self._sizes: dict[sympy.Symbol, list[sympy.Integer]] = {}

    def _both(self, expr: sympy.Expr) -> tuple[int, int]:
        found = self._found.get(expr)
        if found is None:
            unknown = expr.free_symbols - self._ranges.keys()
            if unknown:
                raise NotImplementedError(f"the extent {expr} depends on values that only the device knows: {unknown}")
            at = bound_sympy(expr, self._ranges)
            ends = (sympy.floor(at.lower), sympy.ceiling(at.upper))
            if not all(end.is_Integer for end in ends):  # intervals lose that a divisor is not zero
                ends = self._tried(expr)
            found = self._found[expr] = (int(ends[0]), int(ends[1]))
        return found

    def _tried(self, expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
        """The ends over every size of one symbol. Raises NotImplementedError where that finds none either."""
        values = list(self._values(expr))
        if values and all(value.is_Rational for value in values):
            return sympy.floor(min(values)), sympy.ceiling(max(values))
        raise NotImplementedError(f"the extent {expr} has no bound")

    def _values(self, expr: sympy.Expr) -> Iterator[sympy.Expr]:
        """The value for each size of the only symbol, one by one; none where there are more symbols, or too many sizes."""
        if len(expr.free_symbols) != 1 or not expr.free_symbols <= self._ranges.keys():
            return
        (symbol,) = expr.free_symbols
        for size in self._sizes_of(symbol):
            try:
                yield expr.xreplace({symbol: size})
            except ZeroDivisionError:
                yield sympy.nan

    def _sizes_of(self, symbol: sympy.Symbol) -> list[sympy.Integer]:
        """The sizes within the bounds that the guards allow; none where they are too many to be tried."""
        found = self._sizes.get(symbol)
        if found is None:
            sizes = range(self.lowest[symbol], self.highest[symbol] + 1)
            given = map(sympy.Integer, sizes if len(sizes) <= _TRIED else ())
            asked = self._guards if len(sizes) <= _GUARDED else ()
            guards = [guard for guard in asked if guard.free_symbols == {symbol}]
            found = [size for size in given if all(_allows(guard, symbol, size) for guard in guards)]
            self._sizes[symbol] = found
        return found

    def settled(self, expr: sympy.Expr) -> sympy.Expr:
        """The number that an expression is for every size, where it is one: ``(s + -s % 16) // 16`` up to a size of 16."""
        if not (self._guards or _has_functions(expr)):
            return expr  # a polynomial varies with its sizes
        found = self._settled.get(expr)
        if found is None:
            values = self._values(expr)
            first = next(values, sympy.nan)
            constant = first.is_Integer and all(value == first for value in values)
            found = self._settled[expr] = first if constant else expr
        return found

    def same(self, a: sympy.Expr, b: sympy.Expr) -> bool:
        """Whether two expressions are equal for every size."""
        if a == b:
            return True
        rest = sympy.expand(a - b)
        return bool(rest == 0 or self.settled(rest) == 0)

    def upper(self, expr: sympy.Expr) -> int:
        """The greatest value of ``expr``. Raises NotImplementedError for a size that only the device knows."""
        return self._both(expr)[1]

    def lower(self, expr: sympy.Expr) -> int:
        """The least value of ``expr``."""
        return self._both(expr)[0]

    def prefix(self, expr: sympy.Expr) -> Dim:
        """A dimension of ``expr`` elements before its padding. Raises NotImplementedError for one without a bound."""
        expr = self.settled(expr)
        extent = self.upper(expr)
        if extent >= UNBOUNDED:
            raise NotImplementedError(f"the extent {expr} has no bound")
        return canonical([Factor(extent, expr)])
