"""Bounded dynamic dimensions of single tensors: eager ops on them share one executable for all sizes.

A marked tensor is an alias of the tensor that was marked, of a class of its own, so that ops on other tensors know nothing
of marks. An op on it is traced once with a symbol for each size and compiled for the bounds; what it gives is marked where
its size depends on one of theirs. Ops without a rule run as they do on any tensor, one executable a size.

Autograd saves tensors and makes gradients without that class. So storages remember what of them was marked, and hooks of
the nodes that a call made tell the backward which shapes are dynamic there: a gradient has the shape of what it is of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from emutpu.backend.errors import describe, op_label
from emutpu.backend.location import capture
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE, tensor_over

__all__ = ["BoundedDynamicDimension", "get_dynamism_info", "mark_dynamic"]

_LEAST = 2
_BOUNDS = "Dynamic shape lower/upper bound check failed"
_WATCHED = "emutpu.bounded"  # in the metadata of an autograd node: a marked tensor's call made it


@dataclasses.dataclass(frozen=True, slots=True)
class BoundedDynamicDimension:
    """A dimension whose extent varies between two bounds, both included."""

    dimension: int
    lower_bound: int
    upper_bound: int


# What is asked of the marked tensor itself, and what runs on it as on any other.
_OWN = frozenset(
    {"__get__", "__set__", "__delete__", "backward", "register_hook", "retain_grad", "requires_grad_", "as_subclass"}
)
_ORDINARY = frozenset({"__repr__", "__format__", "tolist", "item", "cpu", "numpy", "__deepcopy__", "__reduce_ex__"})


class BoundedTensor(torch.Tensor):
    """A tensor of the device with one bounded dynamic dimension, ``mark``."""

    mark: BoundedDynamicDimension

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function of PyTorch's on the tensors without marks, its ops bounded where that is possible."""
        kwargs = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in _OWN:
                return function(*args, **kwargs)
            leaves, spec = pytree.tree_flatten((args, kwargs))
            plain = [_plain(leaf) for leaf in leaves]
            given, named = pytree.tree_unflatten(plain, spec)
            if name in _ORDINARY:
                return function(*given, **named)
            marks = _Marks()
            for tensor, leaf in zip(plain, leaves, strict=True):
                if tensor is not leaf:
                    marks.put(tensor, leaf.mark)
            with _Bounding(marks):
                result = function(*given, **named)
            if torch.is_grad_enabled():
                _watch(result, plain, marks.shapes)
            same = {id(p): leaf for p, leaf in zip(plain, leaves, strict=True)}
            return pytree.tree_map_only(
                torch.Tensor, lambda t: same[id(t)] if id(t) in same else _remarked(t, marks), result
            )


Shapes = dict[tuple[int, ...], BoundedDynamicDimension | None]


def _geometry(tensor: torch.Tensor) -> Hashable:
    """What two aliases of the same elements have in common, beside their storage."""
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


class _Marks:
    """The marks of the tensors of one call, and which ``shapes`` it met with one: None where two disagree."""

    def __init__(self) -> None:
        self.shapes: Shapes = {}
        self._found: dict[Hashable, BoundedDynamicDimension] = {}

    def of(self, tensor: torch.Tensor) -> BoundedDynamicDimension | None:
        """The tensor's mark, if it has one."""
        return self._found.get((tensor.untyped_storage()._cdata, _geometry(tensor)))

    def put(self, tensor: torch.Tensor, mark: BoundedDynamicDimension) -> None:
        """Mark a tensor; its storage remembers it for the backward."""
        self._found[tensor.untyped_storage()._cdata, _geometry(tensor)] = mark
        shape = tuple(tensor.shape)
        self.shapes[shape] = mark if self.shapes.get(shape, mark) == mark else None
        _remember(tensor, mark)


def _remember(tensor: torch.Tensor, mark: BoundedDynamicDimension) -> None:
    tensor.untyped_storage().__dict__.setdefault("bounded", {})[_geometry(tensor)] = mark


