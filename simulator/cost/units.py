"""Cycles of one kernel on the MXU, the VPU and the path to memory."""

from __future__ import annotations

import dataclasses
import math

from .attributes import Convolution, Dot
from .graph import Node
from .kernels import Kernel
from .layout import padded_bytes
from .rates import Rates
from .tables import ELEMENTWISE, FREE, TRANSCENDENTAL
from .work import convolution_work, dot_shape

__all__ = ["Cycles", "cycles", "matrix_cycles"]

_VECTOR = 1024  # elements of a vector register of 32-bit values
_VECTOR_BYTES = 4096
_WINDOW = 8 << 20  # bytes of operands and result that a product holds in VMEM per step
_NARROW = frozenset({"bf16", "f16", "i8", "ui8", "i1", "f8E4M3FN", "f8E5M2"})


@dataclasses.dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles by unit; ``total`` is what the kernel takes with the units overlapped."""

    mxu: float
    vpu: float
    memory: float
    total: float


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def matrix_cycles(node: Node, rates: Rates) -> float:
    """Cycles the MXUs need for a product or convolution, its operands padded to the array: depth and columns to the
    side (a narrow side may be split over arrays), rows to 8; once per bf16 pass.
    """
    if node.op == "convolution":
        return _convolution_cycles(node, rates)
    batch, rows, depth, columns = dot_shape(node)
    return batch * _tile_cycles(rows, depth, columns, rates) * _passes(node)


def _tile_cycles(rows: int, depth: int, columns: int, rates: Rates) -> float:
    """The operand with the shorter free side streams or stays, whichever pads less."""
    best = math.inf
    for stream, still in ((rows, columns), (columns, rows)):
        padded = _up(stream, 8) * _up(depth, rates.side) * _up(still, rates.side)
        best = min(best, padded)
    return best / (rates.arrays * rates.side**2)


def _passes(node: Node) -> int:
    attribute: Dot | Convolution = node.attrs[0]
    wide = any(source.spec.dtype == "f32" for source in node.inputs[:2])
    return attribute.passes if wide else 1


def _convolution_cycles(node: Node, rates: Rates) -> float:
    conv: Convolution = node.attrs[0]
    counted, taps = convolution_work(node)
    del counted
    features = node.spec.shape[conv.out[1]] // max(conv.feature_groups, 1)
    positions = node.spec.size // max(node.spec.shape[conv.out[1]], 1)
    depth = node.inputs[1].spec.shape[conv.rhs[0]]
    window = taps // max(depth, 1)
    dense = window * _tile_cycles(positions, depth, features, rates)
    folded = _tile_cycles(positions, taps, features, rates) * 2
    return min(dense, folded) * conv.feature_groups * _passes(node)


def _reads_of(kernel: Kernel, spec_size: int) -> float:
    return sum(padded_bytes(read.spec) for read in kernel.reads if read.spec.size >= spec_size // 8)


def _arithmetic(kernel: Kernel, rates: Rates) -> float:
    total = 0.0
    for member in kernel.members.values():
        if member.op in FREE or member.op not in ELEMENTWISE:
            continue
        each = rates.transcendental * 8 if member.op in TRANSCENDENTAL else rates.operation
        total += each * member.spec.size / _VECTOR
    return total


def cycles(kernel: Kernel, read: int, written: int, rates: Rates) -> Cycles:
    """Cycles of a kernel that reads and writes that many bytes."""
    if kernel.kind in ("dot", "convolution"):
        return _matrix(kernel, read, written, rates)
    vector = _arithmetic(kernel, rates)
    moved = read + written
    alone = len([m for m in kernel.members.values() if m.op not in FREE]) <= 1 and kernel.kind in ("loop", "reduce")
    if alone and kernel.key.op != "vector_product" and _plain(kernel):
        space = max([kernel.key.spec.size, *(s.spec.size for s in kernel.key.inputs)])
        narrow = rates.plain_16 if kernel.key.spec.dtype in _NARROW else 0.0
        memory = space / _VECTOR * (rates.plain + narrow) + read / _VECTOR_BYTES * rates.plain_read
    else:
        memory = moved / _VECTOR_BYTES * rates.stream
        if kernel.kind == "reduce":
            memory += read / _VECTOR_BYTES * rates.reduce
    return Cycles(0.0, vector, memory, max(vector, memory) + rates.launch)


def _plain(kernel: Kernel) -> bool:
    return all(member.op not in FREE for member in kernel.members.values()) or kernel.key.op == "reduce"


def _matrix(kernel: Kernel, read: int, written: int, rates: Rates) -> Cycles:
    products = [m for m in kernel.members.values() if m.op in ("dot_general", "dot", "convolution")]
    mxu = sum(matrix_cycles(product, rates) for product in products) * rates.mxu
    if kernel.softmax and rates.recomputes_scores:
        mxu *= 2
    results = sum(product.spec.size for product in products) / _VECTOR
    memory = (read + written) / rates.matrix_bytes
    vector = max(_arithmetic(kernel, rates), results * rates.stream)
    busiest = max(mxu, memory, vector)
    steps = max(1.0, (read + written) / _WINDOW)
    exposed = min(mxu, memory) / steps
    return Cycles(mxu, vector, memory, busiest + exposed + rates.launch)
