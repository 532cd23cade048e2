"""How XLA's CPU compiler is made to spend less time on convolutions, at the same values.

Every figure is from a 2-core machine, jaxlib 0.10.2, in ms, medians.

*Which code.* A convolution of f32 is given to XLA's matrix library, which computes it on one thread, unless told
otherwise; XLA's own (Eigen's) takes all threads, and divides the work by the batch.

================================================  =========  ==========
operand, kernel                                   library    XLA's own
================================================  =========  ==========
[1, 64, 14, 14], [64, 64, 3, 3]                   0.12       0.21
[1, 3, 224, 224], [64, 3, 7, 7], stride 2         2.94       3.19
[8, 64, 14, 14], [64, 64, 3, 3]                   1.58       0.90
[16, 64, 28, 28], [64, 64, 1, 1]                  3.53       1.73
[8, 64, 28, 28], [64, 16, 3, 3], 4 groups         6.96       2.75
gradient of [32, 3, 3, 3], 96 pictures of 32x32   14.3       1.9
================================================  =========  ==========

*Its groups.* The gradient of a kernel in groups has the groups in the batch, where XLA multiplies every group with every
other and keeps the diagonal. As groups of features they are the same sums. Kernel's gradient, six passes (HIGHEST):

================================================  =========  ==========
operand, kernel                                   batch      features
================================================  =========  ==========
[2, 512, 14, 14], [512, 16, 3, 3]                 4344       40
[2, 584, 2, 2], [584, 1, 9, 9]                    754        16
[2, 64, 74], [64, 32, 19]                         409        7
[2, 64, 32, 32], [64, 1, 3, 3]                    11         26
================================================  =========  ==========

*Its padding.* Where a kernel has more places than what it is moved over, XLA exchanges the two and turns the kernel
round, which no library of its computes; nor is there one for zeros between the places (the gradient of what a stride
skipped) of volumes and of groups. Zeros that are written out cost little. One f32 product (HIGHEST takes six), full effort:

=============================================================  =========  ===========
operand, kernel                                                in window  written out
=============================================================  =========  ===========
[2, 64, 8, 8], [256, 64, 9, 9]                                 105        8.3
[2, 864, 2, 2], [864, 864, 3, 3]                               77         14
[1, 64, 8, 32, 32], [64, 64, 3, 3, 3], every second place      917        278
[2, 64, 56, 56], [64, 1, 3, 3] in 64 groups, every second      78         43
[2, 64, 56, 56], [64, 64, 3, 3], every second place            24         44
=============================================================  =========  ===========

*Its operands.* XLA puts channels last, and makes the transpose part of whatever computes the operand. That then reads
all of its inputs in strides: one stream at a time is read well, two of [96, 32, 32, 32] (a gradient
where its activation is positive) take 15.7 of the 17.3 of a region, which takes 6.4 when they are computed first and the
result is transposed. So such operands are computed by a
function of their own, which XLA does not look into. Not where an input is itself made by the module: between two
convolutions XLA leaves channels last, and transposes nothing.
"""

from __future__ import annotations

import math
from typing import Any

from emutpu import _jaxlib
from emutpu._jaxlib import context, entries, ir

from ._modules import ModuleInfo, entry, walk

__all__ = ["OWN_THREADS", "group_features", "on_own_threads", "separate_operands", "write_padding"]

OWN_THREADS = (
    (
        "xla_cpu_experimental_ynn_fusion_type",
        ",".join(f"LIBRARY_FUSION_TYPE_{kind}" for kind in ("INDIVIDUAL_DOT", "REDUCE")),
    ),
)
"""What XLA gives to its matrix library by default, less convolutions."""

_CONVOLUTION = "stablehlo.convolution"
_SMALLEST = 2**16  # elements: less than that stays in a core's own cache, in whatever order it is read
_STREAMS = 2
_PLANE = 2  # spatial dimensions
_DEPTH = 16  # of operations one behind another
_ELEMENTWISE = frozenset(
    f"stablehlo.{op}"
    for op in (
        "abs",
        "add",
        "and",
        "broadcast_in_dim",
        "clamp",
        "compare",
        "constant",
        "convert",
        "divide",
        "exponential",
        "logistic",
        "maximum",
        "minimum",
        "multiply",
        "negate",
        "not",
        "or",
        "rsqrt",
        "select",
        "sqrt",
        "subtract",
        "tanh",
    )
)


