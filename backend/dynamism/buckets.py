"""Which padded sizes there are."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import sympy

__all__ = ["EXCEEDED", "Symbol", "choose", "sizes_of"]

EXCEEDED = "Runtime symbol values {} exceed all compiled buckets: {}"


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """A size that varies: its least value, its bound, and what is added to it in the first dimension that has it.

    One that is ``number`` is an argument that is no extent: it takes any value, and no bucket depends on it.
    """

    symbol: sympy.Symbol
    lower: int
    upper: int
    offset: int = 0
    number: bool = False


def sizes_of(symbol: Symbol, count: int, size: int) -> tuple[int, ...]:
    """The padded values of a symbol in rising order: its range in ``count`` parts, each rounded up to a multiple of ``size``.

    TorchTPU 0.2.0 pads to ``ceil((start + c) / size) * size - c``, with ``c`` the offset.
    """
    span = symbol.upper - symbol.lower
    starts = (symbol.lower + -(-span * part // count) for part in range(1, count + 1))
    found = (-(-(start + symbol.offset) // size) * size - symbol.offset for start in starts)
    return tuple(sorted(set(found)))


def choose(
    values: Mapping[sympy.Symbol, int], sizes: Mapping[sympy.Symbol, Sequence[int]]
) -> tuple[tuple[sympy.Symbol, int], ...]:
    """The least bucket that holds the values. Raises RuntimeError if none does, with TorchTPU's text."""
    chosen = []
    for symbol, each in sizes.items():
        fitting = next((size for size in each if size >= values[symbol]), None)
        if fitting is None:
            raise RuntimeError(EXCEEDED.format(_shown((name, values[name]) for name in sizes), _all(sizes)))
        chosen.append((symbol, fitting))
    return tuple(chosen)


def _all(sizes: Mapping[sympy.Symbol, Sequence[int]]) -> str:
    names, each = list(sizes), list(sizes.values())
    return "[" + ", ".join(_shown(zip(names, sizes_, strict=True)) for sizes_ in itertools.product(*each)) + "]"


def _shown(pairs: Iterable[tuple[sympy.Symbol, int]]) -> str:
    return "{" + ", ".join(f"{symbol}: {value}" for symbol, value in pairs) + "}"
