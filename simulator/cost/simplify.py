"""What XLA does to a module before it fuses: identities, constants, free reshapes, vector products as reductions.

Works on the light graph of :mod:`.graph` in one forward pass that redirects uses, then drops what nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable

from .attributes import Dot
from .graph import Graph, Node, Spec

__all__ = ["link", "simplify"]

_NEUTRAL = {
    "add": 0.0,
    "subtract": 0.0,
    "multiply": 1.0,
    "divide": 1.0,
    "maximum": float("-inf"),
    "minimum": float("inf"),
}
_COMMUTES = frozenset({"add", "multiply", "maximum", "minimum"})
_FREE = frozenset({"optimization_barrier", "custom_call_identity", "copy"})
_IDENTITY_CALLS = frozenset({"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"})
# Elementwise operations of scalars and splats fold into constants.
_FOLDS: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "maximum": max,
    "minimum": min,
}
_SPREADS = frozenset({"broadcast_in_dim", "reshape", "transpose", "slice", "convert", "reverse"})


def simplify(graph: Graph, *, vector_products: bool = True, result_copies: bool = True) -> Graph:
    """The same computation with the free parts gone, users linked and dead nodes dropped.

    ``vector_products``: a product with a vector becomes a multiplication and a sum. ``result_copies``: an argument that is
    returned is copied into a buffer of its own, as a program does and a loop's body does not.
    """
    replaced: dict[int, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        inputs = node.inputs
        for index, source in enumerate(inputs):
            other = replaced.get(id(source))
            if other is not None:
                if inputs is node.inputs:
                    inputs = list(inputs)
                inputs[index] = other
        node.inputs = inputs
        new = _rewrite(node)
        if vector_products and new.op in ("dot_general", "dot"):
            new = _vector_product(new)
        if new is not node:
            replaced[id(node)] = new
            if new.op in ("constant", "vector_product", "reshape") and not any(new is source for source in inputs):
                nodes.append(new)
            continue
        nodes.append(node)
    outputs = [replaced.get(id(node), node) for node in graph.outputs]
    for position, node in enumerate(outputs):
        if result_copies and node.op == "parameter" and "donated" not in node.attrs:
            outputs[position] = Node("copy", [node], node.spec)
            nodes.append(outputs[position])
    alive = _alive(nodes, outputs)
    kept = [node for node in nodes if id(node) in alive or node.op == "parameter"]
    simplified = Graph(kept, graph.arguments, outputs, graph.donated, graph.operations)
    link(simplified)
    return simplified


def link(graph: Graph) -> None:
    """Set every node's ``users`` (one entry per user, however often it reads the node)."""
    for index, node in enumerate(graph.nodes):
        node.users, node.index = [], index
    for node in graph.nodes:
        seen: set[int] = set()
        for source in node.inputs:
            if id(source) not in seen:
                seen.add(id(source))
                source.users.append(node)


_EFFECTS = frozenset({"outfeed", "send", "recv", "infeed"})


def _alive(nodes: list[Node], outputs: list[Node]) -> set[int]:
    pending = [*outputs, *(node for node in nodes if node.op in _EFFECTS)]
    alive: set[int] = set()
    while pending:
        node = pending.pop()
        if id(node) in alive:
            continue
        alive.add(id(node))
        pending.extend(node.inputs)
    return alive


def _rewrite(node: Node) -> Node:
    """The node that stands for ``node``: itself, one of its inputs, a constant, or a cheaper operation."""
    op, inputs, spec = node.op, node.inputs, node.spec
    if _renames(node):
        return inputs[0]
    if op == "reshape" and inputs[0].op == "reshape":
        node.inputs = [inputs[0].inputs[0]]
        return node if node.inputs[0].spec != spec else node.inputs[0]
    if op == "reduce" and len(node.specs) == 1 and inputs[0].spec.size == spec.size:
        return Node("reshape", [inputs[0]], spec)
    if op in _SPREADS and inputs and inputs[0].value is not None:
        return _constant(inputs[0].value, spec)
    if op in _NEUTRAL and len(inputs) == 2:
        return _arithmetic(node)
    if op == "select" and inputs[0].value is not None:
        return inputs[1] if inputs[0].value else inputs[2]
    return node


def _renames(node: Node) -> bool:
    """Whether ``node`` is its own first operand under another name."""
    op, inputs, spec = node.op, node.inputs, node.spec
    if op == "custom_call":
        return bool(inputs) and node.attrs[0] in _IDENTITY_CALLS
    if len(inputs) != 1:
        return False
    if op in _FREE:
        return True
    if op == "transpose":
        return bool(node.attrs[0] == tuple(range(len(spec.shape))))
    return op in ("broadcast_in_dim", "reshape", "slice", "pad", "concatenate", "convert") and inputs[0].spec == spec


def _constant(value: float, spec: Spec) -> Node:
    made = Node("constant", [], spec)
    made.value = value
    return made


def _arithmetic(node: Node) -> Node:
    left, right = node.inputs
    if left.value is not None and right.value is not None and node.op in _FOLDS:
        return _constant(_FOLDS[node.op](left.value, right.value), node.spec)
    neutral = _NEUTRAL[node.op]
    if right.value == neutral and left.spec == node.spec:
        return left
    if left.value == neutral and node.op in _COMMUTES and right.spec == node.spec:
        return right
    return node


def _vector_product(node: Node) -> Node:
    """A product with a vector (or an outer product) is a multiplication and a sum on the VPU, as XLA rewrites it."""
    dot: Dot = node.attrs[0]
    if dot.lhs_batch or len(node.inputs[0].spec.shape) > 2 or len(node.inputs[1].spec.shape) > 2:
        return node
    depth = 1
    for dimension in dot.lhs_contract:
        depth *= node.inputs[0].spec.shape[dimension]
    rows, columns = node.inputs[0].spec.size // max(depth, 1), node.inputs[1].spec.size // max(depth, 1)
    if min(rows, columns, depth) != 1:
        return node
    made = Node("vector_product", node.inputs, node.spec, (rows, columns, depth))
    made.name = node.op
    return made
