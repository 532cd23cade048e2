"""The table from ops to rules, and what a rule is given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils import _pytree as pytree

from emutpu.backend.dynamism.extents import Bounds, Dim, expression, extent_of, is_dynamic, true_of
from emutpu.backend.dynamism.writer import Padded, Writer

__all__ = ["RULES", "Call", "Rule", "Symbolic", "Unsupported", "arguments_of", "rule"]


class Unsupported(NotImplementedError):
    """A rule cannot do what is asked of it; the message says what, the caller adds op and line."""


@dataclasses.dataclass(frozen=True, slots=True)
class Symbolic:
    """A number of the symbolic graph that depends on sizes."""

    expr: sympy.Expr


def arguments_of(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, defaults included."""
    found = {}
    for position, argument in enumerate(op._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        found[argument.name] = given
    return found


class Call:
    """One op of the symbolic graph. ``given`` are its arguments by name, ``promised`` what its meta kernel gave.

    ``through`` writes the op itself, if it is to be inside of another.
    """

    def __init__(
        self, op: Any, given: dict[str, Any], promised: Any, writer: Writer, through: Callable[..., Any] | None = None
    ) -> None:
        self.op = op
        self.given = given
        self.promised = promised
        self.writer = writer
        self.through = through or writer.call

    @property
    def bounds(self) -> Bounds:
        """The bounds of the symbols."""
        return self.writer.bounds

    def __getitem__(self, name: str) -> Any:
        return self.given[name]

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or ``default`` if the overload has none of the name."""
        return self.given.get(name, default)

    def tensors(self) -> list[Padded]:
        """The tensors among the arguments, in order."""
        leaves = pytree.tree_leaves(list(self.given.values()), is_leaf=lambda leaf: isinstance(leaf, Padded))
        return [leaf for leaf in leaves if isinstance(leaf, Padded)]

    def shape(self, number: int | None = None) -> list[sympy.Expr]:
        """The promised true extents of the result, or of one of several."""
        value = self.promised if number is None else self.promised[number]
        return [self.bounds.settled(expression(extent)) for extent in value.shape]

    def prefixes(self, number: int | None = None) -> tuple[Dim, ...]:
        """The promised shape with all padding at the ends."""
        return tuple(self.bounds.prefix(extent) for extent in self.shape(number))

    def axis(self, dim: Any, tensor: Padded) -> int:
        """A dimension counted from 0."""
        if not isinstance(dim, int):
            raise Unsupported("a dimension that depends on a size")
        return dim % max(len(tensor.dims), 1)

    def axes(self, dims: Any, tensor: Padded) -> list[int]:
        """Dimensions counted from 0; all of them for None or none."""
        if dims is None or dims == []:
            return list(range(len(tensor.dims)))
        return [self.axis(dim, tensor) for dim in ([dims] if isinstance(dims, int) else dims)]

    def emit(self, /, **replaced: Any) -> Any:
        """Write the op itself, with some arguments replaced. Raises Unsupported if a symbolic number is left."""
        given = self.given | replaced
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self.op._schema.arguments:
            value = given[argument.name]
            if any(isinstance(leaf, Symbolic) for leaf in pytree.tree_leaves(value)):
                raise Unsupported(f"its argument {argument.name!r} depends on a size")
            if argument.kwarg_only:
                if value != argument.default_value:
                    kwargs[argument.name] = value
            else:
                args.append(value)
        return self.through(self.op, *args, **kwargs)

    def give(self, node: Any, dims: Sequence[Dim], number: int | None = None) -> Padded:
        """``node`` as the (``number``-th) result, fitted to what its dimensions must hold.

        Raises AssertionError where the true extents are not those that were promised: a wrong rule.
        """
        shape = self.shape(number)
        if len(shape) != len(dims) or not all(map(self.bounds.same, map(true_of, dims), shape)):
            raise AssertionError(f"{self.op}: the rule gives {dims}, {shape} was promised")
        for axis, dim in enumerate(dims):
            node = self.writer.fitted(node, axis, extent_of(dim))
        return Padded(node, tuple(dims))

    def several(self, node: Any, dims: Sequence[Sequence[Dim] | None]) -> list[Any]:
        """The results of ``node``, one after the other; None where the op gives none."""
        found: list[Any] = []
        for number, each in enumerate(dims):
            promised = self.promised[number]
            if each is None or not isinstance(promised, torch.Tensor):
                found.append(promised if not isinstance(promised, torch.Tensor) else self._static(node, number))
            else:
                found.append(self.give(self.writer.item(node, number), each, number))
        return found

    def _static(self, node: Any, number: int) -> Padded:
        return self.give(self.writer.item(node, number), self.prefixes(number), number)

    def refuse_along(self, tensor: Padded, axes: Sequence[int], what: str) -> None:
        """Raise Unsupported if one of the axes is dynamic."""
        for axis in axes:
            if is_dynamic(tensor.dims[axis]):
                raise Unsupported(f"{what} (dimension {axis} of {len(tensor.dims)})")


Rule: TypeAlias = Callable[[Call], Any]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for overloads, named without ``aten.``. Raises for an unknown or a second name."""

    def register(function: Rule) -> Rule:
        for name in names:
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload)
            if str(op) in RULES:
                raise AssertionError(f"two rules for {op}")
            RULES[str(op)] = function
        return function

    return register
