"""Copies between layouts that the compiler puts around operations which need a certain minor dimension.

An argument or result of the program lies as it pads least (:func:`.layout.padded_bytes`); a convolution and a pooling
window want features minor and the batch second, a sort and a running sum want their dimension out of the lanes. Values
between two kernels are written as their reader wants them, so only the ends of the program pay.
"""

from __future__ import annotations

from .attributes import Convolution
from .graph import BITS, Node, Spec
from .kernels import Kernel
from .layout import LANES, padded_bytes, tiled
from .rates import Rates
from .work import tree_reduction

__all__ = ["Copies", "copies", "lies_as_wanted"]

_FEW_FEATURES = 8  # fewer input features than this: the batch goes into the lanes instead


class Copies:
    """What relayouts add to a kernel: bytes of the copies, and bytes by which its own operand and result grow."""

    __slots__ = ("copied", "grown", "kernels")

    def __init__(self, copied: int = 0, grown: int = 0, kernels: int = 0) -> None:
        self.copied, self.grown, self.kernels = copied, grown, kernels


def _laid(spec: Spec, minor: int, second: int) -> int:
    """Bytes of ``spec`` with those two dimensions minor."""
    bits, shape = BITS[spec.dtype], spec.shape
    if minor == second or not spec.size:
        return spec.bytes
    return spec.size // (shape[minor] * shape[second]) * tiled(shape[minor], shape[second], bits) * bits // 8


def copies(kernel: Kernel, outputs: set[int], rates: Rates) -> Copies:
    """The relayouts around ``kernel``; ``outputs`` are the ids of the program's results."""
    key = kernel.key
    if kernel.kind == "convolution":
        return _convolution(kernel, key, outputs)
    if kernel.kind in ("reduce_window", "select_and_scatter"):
        if kernel.kind == "reduce_window" and tree_reduction(key):
            return _scan(key, rates)
        return _pooling(kernel, key, outputs)
    if kernel.kind == "sort":
        return _sort(key)
    if kernel.kind in ("dynamic_update_slice", "scatter"):
        return _preserving(kernel, key)
    return Copies()


def lies_as_wanted(kernel: Kernel, value: Node) -> bool:
    """Whether a convolution reads ``value`` as the program's arguments lie, so that it may be fetched ahead as it is."""
    if kernel.kind != "convolution" or kernel.key.inputs[0] is not value:
        return True
    conv: Convolution = kernel.key.attrs[0]
    batch, feature, spaces = conv.lhs
    spec = value.spec
    if feature == len(spec.shape) - 1 or not spaces:
        return False
    return _laid(spec, feature, batch) <= padded_bytes(spec) and spec.shape[spaces[-1]] % 8 != 0


def _external(node: Node) -> bool:
    return node.op == "parameter"


def _convolution(kernel: Kernel, key: Node, outputs: set[int]) -> Copies:
    conv: Convolution = key.attrs[0]
    made = Copies()
    base, out = key.inputs[0].spec, key.spec
    batch, feature, _ = conv.lhs
    if 1 < conv.feature_groups < base.shape[feature]:
        return _grouped(base, conv)
    if _external(key.inputs[0]):
        minor, second = (feature, batch) if base.shape[feature] >= _FEW_FEATURES else (batch, feature)
        wanted, lying = _laid(base, minor, second), padded_bytes(base)
        spatial = conv.lhs[2][-1] if conv.lhs[2] else second
        if min(wanted, _laid(base, minor, spatial)) > lying:
            made.copied += lying + wanted
            made.grown += wanted - lying
            made.kernels += 1
    if any(id(root) in outputs and root.spec.shape == out.shape for root in kernel.roots):
        batch, feature, spaces = conv.out
        written, lying = _laid(out, feature, batch), padded_bytes(out)
        ties = bool(spaces) and out.shape[spaces[-1]] % 8 == 0 and feature != len(out.shape) - 1
        if written > lying or ties:
            made.copied += written + lying
            made.grown += written - lying
            made.kernels += 1
    return made


def _grouped(base: Spec, conv: Convolution) -> Copies:
    """Groups of few features: each group is padded to the lanes, through a layout with the width minor."""
    batch, feature, spaces = conv.lhs
    lying = padded_bytes(base)
    per_group = base.shape[feature] // conv.feature_groups
    padded = base.bytes * (-(-per_group // LANES) * LANES) // per_group
    width = _laid(base, spaces[-1], feature) if spaces else lying
    return Copies(2 * (lying + width) + 2 * (width + padded), 2 * (padded - lying), 4)


def _pooling(kernel: Kernel, key: Node, outputs: set[int]) -> Copies:
    base = key.inputs[0].spec
    if len(base.shape) < 3:
        return Copies()
    made = Copies()
    wanted, lying = _laid(base, 1, len(base.shape) - 1), padded_bytes(base)
    if _external(key.inputs[0]) and (wanted > lying or kernel.kind == "select_and_scatter"):
        made = Copies(lying + wanted, wanted - lying, 1)
    if kernel.kind == "select_and_scatter" and any(id(root) in outputs for root in kernel.roots):
        made = Copies(made.copied + lying + wanted, made.grown + wanted - lying, made.kernels + 1)
    return made


def _scan(key: Node, rates: Rates) -> Copies:
    """A running sum is a product with a triangle per tile, then the sums of the tiles are added: two passes. Along the
    lanes the tiles are turned out of them and back, two copies each way.
    """
    size = padded_bytes(key.spec)
    window = key.attrs[0]
    dimension = max(range(len(window.size)), key=lambda d: window.size[d])
    turns = 4 if dimension == len(key.spec.shape) - 1 else 1
    return Copies(turns * size * rates.copy_transfers, 2 * size, turns)


def _sort(key: Node) -> Copies:
    """The sorted dimension leaves the lanes and comes back; a single operand is sorted with its positions (stable)."""
    size = padded_bytes(key.inputs[0].spec)
    turns = 2 if key.attrs[0] == len(key.inputs[0].spec.shape) - 1 else 0
    positions = 3 * size if len(key.inputs) == 1 else 0
    return Copies(turns * 2 * size, positions, turns)


def _preserving(kernel: Kernel, key: Node) -> Copies:
    """An update in place of an argument that the program keeps copies it first (donated ones are marked by the caller)."""
    base = key.inputs[0]
    size = padded_bytes(base.spec)
    if base.op == "parameter" and base.attrs[0] >= 0 and not base.attrs[1:]:
        return Copies(2 * size, 0, 1)
    return Copies()
