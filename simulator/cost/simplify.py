"""What XLA does to a module before it fuses: identities, constants, free reshapes, vector products as reductions.

Works on the light graph of :mod:`.graph` in one forward pass that redirects uses, then drops what nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .attributes import Dot
from .graph import Graph, Node, Spec
from .work import dot_shape

__all__ = ["link", "reached", "simplify"]

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
        fresh: list[Node] = []
        new = _rewrite(node, fresh)
        if vector_products and new.op in ("dot_general", "dot"):
            new = _vector_product(new, fresh)
        nodes += fresh
        if new is node:
            nodes.append(node)
        else:
            replaced[id(node)] = new
    outputs = [replaced.get(id(node), node) for node in graph.outputs]
    for position, node in enumerate(outputs):
        if result_copies and node.op == "parameter" and "donated" not in node.attrs:
            outputs[position] = Node("copy", [node], node.spec)
            nodes.append(outputs[position])
    alive = reached(nodes, outputs)
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


def reached(nodes: list[Node], outputs: list[Node]) -> set[int]:
    """Ids of the nodes that results or effects need."""
    pending = [*outputs, *(node for node in nodes if node.op in _EFFECTS)]
    alive: set[int] = set()
    while pending:
        node = pending.pop()
        if id(node) in alive:
            continue
        alive.add(id(node))
        pending.extend(node.inputs)
    return alive


def _rewrite(node: Node, fresh: list[Node]) -> Node:
    """The node that stands for ``node``: itself, an earlier one, or one that is made, and then appended to ``fresh``."""
    op, inputs, spec = node.op, node.inputs, node.spec
    if _renames(node):
        return inputs[0]
    if op == "reshape" and inputs[0].op == "reshape":
        node.inputs = [inputs[0].inputs[0]]
        return node if node.inputs[0].spec != spec else node.inputs[0]
    if op == "reduce" and len(node.specs) == 1 and inputs[0].spec.size == spec.size:
        return _made(fresh, "reshape", [inputs[0]], spec)
    if op in _SPREADS and inputs and inputs[0].value is not None:
        return _constant(inputs[0].value, spec, fresh)
    if op == "reduce" and inputs[0].op == "negate" and len(node.specs) == 1 and node.attrs[1] == "add":
        node.inputs = [inputs[0].inputs[0], *inputs[1:]]
        fresh.append(node)
        return _made(fresh, "negate", [node], spec)
    if op in _NEUTRAL and len(inputs) == 2:
        small = _before_spreading(node, fresh)
        return _arithmetic(node, fresh) if small is None else small
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


def _made(fresh: list[Node], op: str, inputs: list[Node], spec: Spec, attrs: tuple[Any, ...] = ()) -> Node:
    made = Node(op, inputs, spec, attrs)
    fresh.append(made)
    return made


def _constant(value: float, spec: Spec, fresh: list[Node]) -> Node:
    made = _made(fresh, "constant", [], spec)
    made.value = value
    return made


def _arithmetic(node: Node, fresh: list[Node]) -> Node:
    left, right = node.inputs
    if left.value is not None and right.value is not None and node.op in _FOLDS:
        return _constant(_FOLDS[node.op](left.value, right.value), node.spec, fresh)
    neutral = _NEUTRAL[node.op]
    if right.value == neutral and left.spec == node.spec:
        return left
    if left.value == neutral and node.op in _COMMUTES and right.spec == node.spec:
        return right
    if node.op == "multiply":
        return _scaled(node, fresh)
    return _clamped(node, fresh)


def _before_spreading(node: Node, fresh: list[Node]) -> Node | None:
    """An operation of a spread value and a constant is done before the value is spread."""
    left, right = node.inputs
    if left.value is None and right.value is None:
        return None
    for position, (wide, other) in enumerate(((left, right), (right, left))):
        if wide.op != "broadcast_in_dim" or other.value is None or wide.inputs[0].spec.size in (1, wide.spec.size):
            continue
        source = wide.inputs[0]
        constant = _constant(other.value, source.spec, fresh)
        operands = [source, constant] if position == 0 else [constant, source]
        done = _arithmetic(Node(node.op, operands, source.spec, node.attrs), fresh)
        if not any(done is known for known in (*fresh, source)):
            fresh.append(done)
        return _made(fresh, "broadcast_in_dim", [done], node.spec, wide.attrs)
    return None


_OPPOSITE = {"minimum": "maximum", "maximum": "minimum"}


def _clamped(node: Node, fresh: list[Node]) -> Node:
    """The smaller of a constant and the larger of another constant and x is one operation."""
    inner, bound = node.inputs if node.inputs[1].value is not None else reversed(node.inputs)
    if bound.value is None or inner.op != _OPPOSITE.get(node.op):
        return node
    x, other = inner.inputs if inner.inputs[1].value is not None else reversed(inner.inputs)
    if other.value is None:
        return node
    low, high = (other, bound) if node.op == "minimum" else (bound, other)
    return _made(fresh, "clamp", [low, x, high], node.spec)


def _scaled(node: Node, fresh: list[Node]) -> Node:
    """``(x * c) * s`` with a constant c and a constant or spread s is ``x * (s * c)``."""
    inner, factor = node.inputs if node.inputs[0].op == "multiply" else reversed(node.inputs)
    if inner.op != "multiply" or inner.spec.size == 1:
        return node
    x, constant = inner.inputs if inner.inputs[1].value is not None else reversed(inner.inputs)
    if constant.value is None:
        return node
    if factor.value is not None:
        merged = _constant(constant.value * factor.value, node.spec, fresh)
    elif factor.op == "broadcast_in_dim" and factor.inputs[0].spec.size < node.spec.size:
        scalar = factor.inputs[0]
        small = _constant(constant.value, scalar.spec, fresh)
        product = _made(fresh, "multiply", [scalar, small], scalar.spec)
        merged = _made(fresh, "broadcast_in_dim", [product], node.spec, factor.attrs)
    else:
        return node
    return _made(fresh, "multiply", [x, merged], node.spec)


def _vector_product(node: Node, fresh: list[Node]) -> Node:
    """A product with a vector (or an outer product) is a multiplication and a sum on the VPU, as XLA rewrites it."""
    dot: Dot = node.attrs[0]
    if dot.lhs_batch:
        return _row_products(node, dot, fresh)
    if len(node.inputs[0].spec.shape) > 2 or len(node.inputs[1].spec.shape) > 2:
        return node
    depth = 1
    for dimension in dot.lhs_contract:
        depth *= node.inputs[0].spec.shape[dimension]
    rows, columns = node.inputs[0].spec.size // max(depth, 1), node.inputs[1].spec.size // max(depth, 1)
    if min(rows, columns, depth) != 1:
        return node
    return _on_the_vpu(node, (rows, columns, depth), fresh)


def _row_products(node: Node, dot: Dot, fresh: list[Node]) -> Node:
    """A batch of single rows against matrices whose rows they are multiplied with: the depth lies in the lanes."""
    batch, rows, depth, columns = dot_shape(node)
    contracted, matrix = (dot.rhs_contract, node.inputs[1]) if rows == 1 else (dot.lhs_contract, node.inputs[0])
    if min(rows, columns) != 1 or max(rows, columns) == 1 or contracted != (len(matrix.spec.shape) - 1,):
        return node
    return _on_the_vpu(node, (batch * rows, columns, depth), fresh)


def _on_the_vpu(node: Node, shape: tuple[int, int, int], fresh: list[Node]) -> Node:
    made = _made(fresh, "vector_product", node.inputs, node.spec, shape)
    made.name = node.op
    return made
