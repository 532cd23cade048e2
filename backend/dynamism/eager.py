"""Bounded dynamic dimensions of single tensors: eager ops on them share one executable for all sizes.

A marked tensor is an alias of the tensor that was marked, of a class of its own, so that ops on other tensors know nothing
of marks. An op on it is traced once with a symbol for each size and compiled for the bounds; what it gives is marked where
its size depends on one of theirs. Ops without a rule run as they do on any tensor, one executable a size, and so does the
backward: autograd saves the tensors without their marks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from emutpu.backend.errors import describe, op_label
from emutpu.backend.location import capture
from emutpu.backend.storage import DEVICE

__all__ = ["BoundedDynamicDimension", "get_dynamism_info", "mark_dynamic"]

_LEAST = 2
_BOUNDS = "Dynamic shape lower/upper bound check failed"


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
            marks = {_geometry(p): leaf.mark for p, leaf in zip(plain, leaves, strict=True) if p is not leaf}
            with _Bounding(marks):
                result = function(*given, **named)
            same = {id(p): leaf for p, leaf in zip(plain, leaves, strict=True)}
            return pytree.tree_map_only(
                torch.Tensor, lambda t: same[id(t)] if id(t) in same else _remarked(t, marks), result
            )


Marks = dict[Hashable, BoundedDynamicDimension]


def _geometry(tensor: torch.Tensor) -> Hashable:
    """What two aliases of the same elements have in common."""
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _remarked(tensor: torch.Tensor, marks: Marks) -> torch.Tensor:
    if tensor.device.type != DEVICE.type:
        return tensor
    mark = marks.get(_geometry(tensor))
    return tensor if mark is None else _marked(tensor, mark)


class _Bounding(TorchDispatchMode):
    """Inside, ops on tensors with ``marks`` are bounded, and give such tensors; only forward ops of one call run in it."""

    def __init__(self, marks: Marks) -> None:
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


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], marks: Marks) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    known = [marks.get(_geometry(leaf)) if _on_device(leaf) else None for leaf in leaves]
    if not any(known):
        return op(*args, **kwargs)
    _refuse(op, args, kwargs, leaves, known)
    if op._schema.is_mutable or not _traceable(op, leaves):
        return op(*args, **kwargs)
    key = _key(op, leaves, known, spec)
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = _Program(op, leaves, known, spec)
    if not program.serves(leaves):
        return op(*args, **kwargs)
    result = op(*args, **kwargs) if program.graph is None else program.run(leaves)
    for tensor, mark in zip([result] if isinstance(result, torch.Tensor) else result, program.marks, strict=True):
        if mark is not None:
            marks[_geometry(tensor)] = mark
    return result


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE.type


def _traceable(op: Any, leaves: Sequence[Any]) -> bool:
    """Whether an op can be bounded: it works on the device, gives tensors, and draws nothing."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return False
    if any(str(result.type) not in {"Tensor", "List[Tensor]"} for result in op._schema.returns):
        return False
    devices = [leaf if isinstance(leaf, torch.device) else getattr(leaf, "device", DEVICE) for leaf in leaves]
    return all(device.type == DEVICE.type for device in devices)


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
        whole = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            whole[place] = tensor
        args, kwargs = pytree.tree_unflatten(whole, spec)
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