class _Remembered:
    """The marks of a backward: those that storages remember, and those of the ``shapes`` of the node that runs or ran last."""

    def __init__(self) -> None:
        self.shapes: Shapes = {}

    def of(self, tensor: torch.Tensor) -> BoundedDynamicDimension | None:
        """The tensor's mark, if it has one."""
        known: Any = tensor.untyped_storage().__dict__.get("bounded")
        found = None if known is None else known.get(_geometry(tensor))
        return self.shapes.get(tuple(tensor.shape)) if found is None else found

    def put(self, tensor: torch.Tensor, mark: BoundedDynamicDimension) -> None:
        """Mark a tensor."""
        _remember(tensor, mark)


def _remarked(tensor: torch.Tensor, marks: _Marks) -> torch.Tensor:
    if tensor.device.type != DEVICE.type:
        return tensor
    mark = marks.of(tensor)
    return tensor if mark is None else _marked(tensor, mark)


# The backward --------------------------------------------------------------------------------------------


class _Backward(TorchDispatchMode):
    """Around a backward: from the first node on that :func:`_watch` saw, ops on dynamic tensors are bounded, sums of gradients too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks = _Remembered()

    def __torch_dispatch__(
        self, op: Any, _types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self.marks.shapes or not isinstance(op, torch._ops.OpOverload):
            return op(*args, **(kwargs or {}))
        return _run(op, args, dict(kwargs or {}), self.marks, forward=False)


def _watch(result: Any, inputs: Sequence[Any], shapes: Shapes) -> None:
    """Tell a backward through the nodes between ``inputs`` and ``result`` which ``shapes`` are dynamic."""
    seen = {leaf.grad_fn for leaf in inputs if isinstance(leaf, torch.Tensor)}
    waiting: list[Any] = [leaf.grad_fn for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

    def enter(_grads: Any) -> None:
        mode = _get_current_dispatch_mode()
        if isinstance(mode, _Backward):
            mode.marks.shapes = shapes

    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node.name() == "torch::autograd::AccumulateGrad":
            continue
        seen.add(node)
        node.register_prehook(enter)
        node.metadata[_WATCHED] = True
        waiting += [following for following, _ in node.next_functions]


def _around(roots: Sequence[Any]) -> AbstractContextManager[object]:
    """What a backward from ``roots`` runs in: nothing where no node is watched, for under a mode PyTorch's own formulas differ."""
    seen: set[Any] = set()
    waiting: list[Any] = [
        root.node if isinstance(root, torch.autograd.graph.GradientEdge) else root.grad_fn for root in roots
    ]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if _WATCHED in node.metadata:
            return _Backward()
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return nullcontext()


class _Bounding(TorchDispatchMode):
    """Inside, ops on tensors with ``marks`` are bounded, and give such tensors; only forward ops of one call run in it."""

    def __init__(self, marks: _Marks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.marks = marks
        self.kept: list[Any] = []  # so that no storage is given again whose mark is known

    def __torch_dispatch__(
        self, op: Any, _types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = _run(op, args, dict(kwargs or {}), self.marks)
        self.kept.append(result)
        return result


def mark_dynamic(tensor: torch.Tensor, dimension: int, lower_bound: int, upper_bound: int) -> torch.Tensor:
    """Declare one dimension of a device tensor dynamic; gives the tensor, or an alias of it that is so marked.

    Raises RuntimeError for another device, a lower bound below 2, an extent outside the bounds, and a second dynamic
    dimension; IndexError for a dimension that the tensor has not.
    """
    if tensor.device.type != DEVICE.type:
        raise RuntimeError("mark_dynamic(): tensor is not on the PrivateUse1 device")
    if lower_bound < _LEAST:
        raise RuntimeError(
            "mark_dynamic(): expected lower_bound to be >= 2 as 0/1-sized dimensions are processed with particular "
            f"assumptions (e.g. no-data, broadcastable), got {lower_bound}"
        )
    rank = tensor.dim()
    if not -rank <= dimension < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dimension})"
        )
    dimension %= rank
    extent = tensor.shape[dimension]
    if not lower_bound <= extent <= upper_bound:
        raise RuntimeError(
            f"mark_dynamic(): {_BOUNDS}: dimension {dimension} is {extent}, expected {lower_bound} to {upper_bound}"
        )
    runtime().around_backward = _around
    mark = BoundedDynamicDimension(dimension, lower_bound, upper_bound)
    for known in get_dynamism_info(tensor):
        if known == mark:
            return tensor
        if known.dimension != dimension:
            raise RuntimeError(
                f"mark_dynamic(): cannot mark dimension {dimension} as dynamic, because dimension {known.dimension} is "
                "already marked as dynamic (multiple dynamic dimensions in one tensor is not yet supported)"
            )
    return _marked(_plain(tensor), mark)


