"""Copies between layouts that the compiler puts around operations which need a certain minor dimension.

An argument or result of the program lies as it pads least (:func:`.layout.natural`); a convolution and a pooling
window want features minor and the batch second, a sort and a running sum want their dimension out of the lanes. Values
between two kernels are written as their reader wants them, so only the ends of the program pay.
"""

from __future__ import annotations

from collections.abc import Callable

from .attributes import Convolution, Dot
from .graph import BITS, Node, Spec
from .kernels import PRODUCTS, Kernel
from .layout import LANES, laid_elements
from .rates import Rates
from .work import in_place, split_parts, tree_reduction

__all__ = ["Copies", "copies", "lies_as_wanted"]

_FEW_FEATURES = 8  # fewer input features than this: the batch goes into the lanes instead


class Copies:
    """What relayouts add to a kernel: bytes of the copies, and bytes by which its own operand and result grow.

    ``timed`` are the bytes of copies that take cycles: all unless some stay in VMEM.
    """

    __slots__ = ("copied", "grown", "kernels", "timed")

    def __init__(self, copied: int = 0, grown: int = 0, kernels: int = 0, timed: int | None = None) -> None:
        self.copied, self.grown, self.kernels = copied, grown, kernels
        self.timed = copied if timed is None else timed


_NONE = Copies()


def _laid(spec: Spec, minor: int, second: int) -> int:
    """Bytes of ``spec`` with those two dimensions minor."""
    if minor == second or not spec.size:
        return spec.bytes
    bits = BITS[spec.dtype]
    return laid_elements(spec.shape, bits, minor, second) * bits // 8


def copies(kernel: Kernel, outputs: set[int], rates: Rates) -> Copies:
    """The relayouts around ``kernel``; ``outputs`` are the ids of the program's results."""
    key = kernel.key
    around = _AROUND.get(kernel.kind)
    if around is not None:
        return around(kernel, outputs, rates)
    if key.op == "concatenate" and in_place(key) and id(key) in outputs:
        # Made in a buffer in VMEM, which is operand and result of two partial results, then copied out.
        return Copies(2 * key.spec.padded, 2 * key.spec.padded)
    return _NONE


def _windows(kernel: Kernel, outputs: set[int], rates: Rates) -> Copies:
    if kernel.kind == "reduce_window" and tree_reduction(kernel.key):
        return _scan(kernel.key, rates)
    return _pooling(kernel, kernel.key, outputs)


def _batched(kernel: Kernel, outputs: set[int], rates: Rates) -> Copies:
    del rates
    return _product(kernel, kernel.key, outputs) if kernel.key.attrs[0].lhs_batch else _NONE


def _row_major(key: Node, outputs: set[int]) -> Copies:
    """The compiler's own call takes and gives arrays with the last dimension in the lanes."""
    made = Copies()
    last = len(key.spec.shape) - 1
    for spec, outside in ((key.inputs[1].spec, _external(key.inputs[1])), (key.spec, id(key) in outputs)):
        if outside and spec.minor != last:
            _copy(made, spec, last, last - 1)
    return made


def lies_as_wanted(kernel: Kernel, value: Node) -> bool:
    """Whether a product, a convolution or a sum over windows reads ``value`` as the program's arguments lie, so that it may
    be fetched ahead as it is.
    """
    if kernel.kind == "reduce_window":
        return value.spec.minor == 1 and value.spec.second == 0 and len(value.spec.shape) > 2
    if kernel.kind != "convolution" or kernel.key.inputs[0] is not value:
        return kernel.kind in PRODUCTS
    conv: Convolution = kernel.key.attrs[0]
    return not split_parts(kernel.key) and {value.spec.minor, value.spec.second} == {conv.lhs[1], conv.lhs[0]}


def _external(node: Node) -> bool:
    return node.op == "parameter"


def _convolution(kernel: Kernel, key: Node, outputs: set[int]) -> Copies:
    conv: Convolution = key.attrs[0]
    made = Copies()
    base, out = key.inputs[0].spec, key.spec
    batch, feature, _ = conv.lhs
    if 1 < conv.feature_groups < base.shape[feature]:
        return _grouped(base, conv)
    if split_parts(key):
        return _split_over_batch(base, out, conv)
    if _external(key.inputs[0]):
        minor, second = (feature, batch) if base.shape[feature] >= _FEW_FEATURES else (batch, feature)
        if base.minor not in ((feature, batch) if base.shape[feature] >= _FEW_FEATURES else (batch,)):
            _copy(made, base, minor, second)
    if any(id(root) in outputs and root.spec.shape == out.shape for root in kernel.roots):
        batch, feature, _ = conv.out
        if {out.minor, out.second} != {feature, batch}:
            _copy(made, out, feature, batch)
    return made


_SPLIT_OPERAND, _SPLIT_RESULT = 7, 6  # transfers around a convolution whose last space is divided into more of a batch


def _split_over_batch(base: Spec, out: Spec, conv: Convolution) -> Copies:
    """The operand is turned, padded, cut into parts and each joined with the edge of the next; the result is turned back,
    cut and turned again.
    """
    laid = _laid(base, conv.lhs[1], conv.lhs[2][-1]), _laid(out, conv.out[1], conv.out[2][-1])
    return Copies(_SPLIT_OPERAND * laid[0] + _SPLIT_RESULT * laid[1], 0, 6)