def on_own_threads(module: Any, info: ModuleInfo) -> bool:
    """Whether the module's convolutions are better not given to the matrix library: one has a batch, and f32 is all
    they multiply.
    """
    if _CONVOLUTION not in info.ops or not _jaxlib.matrix_library():
        return False
    found = [operation for operation in walk(module.operation) if operation.name == _CONVOLUTION]
    values = [value for operation in found for value in (*operation.operands, *operation.results)]
    if not all(isinstance(value.type.element_type, ir.F32Type) for value in values):
        return False
    return any(_batch(operation) > 1 for operation in found)


def _batch(operation: Any) -> int:
    numbers = _jaxlib.stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    shape: list[int] = operation.results[0].type.shape
    batch: int = shape[numbers.output_batch_dimension]
    return batch


def separate_operands(module: Any, info: ModuleInfo) -> None:
    """Move what computes a convolution's operand from two or more arguments of its size into a function, in place."""
    if _CONVOLUTION not in info.ops:
        return
    block = entry(module).body.blocks[0]
    convolutions = [operation.operation for operation in block.operations if operation.operation.name == _CONVOLUTION]
    operands = dict.fromkeys(operand for operation in convolutions for operand in operation.operands)
    for value in operands:
        cluster = _Cluster(value)
        if cluster.strided():
            cluster.move(module, f"emutpu.operand{list(operands).index(value)}")


def group_features(module: Any, info: ModuleInfo) -> None:
    """Give every convolution whose groups are in the batch (the gradient of a kernel in groups) groups of features, in place."""
    if _CONVOLUTION not in info.ops:
        return
    for operation in [found for found in walk(module.operation) if found.name == _CONVOLUTION]:
        groups = ir.IntegerAttr(operation.attributes["batch_group_count"]).value
        if groups > 1:
            with context(), operation.location:
                _group_features(operation, groups)


