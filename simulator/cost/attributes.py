"""What the cost of an operation depends on beside its shapes, read from its MLIR attributes as hashable tuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emutpu._jaxlib import entries, ir, stablehlo

__all__ = ["READERS", "Convolution", "Dot", "Window"]

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Dot:
    """Dimension numbers of a ``dot_general`` and how many bf16 passes its precision asks for on f32."""

    lhs_batch: tuple[int, ...]
    rhs_batch: tuple[int, ...]
    lhs_contract: tuple[int, ...]
    rhs_contract: tuple[int, ...]
    passes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """One entry per dimension; ``padding`` is (low, high)."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    base_dilation: tuple[int, ...]
    dilation: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution's dimension numbers (positions in the operands' shapes), window, groups and passes."""

    lhs: tuple[int, int, tuple[int, ...]]  # batch, feature, spatial
    rhs: tuple[int, int, tuple[int, ...]]  # input feature, output feature, spatial
    out: tuple[int, int, tuple[int, ...]]  # batch, feature, spatial
    window: Window
    feature_groups: int
    batch_groups: int
    passes: int


def _ints(attribute: Any) -> tuple[int, ...]:
    return tuple(entries(ir.DenseI64ArrayAttr(attribute)))


def _array(operation: Any, name: str) -> tuple[int, ...]:
    attributes = operation.attributes
    return _ints(attributes[name]) if name in attributes else ()


def _integer(operation: Any, name: str, default: int = 0) -> int:
    attributes = operation.attributes
    return int(ir.IntegerAttr(attributes[name]).value) if name in attributes else default


def _matrix(operation: Any, name: str, rows: int) -> tuple[tuple[int, ...], ...]:
    """A dense integer attribute, row by row; ``rows`` rows of zeros where it is absent."""
    attributes = operation.attributes
    if name not in attributes:
        return ((0, 0),) * rows
    attribute = attributes[name]
    values = [int(value) for value in entries(ir.DenseIntElementsAttr(attribute))]
    shape = ir.RankedTensorType(attribute.type).shape
    width = shape[1] if len(shape) > 1 else 1
    return tuple(tuple(values[i : i + width]) for i in range(0, len(values), width))


_PASSES = {"DEFAULT": 1, "HIGH": 3, "HIGHEST": 6}


def _passes(operation: Any) -> int:
    attributes = operation.attributes
    if "precision_config" not in attributes:
        return 1
    asked = entries(ir.ArrayAttr(attributes["precision_config"]))
    return max((_PASSES[str(stablehlo.PrecisionAttr(entry).value)] for entry in asked), default=1)


def _dot(operation: Any) -> tuple[Any, ...]:
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    return (
        Dot(
            tuple(numbers.lhs_batching_dimensions),
            tuple(numbers.rhs_batching_dimensions),
            tuple(numbers.lhs_contracting_dimensions),
            tuple(numbers.rhs_contracting_dimensions),
            _passes(operation),
        ),
    )


def _plain_dot(operation: Any) -> tuple[Any, ...]:
    """``stablehlo.dot``: the last dimension of the left operand with the first of the right one."""
    rank = len(ir.RankedTensorType(operation.operands[0].type).shape)
    return (Dot((), (), (rank - 1,), (0,), _passes(operation)),)


def _window(operation: Any, rank: int, size: tuple[int, ...], names: tuple[str, str, str]) -> Window:
    ones = (1,) * rank
    strides, base, dilation = names
    padding = tuple((low, high) for low, high in _matrix(operation, "padding", rank))
    return Window(
        size,
        _array(operation, strides) or ones,
        padding,
        _array(operation, base) or ones,
        _array(operation, dilation) or ones,
    )


def _convolution(operation: Any) -> tuple[Any, ...]:
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    kernel = ir.RankedTensorType(operation.operands[1].type).shape
    spatial = tuple(numbers.kernel_spatial_dimensions)
    size = tuple(kernel[dimension] for dimension in spatial)
    return (
        Convolution(
            (numbers.input_batch_dimension, numbers.input_feature_dimension, tuple(numbers.input_spatial_dimensions)),
            (numbers.kernel_input_feature_dimension, numbers.kernel_output_feature_dimension, spatial),
            (
                numbers.output_batch_dimension,
                numbers.output_feature_dimension,
                tuple(numbers.output_spatial_dimensions),
            ),
            _window(operation, len(spatial), size, ("window_strides", "lhs_dilation", "rhs_dilation")),
            _integer(operation, "feature_group_count", 1),
            _integer(operation, "batch_group_count", 1),
            _passes(operation),
        ),
    )


def _reduce_window(operation: Any) -> tuple[Any, ...]:
    size = _array(operation, "window_dimensions")
    window = _window(operation, len(size), size, ("window_strides", "base_dilations", "window_dilations"))
    return (window, _body_name(operation))


def _body_name(operation: Any) -> str:
    """The combining operation of a reduction: the first of its body."""
    for inner in operation.regions[0].blocks[0].operations:
        return str(inner.operation.name).partition(".")[2]
    return ""


def _constant(operation: Any) -> tuple[Any, ...]:
    """The value of a splat of real numbers, else None."""
    value = operation.attributes["value"]
    try:
        dense = ir.DenseElementsAttr(value)
        if not dense.is_splat:
            return (None,)
        element = dense.get_splat_value()
        if isinstance(element, ir.FloatAttr):
            return (float(element.value),)
        if isinstance(element, ir.BoolAttr):
            return (float(bool(element.value)),)
        if isinstance(element, ir.IntegerAttr):
            return (float(int(element.value)),)
    except (ValueError, TypeError):
        return (None,)
    return (None,)


def _groups(operation: Any) -> tuple[Any, ...]:
    """Number of groups and devices of each, then the dimension a collective works along (-1: none)."""
    attributes = operation.attributes
    groups = (1, 1)
    if "replica_groups" in attributes:
        shape = ir.RankedTensorType(attributes["replica_groups"].type).shape
        groups = (shape[0], shape[1])
    for name in ("all_gather_dim", "scatter_dimension", "split_dimension"):
        if name in attributes:
            return (*groups, _integer(operation, name))
    return (*groups, -1)


def _gather(operation: Any) -> tuple[Any, ...]:
    return (_array(operation, "slice_sizes"),)


def _custom(operation: Any) -> tuple[Any, ...]:
    return (str(ir.StringAttr(operation.attributes["call_target_name"]).value),)


def _compare(operation: Any) -> tuple[Any, ...]:
    return (str(operation.attributes["comparison_direction"]),)


def _pad(operation: Any) -> tuple[Any, ...]:
    return tuple(_array(operation, name) for name in ("edge_padding_low", "edge_padding_high", "interior_padding"))


def _slice(operation: Any) -> tuple[Any, ...]:
    return tuple(_array(operation, name) for name in ("start_indices", "limit_indices", "strides"))


def _fft(operation: Any) -> tuple[Any, ...]:
    return (_array(operation, "fft_length"),)


def _array_reader(name: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda operation: (_array(operation, name),)


def _integer_reader(name: str) -> Callable[[Any], tuple[Any, ...]]:
    return lambda operation: (_integer(operation, name),)


def _reduce(operation: Any) -> tuple[Any, ...]:
    return (_array(operation, "dimensions"), _body_name(operation))


READERS: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "constant": _constant,
    "dot_general": _dot,
    "dot": _plain_dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "reduce_window": _reduce_window,
    "select_and_scatter": lambda operation: (_array(operation, "window_dimensions"),),
    "broadcast_in_dim": _array_reader("broadcast_dimensions"),
    "transpose": _array_reader("permutation"),
    "reverse": _array_reader("dimensions"),
    "concatenate": _integer_reader("dimension"),
    "iota": _integer_reader("iota_dimension"),
    "sort": _integer_reader("dimension"),
    "top_k": _integer_reader("k"),
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
    "dynamic_slice": _gather,
    "compare": _compare,
    "custom_call": _custom,
    "fft": _fft,
    **dict.fromkeys(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_broadcast"), _groups),
    "collective_permute": lambda operation: (
        1,
        len(_matrix(operation, "source_target_pairs", 0)),
        -1,
    ),
}