def get_dynamism_info(tensor: torch.Tensor) -> list[BoundedDynamicDimension]:
    """The bounded dynamic dimensions of a tensor: none or one."""
    return [tensor.mark] if isinstance(tensor, BoundedTensor) else []


def _marked(tensor: torch.Tensor, mark: BoundedDynamicDimension) -> BoundedTensor:
    made = tensor.as_subclass(BoundedTensor)
    made.mark = mark
    return made


def _plain(tensor: Any) -> Any:
    """The same memory without a mark; gradients go through."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, BoundedTensor) else tensor


# Running an op -------------------------------------------------------------------------------------------


def _run(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], marks: _Marks | _Remembered, *, forward: bool = True
) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    known = [marks.of(leaf) if _on_device(leaf) else None for leaf in leaves]
    if op in _SIZED and not any(known):
        mark = marks.shapes.get(tuple(args[1]))
        if mark is not None:
            leaves, known = (
                [*leaves, _carrier(args[1][mark.dimension])],
                [*known, dataclasses.replace(mark, dimension=0)],
            )
    if not any(known):
        return op(*args, **kwargs)
    if forward:
        _refuse(op, args, kwargs, leaves, known)
    if (
        op._schema.is_mutable
        or not _traceable(op, args, kwargs, leaves)
        or (not forward and _uncertain(op, leaves, known))
    ):
        return op(*args, **kwargs)
    given, (op, leaves) = op, _general(op, leaves, known, spec)
    key = _key(op, leaves, known, spec)
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = _Program(op, leaves, known, spec)
    if not program.serves(leaves):
        return given(*args, **kwargs)
    result = given(*args, **kwargs) if program.graph is None else program.run(leaves)
    for tensor, mark in zip([result] if isinstance(result, torch.Tensor) else result, program.marks, strict=True):
        if mark is not None:
            marks.put(tensor, mark)
    return result


def _carrier(extent: int) -> torch.Tensor:
    """One more operand, for a call whose result alone has a dynamic extent: it tells the extent, and is not read."""
    from emutpu.backend.dynamism.transfer import scalar

    return tensor_over(scalar(0, torch.int64).untyped_storage(), torch.int64, 0, (extent,), (0,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Extent:
    """Stands for the dynamic extent of the tensor at ``place`` among the leaves of a call."""

    place: int


_SIZED = (torch.ops.aten.select_backward.default, torch.ops.aten.slice_backward.default)
_SIZES = frozenset({"input_sizes", "max_q", "max_k"})  # arguments that repeat the extents of tensors
_BESIDE_TENSORS = {
    getattr(torch.ops.aten, name).Scalar: getattr(torch.ops.aten, name).Tensor for name in ("add", "sub", "mul", "div")
}
_EXACT = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})


def _general(
    op: Any, leaves: Sequence[Any], known: Sequence[BoundedDynamicDimension | None], spec: Any
) -> tuple[Any, list[Any]]:
    """A call with what a size may decide in it as values: numbers beside tensors, extents of its result."""
    args, _ = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    general = list(leaves)
    sizes = [
        number for name, given in zip(_names(op), args, strict=False) if name in _SIZES for number in _several(given)
    ]
    if sizes:
        place = next(n for n, mark in enumerate(known) if mark is not None)
        extent = leaves[place].shape[known[place].dimension]  # type: ignore[union-attr]  # the place of a mark
        for number in sizes:
            if leaves[number] == extent:
                general[number] = _Extent(place)
    op = _BESIDE_TENSORS.get(op, op)
    if torch.Tag.pointwise in op.tags and all(t.dtype in _EXACT for t in leaves if isinstance(t, torch.Tensor)):
        wide = any(t.dtype is torch.float64 for t in leaves if isinstance(t, torch.Tensor))
        for number, argument in zip(args, op._schema.arguments, strict=False):
            value: Any = leaves[number] if isinstance(number, int) else None
            if str(argument.type) == "Tensor" and type(value) in (int, float):
                general[number] = _as_tensor(value, wide=wide)
    return op, general


def _as_tensor(value: float, *, wide: bool) -> torch.Tensor:
    """A number as 0-d tensor of the device, which promotes as the number does. It is copied there, not computed."""
    from emutpu.backend.dynamism.transfer import scalar

    return scalar(value, torch.int64 if isinstance(value, int) else torch.float64 if wide else torch.float32)


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE.type


def _names(op: Any) -> list[str]:
    return [argument.name for argument in op._schema.arguments]


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _draws_nothing(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a random op is called without dropout."""
    names = _names(op)
    if "dropout_p" not in names:
        return False
    place = names.index("dropout_p")
    return not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))


