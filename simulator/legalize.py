"""Give f32 ``dot_general`` and ``convolution`` the precision that a TPU gives them, on a client that ignores
``precision_config``.

A TPU multiplies in bf16 and accumulates in f32. ``DEFAULT`` is one pass over operands rounded to bf16; ``HIGH`` three
passes over a two-way split; ``HIGHEST`` six passes over a three-way split. Error of 512x512x512, normal operands,
largest absolute error over the largest value: 2e-3, 4e-6 and 1.5e-7.

Six passes round a little less often than one f32 product, which errs by 2.1e-7 (k = 256) and 4.1e-7 (k = 512) where they
err by 1.1e-7 and 1.6e-7, and cost 4 to 8 times as much: ``native_highest`` is for whoever would rather have the time.

How an operand is rounded to bf16 matters twice:

* ``convert`` to bf16 makes a pass a bf16 operation. XLA:CPU is fast at those (512^3 in 0.7 of the f32 time) where its
  matrix library takes them, but where a dot is not in the library's layout it fails at run time ("Unsupported element
  type for DotThunk::Execute: BF16 x BF16 = F32"), and where a dot of one row and one column turns into multiplications
  it loses the rounding, even with excess precision forbidden. So only single, plain dots are compiled so, see
  :func:`plain_dot`.
* ``reduce_precision`` to 8 exponent and 7 mantissa bits keeps the pass in f32. It is the same function, for products of
  bf16 values are exact in f32, and nothing elides it.

The first failure also meets programs that multiply bf16 into f32 themselves: :func:`widen_bf16_dots` gives them f32
operands, which changes no value.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from emutpu._jaxlib import context, entries, ir, stablehlo

from ._modules import ModuleInfo, walk

__all__ = [
    "VERSION",
    "Rounding",
    "legalize_precision",
    "own_scatter_operands",
    "passes",
    "plain_dot",
    "widen_bf16_dots",
]

VERSION = 9
"""Raised with every change of what a client does to a module or its flags: executables cached before are then stale."""

_TARGETS = frozenset({"stablehlo.dot_general", "stablehlo.convolution"})
_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}


class Rounding(enum.Enum):
    """How an operand is rounded to bf16: ``CONVERT`` makes the passes bf16 operations, ``REDUCE`` keeps them f32."""

    CONVERT = "convert"
    REDUCE = "reduce_precision"


def legalize_precision(
    module: Any, info: ModuleInfo, rounding: Rounding = Rounding.REDUCE, *, native_highest: bool = False
) -> None:
    """Rewrite ``module`` in place; at once when nothing in it is concerned.

    Only operations of two f32 operands and an f32 result that carry ``precision_config`` are touched. ``native_highest``
    leaves ``HIGHEST`` to one f32 operation.
    """
    if not info.ops & _TARGETS:
        return
    for operation in [found for found in walk(module.operation) if found.name in _TARGETS]:
        count = passes(operation)
        if count is not None and not (count == 6 and native_highest):
            _Rewriter(operation, rounding).rewrite(count)


def plain_dot(operation: Any) -> bool:
    """True for ``[b, m, k] x [b, k, n]`` or its transposes, b optional, none of b, m, k, n below 2.

    Of a batch of one XLA makes a plain product whose left operand may be transposed, which is not in the library's layout.
    """
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    batches = len(numbers.lhs_batching_dimensions)
    if batches > 1 or any([*numbers.lhs_batching_dimensions, *numbers.rhs_batching_dimensions]):
        return False
    if len(numbers.lhs_contracting_dimensions) != 1:
        return False
    shapes = [operand.type.shape for operand in operation.operands]
    return all(len(shape) == batches + 2 and min(shape) > 1 for shape in shapes)


def widen_bf16_dots(module: Any, info: ModuleInfo) -> None:
    """Give every ``dot_general`` of bf16 operands and f32 result f32 operands instead, in place."""
    if "stablehlo.dot_general" not in info.ops:
        return
    for operation in [found for found in walk(module.operation) if found.name == "stablehlo.dot_general"]:
        kinds = [value.type.element_type for value in (*operation.operands, *operation.results)]
        if isinstance(kinds[2], ir.F32Type) and all(isinstance(kind, ir.BF16Type) for kind in kinds[:2]):
            _Rewriter(operation, Rounding.REDUCE).widen()


def own_scatter_operands(module: Any, info: ModuleInfo) -> None:
    """Give every ``scatter`` copies of what it writes into: the reference interpreter writes into the operand itself,
    and whatever reads that value later would see it changed. In place.
    """
    if "stablehlo.scatter" not in info.ops:
        return
    for operation in [found for found in walk(module.operation) if found.name == "stablehlo.scatter"]:
        _Rewriter(operation, Rounding.REDUCE).own(len(operation.results))


def passes(operation: Any) -> int | None:
    """How many bf16 passes an operation owes (1, 3 or 6), or None where it keeps its own precision."""
    if "precision_config" not in operation.attributes:
        return None
    values = (*operation.operands, *operation.results)
    if any(not isinstance(value.type.element_type, ir.F32Type) for value in values):
        return None
    asked = entries(ir.ArrayAttr(operation.attributes["precision_config"]))
    return max((_PASSES[stablehlo.PrecisionAttr(entry).value] for entry in asked), default=1)


class _Rewriter:
    """Replaces one operation by its passes, in front of it."""

    def __init__(self, operation: Any, rounding: Rounding) -> None:
        self.operation = operation
        self.rounding = rounding
        self.point = ir.InsertionPoint(operation)
        self.result = operation.results[0].type
        named = entries(operation.attributes)
        self.attributes = {entry.name: entry.attr for entry in named if entry.name != "precision_config"}

    def rewrite(self, count: int) -> None:
        with context(), self.operation.location:
            ways = {1: 1, 3: 2, 6: 3}[count]
            left, right = (self.split(operand, ways) for operand in self.operation.operands)
            products = [
                self.product(left[index], right[order - index])
                for order in range(ways - 1, -1, -1)
                for index in range(order + 1)
            ]
            total = self.total(products)
            self.operation.results[0].replace_all_uses_with(total)
            self.operation.erase()

    def widen(self) -> None:
        with context(), self.operation.location:
            for index, operand in enumerate(self.operation.operands):
                wide = ir.RankedTensorType.get(operand.type.shape, ir.F32Type.get())
                self.operation.operands[index] = self.emit("convert", [operand], wide)

    def own(self, count: int) -> None:
        with context(), self.operation.location:
            for index in range(count):
                operand = self.operation.operands[index]
                shape = list(operand.type.shape)
                bounds = {
                    "start_indices": ir.DenseI64ArrayAttr.get([0] * len(shape)),
                    "limit_indices": ir.DenseI64ArrayAttr.get(shape),
                    "strides": ir.DenseI64ArrayAttr.get([1] * len(shape)),
                }
                self.operation.operands[index] = self.emit("slice", [operand], operand.type, bounds)

    def emit(self, name: str, operands: Sequence[Any], kind: Any, attributes: dict[str, Any] | None = None) -> Any:
        made = ir.Operation.create(
            f"stablehlo.{name}", results=[kind], operands=list(operands), attributes=attributes or {}, ip=self.point
        )
        return made.results[0]

    def product(self, left: Any, right: Any) -> Any:
        return self.emit(self.operation.name.removeprefix("stablehlo."), [left, right], self.result, self.attributes)

    def split(self, value: Any, ways: int) -> list[Any]:
        """``value`` as a sum of ``ways`` bf16 parts, most significant first."""
        parts = []
        rest = value
        for way in range(ways):
            part, rounded = self.round(rest)
            parts.append(part)
            if way + 1 < ways:
                rest = self.emit("subtract", [rest, self.reduce(rest) if rounded is None else rounded], rest.type)
        return parts

    def round(self, value: Any) -> tuple[Any, Any]:
        """The operand of a pass, and the same number in f32 (only emitted where it is already there)."""
        kind = value.type
        if self.rounding is Rounding.REDUCE:
            return (self.reduce(value),) * 2
        narrow = ir.RankedTensorType.get(kind.shape, ir.BF16Type.get())
        return self.emit("convert", [value], narrow), None

    def reduce(self, value: Any) -> Any:
        bits = ir.IntegerType.get_signless(32)
        attributes = {"exponent_bits": ir.IntegerAttr.get(bits, 8), "mantissa_bits": ir.IntegerAttr.get(bits, 7)}
        return self.emit("reduce_precision", [value], value.type, attributes)

    def total(self, products: list[Any]) -> Any:
        """The sum, least significant products first, so that they are not lost one by one.

        An infinite operand makes its remainder NaN and 0 * inf another: corrections that are not finite are dropped,
        the leading product has what there is to say.
        """
        *corrections, leading = products
        if not corrections:
            return leading
        kind = self.result
        low = corrections[0]
        for correction in corrections[1:]:
            low = self.emit("add", [low, correction], kind)
        finite = self.emit("is_finite", [low], ir.RankedTensorType.get(kind.shape, ir.IntegerType.get_signless(1)))
        zero = ir.DenseElementsAttr.get_splat(kind, ir.FloatAttr.get(ir.F32Type.get(), 0.0))
        nothing = self.emit("constant", [], kind, {"value": zero})
        return self.emit("add", [self.emit("select", [finite, low, nothing], kind), leading], kind)
