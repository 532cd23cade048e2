"""Loops and branches: how often a loop's body runs, read from the module where it says so."""

from __future__ import annotations

from .graph import Graph, Node

__all__ = ["trips"]

_STEPS = {"LT": 0, "LE": 1, "GT": 0, "GE": 1, "NE": 0}


def _constant(node: Node) -> float | None:
    while node.op in ("convert", "reshape", "broadcast_in_dim") and node.value is None and node.inputs:
        node = node.inputs[0]
    return node.value


def trips(loop: Node) -> int | None:
    """Iterations of a ``while`` that counts an argument by a constant to a constant; None where it does not say."""
    condition, body = loop.bodies
    test = condition.outputs[0] if condition.outputs else None
    if test is None or test.op != "compare":
        return None
    direction = next((name for name in _STEPS if name in test.attrs[0]), None)
    counter, limit = test.inputs
    position = _position(condition, counter)
    end = _constant(limit)
    if end is None:
        captured = _position(condition, limit)
        end = _constant(loop.inputs[captured]) if captured is not None else None
    if direction is None or position is None or end is None:
        return None
    start, step = _constant(loop.inputs[position]), _step(body, position)
    if start is None or not step:
        return None
    count = (end - start) / step
    if count < 0:
        return 0
    return int(-(-count // 1)) + (1 if _STEPS[direction] and count == int(count) else 0)


def _position(graph: Graph, node: Node) -> int | None:
    return next((index for index, argument in enumerate(graph.arguments) if argument is node), None)


def _step(body: Graph, position: int) -> float | None:
    """What the body adds to the counter."""
    value = body.outputs[position]
    if value.op not in ("add", "subtract"):
        return None
    left, right = value.inputs
    sign = 1.0 if value.op == "add" else -1.0
    if left is body.arguments[position]:
        amount = _constant(right)
        return None if amount is None else sign * amount
    if right is body.arguments[position] and value.op == "add":
        return _constant(left)
    return None