def _group_features(operation: Any, groups: int) -> None:
    numbers = _jaxlib.stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    batch, feature = numbers.input_batch_dimension, numbers.input_feature_dimension
    value, point = operation.operands[0], ir.InsertionPoint(operation)
    sizes = list(value.type.shape)
    split = [*sizes[:batch], groups, sizes[batch] // groups, *sizes[batch + 1 :]]
    at = feature + (feature > batch)  # the features, once the batch is two dimensions
    order = [dimension for dimension in range(len(split)) if dimension != batch]
    order.insert(order.index(at), batch)
    merged = list(sizes)
    merged[batch], merged[feature] = sizes[batch] // groups, groups * sizes[feature]
    parts = _made("reshape", value, split, point)
    parts = _made("transpose", parts, [split[d] for d in order], point, permutation=ir.DenseI64ArrayAttr.get(order))
    operation.operands[0] = _made("reshape", parts, merged, point)
    operation.attributes["feature_group_count"] = operation.attributes["batch_group_count"]
    operation.attributes["batch_group_count"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 1)


def write_padding(module: Any, info: ModuleInfo) -> None:
    """Give convolutions that XLA has no library for operands with their zeros written out, in place."""
    if _CONVOLUTION not in info.ops:
        return
    for operation in [found for found in walk(module.operation) if found.name == _CONVOLUTION]:
        window = _Window(operation)
        if window.exchanged or window.scattered:
            with context(), operation.location:
                window.write()


class _Window:
    """How a convolution's kernel moves over its operand."""

    def __init__(self, operation: Any) -> None:
        self._operation = operation
        self._numbers = _jaxlib.stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
        places = self._numbers.input_spatial_dimensions
        given = operation.attributes
        self._padding = [0] * 2 * len(places)
        if "padding" in given:
            self._padding = [int(size) for size in entries(ir.DenseIntElementsAttr(given["padding"]))]
        self._dilation = [1] * len(places)
        if "lhs_dilation" in given:
            self._dilation = entries(ir.DenseI64ArrayAttr(given["lhs_dilation"]))
        self._groups = ir.IntegerAttr(operation.attributes["feature_group_count"]).value

    @property
    def exchanged(self) -> bool:
        """Whether XLA would exchange operand and kernel."""
        operand, kernel = self._operation.operands
        over = math.prod(operand.type.shape[place] for place in self._numbers.input_spatial_dimensions)
        moved = math.prod(kernel.type.shape[place] for place in self._numbers.kernel_spatial_dimensions)
        return self._groups == 1 and moved > over and any(self._padding)

    @property
    def scattered(self) -> bool:
        """Whether there are zeros between the places of a volume, or of groups."""
        return max(self._dilation, default=1) > 1 and (self._groups > 1 or len(self._dilation) > _PLANE)

    def write(self) -> None:
        operation, point = self._operation, ir.InsertionPoint(self._operation)
        value = operation.operands[0]
        sizes, edges = list(value.type.shape), [[0] * len(value.type.shape) for _ in range(3)]
        for index, place in enumerate(self._numbers.input_spatial_dimensions):
            low, high, between = *self._padding[2 * index : 2 * index + 2], self._dilation[index] - 1
            sizes[place] += low + high + between * max(0, sizes[place] - 1)
            for kind, size in zip(edges, (low, high, between), strict=True):
                kind[place] = size
        element = value.type.element_type
        scalar = ir.RankedTensorType.get([], element)
        zero = ir.DenseElementsAttr.get_splat(scalar, ir.FloatAttr.get(element, 0.0))
        zeros = ir.Operation.create("stablehlo.constant", [scalar], [], {"value": zero}, ip=point).results[0]
        names = ("edge_padding_low", "edge_padding_high", "interior_padding")
        attributes = {name: ir.DenseI64ArrayAttr.get(kind) for name, kind in zip(names, edges, strict=True)}
        padded = ir.RankedTensorType.get(sizes, element)
        written = ir.Operation.create("stablehlo.pad", [padded], [value, zeros], attributes, ip=point).results[0]
        # XLA would make the padding a part of the window again.
        kept = ir.Operation.create("stablehlo.optimization_barrier", [padded], [written], ip=point).results[0]
        operation.operands[0] = kept
        for name in ("padding", "lhs_dilation"):
            if name in operation.attributes:
                del operation.attributes[name]


def _made(name: str, value: Any, sizes: list[int], point: Any, **attributes: Any) -> Any:
    kind = ir.RankedTensorType.get(sizes, value.type.element_type)
    return ir.Operation.create(f"stablehlo.{name}", [kind], [value], attributes, ip=point).results[0]


class _Cluster:
    """An elementwise value with all that computes it; ``inputs`` are what that takes, ``operations`` in order."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.operations: list[Any] = []
        self.inputs: list[Any] = []
        self._gather(value, _DEPTH)

    def _gather(self, value: Any, depth: int) -> None:
        operation = None if isinstance(value.owner, ir.Block) else value.owner.operation
        if operation is None or operation.name not in _ELEMENTWISE or not depth:
            if value not in self.inputs:
                self.inputs.append(value)
        elif operation not in self.operations:
            for operand in operation.operands:
                self._gather(operand, depth - 1)
            self.operations.append(operation)

    def strided(self) -> bool:
        """Whether transposing the value would read two or more arguments of its size, and nothing else of that size."""
        elements = math.prod(self.value.type.shape)
        whole = [value for value in self.inputs if math.prod(value.type.shape) == elements]
        arguments = all(isinstance(value.owner, ir.Block) for value in whole)
        return elements >= _SMALLEST and len(whole) >= _STREAMS and arguments

    def move(self, module: Any, name: str) -> None:
        with context(), self.value.owner.location:
            kinds = [value.type for value in self.inputs]
            signature = ir.TypeAttr.get(ir.FunctionType.get(kinds, [self.value.type]))
            attributes = {
                "sym_name": ir.StringAttr.get(name),
                "function_type": signature,
                "sym_visibility": ir.StringAttr.get("private"),
            }
            function = ir.Operation.create(
                "func.func", attributes=attributes, regions=1, ip=ir.InsertionPoint.at_block_begin(module.body)
            )
            self._fill(function.regions[0].blocks.append(*kinds))
            call = ir.Operation.create(
                "func.call",
                results=[self.value.type],
                operands=self.inputs,
                attributes={
                    "callee": ir.FlatSymbolRefAttr.get(name),
                    "mhlo.frontend_attributes": ir.DictAttr.get({"inlineable": ir.StringAttr.get("false")}),
                },
                ip=ir.InsertionPoint(self.value.owner),
            )
            self.value.replace_all_uses_with(call.results[0])

    def _fill(self, block: Any) -> None:
        known = list(zip(self.inputs, block.arguments, strict=True))
        point = ir.InsertionPoint(block)
        for operation in self.operations:
            copied = operation.clone(ip=point)
            for index, operand in enumerate(operation.operands):
                copied.operands[index] = next(inner for outer, inner in known if outer == operand)
            known.append((operation.results[0], copied.operation.results[0]))
        ir.Operation.create("func.return", operands=[known[-1][1]], ip=point)
