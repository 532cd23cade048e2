"""A light graph of a canonical module: functions inlined, common subexpressions shared, dead code dropped.

One pass over the MLIR bindings (about 8 us per operation); everything after it is plain Python on small objects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from emutpu._jaxlib import entries, ir
from emutpu.backend.pjrt import InvalidArgument, Unimplemented
from emutpu.simulator._modules import parse

from .attributes import READERS
from .layout import natural

__all__ = ["BITS", "Graph", "Node", "Spec", "read"]

# Bits an element occupies in the device's memory (a boolean is a byte there).
BITS = {
    "i1": 8, "i2": 2, "ui2": 2, "i4": 4, "ui4": 4, "i8": 8, "ui8": 8, "i16": 16, "ui16": 16, "i32": 32, "ui32": 32,
    "i64": 64, "ui64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "complex<f32>": 64, "complex<f64>": 128,
    "f4E2M1FN": 4, "f8E4M3FN": 8, "f8E4M3": 8, "f8E3M4": 8, "f8E5M2": 8, "f8E4M3B11FNUZ": 8, "f8E4M3FNUZ": 8,
    "f8E5M2FNUZ": 8, "f8E8M0FNU": 8,
}  # fmt: skip
_PLAIN_BODY = 2  # operations: the one that combines two arguments, and the return
_MAX_DEPTH = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Spec:
    """A static tensor type: ``size`` in elements, ``bytes`` without and ``padded`` with tiling in its natural layout,
    whose minor dimensions are ``minor`` and ``second`` (-1: a scalar).
    """

    shape: tuple[int, ...]
    dtype: str
    size: int
    bytes: int
    padded: int
    minor: int
    second: int

    @classmethod
    def of(cls, shape: Sequence[int], dtype: str) -> Spec:
        """The type of that shape and MLIR element type. Raises Unimplemented for an element type without a size."""
        if dtype not in BITS:
            raise Unimplemented(f"no size is known for element type {dtype}")
        size, bits = math.prod(shape), BITS[dtype]
        elements, minor, second = natural(tuple(shape), bits)
        return cls(tuple(shape), dtype, size, (size * bits + 7) // 8, (elements * bits + 7) // 8, minor, second)


_TOKEN = Spec((), "token", 0, 0, 0, -1, -1)


class Node:
    """One value. ``op`` is the operation's name without its dialect; ``result`` nodes pick one of several results."""

    __slots__ = ("attrs", "bodies", "index", "inputs", "name", "op", "spec", "specs", "users", "value")

    def __init__(self, op: str, inputs: list[Node], spec: Spec, attrs: tuple[Any, ...] = ()) -> None:
        self.op = op
        self.name = op
        self.inputs = inputs
        self.spec = spec
        self.specs: tuple[Spec, ...] = (spec,)
        self.attrs = attrs
        self.users: list[Node] = []
        self.bodies: tuple[Graph, ...] = ()
        self.value: float | None = None  # of a splat constant
        self.index = 0  # position in the simplified graph

    def over(self, inputs: list[Node]) -> Node:
        """The same operation over other values, with no users yet."""
        node = Node(self.op, inputs, self.spec, self.attrs)
        node.name, node.specs, node.value = self.name, self.specs, self.value
        node.bodies = tuple([body.copy() for body in self.bodies])
        return node

    def __repr__(self) -> str:
        return f"{self.op}:{'x'.join(map(str, self.spec.shape))}{self.spec.dtype}"


@dataclasses.dataclass(slots=True)
class Graph:
    """Nodes in a topological order; ``arguments`` and ``outputs`` are values of it, ``donated`` argument positions."""

    nodes: list[Node]
    arguments: list[Node]
    outputs: list[Node]
    donated: frozenset[int] = frozenset()
    operations: int = 0

    def copy(self) -> Graph:
        """Nodes of its own, for a model of one chip to rewrite; the bodies of loops and reductions are copied, too."""
        made: dict[int, Node] = {}
        for node in self.nodes:
            made[id(node)] = node.over([made[id(source)] for source in node.inputs])
        nodes, arguments, outputs = (
            [made[id(node)] for node in values] for values in (self.nodes, self.arguments, self.outputs)
        )
        return Graph(nodes, arguments, outputs, self.donated, self.operations)


