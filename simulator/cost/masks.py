"""Which pairs of positions a mask of attention hides, where the module computes the mask from positions alone."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from .graph import Node

__all__ = ["UnseenMaskError", "hidden_share", "varies_with_both"]

_MOST_ROWS = 128
_TRUTH: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.not_equal,
    "not": np.logical_not,
    "negate": operator.neg,
    "abs": np.abs,
    "select": np.where,
    "convert": lambda value: value,
    "copy": lambda value: value,
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_ORDERS = ("GE", "GT", "LE", "LT")


class UnseenMaskError(Exception):
    """The mask depends on values that are not in the module."""


def hidden_share(predicate: Node, *, hides: bool | None) -> float:
    """The share of the pairs of positions (the last two dimensions of ``predicate``) at which it is ``hides`` (None: that is
    not known, which matters for one comparison of positions alone not).

    One comparison of two positions counts as a causal mask: half of a sequence is seen, as :mod:`emutpu.simulator.mfu` has
    it. Any other mask is looked at in up to 128 rows. Raises UnseenMaskError.
    """
    share = _causal_share(predicate)
    if share is not None:
        return share
    shape = predicate.spec.shape
    if len(shape) < 2 or not predicate.spec.size or hides is None:
        raise UnseenMaskError
    rows, columns = shape[-2:]
    taken = np.unique(np.linspace(0, rows - 1, min(rows, _MOST_ROWS)).round().astype(np.int64))
    places = [np.zeros((1, 1), np.int64)] * (len(shape) - 2) + [taken[:, None], np.arange(columns)[None]]
    truth = np.broadcast_to(np.asarray(_evaluate(predicate, places, {})).astype(bool), (len(taken), columns))
    return float((truth == hides).mean())


def varies_with_both(node: Node) -> bool:
    """Whether ``node``, or what it is spread from, has an extent in both of the last two dimensions: a mask of keys alone
    (padding) has not.
    """
    varying = [True, True]
    dimensions = list(range(len(node.spec.shape)))[-2:]
    while node.op in ("broadcast_in_dim", "reshape", "convert", "transpose", "not", "select", "multiply", "subtract"):
        if node.op == "broadcast_in_dim":
            source, mapped = node.inputs[0], node.attrs[0]
            inner = [mapped.index(d) if d in mapped else -1 for d in dimensions]
            varying = [v and i >= 0 and source.spec.shape[i] > 1 for v, i in zip(varying, inner, strict=True)]
            dimensions, node = inner, source
        elif node.op in ("convert", "not"):
            node = node.inputs[0]
        else:
            break
        if not all(varying):
            return False
    return len(dimensions) == 2 and all(d >= 0 and node.spec.shape[d] > 1 for d in dimensions)


def _evaluate(node: Node, places: list[Any], known: dict[int, Any]) -> Any:
    """The values of ``node`` at ``places``, one array of positions per dimension; they broadcast against each other."""
    if node.value is not None:
        return node.value
    rank = len(node.spec.shape)
    if len(places) != rank:  # a scalar predicate or bound
        if node.spec.size != 1:
            raise UnseenMaskError
        places = [np.zeros((1, 1), np.int64)] * rank
    if node.op == "iota":
        return places[node.attrs[0]]
    if node.op == "broadcast_in_dim":
        source = node.inputs[0]
        inner = [places[d] if source.spec.shape[i] > 1 else places[d] * 0 for i, d in enumerate(node.attrs[0])]
        return _evaluate(source, inner, {})
    if node.op == "reshape":
        return _evaluate(node.inputs[0], _unreshaped(node, places), {})
    if id(node) not in known:
        known[id(node)] = _computed(node, [_evaluate(source, places, known) for source in node.inputs])
    return known[id(node)]


def _computed(node: Node, values: list[Any]) -> Any:
    if node.op == "compare":
        name = next((name for name in _COMPARISONS if name in node.attrs[0]), None)
        if name is not None:
            return _COMPARISONS[name](*values)
    function = _TRUTH.get(node.op)
    if function is None:
        raise UnseenMaskError
    return function(*values)


def _unreshaped(node: Node, places: list[Any]) -> list[Any]:
    """Positions before a reshape that adds or drops dimensions of size 1."""
    before, after = node.inputs[0].spec.shape, node.spec.shape
    real = [place for place, extent in zip(places, after, strict=True) if extent != 1]
    if [extent for extent in before if extent != 1] != [extent for extent in after if extent != 1]:
        raise UnseenMaskError
    remaining = iter(real)
    return [next(remaining) if extent != 1 else np.zeros((1, 1), np.int64) for extent in before]


def _causal_share(predicate: Node) -> float | None:
    """The share that one comparison of two positions hides; None for any other predicate."""
    while predicate.op in ("broadcast_in_dim", "reshape", "convert", "not") or _is_truth(predicate):
        predicate = predicate.inputs[0]
    if predicate.op != "compare" or not any(order in predicate.attrs[0] for order in _ORDERS):
        return None
    sides = [_position(side) for side in predicate.inputs]
    if None in sides or sides[0] == sides[1] or len(predicate.spec.shape) < 2:
        return None
    rows, columns = predicate.spec.shape[-2:]
    if not rows or not columns:
        return None
    seen = rows * rows / 2 if rows <= columns else columns * columns / 2 + (rows - columns) * columns
    return 1 - seen / (rows * columns)


def _is_truth(node: Node) -> bool:
    """Whether ``node`` only turns a predicate into true and false."""
    return node.op == "select" and {branch.value for branch in node.inputs[1:]} == {0.0, 1.0}


def _position(node: Node) -> int | None:
    """The dimension along which ``node`` counts positions from 0, possibly spread or converted, shifted by one at most."""
    if node.op == "iota":
        return int(node.attrs[0])
    if node.op == "broadcast_in_dim":
        inner = _position(node.inputs[0])
        return None if inner is None else int(node.attrs[0][inner])
    if node.op == "reshape":
        inner = _position(node.inputs[0])
        real = [dimension for dimension, extent in enumerate(node.spec.shape) if extent != 1]
        return real[0] if inner is not None and len(real) == 1 else None
    if node.op == "convert":
        return _position(node.inputs[0])
    if node.op in ("add", "subtract") and node.inputs[1].value is not None and abs(node.inputs[1].value) <= 1:
        return _position(node.inputs[0])
    return None