def _copy(made: Copies, spec: Spec, minor: int, second: int) -> None:
    """Add a copy between the natural layout of ``spec`` and another."""
    wanted = _laid(spec, minor, second)
    made.copied += spec.padded + wanted
    made.timed += spec.padded + wanted
    made.grown += wanted - spec.padded
    made.kernels += 1


def _grouped(base: Spec, conv: Convolution) -> Copies:
    """Groups of few features: each group is padded to the lanes, through a layout with the width minor."""
    _, feature, spaces = conv.lhs
    lying = base.padded
    per_group = base.shape[feature] // conv.feature_groups
    padded = base.bytes * (-(-per_group // LANES) * LANES) // per_group
    width = _laid(base, spaces[-1], feature) if spaces else lying
    return Copies(2 * (lying + width) + 2 * (width + padded), 2 * (padded - lying), 4)


def _pooling(kernel: Kernel, key: Node, outputs: set[int]) -> Copies:
    base = key.inputs[0].spec
    if len(base.shape) < 3 or (kernel.kind == "reduce_window" and key.attrs[1] == "add"):
        return Copies()  # a sum over windows is a convolution, which takes features in the lanes as they lie
    made = Copies()
    if _external(key.inputs[0]) and (base.minor != 1 or kernel.kind == "select_and_scatter"):
        _copy(made, base, 1, len(base.shape) - 1)
    if kernel.kind == "select_and_scatter" and any(id(root) in outputs for root in kernel.roots):
        _copy(made, base, 1, len(base.shape) - 1)
    return made


def _scan(key: Node, rates: Rates) -> Copies:
    """A running sum is a product with a triangle per tile, then the sums of the tiles are added: two passes. Along the
    lanes the tiles are turned out of them and back, two copies each way, most of them in VMEM.
    """
    size = key.spec.padded
    window = key.attrs[0]
    dimension = max(range(len(window.size)), key=lambda d: window.size[d])
    turns = 4 if dimension == len(key.spec.shape) - 1 else 1
    return Copies(turns * size * rates.copy_transfers, 2 * size, turns, min(turns, 1) * 2 * size)


def _sort(key: Node) -> Copies:
    """A sorted dimension leaves the lanes, and comes back, where enough rows take its place; otherwise the operand is
    fetched, four transfers. A single operand is sorted with its positions (stable), which are made meanwhile.
    """
    base = key.inputs[0].spec
    last = len(base.shape) - 1
    turns = 2 if key.attrs[0] == last and _fills_lanes(base) else 0
    alone = len(key.inputs) == 1
    fetched = 4 * base.padded if alone and not turns and _external(key.inputs[0]) else 0
    return Copies(turns * 2 * base.padded, 3 * base.padded * alone + fetched, turns)


def _fills_lanes(spec: Spec) -> bool:
    """Whether the rows fill the lanes when they change places with the columns."""
    return len(spec.shape) > 1 and spec.shape[-2] % LANES == 0


def _largest(key: Node) -> Copies:
    """The largest of each row: the operand is turned like that of a sort, the few results are not."""
    base = key.inputs[0].spec
    return Copies(2 * base.padded, 0, 1) if _external(key.inputs[0]) and _fills_lanes(base) else Copies()


def _product(kernel: Kernel, key: Node, outputs: set[int]) -> Copies:
    """A batched product wants no batch dimension in the lanes."""
    dot: Dot = key.attrs[0]
    made = Copies()
    sides = ((key.inputs[0], dot.lhs_batch), (key.inputs[1], dot.rhs_batch))
    for source, batch in sides:
        rank = len(source.spec.shape)
        if _external(source) and source.spec.minor in batch:
            _copy(made, source.spec, rank - 1, rank - 2)
    if len(kernel.roots) == 1 and id(key) in outputs and key.spec.minor in range(len(dot.lhs_batch)):
        _copy(made, key.spec, len(key.spec.shape) - 1, len(key.spec.shape) - 2)
    return made


def _preserving(kernel: Kernel, key: Node) -> Copies:
    """An update in place of an argument that the program keeps copies it first (donated ones are marked by the caller)."""
    base = key.inputs[0]
    size = base.spec.padded
    if base.op == "parameter" and base.attrs[0] >= 0 and not base.attrs[1:]:
        return Copies(2 * size, 0, 1)
    return Copies()


_AROUND: dict[str, Callable[[Kernel, set[int], Rates], Copies]] = {
    "convolution": lambda kernel, outputs, rates: _convolution(kernel, kernel.key, outputs),
    "reduce_window": _windows,
    "select_and_scatter": _windows,
    "sort": lambda kernel, outputs, rates: _sort(kernel.key),
    "top_k": lambda kernel, outputs, rates: _largest(kernel.key),
    "dot": _batched,
    "dynamic_update_slice": lambda kernel, outputs, rates: _preserving(kernel, kernel.key),
    "scatter": lambda kernel, outputs, rates: _preserving(kernel, kernel.key),
    "online_softmax": lambda kernel, outputs, rates: _row_major(kernel.key, outputs),
}