def read(module: bytes | str) -> Graph:
    """The graph of a module's ``main``. Raises InvalidArgument for a malformed one or a dynamic shape."""
    parsed = parse(module.encode() if isinstance(module, str) else module)
    functions = {}
    for operation in parsed.body.operations:
        operation = operation.operation
        if operation.name == "func.func":
            functions[ir.StringAttr(operation.attributes["sym_name"]).value] = operation
    main = functions.get("main")
    if main is None:
        raise InvalidArgument("the module has no function 'main'")
    reader = _Reader(functions)
    block = main.regions[0].blocks[0]
    nodes: list[Node] = []
    donated = _donated(main)
    arguments = [
        Node("parameter", [], reader.spec(value.type), (index, "donated") if index in donated else (index,))
        for index, value in enumerate(block.arguments)
    ]
    nodes.extend(arguments)
    outputs = reader.block(block, arguments, nodes, {}, 0)
    return Graph(nodes, arguments, outputs, donated, reader.operations)


def _donated(main: Any) -> frozenset[int]:
    if "arg_attrs" not in main.attributes:
        return frozenset()
    found = set()
    for position, attributes in enumerate(entries(ir.ArrayAttr(main.attributes["arg_attrs"]))):
        attributes = ir.DictAttr(attributes)
        donor = "jax.buffer_donor" in attributes and ir.BoolAttr(attributes["jax.buffer_donor"]).value
        if donor or "tf.aliasing_output" in attributes:
            found.add(position)
    return frozenset(found)


