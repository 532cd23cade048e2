"""The symbols of a graph: where their values are found, and between which bounds they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree

from emutpu.backend.compile.graph import is_random_state
from emutpu.backend.dynamism.buckets import Symbol
from emutpu.backend.dynamism.extents import UNBOUNDED, Bounds, expression

__all__ = ["Symbols", "has_symbols"]


def has_symbols(module: fx.GraphModule) -> bool:
    """Whether an input of a graph has a symbolic extent, or is a symbolic number; saved random states do not count."""
    inputs = module.graph.find_nodes(op="placeholder")
    values = [node.meta.get("val") for node in inputs if not is_random_state(node)]
    extents = [extent for value in values if isinstance(value, torch.Tensor) for extent in value.shape]
    return any(isinstance(value, torch.SymInt | torch.SymFloat) for value in (*values, *extents))


class Symbols:
    """``all`` symbols of a graph, in the order of the inputs.

    Raises NotImplementedError for one whose value no input tells.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        placeholders = [None if is_random_state(node) else node for node in module.graph.find_nodes(op="placeholder")]
        self.environment = _environment(module)
        self._sources = _sources(placeholders)
        # Of all nodes: a backward may be given a size as a number alone.
        nodes = [node for node in module.graph.nodes if not is_random_state(node)]
        leaves = pytree.tree_leaves([node.meta.get("val") for node in nodes])
        extents = [expression(n) for leaf in leaves if isinstance(leaf, torch.Tensor) for n in leaf.shape]
        self.all = [_bounded(symbol, self.environment, extents) for symbol in self._sources]

    def values_of(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """The sizes of a call."""
        return {symbol: _read(inputs, source) for symbol, source in self._sources.items()}

    def hints(self) -> dict[sympy.Symbol, int]:
        """The sizes that the graph was traced with."""
        known = self.environment.backed_var_to_val
        return {symbol.symbol: int(known.get(symbol.symbol, symbol.upper)) for symbol in self.all}

    def bounds(self, upper: Mapping[sympy.Symbol, int] | None = None) -> Bounds:
        """The bounds, some of them replaced."""
        highest = {symbol.symbol: symbol.upper for symbol in self.all} | dict(upper or {})
        guards = [guard.expr for guard in self.environment.guards]
        return Bounds({symbol.symbol: symbol.lower for symbol in self.all}, highest, guards)

    def check_guards(self) -> None:
        """Raise ConstraintViolationError where the bounds themselves are no sizes that the graph was traced for."""
        from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

        upper = {symbol.symbol: sympy.Integer(symbol.upper) for symbol in self.all if not symbol.number}
        for guard in self.environment.guards:
            free = guard.expr.free_symbols
            if free and free <= upper.keys() and guard.expr.xreplace(upper) is sympy.false:
                shown = {str(symbol): int(value) for symbol, value in upper.items()}
                raise ConstraintViolationError(f"Upper bounds {shown} violate active shape guard: {guard.expr}")


def _environment(module: fx.GraphModule) -> Any:
    for node in module.graph.nodes:
        value = node.meta.get("val")
        candidates = (value, *value.shape) if isinstance(value, torch.Tensor) else (value,)
        for candidate in candidates:
            if isinstance(candidate, torch.SymInt | torch.SymFloat):
                return candidate.node.shape_env
    raise AssertionError("a graph without symbols has no bounds")


def _sources(placeholders: Sequence[fx.Node | None]) -> dict[sympy.Symbol, tuple[int, int | None]]:
    """Where each symbol's value is found: in which input, in which of its dimensions."""
    found: dict[sympy.Symbol, tuple[int, int | None]] = {}
    every: set[sympy.Symbol] = set()
    for position, node in enumerate(placeholders):
        value = None if node is None else node.meta.get("val")
        parts: list[tuple[int | None, Any]] = [(None, value)]
        if isinstance(value, torch.Tensor):
            parts = list(enumerate(value.shape))
        for axis, part in parts:
            if isinstance(part, torch.SymInt):
                expr = expression(part)
                every |= expr.free_symbols
                if expr.is_Symbol:
                    found.setdefault(expr, (position, axis))
    if every - found.keys():
        raise NotImplementedError(f"the sizes {sorted(map(str, every - found.keys()))} are extents of no input")
    return found


def _read(inputs: Sequence[Any], source: tuple[int, int | None]) -> int:
    position, axis = source
    return int(inputs[position] if axis is None else inputs[position].shape[axis])


def _bounded(symbol: sympy.Symbol, environment: Any, extents: Sequence[sympy.Expr]) -> Symbol:
    known = environment.var_to_range[symbol]
    using = [extent for extent in extents if symbol in extent.free_symbols]
    if not using:
        return Symbol(symbol, -UNBOUNDED, UNBOUNDED, number=True)
    lower = max(1, int(known.lower))
    hint = int(environment.backed_var_to_val.get(symbol, lower))
    upper = int(known.upper) if known.upper.is_Integer and known.upper < UNBOUNDED else 2 * hint
    offsets = [int(rest) for extent in using if (rest := extent - symbol).is_Integer]
    return Symbol(symbol, lower, upper, 0 if 0 in offsets or not offsets else offsets[0])
