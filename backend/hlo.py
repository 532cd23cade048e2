"""A thin layer over MLIR's builders: values with PyTorch dtypes, broadcasting, and one method an StableHLO op.

Nothing here knows of ATen. Values and their arithmetic are in :mod:`emutpu.backend.value`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from emutpu._jaxlib import context, func, ir
from emutpu.backend.dtypes import mlir_name, numpy_dtype
from emutpu.backend.location import Location
from emutpu.backend.value import Number, Shape, Value, attribute, highest, int_array, lowest

__all__ = ["Body", "Builder", "Number", "Precision", "Shape", "Value", "broadcast_shapes", "highest", "lowest"]

Precision = Literal["DEFAULT", "HIGH", "HIGHEST"]
Body = Callable[..., "Value | Sequence[Value]"]


@functools.cache
def _unknown() -> Any:
    return ir.Location.unknown(context())


@functools.lru_cache(maxsize=4096)
def _line(file: str, line: int) -> Any:
    return ir.Location.file(file, line, 0, context())


@functools.lru_cache(maxsize=65536)
def _type(shape: Shape, dtype: torch.dtype) -> Any:
    return ir.Type.parse("tensor<" + "".join(f"{n}x" for n in shape) + mlir_name(dtype) + ">", context())


def _dense_pairs(pairs: Sequence[tuple[int, int]]) -> Any:
    if not pairs:
        return attribute("dense<> : tensor<0x2xi64>")
    return attribute(f"dense<{[list(p) for p in pairs]}> : tensor<{len(pairs)}x2xi64>")


def broadcast_shapes(*shapes: Shape) -> Shape:
    """PyTorch's (numpy's) broadcast of shapes. Raises RuntimeError in PyTorch's words when they do not fit."""
    return tuple(torch.broadcast_shapes(*shapes))


