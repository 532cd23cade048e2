"""SSA values with PyTorch dtypes: the operators and methods that lowerings are written in.

Arithmetic never promotes: both sides must have one dtype (Python numbers take the other side's), so that a lowering says
where a conversion happens. Shapes broadcast as in PyTorch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from emutpu._jaxlib import context, ir

if TYPE_CHECKING:
    from emutpu.backend.hlo import Builder

__all__ = ["Number", "Shape", "Value", "attribute", "highest", "int_array", "lowest"]

Shape = tuple[int, ...]
Number = bool | int | float | complex


@functools.lru_cache(maxsize=65536)
def attribute(text: str) -> Any:
    """A parsed MLIR attribute."""
    return ir.Attribute.parse(text, context())


def int_array(values: Sequence[int]) -> Any:
    """``array<i64: …>``."""
    return attribute(f"array<i64: {', '.join(map(str, values))}>" if len(values) else "array<i64>")


class Value:
    """An SSA value with static ``shape`` and PyTorch ``dtype``. Operators emit into the builder that made it."""

    __slots__ = ("builder", "dtype", "ir", "shape")

    def __init__(self, builder: Builder, value: Any, shape: Shape, dtype: torch.dtype) -> None:
        self.builder = builder
        self.ir = value
        self.shape = shape
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"Value({self.dtype}, {list(self.shape)})"

    # Arithmetic ------------------------------------------------------------------------------------------

    def _with(self, name: str, other: Value | Number) -> Value:
        return self.builder.binary(name, self, other)

    def _from(self, name: str, other: Number) -> Value:
        return self.builder.binary(name, self.builder.full(other, (), self.dtype), self)

    def __add__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.add", other)

    def __radd__(self, other: Number) -> Value:
        return self._from("stablehlo.add", other)

    def __sub__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.subtract", other)

    def __rsub__(self, other: Number) -> Value:
        return self._from("stablehlo.subtract", other)

    def __mul__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.multiply", other)

    def __rmul__(self, other: Number) -> Value:
        return self._from("stablehlo.multiply", other)

    def __truediv__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.divide", other)

    def __rtruediv__(self, other: Number) -> Value:
        return self._from("stablehlo.divide", other)

    def __neg__(self) -> Value:
        return self.builder.unary("stablehlo.negate", self)

    def __and__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.and", other)

    def __or__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.or", other)

    def __xor__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.xor", other)

    def __invert__(self) -> Value:
        return self.builder.unary("stablehlo.not", self)

    def __lshift__(self, other: Value | Number) -> Value:
        return self._with("stablehlo.shift_left", other)

    def __rshift__(self, other: Value | Number) -> Value:
        """Logical shift: for unsigned values."""
        return self._with("stablehlo.shift_right_logical", other)

    def __lt__(self, other: Value | Number) -> Value:
        return self.builder.compare("LT", self, other)

    def __le__(self, other: Value | Number) -> Value:
        return self.builder.compare("LE", self, other)

    def __gt__(self, other: Value | Number) -> Value:
        return self.builder.compare("GT", self, other)

    def __ge__(self, other: Value | Number) -> Value:
        return self.builder.compare("GE", self, other)

    def eq(self, other: Value | Number) -> Value:
        return self.builder.compare("EQ", self, other)

    def ne(self, other: Value | Number) -> Value:
        return self.builder.compare("NE", self, other)

    def maximum(self, other: Value | Number) -> Value:
        """Elementwise maximum; a NaN on either side gives NaN."""
        return self._with("stablehlo.maximum", other)

    def minimum(self, other: Value | Number) -> Value:
        return self._with("stablehlo.minimum", other)

    def pow(self, other: Value | Number) -> Value:
        return self._with("stablehlo.power", other)

    def unary(self, name: str) -> Value:
        """Any shape- and dtype-preserving op by its full name (``stablehlo.tanh``, ``chlo.erf``)."""
        return self.builder.unary(name, self)

    def exp(self) -> Value:
        return self.unary("stablehlo.exponential")

    def log(self) -> Value:
        return self.unary("stablehlo.log")

    def tanh(self) -> Value:
        return self.unary("stablehlo.tanh")

    def logistic(self) -> Value:
        return self.unary("stablehlo.logistic")

    def sqrt(self) -> Value:
        return self.unary("stablehlo.sqrt")

    def rsqrt(self) -> Value:
        return self.unary("stablehlo.rsqrt")

    def abs(self) -> Value:
        if self.dtype.is_complex:
            return self.builder.emit("stablehlo.abs", [self], self.shape, self.dtype.to_real())
        return self if not self.dtype.is_signed else self.unary("stablehlo.abs")

    def floor(self) -> Value:
        return self.unary("stablehlo.floor")

    def is_nan(self) -> Value:
        return self.ne(self)

    # Types and shapes ------------------------------------------------------------------------------------

    def convert(self, dtype: torch.dtype) -> Value:
        """Convert as PyTorch does: to bool by ``!= 0``, float to integer by truncation, complex to real by its real part."""
        return self.builder.convert(self, dtype)

    def reshape(self, shape: Sequence[int]) -> Value:
        shape = tuple(shape)
        if shape == self.shape:
            return self
        if math.prod(shape) != self.numel:
            raise AssertionError(f"reshape of {list(self.shape)} to {list(shape)}")
        return self.builder.emit("stablehlo.reshape", [self], shape, self.dtype)

    def transpose(self, permutation: Sequence[int]) -> Value:
        if list(permutation) == list(range(self.ndim)):
            return self
        shape = tuple(self.shape[p] for p in permutation)
        return self.builder.emit("stablehlo.transpose", [self], shape, self.dtype, permutation=int_array(permutation))

    def broadcast(self, shape: Sequence[int]) -> Value:
        """Broadcast to ``shape``, aligned at the last dimension."""
        shape = tuple(shape)
        first = len(shape) - self.ndim
        return self.broadcast_in_dim(shape, range(first, len(shape)))

    def broadcast_in_dim(self, shape: Sequence[int], dims: Sequence[int]) -> Value:
        """Own dimension ``i`` becomes dimension ``dims[i]`` of ``shape``; extents of 1 are stretched."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        return self.builder.emit(
            "stablehlo.broadcast_in_dim", [self], shape, self.dtype, broadcast_dimensions=int_array(list(dims))
        )

    def slice(self, start: Sequence[int], limit: Sequence[int], step: Sequence[int] | None = None) -> Value:
        steps = [1] * self.ndim if step is None else list(step)
        shape = tuple(max(0, -(-(stop - begin) // by)) for begin, stop, by in zip(start, limit, steps, strict=True))
        if shape == self.shape:
            return self
        return self.builder.emit(
            "stablehlo.slice",
            [self],
            shape,
            self.dtype,
            start_indices=int_array(start),
            limit_indices=int_array(limit),
            strides=int_array(steps),
        )

    def slice_dim(self, dim: int, start: int, limit: int, step: int = 1) -> Value:
        starts, limits, steps = [0] * self.ndim, list(self.shape), [1] * self.ndim
        starts[dim], limits[dim], steps[dim] = start, limit, step
        return self.slice(starts, limits, steps)

    def pad(
        self,
        low: Sequence[int],
        high: Sequence[int],
        interior: Sequence[int] | None = None,
        value: Value | Number = 0,
    ) -> Value:
        """Pad (negative amounts crop); ``interior`` puts that many fill elements between neighbours."""
        inner = [0] * self.ndim if interior is None else list(interior)
        shape = tuple(
            below + above + n + max(0, n - 1) * gap
            for below, above, n, gap in zip(low, high, self.shape, inner, strict=True)
        )
        fill = value if isinstance(value, Value) else self.builder.full(value, (), self.dtype)
        return self.builder.emit(
            "stablehlo.pad",
            [self, fill],
            shape,
            self.dtype,
            edge_padding_low=int_array(low),
            edge_padding_high=int_array(high),
            interior_padding=int_array(inner),
        )

    def reverse(self, dims: Sequence[int]) -> Value:
        if not dims:
            return self
        return self.builder.emit("stablehlo.reverse", [self], self.shape, self.dtype, dimensions=int_array(dims))

    # Reductions ------------------------------------------------------------------------------------------

    def sum(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        return self.builder.reduce(self, "stablehlo.add", 0, dims, keepdim)

    def prod(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        return self.builder.reduce(self, "stablehlo.multiply", 1, dims, keepdim)

    def max(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        return self.builder.reduce(self, "stablehlo.maximum", lowest(self.dtype), dims, keepdim)

    def min(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        return self.builder.reduce(self, "stablehlo.minimum", highest(self.dtype), dims, keepdim)

    def any(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        return self.builder.reduce(self, "stablehlo.or", False, dims, keepdim)

    def all(self, dims: Sequence[int], keepdim: bool = False) -> Value:
        return self.builder.reduce(self, "stablehlo.and", True, dims, keepdim)


def lowest(dtype: torch.dtype) -> Number:
    """The identity of a maximum."""
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Number:
    """The identity of a minimum."""
    if dtype.is_floating_point:
        return math.inf
    return True if dtype == torch.bool else torch.iinfo(dtype).max
