"""A symbolic graph becomes a static one for given bounds."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from emutpu.backend.compile.graph import output_arguments
from emutpu.backend.compile.locations import node_origin
from emutpu.backend.dynamism import (
    rules_contractions,
    rules_factories,
    rules_indexing,
    rules_reductions,
    rules_views,
)
from emutpu.backend.dynamism.extents import Bounds, Dim, expression, extent_of, is_dynamic
from emutpu.backend.dynamism.rules import RULES, Call, Symbolic, Unsupported, arguments_of
from emutpu.backend.dynamism.rules_pointwise import is_pointwise, pointwise
from emutpu.backend.dynamism.writer import Padded, Writer
from emutpu.backend.errors import describe
from emutpu.backend.storage import DEVICE

__all__ = ["CPU_TENSORS", "UNHANDLED", "Given", "LoweringError", "Translated", "View", "Wrote", "translate"]

_FAMILIES = (rules_contractions, rules_factories, rules_indexing, rules_reductions, rules_views)
CPU_TENSORS = "CPU tensors are not supported in dynamic shapes compilation, please move inputs to TPU."
_REMEDY = "Please set torch.compile(..., dynamic=False, ...) and try again."
_FAILED = "Failed to lower FX graph with dynamic shapes to MLIR with error: {} " + _REMEDY
UNHANDLED = "Detected following unhandled SymInt usage(s) in FX graph. " + _REMEDY

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
            return _symbolic(value)
        if not isinstance(value, torch.Tensor):
            made = self.writer.placeholder(node.name, value)
            self.taken[made] = (position, None)
            return made
        if value.device.type != DEVICE.type and not _restores(node):
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
            return _symbolic(promised)
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
            return self._write(node, given)
        if not _dynamic(list(given.values()), promised):
            return self._as_it_is(op, args, kwargs, promised)
        call = Call(op, given, promised, self.writer)
        found = RULES.get(str(op)) or (pointwise if is_pointwise(op) else None)
        if found is None:
            return self._decomposed(op, node, values)
        return found(call)

    def _other(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], promised: Any, node: fx.Node) -> Any:
        """A higher-order op, or a function: allowed where nothing is dynamic."""
        if _dynamic([args, kwargs], promised):
            if not isinstance(op, torch._ops.HigherOrderOperator):
                raise LoweringError(f"{UNHANDLED}\n  {node.format_node()}{_line(node)}")
            raise Unsupported("no rule for bounded dynamic dimensions")
        return self._as_it_is(op, args, kwargs, promised)

    def _as_it_is(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], promised: Any) -> Any:
        args, kwargs = pytree.tree_map(_plain, (list(args), kwargs), is_leaf=_leaf)
        made = self.writer.call(op, *args, **kwargs)
        if isinstance(promised, torch.Tensor):
            return self._static(made, promised)
        if isinstance(promised, tuple | list):
            parts = [(self.writer.item(made, n), value) for n, value in enumerate(promised)]
            return [self._static(p, v) if isinstance(v, torch.Tensor) else v for p, v in parts]
        return made

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
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: whole[given])
            made = function(*args, **kwargs)
            return tuple(made) if isinstance(made, tuple | list) else made

        traced = make_fx(run)(*[given.meta["val"] for given in inputs])
        inside = dict(zip(traced.graph.find_nodes(op="placeholder"), map(values.get, inputs), strict=True))
        self.within.append(op)
        self._block(traced.graph, inside)
        self.within.pop()
        returned = [inside[r] if isinstance(r, fx.Node) else r for r in output_arguments(traced.graph)]
        return returned if isinstance(node.meta["val"], tuple | list) else returned[0]

    def _write(self, node: fx.Node, given: dict[str, Any]) -> Any:
        """``copy_`` into an input."""
        target, source = given["self"], given["src"]
        if not target.dynamic:
            return Padded(self.writer.call(aten.copy_.default, target, source), target.dims)
        position, _ = self.taken[target.node]
        _ = node
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


def _symbolic(value: Any) -> Any:
    """A number: as it is where no size decides it."""
    expr = expression(value)
    if expr.free_symbols:
        return Symbolic(expr)
    return float(expr) if isinstance(value, float | torch.SymFloat) else int(expr)


def _leaf(value: Any) -> bool:
    return isinstance(value, Padded | Symbolic)


def _plain(value: Any) -> Any:
    return value.node if isinstance(value, Padded) else value


def _only_numbers(node: fx.Node) -> bool:
    return not any(isinstance(given.meta.get("val"), torch.Tensor) for given in node.all_input_nodes)


def _dynamic(given: Any, promised: Any) -> bool:
    """Whether a size decides anything of a call."""
    for leaf in pytree.tree_leaves(given, is_leaf=_leaf):
        if isinstance(leaf, Symbolic) or (isinstance(leaf, Padded) and leaf.dynamic):
            return True
    for leaf in pytree.tree_leaves(promised):
        if isinstance(leaf, torch.Tensor) and any(isinstance(extent, torch.SymInt) for extent in leaf.shape):
            return True
    return False


def _restores(node: fx.Node) -> bool:
    restoring = torch._prims.rng_prims.run_with_rng_state
    return bool(node.users) and all(user.target is restoring and user.args[0] is node for user in node.users)


def _line(node: fx.Node) -> str:
    origin = node_origin(node)
    return f", issued at {describe(*origin[1:])}" if origin is not None else ""


def _shown(args: Sequence[Any]) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(list(args), is_leaf=_leaf) if isinstance(leaf, Padded)]
    return ", ".join("[" + ", ".join(map(_dim_text, tensor.dims)) + "]" for tensor in tensors)


def _dim_text(dim: Dim) -> str:
    from emutpu.backend.dynamism.extents import true_of

    return f"{true_of(dim)} (up to {extent_of(dim)})" if is_dynamic(dim) else str(extent_of(dim))


def _decomposition(op: Any) -> Any:
    from torch._decomp import decomposition_table

    found = decomposition_table.get(op)
    if found is None and op._can_decompose():
        return op.decompose
    return found
