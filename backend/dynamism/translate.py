"""A symbolic graph becomes a static one for given bounds."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from emutpu.backend.compile.graph import is_random_state, output_arguments
from emutpu.backend.compile.locations import node_origin
from emutpu.backend.compile.structured import barrier
from emutpu.backend.dynamism import (
    rules_batches,
    rules_contractions,
    rules_factories,
    rules_indexing,
    rules_reductions,
    rules_views,
)
from emutpu.backend.dynamism.extents import Bounds, Dim, expression, extent_of, is_dynamic, true_of
from emutpu.backend.dynamism.rules import RULES, Call, Symbolic, Unsupported, arguments_of
from emutpu.backend.dynamism.rules_pointwise import is_pointwise, pointwise
from emutpu.backend.dynamism.scans import scanned
from emutpu.backend.dynamism.writer import Padded, Writer, plain_nodes
from emutpu.backend.errors import describe
from emutpu.backend.storage import DEVICE

__all__ = ["CPU_TENSORS", "UNHANDLED", "Given", "LoweringError", "Translated", "View", "Wrote", "translate"]

_FAMILIES = (rules_batches, rules_contractions, rules_factories, rules_indexing, rules_reductions, rules_views)
CPU_TENSORS = "CPU tensors are not supported in dynamic shapes compilation, please move inputs to TPU."
_REMEDY = "Please set torch.compile(..., dynamic=False, ...) and try again."
_FAILED = "Failed to lower FX graph with dynamic shapes to MLIR with error: {} " + _REMEDY
UNHANDLED = "Detected following unhandled SymInt usage(s) in FX graph. " + _REMEDY

_STATE = 16  # bytes of a saved random state
_RANDOM_STATES = frozenset({"run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"})

aten = torch.ops.aten


class LoweringError(RuntimeError):
    """A graph has an op that no rule lowers."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """True extents, strides and offset of a tensor."""

    size: tuple[sympy.Expr, ...]
    stride: tuple[sympy.Expr, ...]
    offset: sympy.Expr

    @property
    def varies(self) -> bool:
        """Whether any of them depends on a size."""
        return any(expr.free_symbols for expr in (*self.size, *self.stride, self.offset))


def _view_of(tensor: torch.Tensor) -> View:
    size, stride = tuple(map(expression, tensor.shape)), tuple(map(expression, tensor.stride()))
    return View(size, stride, expression(tensor.storage_offset()))


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """An output of the symbolic graph: ``number`` of the static graph's outputs, or ``value`` (a number, an input).

    ``dims`` say how a padded result lies, ``view`` as what it is given (None: as it comes). With a ``view`` and neither
    number nor other value, ``value`` is the position of the input that it is a view of.
    """

    number: int | None
    value: Any = None
    dims: tuple[Dim, ...] = ()
    view: View | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Wrote:
    """The new value of an input with dynamic dimensions: output ``number`` goes to input ``position``."""

    position: int
    number: int
    dims: tuple[Dim, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Translated:
    """``module`` takes the inputs at ``positions`` (padded to ``extents``; None where as they are), then ``sizes``."""

    module: fx.GraphModule
    positions: tuple[int, ...]
    extents: tuple[tuple[int, ...] | None, ...]
    order: tuple[int, ...]  # of the placeholders: n-th input, or ~n-th size
    sizes: tuple[sympy.Expr, ...]
    outputs: tuple[Given, ...]
    writes: tuple[Wrote, ...]


def translate(module: fx.GraphModule, bounds: Bounds, visible: int | None = None) -> Translated:
    """Write the static graph. Outputs from the ``visible``-th on stay on the device as they lie, for a later graph.

    Raises RuntimeError that names the op, the reason and the user's line for what no rule can do.
    """
    return _Translator(module, bounds, visible).run()


class _Translator:
    def __init__(self, module: fx.GraphModule, bounds: Bounds, visible: int | None) -> None:
        self.module = module
        self.bounds = bounds
        self.visible = visible
        self.writer = Writer(module, bounds)
        self.values: dict[fx.Node, Any] = {}
        self.positions: dict[fx.Node, int] = {}  # placeholders of the symbolic graph
        self.taken: dict[fx.Node, tuple[int, tuple[int, ...] | None]] = {}  # those of the static graph
        self.storages: dict[int, int] = {}  # of inputs with dynamic dimensions: which position they are of
        self.writes: dict[int, Padded] = {}
        self.within: list[Any] = []  # ops that are being taken apart
        self.outer: fx.Node | None = None

    def run(self) -> Translated:
        for position, node in enumerate(self.module.graph.find_nodes(op="placeholder")):
            self.positions[node] = position
            self.values[node] = self._input(position, node)
        self._block(self.module.graph, self.values)
        return self._finish()

    def _input(self, position: int, node: fx.Node) -> Any:
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            return self._number(value)
        if not isinstance(value, torch.Tensor):
            made = self.writer.placeholder(node.name, value)
            self.taken[made] = (position, None)
            return made
        if is_random_state(node):
            made = self.writer.placeholder(node.name, self.writer.fake(_state))
            self.taken[made] = (position, None)
            return Padded(made, (self.bounds.prefix(sympy.Integer(_STATE)),))
        if value.device.type != DEVICE.type:
            raise RuntimeError(CPU_TENSORS)
        dims = tuple(self.bounds.prefix(expression(extent)) for extent in value.shape)
        extents = [extent_of(dim) for dim in dims]
        # Strides that vary with a size are as good as padding: the graph takes a contiguous copy.
        dynamic = any(map(is_dynamic, dims)) or any(isinstance(step, torch.SymInt) for step in value.stride())
        stride = None if dynamic else [int(step) for step in value.stride()]

        def fake() -> torch.Tensor:
            if stride is None:
                return torch.empty(extents, dtype=value.dtype, device=value.device)
            return torch.empty_strided(extents, stride, dtype=value.dtype, device=value.device)

        made = self.writer.placeholder(node.name, self.writer.fake(fake))
        self.taken[made] = (position, tuple(extents) if dynamic else None)
        if dynamic:
            self.storages[value.untyped_storage()._cdata] = position
        return Padded(made, dims)

    def _number(self, value: Any) -> Any:
        """A number: as it is where no size decides it."""
        expr = self.bounds.settled(expression(value))
        if expr.free_symbols:
            return Symbolic(expr)
        return float(expr) if isinstance(value, float | torch.SymFloat) else int(expr)

    def _dynamic(self, given: Any, promised: Any) -> bool:
        """Whether a size decides anything of a call."""
        for leaf in pytree.tree_leaves(given, is_leaf=_leaf):
            if isinstance(leaf, Symbolic) or (isinstance(leaf, Padded) and leaf.dynamic):
                return True
        tensors = [leaf for leaf in pytree.tree_leaves(promised) if isinstance(leaf, torch.Tensor)]
        extents = [expression(extent) for tensor in tensors for extent in tensor.shape]
        return any(self.bounds.settled(extent).free_symbols for extent in extents if not extent.is_number)

    # Ops -------------------------------------------------------------------------------------------------

    def _block(self, graph: fx.Graph, values: dict[fx.Node, Any]) -> None:
        for node in graph.nodes:
            if node.op == "get_attr":
                values[node] = self._attribute(node)
            elif node.op not in ("placeholder", "output"):
                self.writer.trace = node.meta.get("stack_trace") or self.writer.trace
                values[node] = self._node(node, values)

    def _attribute(self, node: fx.Node) -> Any:
        found: Any = self.module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        if not isinstance(found, torch.Tensor):
            return found
        made = self.writer.attribute(str(node.target), found)
        return Padded(made, tuple(self.bounds.prefix(sympy.Integer(n)) for n in found.shape))

    def _node(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        promised = node.meta.get("val")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: values[given])
        if node.target is operator.getitem:
            source: Any = args[0]
            return source[args[1]]
        if isinstance(promised, torch.SymInt | torch.SymFloat | int | float) and not isinstance(promised, bool):
            return self._number(promised)
        if promised is None and _only_numbers(node):
            return None  # an assertion over sizes: the guards hold it
        if not self.within:
            self.outer = node
        try:
            return self._call(node.target, args, kwargs, node, values)
        except (Unsupported, NotImplementedError) as error:
            raise LoweringError(_FAILED.format(f"{node.target}: {error}{_line(self.outer or node)}.")) from error

    def _call(
        self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], node: fx.Node, values: dict[fx.Node, Any]
    ) -> Any:
        promised = node.meta.get("val")
        if not isinstance(op, torch._ops.OpOverload):
            return self._other(op, args, kwargs, promised, node)
        given = arguments_of(op, args, kwargs)
        if op is aten.copy_.default:
            return self._write(given)
        if not self._dynamic(list(given.values()), promised):
            return self._as_it_is(op, args, kwargs)
        call = Call(op, given, promised, self.writer)
        found = RULES.get(str(op)) or (pointwise if is_pointwise(op) else None)
        if found is None:
            return self._decomposed(op, node, values)
        return found(call)

    def _other(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], promised: Any, node: fx.Node) -> Any:
        """A higher-order op, or a function: allowed where nothing is dynamic, and for random states and barriers."""
        if op is barrier:
            return self._barrier(args)
        if isinstance(op, torch._ops.HigherOrderOperator) and op._name in _RANDOM_STATES:
            return self._drawn(op, list(args), kwargs, node)
        if not self._dynamic([args, kwargs], promised):
            return self._as_it_is(op, args, kwargs)
        if isinstance(op, torch._ops.HigherOrderOperator) and op._name == "scan":
            return scanned(self.writer, op, *args)
        if not isinstance(op, torch._ops.HigherOrderOperator):
            raise LoweringError(f"{UNHANDLED}\n  {node.format_node()}{_line(node)}")
        raise Unsupported("no rule for bounded dynamic dimensions")

    def _barrier(self, tensors: Sequence[Padded]) -> list[Padded]:
        made = self.writer.graph.call_function(barrier, tuple(tensor.node for tensor in tensors))
        made.meta["val"] = tuple(tensor.node.meta["val"] for tensor in tensors)
        return [Padded(self.writer.item(made, n), tensor.dims) for n, tensor in enumerate(tensors)]

    def _drawn(self, op: Any, args: list[Any], kwargs: dict[str, Any], node: fx.Node) -> Any:
        """A random op with the state that it saves or draws from."""
        writer = self.writer
        first = [_plain(args.pop(0))] if op._name == "run_with_rng_state" else []
        state = {"rng_state": kwargs.pop("rng_state")} if "rng_state" in kwargs else {}
        inner, saves = args.pop(0), op._name == "run_and_save_rng_state"
        nodes: list[fx.Node] = []

        def through(_: Any, *given: Any, **named: Any) -> fx.Node:
            given, named = plain_nodes(given), plain_nodes(named)
            values, others = fx.node.map_arg((given, named), lambda operand: operand.meta["val"])
            value = writer.fake(lambda: inner(*values, **others))
            made = writer.graph.call_function(op, (*first, inner, *given), {**named, **state})
            # The node itself says nothing of what it gives.
            made.meta["val"] = (writer.fake(_state), value) if saves else value
            nodes.append(made)
            return writer.item(made, 1) if saves else made

        found = RULES.get(str(inner)) or (pointwise if is_pointwise(inner) else None)
        if not self._dynamic([args, kwargs], None):
            result = self._wrapped(through(inner, *args, **kwargs))
        elif found is None:
            raise Unsupported(f"no rule for bounded dynamic dimensions of {inner}")
        else:
            result = found(Call(inner, arguments_of(inner, args, kwargs), _promise(inner, node), writer, through))
        return [self._wrapped(writer.item(nodes[0], 0)), result] if saves else result

    def _as_it_is(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        args, kwargs = pytree.tree_map(_plain, (list(args), kwargs), is_leaf=_leaf)
        return self._wrapped(self.writer.call(op, *args, **kwargs))

    def _wrapped(self, node: fx.Node) -> Any:
        """What a node of the static graph gives, none of it dynamic."""
        value = node.meta["val"]
        if isinstance(value, torch.Tensor):
            return self._static(node, value)
        if isinstance(value, tuple | list):
            return [self._wrapped(self.writer.item(node, n)) if _holds(v) else v for n, v in enumerate(value)]
        return node

    def _static(self, node: fx.Node, promised: torch.Tensor) -> Padded:
        return Padded(node, tuple(self.bounds.prefix(expression(extent)) for extent in promised.shape))

    def _decomposed(self, op: Any, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """The op as PyTorch takes it apart, part by part."""
        function = _decomposition(op)
        if function is None or op in self.within:
            own = [values[given] for given in node.all_input_nodes]
            raise Unsupported(f"no rule for bounded dynamic dimensions, here {_shown(own)}")
        inputs = list(node.all_input_nodes)

        def run(*moving: Any) -> Any:
            whole = dict(zip(inputs, moving, strict=True))
            args, kwargs = _mutable(fx.node.map_arg((node.args, node.kwargs), lambda given: whole[given]))
            made = function(*args, **kwargs)
            return tuple(made) if isinstance(made, tuple | list) else made

        fakes = [given.meta["val"] for given in inputs]
        with _mode_of(fakes):  # which makes constants fake, too
            traced = make_fx(run)(*fakes)
        inside = dict(zip(traced.graph.find_nodes(op="placeholder"), map(values.get, inputs), strict=True))
        self.within.append(op)
        self._block(traced.graph, inside)
        self.within.pop()
        returned = [inside[r] if isinstance(r, fx.Node) else r for r in output_arguments(traced.graph)]
        return returned if isinstance(node.meta["val"], tuple | list) else returned[0]

    def _write(self, given: dict[str, Any]) -> Any:
        """``copy_`` into an input."""
        target, source = given["self"], given["src"]
        if not target.dynamic:
            return Padded(self.writer.call(aten.copy_.default, target, source), target.dims)
        position, _ = self.taken[target.node]
        if [true_of(dim) for dim in source.dims] != [true_of(dim) for dim in target.dims]:
            raise Unsupported("a copy that broadcasts into an argument")
        if source.dtype is not target.dtype:
            source = Padded(self.writer.call(aten._to_copy.default, source, dtype=target.dtype), source.dims)
        self.writes[position] = source
        return source

    # Results ---------------------------------------------------------------------------------------------

    def _finish(self) -> Translated:
        writer = self.writer
        nodes: list[fx.Node] = []
        outputs = tuple(self._output(n, node, nodes) for n, node in enumerate(output_arguments(self.module.graph)))
        writes = []
        for position, value in self.writes.items():
            writes.append(Wrote(position, len(nodes), value.dims))
            nodes.append(self._dense(value.node))
        writer.graph.output(tuple(nodes))
        placeholders = writer.graph.find_nodes(op="placeholder")
        inputs = [node for node in placeholders if node in self.taken]
        expressions = {node: expr for expr, node in writer.sizes.items()}
        sizes = [expressions[node] for node in placeholders if node not in self.taken]
        order, seen = [], 0
        for number, node in enumerate(placeholders):
            mine = node in self.taken
            order.append(inputs.index(node) if mine else ~seen)
            seen += not mine
            _ = number
        taken = [self.taken[node] for node in inputs]
        made = fx.GraphModule(self.module, writer.graph)
        return Translated(
            made,
            tuple(position for position, _ in taken),
            tuple(extents for _, extents in taken),
            tuple(order),
            tuple(sizes),
            outputs,
            tuple(writes),
        )

    def _dense(self, node: fx.Node) -> fx.Node:
        if node.meta["val"].is_contiguous():
            return node
        return self.writer.call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _output(self, number: int, node: Any, nodes: list[fx.Node]) -> Given:
        value = self.values[node] if isinstance(node, fx.Node) else node
        if isinstance(value, fx.Node):
            nodes.append(value)
            return Given(len(nodes) - 1)
        if not isinstance(value, Padded):
            return Given(None, value)
        if value.node.meta["val"].device.type != DEVICE.type and not value.dynamic:
            nodes.append(value.node)
            return Given(len(nodes) - 1)
        view = _view_of(node.meta["val"])
        if node in self.positions and view.varies:
            return Given(None, node)
        if self.visible is not None and number >= self.visible:
            return self._saved(value, view, node.meta["val"], nodes)
        return self._visible(value, view, node.meta["val"], nodes)

    def _visible(self, value: Padded, view: View, promised: torch.Tensor, nodes: list[fx.Node]) -> Given:
        position = self.storages.get(promised.untyped_storage()._cdata)
        if position is not None:  # a view of an input: of the input as it was given, not of its padded copy
            base = next(node for node, at in self.positions.items() if at == position).meta["val"]
            offset = sympy.expand(view.offset - expression(base.storage_offset()))
            return Given(None, position, value.dims, dataclasses.replace(view, offset=offset))
        made = value.node.meta["val"]
        if view.varies or promised.stride() != made.stride() or promised.storage_offset() != made.storage_offset():
            nodes.append(self._dense(value.node))
            return Given(len(nodes) - 1, None, value.dims, view)
        nodes.append(value.node)
        return Given(len(nodes) - 1)

    def _saved(self, value: Padded, view: View, promised: torch.Tensor, nodes: list[fx.Node]) -> Given:
        if view.varies:
            for axis in value.axes():
                value = self.writer.prefixed(value, axis)
            nodes.append(self._dense(value.node))
            return Given(len(nodes) - 1, None, value.dims, view)
        nodes.append(self._strided(value.node, promised))
        return Given(len(nodes) - 1)

    def _strided(self, node: fx.Node, promised: torch.Tensor) -> fx.Node:
        """A saved tensor as the graph that takes it expects it to lie."""
        size, stride = [int(n) for n in promised.shape], [int(n) for n in promised.stride()]
        if node.meta["val"].stride() == promised.stride():
            return node
        made = self.writer.call(aten.alias.default, node)
        dtype, device = promised.dtype, promised.device
        made.meta["val"] = self.writer.fake(lambda: torch.empty_strided(size, stride, dtype=dtype, device=device))
        return made

    def _alias(self, position: int, promised: torch.Tensor, dims: tuple[Dim, ...]) -> Given:
        """A view of an input with dynamic dimensions: of the input as it was given, not of its padded copy."""
        view = _view_of(promised)
        base = next(node for node, at in self.positions.items() if at == position).meta["val"]
        offset = sympy.expand(view.offset - expression(base.storage_offset()))
        return Given(None, position, dims, dataclasses.replace(view, offset=offset))


def _mutable(values: Any) -> Any:
    """Lists that a function may write, where a graph has its own that nobody may."""
    if isinstance(values, tuple):
        return tuple(map(_mutable, values))
    if isinstance(values, list):
        return list(map(_mutable, values))
    return {name: _mutable(value) for name, value in values.items()} if isinstance(values, dict) else values


def _state() -> torch.Tensor:
    return torch.empty(_STATE, dtype=torch.uint8)


def _promise(inner: Any, node: fx.Node) -> Any:
    """What the meta kernel of a random op gives, of which the node that holds it says nothing."""
    given, named = fx.node.map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
    named = {name: value for name, value in named.items() if name != "rng_state"}
    given = given[given.index(inner) + 1 :]
    with _mode_of((given, named)), torch.no_grad():
        return inner(*given, **named)


def _mode_of(values: Any) -> FakeTensorMode:
    return next(value.fake_mode for value in pytree.tree_leaves(values) if isinstance(value, FakeTensor))


def _holds(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _leaf(value: Any) -> bool:
    return isinstance(value, Padded | Symbolic)


def _plain(value: Any) -> Any:
    return value.node if isinstance(value, Padded) else value


def _only_numbers(node: fx.Node) -> bool:
    return not any(isinstance(given.meta.get("val"), torch.Tensor) for given in node.all_input_nodes)


def _line(node: fx.Node) -> str:
    origin = node_origin(node)
    return f", issued at {describe(*origin[1:])}" if origin is not None else ""


def _shown(args: Sequence[Any]) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(list(args), is_leaf=_leaf) if isinstance(leaf, Padded)]
    return ", ".join("[" + ", ".join(map(_dim_text, tensor.dims)) + "]" for tensor in tensors)


def _dim_text(dim: Dim) -> str:
    return f"{true_of(dim)} (up to {extent_of(dim)})" if is_dynamic(dim) else str(extent_of(dim))


def _decomposition(op: Any) -> Any:
    from torch._decomp import decomposition_table

    found = decomposition_table.get(op)
    if found is None and op._can_decompose():
        return op.decompose
    return found
