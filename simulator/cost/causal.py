"""FLOPs that a causal mask discards: the half of attention's products that a chip computes and a model does not use.

Found in the graph itself: a selection by a comparison of two positions along two dimensions masks the scores, and what
reaches the scores element by element (their gradient, the probabilities) is masked with them. Every product that makes
or takes such values is attention.
"""

from __future__ import annotations

from collections.abc import Iterable

from .graph import Graph, Node
from .tables import ELEMENTWISE
from .work import flops

__all__ = ["masked_flops"]

_SPREADS = frozenset({"broadcast_in_dim", "reshape", "convert"})
_THROUGH = ELEMENTWISE | {"reshape", "transpose", "copy"}
_ORDERS = ("GE", "GT", "LE", "LT")


def masked_flops(graph: Graph) -> float:
    """FLOPs of a simplified graph's products behind a causal mask that the mask discards; 0 without one.

    Counted as :mod:`emutpu.simulator.mfu` does: of a sequence of S, half is seen; of L queries and S keys, the part below
    the diagonal from the first corner.
    """
    found: dict[int, tuple[Node, float]] = {}
    for node in graph.nodes:
        if node.op == "select":
            hidden = _hidden_share(node.inputs[0])
            if hidden is not None:
                for product in _products(node):
                    found.setdefault(id(product), (product, hidden))
    return sum(flops(product) * hidden for product, hidden in found.values())


_PRODUCTS = ("dot_general", "online_softmax")


def _product(node: Node) -> Node:
    """The product itself, also where it is part of a kernel of the compiler's own."""
    alone: Node = node.attrs[0] if node.op == "online_softmax" else node
    return alone


def _hidden_share(predicate: Node) -> float | None:
    """The share of the pairs of positions that a causal predicate hides; None for any other predicate."""
    while predicate.op in _SPREADS:
        predicate = predicate.inputs[0]
    if predicate.op == "not":
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


def _position(node: Node) -> int | None:
    """The dimension along which ``node`` counts positions, possibly spread, converted or shifted by a constant."""
    if node.op == "iota":
        return int(node.attrs[0])
    if node.op == "broadcast_in_dim" and len(node.inputs) == 1 and node.inputs[0].op in ("iota", "add", "subtract"):
        inner = _position(node.inputs[0])
        return None if inner is None else int(node.attrs[0][inner])
    if node.op == "convert":
        return _position(node.inputs[0])
    if node.op in ("add", "subtract") and node.inputs[1].value is not None:
        return _position(node.inputs[0])
    return None


def _products(select: Node) -> Iterable[Node]:
    """The products that make or take what is connected, element by element, with the selection's result."""
    pending, seen = [select, *select.inputs[1:]], {id(select.inputs[0])}
    while pending:
        node = pending.pop()
        if id(node) in seen or node.spec.size != select.spec.size:
            continue
        seen.add(id(node))
        if node.op in _PRODUCTS:
            yield _product(node)
            continue
        if node.op not in _THROUGH:
            continue
        pending += node.inputs
        for user in node.users:
            if user.op in _PRODUCTS:
                yield _product(user)
            else:
                pending.append(user)