def _traceable(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]) -> bool:
    """Whether an op can be bounded: it works on the device, gives tensors, and draws nothing."""
    if torch.Tag.nondeterministic_seeded in op.tags and not _draws_nothing(op, args, kwargs):
        return False
    if any(str(result.type) not in _GIVEN for result in op._schema.returns):
        return False
    devices = [leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", DEVICE) for leaf in leaves]
    return all(device.type == DEVICE.type for device in devices)


_GIVEN = frozenset({"Tensor", "List[Tensor]", "int"})
_CHECKED = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "dot"})


def _uncertain(op: Any, leaves: Sequence[Any], known: Sequence[BoundedDynamicDimension | None]) -> bool:
    """Whether an operand of a backward op may be dynamic without being known as such. Ops that compare shapes would tell."""
    if torch.Tag.pointwise in op.tags or op._opname in _CHECKED:
        return False
    sizes = {leaf.shape[mark.dimension] for leaf, mark in zip(leaves, known, strict=True) if mark is not None}
    others = [leaf for leaf, mark in zip(leaves, known, strict=True) if mark is None and isinstance(leaf, torch.Tensor)]
    return any(extent in sizes for other in others for extent in other.shape)


_STATIC = ("_fft_", "embedding_bag", "_embedding_bag")


def _refuse(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    known: Sequence[BoundedDynamicDimension | None],
) -> None:
    """Raise for what the device wants static dimensions for."""
    name = op._schema.name.partition("::")[2]
    tensor, mark = next((leaf, mark) for leaf, mark in zip(leaves, known, strict=True) if mark is not None)
    sliced = name == "slice" and _axis(args, kwargs) == mark.dimension and not _whole(args, kwargs)
    bits = str(op) == "aten.view.dtype" and kwargs.get("dtype", args[-1]).itemsize != tensor.dtype.itemsize
    if not sliced and not bits and not name.startswith(_STATIC):
        return
    raise NotImplementedError(
        f"{op_label(str(op))}(): expected a tensor with static dimensions, got {_shape_text(tensor, mark)}\n"
        f"  issued at {describe(*capture())}\n  take the mark away: tensor.as_subclass(torch.Tensor)"
    )


