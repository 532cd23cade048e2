"""Writes the static graph: ops on padded tensors, the true sizes as arguments, masks from them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from emutpu.backend.dynamism.extents import Bounds, Dim, extent_of, is_dynamic, true_of
from emutpu.backend.storage import DEVICE

__all__ = ["Padded", "Writer", "greatest", "least", "plain_nodes"]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Padded:
    """A tensor of the static graph: the node that gives it, and what its dimensions hold."""

    node: fx.Node
    dims: tuple[Dim, ...]

    @property
    def dynamic(self) -> bool:
        """Whether any dimension has padding."""
        return any(map(is_dynamic, self.dims))

    @property
    def dtype(self) -> torch.dtype:
        """The elements' dtype."""
        dtype: torch.dtype = self.node.meta["val"].dtype
        return dtype

    def axes(self) -> list[int]:
        """The dimensions with padding."""
        return [axis for axis, dim in enumerate(self.dims) if is_dynamic(dim)]


def least(dtype: torch.dtype) -> float | int | bool:
    """What no element is less than."""
    if dtype is torch.bool:
        return False
    return -float("inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def greatest(dtype: torch.dtype) -> float | int | bool:
    """What no element but NaN is greater than."""
    if dtype is torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


class Writer:
    """``sizes`` maps each expression that the graph takes to its placeholder: 0-d int64 (float32 for fractions)."""

    def __init__(self, module: fx.GraphModule, bounds: Bounds) -> None:
        self.module = module
        self.bounds = bounds
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.sizes: dict[sympy.Expr, fx.Node] = {}
        self.trace: str | None = None  # the user's lines, for the nodes that are written
        self._last: fx.Node | None = None
        self._memo: dict[Hashable, fx.Node] = {}

    # Nodes -----------------------------------------------------------------------------------------------

    def placeholder(self, name: str, value: Any) -> fx.Node:
        """An argument with the (fake) value ``value``."""
        place = self.graph._root if self._last is None else self._last
        with self.graph.inserting_after(place):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        self._last = node
        return node

    def fake(self, make: Callable[[], Any]) -> Any:
        """What ``make`` gives when it works on fake tensors."""
        with self.mode, torch.no_grad():
            return make()

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """An op on nodes, :class:`Padded` tensors and constants. Raises what the op's meta kernel raises."""
        args, kwargs = plain_nodes(args), plain_nodes(kwargs)
        values = fx.node.map_arg((args, kwargs), lambda node: node.meta["val"])
        value = self.fake(lambda: op(*values[0], **values[1]))
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = value
        if self.trace is not None:
            node.meta["stack_trace"] = self.trace
        return node

    def attribute(self, target: str, value: torch.Tensor) -> fx.Node:
        """A tensor that the module holds."""
        node = self.graph.get_attr(target)
        node.meta["val"] = self.mode.from_tensor(value)
        return node

    def submodule(self, module: fx.GraphModule) -> fx.Node:
        """A graph that an op of this one takes; it is added to the module whose graph is written anew."""
        target = f"bounded_{len(list(self.module.children()))}"
        self.module.add_module(target, module)
        return self.graph.get_attr(target)

    def item(self, node: fx.Node, number: int) -> fx.Node:
        """One of several results."""
        return self.call(operator.getitem, node, number)

    def once(self, key: Hashable, make: Callable[[], fx.Node]) -> fx.Node:
        """The node of ``key``, written at its first use."""
        node = self._memo.get(key)
        if node is None:
            node = self._memo[key] = make()
        return node

    # Numbers ---------------------------------------------------------------------------------------------

    def size(self, expr: sympy.Expr) -> fx.Node:
        """The value of an expression over the symbols, as 0-d tensor."""
        expr = sympy.expand(expr)
        found = self.sizes.get(expr)
        if found is None:
            dtype = torch.int64 if expr.is_integer else torch.float32
            value = self.fake(lambda: torch.empty((), dtype=dtype, device=DEVICE))
            found = self.sizes[expr] = self.placeholder(f"size_{len(self.sizes)}", value)
        return found

    def scalar(self, value: float | bool, dtype: torch.dtype) -> fx.Node:
        """A 0-d constant."""
        key = ("scalar", repr(value), dtype)
        return self.once(key, lambda: self.call(aten.full.default, [], value, dtype=dtype, device=DEVICE))

    def iota(self, extent: int) -> fx.Node:
        """0, 1, … as int64."""
        return self.once(("iota", extent), lambda: self.call(aten.arange.default, extent, device=DEVICE))

    # Masks -----------------------------------------------------------------------------------------------

    def valid(self, dim: Dim) -> fx.Node:
        """Which elements of a dynamic dimension are no padding: bool, as long as the dimension."""
        return self.once(("valid", dim), lambda: self._valid(dim))

    def _valid(self, dim: Dim) -> fx.Node:
        inner = extent_of(dim)
        position = self.iota(inner)
        found: fx.Node | None = None
        for number, factor in enumerate(dim):
            inner //= factor.extent
            if not factor.dynamic:
                continue
            at = position
            if inner > 1:
                at = self.call(aten.floor_divide.default, at, self.scalar(inner, torch.int64))
            if number:
                at = self.call(aten.remainder.Scalar, at, factor.extent)
            inside = self.call(aten.lt.Tensor, at, self.size(factor.true))
            found = inside if found is None else self.call(aten.logical_and.default, found, inside)
        assert found is not None, "a static dimension has no padding"
        return found

    def along(self, node: fx.Node, axis: int, rank: int) -> fx.Node:
        """A vector laid along an axis, to be broadcast."""
        return self.call(aten.view.default, node, [-1 if d == axis else 1 for d in range(rank)])

    def mask_of(self, dims: Sequence[Dim], axes: Sequence[int]) -> fx.Node | None:
        """Which elements are no padding along the given axes, to be broadcast; None if none of them has any."""
        wanted = tuple((axis, dims[axis]) for axis in axes if is_dynamic(dims[axis]))
        if not wanted:
            return None

        def make() -> fx.Node:
            parts = [self.along(self.valid(dim), axis, len(dims)) for axis, dim in wanted]
            found = parts[0]
            for part in parts[1:]:
                found = self.call(aten.logical_and.default, found, part)
            return found

        return self.once(("mask", len(dims), wanted), make)

    def masked(self, tensor: Padded, axes: Sequence[int], fill: float | bool) -> Padded:
        """``tensor`` with its padding along ``axes`` (from 0) replaced."""
        mask = self.mask_of(tensor.dims, axes)
        if mask is None:
            return tensor
        node = tensor.node
        key = ("masked", node, mask, repr(fill))
        other = self.scalar(fill, tensor.dtype)
        return Padded(self.once(key, lambda: self.call(aten.where.self, mask, node, other)), tensor.dims)

    def clean(self, tensor: Padded, fill: float | bool = 0) -> Padded:
        """``tensor`` with all its padding replaced."""
        return self.masked(tensor, tensor.axes(), fill)

    # Layouts ---------------------------------------------------------------------------------------------

    def fitted(self, node: fx.Node, axis: int, extent: int) -> fx.Node:
        """``node`` with padding dropped or added at the end of an axis."""
        given = node.meta["val"].shape[axis]
        if given > extent:
            return self.call(aten.slice.Tensor, node, axis, 0, extent)
        if given < extent:
            after = len(node.meta["val"].shape) - 1 - axis
            return self.call(aten.constant_pad_nd.default, node, [0, 0] * after + [0, extent - given])
        return node

    def taken(self, tensor: Padded, axis: int, index: fx.Node, dim: Dim) -> Padded:
        """The elements at ``index`` (int64, in range for elements that count) along an axis."""
        extent = extent_of(tensor.dims[axis])
        inside = self.call(aten.clamp.default, index, 0, max(extent - 1, 0))
        node = self.call(aten.index_select.default, tensor.node, axis, inside)
        return Padded(node, (*tensor.dims[:axis], dim, *tensor.dims[axis + 1 :]))

    def prefixed(self, tensor: Padded, axis: int) -> Padded:
        """The same tensor with all padding of an axis at its end."""
        dim = tensor.dims[axis]
        if len(dim) <= 1:
            return tensor
        wanted = self.bounds.prefix(true_of(dim))
        (index,) = [self.linear([wanted], dim)]
        return self.taken(tensor, axis, index, wanted)

    def bounded(self, tensor: Padded, axis: int, dim: Dim) -> Padded:
        """A tensor whose axis has its padding at its end, with ``dim`` instead: a prefix of as many elements that count."""
        node = self.fitted(tensor.node, axis, extent_of(dim))
        return Padded(node, (*tensor.dims[:axis], dim, *tensor.dims[axis + 1 :]))

    def linear(self, wanted: Sequence[Dim], given: Dim) -> fx.Node:
        """For each element of prefixes ``wanted``, in row-major order, its place among elements that lie as ``given``."""
        return self.once(("linear", tuple(wanted), given), lambda: self._linear(wanted, given))

    def _linear(self, wanted: Sequence[Dim], given: Dim) -> fx.Node:
        rank = len(wanted)
        number: fx.Node | None = None
        step = sympy.Integer(1)
        for axis in reversed(range(rank)):
            part = self.along(self.iota(extent_of(wanted[axis])), axis, rank)
            if step != 1:
                part = self.call(aten.mul.Tensor, part, self.size(step))
            number = part if number is None else self.call(aten.add.Tensor, number, part)
            step = sympy.expand(step * true_of(wanted[axis]))
        assert number is not None
        number = self.call(aten.reshape.default, number, [-1])
        place: fx.Node | None = None
        pace = 1
        for position, factor in reversed(list(enumerate(given))):
            at = number
            if position:
                true = self.call(aten.clamp.default, self.size(factor.true), 1)
                at = self.call(aten.remainder.Tensor, number, true)
                number = self.call(aten.floor_divide.default, number, true)
            part = at if pace == 1 else self.call(aten.mul.Tensor, at, self.scalar(pace, torch.int64))
            place = part if place is None else self.call(aten.add.Tensor, place, part)
            pace *= factor.extent
        return place if place is not None else number


def plain_nodes(values: Any) -> Any:
    """Padded tensors as their nodes, inside of tuples, lists and dicts too."""
    if isinstance(values, Padded):
        return values.node
    if isinstance(values, tuple | list):
        return type(values)(plain_nodes(value) for value in values)
    if isinstance(values, dict):
        return {name: plain_nodes(value) for name, value in values.items()}
    return values
