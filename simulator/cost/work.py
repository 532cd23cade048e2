"""Flops, transcendentals and bytes of one node, counted as XLA's cost analysis counts them.

A multiply-add is two flops; an elementwise operation one per element, whatever the type; the functions in
``tables.TRANSCENDENTAL`` count as transcendentals instead. A convolution counts only window positions inside the base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from .attributes import Convolution, Dot, Window
from .graph import Graph, Node
from .tables import ELEMENTWISE, LIBRARY, TRANSCENDENTAL

__all__ = ["conversions", "convolution_work", "dot_shape", "flops", "transcendentals", "tree_reduction"]

# A concatenation is a maximum of padded operands, or writes what it computes in place.
_COMPUTING = (ELEMENTWISE | {"concatenate"}) - {"convert", "compare", "select", "bitcast_convert"}
_SUBLANES = 8
_SCAN_TILE = 128  # a running sum is a product with a triangle of this side, then a running sum of the tiles
_RNG_FLOPS = {1: 50, 2: 45}  # per element that rng or rng_bit_generator makes, by number of results


def dot_shape(node: Node) -> tuple[int, int, int, int]:
    """Batch, rows, depth and columns of a ``dot_general``."""
    dot: Dot = node.attrs[0]
    lhs, rhs = node.inputs[0].spec, node.inputs[1].spec
    batch = math.prod(lhs.shape[d] for d in dot.lhs_batch)
    depth = math.prod(lhs.shape[d] for d in dot.lhs_contract)
    return batch, lhs.size // max(batch * depth, 1), depth, rhs.size // max(batch * depth, 1)


def _valid_positions(size: int, window: Window, dimension: int, out: int) -> int:
    """Pairs of output position and window position that fall on an element of the base."""
    stride, dilation = window.strides[dimension], window.dilation[dimension]
    base, low = window.base_dilation[dimension], window.padding[dimension][0]
    extent = (size - 1) * base + 1
    if out * window.size[dimension] > 1 << 20:
        return out * window.size[dimension]
    count = 0
    for tap in range(window.size[dimension]):
        offset = tap * dilation - low
        if base == 1:
            first = max(0, -(offset // stride)) if offset < 0 else 0
            last = min(out - 1, (extent - 1 - offset) // stride)
            count += max(0, last - first + 1)
        else:
            count += sum(0 <= p < extent and p % base == 0 for p in range(offset, offset + out * stride, stride))
    return count


def split_parts(node: Node) -> int:
    """Positions of each of the eight parts into which the last space of a convolution over a small batch is divided, so
    that the parts fill the sublanes; 0 where it is not.
    """
    conv: Convolution = node.attrs[0]
    batch, space = node.spec.shape[conv.out[0]], node.spec.shape[conv.out[2][-1]] if conv.out[2] else 0
    plain = conv.batch_groups == 1 and all(each == 1 for each in conv.window.base_dilation)
    if not plain or batch >= _SUBLANES or space < 2 * _SUBLANES or conv.window.size[-1] == 1:
        return 0
    return space // _SUBLANES + 1


def convolution_work(node: Node) -> tuple[int, int]:
    """Flops of a convolution, and multiply-adds per output element without padding."""
    conv: Convolution = node.attrs[0]
    lhs, rhs = node.inputs[0].spec.shape, node.inputs[1].spec.shape
    positions = 1
    for index, dimension in enumerate(conv.lhs[2]):
        if index == len(conv.lhs[2]) - 1 and (parts := split_parts(node)):
            positions *= _SUBLANES * parts * conv.window.size[index]
            continue
        positions *= _valid_positions(lhs[dimension], conv.window, index, node.spec.shape[conv.out[2][index]])
    batch = node.spec.shape[conv.out[0]]
    features = node.spec.shape[conv.out[1]]
    depth = rhs[conv.rhs[0]]
    if conv.batch_groups > 1:
        return 2 * positions * features * depth * (lhs[conv.lhs[0]] // conv.batch_groups), depth * math.prod(
            conv.window.size
        )
    return 2 * positions * batch * features * depth, depth * math.prod(conv.window.size)


def _body_flops(bodies: tuple[Graph, ...]) -> int:
    return max(1, sum(flops(node) for body in bodies for node in body.nodes))


def tree_reduction(node: Node) -> bool:
    """Whether a ``reduce_window`` is a running reduction over a whole dimension (cumsum, cumprod, cummax)."""
    window: Window = node.attrs[0]
    shape = node.inputs[0].spec.shape
    return any(bool(size > _SCAN_TILE) and size >= extent for size, extent in zip(window.size, shape, strict=True))


def _scan_flops(node: Node) -> int:
    window: Window = node.attrs[0]
    extent, size = max(window.size), node.spec.size
    tiles = -(-extent // _SCAN_TILE)
    return size * _SCAN_TILE + (size // _SCAN_TILE + size // extent) * max(tiles - 1, 0)


def _reduce(node: Node) -> int:
    inputs = node.inputs[0].spec.size
    return max(0, inputs - node.spec.size) * _body_flops(node.bodies)


def _reduce_window(node: Node) -> int:
    if tree_reduction(node):
        return _scan_flops(node)
    window: Window = node.attrs[0]
    return node.spec.size * max(0, math.prod(window.size) - 1) * _body_flops(node.bodies)


def _sort(node: Node) -> int:
    size = node.spec.size
    return size * max(1, math.ceil(math.log2(max(size, 2))))


def _dot(node: Node) -> int:
    batch, rows, depth, columns = dot_shape(node)
    return 2 * batch * rows * depth * columns


def _vector_product(node: Node) -> int:
    rows, columns, depth = node.attrs
    return int(rows * columns * depth + max(0, depth - 1) * rows * columns)


def _fft(node: Node) -> int:
    """A transform of length n by products with n x n matrices, as the compiler emits it: see ``assumptions``."""
    length = math.prod(node.attrs[0])
    return int(node.spec.size * (4 * math.ceil(math.sqrt(length)) * 8 + 10))


def _triangular(node: Node) -> int:
    side = node.inputs[0].spec.shape[-1]
    return node.spec.size * side


def _cholesky(node: Node) -> int:
    side = node.spec.shape[-1]
    return node.spec.size * side // 3


def _random(node: Node) -> int:
    return sum(spec.size for spec in node.specs) * _RNG_FLOPS.get(len(node.specs), 45)


def _online_softmax(node: Node) -> int:
    """A softmax over the rows of the first operand, and the product of the probabilities with the second."""
    return 5 * node.inputs[0].spec.size + flops(node.attrs[0])


_COUNTS: dict[str, Callable[[Node], int]] = {
    "dot_general": _dot,
    "dot": _dot,
    "vector_product": _vector_product,
    "online_softmax": _online_softmax,
    "row_shift": lambda node: node.spec.size + node.spec.size // node.spec.shape[-1] + node.spec.shape[-1] - 1,
    "convolution": lambda node: convolution_work(node)[0],
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "select_and_scatter": lambda node: node.inputs[1].spec.size * math.prod(node.attrs[0]),
    "scatter": lambda node: node.inputs[-1].spec.size * sum(flops(n) for body in node.bodies for n in body.nodes),
    "sort": _sort,
    "top_k": lambda node: node.inputs[0].spec.size * node.attrs[0],
    "concatenate": lambda node: 0 if in_place(node) else node.spec.size * (len(node.inputs) - 1),
    "gather": lambda node: node.inputs[1].spec.size,
    "fft": _fft,
    "triangular_solve": _triangular,
    "cholesky": _cholesky,
    "rng": _random,
    "rng_bit_generator": _random,
    "all_reduce": lambda node: sum(spec.size for spec in node.specs),
    "reduce_scatter": lambda node: node.inputs[0].spec.size,
    "batch_norm_training": lambda node: node.inputs[0].spec.size * 9,
    "batch_norm_inference": lambda node: node.inputs[0].spec.size * 4,
    "batch_norm_grad": lambda node: node.inputs[0].spec.size * 14,
}


def flops(node: Node) -> int:
    """Flops of one node."""
    counted = _COUNTS.get(node.op)
    if counted is not None:
        return int(counted(node))
    library = LIBRARY.get(node.op)
    if library is not None:
        return library[0] * node.spec.size
    if node.op in ELEMENTWISE and node.op not in TRANSCENDENTAL:
        return node.spec.size
    return 3 * node.spec.size if node.op == "logistic" else 0


def in_place(concatenation: Node) -> bool:
    """Whether each part of a concatenation is computed into its place; parts that lie in memory are padded and merged."""
    return all(source.op in ELEMENTWISE for source in concatenation.inputs)


def counted_flops(members: Iterable[Node]) -> int:
    """Flops of a whole softmax, or of a call of the compiler's own, as it counts them: none of its own; reductions are
    windows over whole rows, which count one operation a row and one a column.
    """
    total = 0
    for node in members:
        if node.op == "reduce":
            total += node.spec.size + node.inputs[0].spec.size // max(node.spec.size, 1) - 1
        else:
            total += 0 if node.op == "online_softmax" else flops(node)
    return total


def conversions(members: Iterable[Node], roots: Sequence[Node]) -> int:
    """Elements that a fused loop over bf16 converts to f32 and back, where the VPU computes in f32: each operand once,
    also a scalar that is spread, and each result. An operation alone converts nothing (its emitter does).
    """
    inside = list(members)
    narrow = [m for m in inside if m.spec.dtype == "bf16" and (m.op in _COMPUTING or m.op == "vector_product")]
    lone = len(inside) == 1 and inside[0].op not in ("vector_product", "concatenate")
    if not narrow or lone:
        return 0
    ids = {id(m) for m in inside}
    computing = {id(m) for m in narrow}
    converted: dict[int, int] = {}
    for node in narrow:
        size = node.inputs[0].spec.size if node.op == "vector_product" else node.spec.size
        for source in node.inputs:
            if source.spec.dtype == "bf16" and (id(source) not in ids or id(source) not in computing):
                converted[id(source)] = math.prod(node.attrs) if node.op == "vector_product" else size
        if node.op == "vector_product":
            converted[-1] = math.prod(node.attrs)
    return sum(converted.values()) + sum(
        root.spec.size for root in roots if id(root) in computing and root.op != "vector_product"
    )


WITH_TRANSCENDENTALS = TRANSCENDENTAL | LIBRARY.keys()


def transcendentals(node: Node) -> int:
    """Transcendental functions that one node evaluates."""
    library = LIBRARY.get(node.op)
    if library is not None:
        return library[1] * node.spec.size
    return node.spec.size if node.op in TRANSCENDENTAL else 0
