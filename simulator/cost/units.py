"""Cycles of one kernel on the MXU, the VPU and the path to memory."""

from __future__ import annotations

import dataclasses
import math

from .attributes import Convolution, Dot
from .graph import BITS, Node
from .kernels import PRODUCTS, Kernel, kind_of
from .memory import Traffic
from .rates import Rates
from .tables import ELEMENTWISE, FREE, TRANSCENDENTAL
from .work import convolution_work, dot_shape, flops

__all__ = ["Cycles", "cycles", "matrix_cycles"]

_VECTOR = 1024  # elements of a vector register of 32-bit values
_VECTOR_BYTES = 4096
_STEPS = 8  # steps of a product's pipeline: its first operands and last results are not overlapped
_STEP_RESULTS = 650  # vectors of results per step, at most
_MATRIX_LAUNCH = 2.2  # launches of a product, in those of a loop
_LOADED_ROWS = 32  # streaming fewer rows than this through a tile costs as much: the tile has to be loaded
_DEPTHWISE = 2.7  # cycles per tap and 1,024 results of a depthwise convolution
_SORT_STAGE = 14.0  # cycles per stage of a sorting network and vector of 32-bit words
_WHOLE = 3  # room that an operation alone needs, in operands and results, to run without dividing them
_UNPACKED = 1.8  # a 16-bit operand that is unpacked to 32 bit takes the time of a 32-bit one, nearly
_NARROW = frozenset({"bf16", "f16", "i8", "ui8", "i1", "f8E4M3FN", "f8E5M2"})


@dataclasses.dataclass(frozen=True, slots=True)
class Cycles:
    """Cycles by unit; ``total`` is what the kernel takes with the units overlapped."""

    mxu: float
    vpu: float
    memory: float
    copies: float
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
        padded = max(_up(stream, 8), _LOADED_ROWS) * _up(depth, rates.side) * _up(still, rates.side)
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
    if depth == 1 and conv.feature_groups > 1:
        return node.spec.size / _VECTOR * taps * _DEPTHWISE  # on the VPU, one tap after the other
    dense = window * _tile_cycles(positions, depth, features, rates)
    folded = _tile_cycles(positions, taps, features, rates) * 2
    return min(dense, folded) * conv.feature_groups * _passes(node)


def _arithmetic(kernel: Kernel, rates: Rates) -> float:
    total = 0.0
    for member in kernel.members.values():
        if member.op in TRANSCENDENTAL:
            total += rates.transcendental * member.spec.size
        elif member.op in ELEMENTWISE:
            total += rates.operation * member.spec.size
    return total / _VECTOR


def cycles(kernel: Kernel, traffic: Traffic, rates: Rates) -> Cycles:
    """Cycles of a kernel that moves ``traffic``."""
    copied = traffic.timed / _VECTOR_BYTES * rates.stream
    if kernel.kind in PRODUCTS:
        return _matrix(kernel, traffic, copied, rates)
    vector = _arithmetic(kernel, rates)
    if kernel.kind == "reduce_window" and traffic.copied:
        vector = max(vector, flops(kernel.key) / 2 / (rates.side * _VECTOR) * rates.scan)
    memory = _loop(kernel, traffic, rates)
    if kernel.kind == "online_softmax":
        return _online_softmax(kernel.key, memory, copied, rates)
    if kernel.kind == "sort":
        vector = _sorting(key=kernel.key)
    return Cycles(
        0.0, vector, memory + copied, copied, max(vector, memory) + copied + rates.launch * (1 + traffic.copies)
    )


def _online_softmax(key: Node, memory: float, copied: float, rates: Rates) -> Cycles:
    """The call's own time, which the compiler does not estimate: its product, or its exponentials, or its operands."""
    mxu = matrix_cycles(key.attrs[0], rates) * rates.mxu
    vector = key.inputs[0].spec.size * (rates.transcendental + 3 * rates.operation) / _VECTOR
    return Cycles(mxu, vector, memory + copied, copied, max(mxu, vector, memory) + copied + rates.launch)


def _sorting(key: Node) -> float:
    """A bitonic network: log n (log n + 1) / 2 stages, each two rotations, a comparison and selections per vector."""
    extent = max(2, key.inputs[0].spec.shape[key.attrs[0]])
    depth = math.ceil(math.log2(extent))
    words = sum(max(4, source.spec.bytes // max(source.spec.size, 1)) // 4 * source.spec.size for source in key.inputs)
    return depth * (depth + 1) / 2 * words / _VECTOR * _SORT_STAGE


def _loop(kernel: Kernel, traffic: Traffic, rates: Rates) -> float:
    """Cycles to bring operands in and results out: an operation alone does it worse than a fused loop."""
    work = [member for member in kernel.members.values() if member.op not in FREE]
    key = kernel.key
    if len(work) == 1 == len(kernel.members) and _stands_alone(key):
        space = max(key.spec.size, key.inputs[0].spec.size if key.op == "reduce" else 0)
        narrow = rates.plain_16 if key.spec.dtype in _NARROW else 0.0
        taken = space / _VECTOR * (rates.plain + narrow) + traffic.read / _VECTOR_BYTES * rates.plain_read
        whole = _WHOLE * (traffic.read + traffic.written) <= rates.vmem * (1 - rates.vmem_share)
        return taken * (rates.whole if whole else 1.0)
    read = traffic.read
    if key.op == "vector_product":  # each element of the product is read, though some are spread from fewer
        read = max(read, math.prod(key.attrs) * BITS[key.inputs[0].spec.dtype] // 8)
    elif not work and key.op in ("broadcast_in_dim", "constant"):
        return key.spec.size / _VECTOR * rates.plain
    moved = (read + traffic.written) / _VECTOR_BYTES
    if key.op == "transpose" and len(work) == 1:
        return max(key.spec.size / _VECTOR, moved / 2) * rates.turn
    if kernel.kind == "reduce":
        return moved * rates.stream + read / _VECTOR_BYTES * rates.reduce
    if not rates.native_bf16 and key.spec.dtype == "bf16":
        moved *= _UNPACKED
    return moved * rates.stream


def _stands_alone(key: Node) -> bool:
    """Whether the compiler leaves the operation without a fusion: no scalar is spread into it, no second result."""
    if key.op == "reduce":
        return len(key.specs) == 1
    return (key.op in ELEMENTWISE or key.op in ("slice", "pad")) and all(
        s.value is None or key.op == "pad" for s in key.inputs
    )


def _matrix(kernel: Kernel, traffic: Traffic, copied: float, rates: Rates) -> Cycles:
    products = [member for member in kernel.members.values() if kind_of(member) in PRODUCTS]
    mxu = sum(matrix_cycles(product, rates) for product in products) * rates.mxu
    if kernel.softmax and rates.recomputes_scores:
        mxu *= 2
    results = (
        max(sum(product.spec.size for product in products), sum(root.spec.size for root in kernel.roots)) / _VECTOR
    )
    stored = results * (rates.result if traffic.to_hbm else rates.kept)
    vector = _arithmetic(kernel, rates)
    memory = max(stored, traffic.hbm / rates.matrix_bytes)
    busiest, other = max(mxu, memory), min(mxu, memory)
    exposed = other * max(1 / _STEPS, min(1.0, _STEP_RESULTS / max(results, 1)))
    return Cycles(
        mxu,
        vector,
        memory,
        copied,
        max(busiest + exposed, vector) + copied + rates.launch * (_MATRIX_LAUNCH + traffic.copies),
    )