class Builder:
    """Builds one canonical module. ``precision`` goes into every f32 dot and convolution; without it there may be none."""

    def __init__(self, name: str, precision: Precision | None = None) -> None:
        self.name = name
        self.precision = precision
        self._location = _unknown()
        self._module = ir.Module.create(self._location)
        self._module.operation.attributes["sym_name"] = _string(name)
        with context(), self._location:
            self._main = func.FuncOp("main", ([], []), ip=ir.InsertionPoint(self._module.body), loc=self._location)
            self._block = self._main.add_entry_block()
        self._insertion = ir.InsertionPoint(self._block)
        self._types: list[Any] = []
        self._argument_attributes: list[Any] = []

    def argument(self, shape: Sequence[int], dtype: torch.dtype, *, donated: bool = False) -> Value:
        """Append an entry parameter."""
        shape = tuple(shape)
        mlir_type = _type(shape, dtype)
        self._types.append(mlir_type)
        self._argument_attributes.append(attribute("{jax.buffer_donor = true}" if donated else "{}"))
        return Value(self, self._block.add_argument(mlir_type, self._location), shape, dtype)

    def at(self, location: Location | None) -> None:
        """What is emitted from now on comes from this line of the user's."""
        if location is None:
            self._location = _unknown()
        else:
            self._location = _line(location.file, location.line)

    def finish(self, results: Sequence[Value], reused: Sequence[int] = ()) -> bytes:
        """End the module and give its bytecode; ``reused`` are the results that replace a tensor in its own memory."""
        ir.Operation.create("func.return", operands=[r.ir for r in results], loc=self._location, ip=self._insertion)
        attributes = self._main.attributes
        function_type = ir.FunctionType.get(self._types, [r.ir.type for r in results], context())
        attributes["function_type"] = ir.TypeAttr.get(function_type, context())
        attributes["arg_attrs"] = ir.ArrayAttr.get(self._argument_attributes, context())
        attributes["sym_visibility"] = _string("public")
        if reused:
            self._module.operation.attributes["emutpu.reused"] = int_array(reused)
        return _bytecode(self._module)

    def text(self, *, locations: bool = False) -> str:
        """The module as text, for messages and dumps; with the users' lines on request."""
        return str(self._module.operation.get_asm(enable_debug_info=True)) if locations else str(self._module)

    # Emission --------------------------------------------------------------------------------------------

    def emit_many(
        self, name: str, operands: Sequence[Value], results: Sequence[tuple[Shape, torch.dtype]], **attributes: Any
    ) -> list[Value]:
        """Emit any op with several results."""
        operation = self._create(name, operands, results, 0, attributes)
        return self._results(operation, results)

    def emit(
        self, name: str, operands: Sequence[Value], shape: Sequence[int], dtype: torch.dtype, **attributes: Any
    ) -> Value:
        """Emit any op with one result. Attribute values are MLIR attributes or their text."""
        return self.emit_many(name, operands, [(tuple(shape), dtype)], **attributes)[0]

    def emit_with_body(
        self,
        name: str,
        operands: Sequence[Value],
        results: Sequence[tuple[Shape, torch.dtype]],
        bodies: Sequence[tuple[Sequence[tuple[Shape, torch.dtype]], Body]],
        **attributes: Any,
    ) -> list[Value]:
        """Emit an op with regions: each body is (its arguments' shapes and dtypes, a function from values to values)."""
        operation = self._create(name, operands, results, len(bodies), attributes)
        for region, (arguments, body) in zip(operation.regions, bodies, strict=True):
            self._fill(region, arguments, body)
        return self._results(operation, results)

    def _create(
        self,
        name: str,
        operands: Sequence[Value],
        results: Sequence[tuple[Shape, torch.dtype]],
        regions: int,
        attributes: dict[str, Any],
    ) -> Any:
        parsed = {k: attribute(v) if isinstance(v, str) else v for k, v in attributes.items()}
        return ir.Operation.create(
            name,
            results=[_type(shape, dtype) for shape, dtype in results],
            operands=[o.ir for o in operands],
            attributes=parsed,
            regions=regions,
            loc=self._location,
            ip=self._insertion,
        )

    def _results(self, operation: Any, results: Sequence[tuple[Shape, torch.dtype]]) -> list[Value]:
        return [Value(self, operation.results[i], shape, dtype) for i, (shape, dtype) in enumerate(results)]

    def _fill(self, region: Any, arguments: Sequence[tuple[Shape, torch.dtype]], body: Body) -> None:
        types = [_type(shape, dtype) for shape, dtype in arguments]
        block = region.blocks.append(*types, arg_locs=[self._location] * len(types))
        values = [Value(self, block.arguments[i], shape, dtype) for i, (shape, dtype) in enumerate(arguments)]
        with self._inside(block):
            given = body(*values)
            returned = [given] if isinstance(given, Value) else list(given)
            ir.Operation.create(
                "stablehlo.return", operands=[v.ir for v in returned], loc=self._location, ip=self._insertion
            )

    @contextmanager
    def _inside(self, block: Any) -> Iterator[None]:
        outer = self._insertion
        self._insertion = ir.InsertionPoint(block)
        try:
            yield
        finally:
            self._insertion = outer

    # Constants -------------------------------------------------------------------------------------------

    def full(self, value: Number, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """A constant with one value everywhere."""
        if dtype.is_complex:
            parts = complex(value)
            real, imaginary = (self.full(part, shape, dtype.to_real()) for part in (parts.real, parts.imag))
            return self.complex(real, imaginary)
        scalar = np.asarray(value).astype(numpy_dtype(dtype))
        return self.emit("stablehlo.constant", [], shape, dtype, value=_dense(scalar, tuple(shape), dtype))

    def constant(self, array: np.ndarray[Any, Any], dtype: torch.dtype) -> Value:
        """A constant from a host array."""
        if dtype.is_complex:
            real, imaginary = (self.constant(part, dtype.to_real()) for part in (array.real, array.imag))
            return self.complex(real, imaginary)
        data = np.ascontiguousarray(array.astype(numpy_dtype(dtype)))
        return self.emit("stablehlo.constant", [], array.shape, dtype, value=_dense(data, array.shape, dtype))

    def iota(self, shape: Sequence[int], dim: int, dtype: torch.dtype) -> Value:
        return self.emit("stablehlo.iota", [], shape, dtype, iota_dimension=f"{dim} : i64")

    # Elementwise -----------------------------------------------------------------------------------------

    def unary(self, name: str, x: Value) -> Value:
        return self.emit(name, [x], x.shape, x.dtype)

    def binary(self, name: str, x: Value, y: Value | Number) -> Value:
        x, right = self._match(x, y)
        return self.emit(name, [x, right], x.shape, x.dtype)

    def _match(self, x: Value, y: Value | Number) -> tuple[Value, Value]:
        if not isinstance(y, Value):
            return x, self.full(y, x.shape, x.dtype)
        if x.dtype != y.dtype:
            raise AssertionError(f"mixed dtypes in one op: {x.dtype} and {y.dtype}")
        if x.shape == y.shape:
            return x, y
        shape = broadcast_shapes(x.shape, y.shape)
        return x.broadcast(shape), y.broadcast(shape)

    def compare(self, direction: str, x: Value, y: Value | Number) -> Value:
        x, right = self._match(x, y)
        kind = "FLOAT" if x.dtype.is_floating_point or x.dtype.is_complex else "SIGNED"
        if kind == "SIGNED" and not x.dtype.is_signed:
            kind = "UNSIGNED"
        return self.emit(
            "stablehlo.compare",
            [x, right],
            x.shape,
            torch.bool,
            comparison_direction=f"#stablehlo<comparison_direction {direction}>",
            compare_type=f"#stablehlo<comparison_type {kind}>",
        )

    def select(self, condition: Value, x: Value | Number, y: Value | Number) -> Value:
        """``where``: at least one branch is a Value; everything broadcasts."""
        given = [v for v in (x, y) if isinstance(v, Value)]
        dtype = given[0].dtype
        shape = broadcast_shapes(condition.shape, *(v.shape for v in given))
        branches = [v.broadcast(shape) if isinstance(v, Value) else self.full(v, shape, dtype) for v in (x, y)]
        if branches[0].dtype != branches[1].dtype:
            raise AssertionError(f"mixed dtypes in select: {branches[0].dtype} and {branches[1].dtype}")
        return self.emit("stablehlo.select", [condition.broadcast(shape), *branches], shape, dtype)

    def convert(self, x: Value, dtype: torch.dtype) -> Value:
        if x.dtype == dtype:
            return x
        if dtype == torch.bool:
            return x.ne(0)
        if x.dtype.is_complex and not dtype.is_complex:
            return self.real(x).convert(dtype)
        if dtype.is_complex and not x.dtype.is_complex:
            real = x.convert(dtype.to_real())
            return self.complex(real, self.full(0, real.shape, real.dtype))
        if x.dtype.is_floating_point and not dtype.is_floating_point and dtype.itemsize < 4:
            # XLA saturates, PyTorch on a CPU wraps through the wider integer.
            return self.emit("stablehlo.convert", [x.convert(torch.int32)], x.shape, dtype)
        return self.emit("stablehlo.convert", [x], x.shape, dtype)

    def complex(self, real: Value, imaginary: Value) -> Value:
        return self.emit("stablehlo.complex", [real, imaginary], real.shape, real.dtype.to_complex())

    def real(self, x: Value) -> Value:
        return self.emit("stablehlo.real", [x], x.shape, x.dtype.to_real()) if x.dtype.is_complex else x

    def imag(self, x: Value) -> Value:
        return self.emit("stablehlo.imag", [x], x.shape, x.dtype.to_real())

    def bitcast(self, x: Value, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Reinterpret bits; a narrower dtype adds a minor dimension, a wider one removes it."""
        return self.emit("stablehlo.bitcast_convert", [x], shape, dtype)

    # Structure -------------------------------------------------------------------------------------------

    def concatenate(self, values: Sequence[Value], dim: int) -> Value:
        first = values[0]
        if len(values) == 1:
            return first
        shape = list(first.shape)
        shape[dim] = sum(v.shape[dim] for v in values)
        return self.emit("stablehlo.concatenate", values, shape, first.dtype, dimension=f"{dim} : i64")

    def dynamic_update_slice(self, base: Value, update: Value, start: Sequence[int] | Sequence[Value]) -> Value:
        starts = [s if isinstance(s, Value) else self.full(s, (), torch.int32) for s in start]
        return self.emit("stablehlo.dynamic_update_slice", [base, update, *starts], base.shape, base.dtype)

    def dynamic_slice(self, base: Value, start: Sequence[Value], sizes: Sequence[int]) -> Value:
        return self.emit("stablehlo.dynamic_slice", [base, *start], sizes, base.dtype, slice_sizes=int_array(sizes))

    def gather(
        self,
        operand: Value,
        indices: Value,
        *,
        offset_dims: Sequence[int],
        collapsed: Sequence[int],
        start_index_map: Sequence[int],
        slice_sizes: Sequence[int],
        shape: Sequence[int],
        sorted_indices: bool = False,
        batching: Sequence[int] = (),
    ) -> Value:
        """StableHLO gather; the index vector is the last dimension of ``indices``. Out-of-range starts are clamped.

        ``batching`` dimensions of the operand go together with the same ones of ``indices``.
        """
        numbers = (
            f"#stablehlo.gather<offset_dims = {list(offset_dims)}, collapsed_slice_dims = {list(collapsed)}, "
            f"operand_batching_dims = {list(batching)}, start_indices_batching_dims = {list(batching)}, "
            f"start_index_map = {list(start_index_map)}, index_vector_dim = {indices.ndim - 1}>"
        )
        return self.emit(
            "stablehlo.gather",
            [operand, indices],
            shape,
            operand.dtype,
            dimension_numbers=numbers,
            slice_sizes=int_array(slice_sizes),
            indices_are_sorted=str(sorted_indices).lower(),
        )

    def scatter(
        self,
        operand: Value,
        indices: Value,
        updates: Value,
        *,
        update_window_dims: Sequence[int],
        inserted: Sequence[int],
        scatter_dims: Sequence[int],
        combine: Body,
        unique: bool = False,
        batching: Sequence[int] = (),
    ) -> Value:
        """StableHLO scatter; ``combine(old, new)`` joins scalars; out-of-range updates are dropped."""
        numbers = (
            f"#stablehlo.scatter<update_window_dims = {list(update_window_dims)}, "
            f"inserted_window_dims = {list(inserted)}, input_batching_dims = {list(batching)}, "
            f"scatter_indices_batching_dims = {list(batching)}, scatter_dims_to_operand_dims = {list(scatter_dims)}, "
            f"index_vector_dim = {indices.ndim - 1}>"
        )
        scalar = ((), operand.dtype)
        return self.emit_with_body(
            "stablehlo.scatter",
            [operand, indices, updates],
            [(operand.shape, operand.dtype)],
            [([scalar, scalar], combine)],
            scatter_dimension_numbers=numbers,
            unique_indices=str(unique).lower(),
            indices_are_sorted="false",
        )[0]

    def reduce(self, x: Value, op: str, initial: Number, dims: Sequence[int], keepdim: bool = False) -> Value:
        """Reduce with an elementwise op by name."""
        return self.reduce_many(
            [x], [self.full(initial, (), x.dtype)], lambda a, b: self.binary(op, a, b), dims, keepdim
        )[0]

    def reduce_many(
        self, xs: Sequence[Value], initial: Sequence[Value], body: Body, dims: Sequence[int], keepdim: bool = False
    ) -> list[Value]:
        """Variadic reduce: ``body`` takes the accumulators, then the elements."""
        axes = sorted(d % max(1, xs[0].ndim) for d in dims)
        shape = tuple(n for d, n in enumerate(xs[0].shape) if d not in axes)
        if not axes:
            return list(xs)
        scalars = [((), x.dtype) for x in xs] * 2
        reduced = self.emit_with_body(
            "stablehlo.reduce",
            [*xs, *initial],
            [(shape, x.dtype) for x in xs],
            [(scalars, body)],
            dimensions=int_array(axes),
        )
        if not keepdim:
            return reduced
        kept = tuple(1 if d in axes else n for d, n in enumerate(xs[0].shape))
        return [r.reshape(kept) for r in reduced]

    def reduce_window(
        self,
        xs: Sequence[Value],
        initial: Sequence[Value],
        body: Body,
        *,
        window: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        window_dilation: Sequence[int] | None = None,
        base_dilation: Sequence[int] | None = None,
    ) -> list[Value]:
        rank = xs[0].ndim
        inner = list(window_dilation or [1] * rank)
        outer = list(base_dilation or [1] * rank)
        shape = []
        for n, size, step, (low, high), wide, base in zip(
            xs[0].shape, window, strides, padding, inner, outer, strict=True
        ):
            extent = low + high + (0 if n == 0 else (n - 1) * base + 1)
            reach = (size - 1) * wide + 1
            shape.append(0 if extent < reach else (extent - reach) // step + 1)
        scalars = [((), x.dtype) for x in xs] * 2
        return self.emit_with_body(
            "stablehlo.reduce_window",
            [*xs, *initial],
            [(tuple(shape), x.dtype) for x in xs],
            [(scalars, body)],
            window_dimensions=int_array(window),
            window_strides=int_array(strides),
            window_dilations=int_array(inner),
            base_dilations=int_array(outer),
            padding=_dense_pairs(padding),
        )

    def select_and_scatter(
        self,
        x: Value,
        source: Value,
        *,
        keep: Body,
        window: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
    ) -> Value:
        """Add each element of ``source`` where its window of ``x`` chose: ``keep(held, new)`` holds on to the first."""
        scalar = ((), x.dtype)
        return self.emit_with_body(
            "stablehlo.select_and_scatter",
            [x, source, self.full(0, (), x.dtype)],
            [(x.shape, x.dtype)],
            [([scalar, scalar], keep), ([scalar, scalar], Value.__add__)],
            window_dimensions=int_array(window),
            window_strides=int_array(strides),
            padding=_dense_pairs(padding),
        )[0]

    def sort(self, xs: Sequence[Value], dim: int, before: Body, stable: bool = True) -> list[Value]:
        """Sort by a comparator on (a0, b0, a1, b1, …) scalars."""
        scalars = [((), x.dtype) for x in xs for _ in range(2)]
        return self.emit_with_body(
            "stablehlo.sort",
            list(xs),
            [(x.shape, x.dtype) for x in xs],
            [(scalars, before)],
            dimension=f"{dim} : i64",
            is_stable=str(stable).lower(),
        )

    def while_loop(self, carry: Sequence[Value], condition: Body, body: Body) -> list[Value]:
        state = [(v.shape, v.dtype) for v in carry]
        return self.emit_with_body("stablehlo.while", list(carry), state, [(state, condition), (state, body)])

    # Contractions ----------------------------------------------------------------------------------------

    def dot_general(
        self,
        x: Value,
        y: Value,
        *,
        contract: tuple[Sequence[int], Sequence[int]],
        batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
        accumulate: torch.dtype | None = None,
    ) -> Value:
        """Result dims: batch, free dims of ``x``, free dims of ``y``; dtype ``accumulate`` (default: the operands')."""
        free_x = [n for d, n in enumerate(x.shape) if d not in contract[0] and d not in batch[0]]
        free_y = [n for d, n in enumerate(y.shape) if d not in contract[1] and d not in batch[1]]
        shape = [x.shape[d] for d in batch[0]] + free_x + free_y
        numbers = (
            f"#stablehlo.dot<lhs_batching_dimensions = {list(batch[0])}, rhs_batching_dimensions = {list(batch[1])}, "
            f"lhs_contracting_dimensions = {list(contract[0])}, rhs_contracting_dimensions = {list(contract[1])}>"
        )
        return self.emit(
            "stablehlo.dot_general",
            [x, y],
            shape,
            accumulate or x.dtype,
            dot_dimension_numbers=numbers,
            precision_config=self._precision_config(x.dtype),
        )

    def _precision_config(self, dtype: torch.dtype) -> str:
        precision = self.precision if dtype == torch.float32 else "DEFAULT"
        if precision is None:
            raise AssertionError(f"{self.name} emits an f32 dot or convolution: declare its lowering with dots=True")
        return f"[#stablehlo<precision {precision}>, #stablehlo<precision {precision}>]"

    def convolution(
        self,
        x: Value,
        kernel: Value,
        *,
        dimension_numbers: str,
        shape: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        feature_groups: int = 1,
        batch_groups: int = 1,
        accumulate: torch.dtype | None = None,
    ) -> Value:
        """``dimension_numbers`` in StableHLO's own notation, such as ``[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]``."""
        spatial = len(strides)
        return self.emit(
            "stablehlo.convolution",
            [x, kernel],
            shape,
            accumulate or x.dtype,
            dimension_numbers=f"#stablehlo.conv<{dimension_numbers}>",
            window_strides=int_array(strides),
            padding=_dense_pairs(padding),
            lhs_dilation=int_array(lhs_dilation or [1] * spatial),
            rhs_dilation=int_array(rhs_dilation or [1] * spatial),
            window_reversal="array<i1: " + ", ".join(["false"] * spatial) + ">" if spatial else "array<i1>",
            feature_group_count=f"{feature_groups} : i64",
            batch_group_count=f"{batch_groups} : i64",
            precision_config=self._precision_config(x.dtype),
        )

    def random_bits(self, state: Value, shape: Sequence[int], dtype: torch.dtype) -> Value:
        """Philox bits (``ui32`` or ``ui64``) from a ui64[2 or 3] state: key, then counter."""
        return self.emit_many(
            "stablehlo.rng_bit_generator",
            [state],
            [(state.shape, state.dtype), (tuple(shape), dtype)],
            rng_algorithm="#stablehlo<rng_algorithm PHILOX>",
        )[1]


@functools.lru_cache(maxsize=4096)
def _string(text: str) -> Any:
    return ir.StringAttr.get(text, context())


def _dense(data: np.ndarray[Any, Any], shape: Shape, dtype: torch.dtype) -> Any:
    kind = "tensor<" + "".join(f"{n}x" for n in shape) + mlir_name(dtype) + ">"
    if 0 in shape:
        return attribute(f"dense<> : {kind}")
    if dtype == torch.bool:
        if data.ndim == 0:
            return attribute(f"dense<{str(bool(data)).lower()}> : {kind}")
        return attribute(f"dense<{str(data.tolist()).lower()}> : {kind}")
    return attribute(f'dense<"0x{data.tobytes().hex().upper()}"> : {kind}')


def _bytecode(module: Any) -> bytes:
    import io

    out = io.BytesIO()
    module.operation.write_bytecode(out)
    return out.getvalue()