class _Reader:
    """Turns MLIR blocks into nodes; types are translated once each."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self._specs: dict[Any, Spec] = {}
        self._bodies: dict[Any, Graph] = {}
        self.operations = 0

    def spec(self, kind: Any) -> Spec:
        found = self._specs.get(kind)
        if found is None:
            found = self._specs[kind] = self._translate(kind)
        return found

    @staticmethod
    def _translate(kind: Any) -> Spec:
        if not isinstance(kind, ir.RankedTensorType):
            if str(kind) in ("!stablehlo.token", "!mhlo.token"):
                return _TOKEN
            raise Unimplemented(f"a value of type {kind}: only static ranked tensors are costed")
        if not kind.has_static_shape:
            raise InvalidArgument(f"{kind} has a dynamic extent: only static shapes can be costed")
        return Spec.of(kind.shape, str(kind.element_type))

    def block(
        self,
        block: Any,
        arguments: Sequence[Node],
        nodes: list[Node],
        known: dict[Any, Node],
        depth: int,
        shared: dict[Any, Node] | None = None,
    ) -> list[Node]:
        """Append the block's nodes; returns what its terminator returns. ``shared`` are the expressions of the caller."""
        if depth > _MAX_DEPTH:
            raise InvalidArgument("the module's calls or regions nest too deeply (or recur)")
        values: dict[Any, Node] = dict(zip(block.arguments, arguments, strict=True))
        shared = {} if shared is None else shared
        outputs: list[Node] = []
        for operation in block.operations:
            operation = operation.operation
            name = operation.name
            self.operations += 1
            try:
                inputs = [values[value] for value in operation.operands]
            except KeyError:
                inputs = [values.get(value) or known[value] for value in operation.operands]
            if name in ("func.return", "stablehlo.return"):
                outputs = inputs
                continue
            callee = _callee(operation, name)
            if callee is not None:
                if callee not in self._functions:
                    raise InvalidArgument(f"{name} calls {callee!r}, which the module does not define")
                inner = self._functions[callee].regions[0].blocks[0]
                results = self.block(inner, inputs, nodes, {}, depth + 1, shared)
            else:
                around = {**known, **values} if name in _CAPTURING else known
                results = self._operation(operation, name, inputs, nodes, shared, around, depth)
            values.update(zip(operation.results, results, strict=True))
        return outputs

    def _operation(
        self,
        operation: Any,
        name: str,
        inputs: list[Node],
        nodes: list[Node],
        shared: dict[Any, Node],
        known: dict[Any, Node],
        depth: int,
    ) -> list[Node]:
        dialect, _, op = name.partition(".")
        if dialect not in ("stablehlo", "chlo"):
            op = name
        specs = [self.spec(value.type) for value in operation.results]
        reader: Callable[[Any], tuple[Any, ...]] | None = READERS.get(op)
        attrs = reader(operation) if reader is not None else ()
        if op == "constant":
            node = Node(op, [], specs[0])
            node.value = attrs[0]
            key: Any = (op, node.value, id(specs[0])) if node.value is not None else None
        elif len(specs) == 1 and not operation.regions:
            node = Node(op, inputs, specs[0], attrs)
            key = (op, *map(id, inputs), attrs, id(specs[0])) if op not in _IMPURE else None
        else:
            return self._complex(operation, op, inputs, specs, attrs, nodes, shared, known, depth)
        if key is not None:
            found = shared.get(key)
            if found is not None:
                return [found]
            shared[key] = node
        nodes.append(node)
        return [node]

    def _complex(
        self,
        operation: Any,
        op: str,
        inputs: list[Node],
        specs: list[Spec],
        attrs: tuple[Any, ...],
        nodes: list[Node],
        shared: dict[Any, Node],
        known: dict[Any, Node],
        depth: int,
    ) -> list[Node]:
        """An operation with regions or with other than one result."""
        first = specs[0] if specs else _TOKEN
        node = Node(op, inputs, first, attrs)
        node.specs = tuple(specs)
        if op == "reduce" and len(specs) == 1 and (plain := self._plain_body(operation, attrs[1])) is not None:
            node.bodies = (plain,)
            same = shared.setdefault((op, *map(id, inputs), attrs, id(first)), node)
            if same is not node:
                return [same]
        else:
            node.bodies = tuple(self._region(region, operation.name, known, depth) for region in operation.regions)
        nodes.append(node)
        if len(specs) == 1:
            return [node]
        picked = []
        for index, spec in enumerate(specs):
            part = Node("result", [node], spec, (index,))
            nodes.append(part)
            picked.append(part)
        return picked

    def _plain_body(self, operation: Any, name: str) -> Graph | None:
        """The body of a reduction by the one operation ``name``, read once for each type; None for any other body."""
        block = operation.regions[0].blocks[0]
        if len(block.operations) != _PLAIN_BODY:
            return None
        kind = block.arguments[0].type
        found = self._bodies.get((name, kind))
        if found is None:
            found = self._bodies[name, kind] = self._region(operation.regions[0], operation.name, {}, 0)
        self.operations += _PLAIN_BODY
        return found

    def _region(self, region: Any, name: str, known: dict[Any, Node], depth: int) -> Graph:
        if not len(region.blocks):
            return Graph([], [], [])
        block = region.blocks[0]
        arguments = [Node("parameter", [], self.spec(v.type), (i,)) for i, v in enumerate(block.arguments)]
        nodes = list(arguments)
        # What a region captures is, inside it, an argument that is already there, or the constant that it is.
        outer = {value: _captured(node) for value, node in known.items()} if name in _CAPTURING else {}
        outputs = self.block(block, arguments, nodes, outer, depth + 1)
        nodes[:0] = outer.values()
        return Graph(nodes, arguments, outputs)


def _captured(node: Node) -> Node:
    made = Node("parameter" if node.value is None else "constant", [], node.spec, (-1,))
    made.value = node.value
    return made


_IMPURE = frozenset({"rng", "rng_bit_generator", "custom_call", "infeed", "outfeed", "send", "recv"})


# Only the regions of these may use values from outside.
_CAPTURING = frozenset({"stablehlo.case", "stablehlo.if", "stablehlo.while"})


def _callee(operation: Any, name: str) -> str | None:
    if name in ("func.call", "call"):
        return str(ir.FlatSymbolRefAttr(operation.attributes["callee"]).value)
    if name == "stablehlo.composite":
        return str(ir.FlatSymbolRefAttr(operation.attributes["decomposition"]).value)
    return None