def _axis(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    dim: int = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    rank: int = args[0].dim()
    return dim % rank


def _whole(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a slice takes everything."""
    start, end, step = [*args, *[None] * 5][2:5]
    start, end, step = kwargs.get("start", start), kwargs.get("end", end), kwargs.get("step", step)
    return not start and step in {None, 1} and (end is None or end >= args[0].shape[_axis(args, kwargs)])


def _shape_text(tensor: torch.Tensor, mark: BoundedDynamicDimension) -> str:
    """``[3, 10 (up to 20)]``."""
    extents = [
        f"{extent} (up to {mark.upper_bound})" if axis == mark.dimension else str(extent)
        for axis, extent in enumerate(tensor.shape)
    ]
    return f"[{', '.join(extents)}]"


def _key(op: Any, leaves: Sequence[Any], known: Sequence[BoundedDynamicDimension | None], spec: Any) -> Hashable:
    """What decides a program: everything but the dynamic sizes, and which of them are equal."""
    parts: list[Hashable] = [op, str(spec)]
    symbols: dict[tuple[int, int, int], int] = {}
    for leaf, mark in zip(leaves, known, strict=True):
        if not isinstance(leaf, torch.Tensor):
            parts.append((type(leaf), str(leaf)))
            continue
        size: list[Any] = list(leaf.shape)
        if mark is not None:
            limits = (mark.lower_bound, mark.upper_bound)
            same = symbols.setdefault((size[mark.dimension], *limits), len(symbols))
            size[mark.dimension] = ("s", same, *limits)
        parts.append((tuple(size), leaf.dtype))
    return tuple(parts)


class _Program:
    """An op at given bounds. Without a ``graph`` it runs as it is: a view, or one that no rule lowers."""

    def __init__(
        self, op: Any, leaves: Sequence[Any], known: Sequence[BoundedDynamicDimension | None], spec: Any
    ) -> None:
        from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

        from emutpu.backend.dynamism.program import BoundedGraph
        from emutpu.backend.dynamism.symbols import Symbols
        from emutpu.backend.dynamism.translate import LoweringError

        self.graph: BoundedGraph | None = None
        self.marks: list[BoundedDynamicDimension | None] = []
        self._symbols: Symbols | None = None
        self._varying = [m is not None for leaf, m in zip(leaves, known, strict=True) if isinstance(leaf, torch.Tensor)]
        for variant, form in _forms(op, leaves, spec):
            module = _traced(op, variant, known, form)
            if not _varies(module):
                continue
            symbols = Symbols(module)
            try:
                symbols.check_guards()
                if not _is_view(op):
                    self.graph = BoundedGraph(module, f"bounded_{op_label(str(op))}", bucket_size=1)
            except (LoweringError, ConstraintViolationError):
                continue
            outputs: Any = fx.map_arg(module.graph.output_node().args[0], lambda node: node.meta["val"])
            self._single = not isinstance(outputs, tuple | list)
            self.marks = [_mark_of(value, symbols.bounds()) for value in ([outputs] if self._single else outputs)]
            self._guards = [guard.expr for guard in symbols.environment.guards]
            if self.graph is not None or any(self.marks):
                self._symbols = symbols
                break

    def serves(self, leaves: Sequence[Any]) -> bool:
        """Whether it says anything of these sizes."""
        if self._symbols is None:
            return False
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values = {symbol: sympy.Integer(size) for symbol, size in self._symbols.values_of(inputs).items()}
        return all(guard.xreplace(values) is not sympy.false for guard in self._guards)

    def run(self, leaves: Sequence[Any]) -> Any:
        """The op's results."""
        assert self.graph is not None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Of a static operand the graph takes the storage as it lies, of a dynamic one a copy.
        outputs = self.graph(
            [t if varies else t.contiguous() for t, varies in zip(tensors, self._varying, strict=True)]
        )
        return outputs[0] if self._single else tuple(outputs)


_programs: dict[Hashable, _Program] = {}


def _is_view(op: Any) -> bool:
    """Whether an op gives another view of its operand, and no new values."""
    return op in _SHAPED or any(result.alias_info is not None for result in op._schema.returns)


_SHAPED = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.expand.default)


def _forms(op: Any, leaves: Sequence[Any], spec: Any) -> list[tuple[list[Any], Any]]:
    """Ways to write a call: as it is, and where shapes are given as numbers, with the dynamic one left open (-1)."""
    plain = [(list(leaves), spec)]
    if op not in _SHAPED:
        return plain
    args, kwargs = pytree.tree_unflatten(list(leaves), spec)
    tensor, size, *rest = args
    if op is torch.ops.aten.expand.default:
        new = len(size) - tensor.dim()
        own = [-1 if n >= new and tensor.shape[n - new] == extent else extent for n, extent in enumerate(size)]
        opened = [own]
    else:
        opened = [[-1 if n == at else extent for n, extent in enumerate(size)] for at in range(len(size))]
        opened = [shape for shape, extent in zip(opened, size, strict=True) if extent >= 2 and -1 not in size]
    return plain + [pytree.tree_flatten(((tensor, shape, *rest), kwargs)) for shape in opened]


def _traced(
    op: Any, leaves: Sequence[Any], known: Sequence[BoundedDynamicDimension | None], spec: Any
) -> fx.GraphModule:
    """The graph of one op on symbolic tensors."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
        StrictMinMaxConstraint,
    )
    from torch.utils._sympy.value_ranges import ValueRanges

    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    fakes = []
    for place in places:
        leaf = leaves[place]
        dynamic = [DimDynamic.STATIC] * leaf.dim()
        limits: list[Any] = [None] * leaf.dim()
        mark = known[place]
        if mark is not None:
            dynamic[mark.dimension] = DimDynamic.DUCK
            between = ValueRanges(sympy.Integer(mark.lower_bound), sympy.Integer(mark.upper_bound))
            limits[mark.dimension] = StrictMinMaxConstraint(warn_only=True, vr=between)
        context: Any = StatelessSymbolicContext(dynamic, constraint_sizes=limits)
        # Its own strides do not matter: the graph takes contiguous copies.
        like = torch.empty(leaf.shape, dtype=leaf.dtype, device=DEVICE)
        fakes.append(mode.from_tensor(like, symbolic_context=context, source=ConstantSource(f"operand_{place}")))

    def call(*tensors: Any) -> Any:
        given = dict(zip(places, tensors, strict=True))
        whole = [given.get(place, leaf) for place, leaf in enumerate(leaves)]
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, _Extent):
                whole[place] = given[leaf.place].shape[known[leaf.place].dimension]  # type: ignore[union-attr]  # marked
        args, kwargs = pytree.tree_unflatten(whole[: spec.num_leaves], spec)
        return op(*args, **kwargs)

    with torch.no_grad():
        return make_fx(call)(*fakes)


def _varies(module: fx.GraphModule) -> bool:
    """Whether tracing left a size free."""
    from emutpu.backend.dynamism.extents import expression

    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return any(expression(n).free_symbols for value in values if isinstance(value, torch.Tensor) for n in value.shape)


def _mark_of(value: Any, bounds: Any) -> BoundedDynamicDimension | None:
    """The mark of a result, if one of its dimensions varies."""
    from emutpu.backend.dynamism.extents import expression

    if not isinstance(value, torch.Tensor):
        return None
    varying = [(axis, expression(n)) for axis, n in enumerate(value.shape) if expression(n).free_symbols]
    if len(varying) != 1:
        return None
    ((axis, extent),) = varying
    lower = bounds.lower(extent)
    return BoundedDynamicDimension(axis, lower, bounds.upper(extent)) if lower >= _LEAST else None
