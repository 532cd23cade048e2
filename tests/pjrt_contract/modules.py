"""StableHLO modules for the contract suite, written as text so that no builder of ours is trusted."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from emutpu._jaxlib import context, ir

DTYPES: dict[str, np.dtype] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "i8": np.dtype(np.int8),
    "i16": np.dtype(np.int16),
    "i32": np.dtype(np.int32),
    "i64": np.dtype(np.int64),
    "ui8": np.dtype(np.uint8),
    "ui16": np.dtype(np.uint16),
    "ui32": np.dtype(np.uint32),
    "ui64": np.dtype(np.uint64),
    "i1": np.dtype(np.bool_),
    "complex<f32>": np.dtype(np.complex64),
}


def tensor(shape: Sequence[int], element: str = "f32") -> str:
    """MLIR's spelling of a tensor type."""
    return f"tensor<{''.join(f'{extent}x' for extent in shape)}{element}>"


def function(arguments: Sequence[str], results: Sequence[str], body: str, name: str = "test.op") -> bytes:
    """Bytecode of a module ``name``; arguments are ``%a0`` …, and ``body`` ends with its own return values after 'ret'."""
    inputs = ", ".join(f"%a{index}: {kind}" for index, kind in enumerate(arguments))
    lines, _, values = body.rpartition("ret")
    outputs = ", ".join(results)
    ending = f"return {values.strip()} : {outputs}" if results else "return"
    text = f'module @"{name}" {{ func.func public @main({inputs}) -> ({outputs}) {{\n{lines}\n{ending}\n}} }}'
    module = ir.Module.parse(text, context=context())
    return bytecode(module)


def bytecode(module: object) -> bytes:
    """MLIR bytecode of an ``ir.Module``."""
    import io

    buffer = io.BytesIO()
    module.operation.write_bytecode(buffer)  # type: ignore[attr-defined]  # not in MLIR's stubs
    return buffer.getvalue()


def binary(op: str, shape: Sequence[int] = (4,), element: str = "f32", name: str | None = None) -> bytes:
    """``op(a0, a1)`` of two equal tensors."""
    kind = tensor(shape, element)
    return function([kind, kind], [kind], f"%0 = stablehlo.{op} %a0, %a1 : {kind}\nret %0", name or f"aten.{op}.Tensor")


def donating(shape: Sequence[int] = (1024,)) -> bytes:
    """``a0 + a1`` where ``a0`` is donated."""
    kind = tensor(shape)
    donated = f"{kind} {{jax.buffer_donor = true}}"
    return function([donated, kind], [kind], f"%0 = stablehlo.add %a0, %a1 : {kind}\nret %0", "aten.add_.Tensor")


def dot(m: int, k: int, n: int, precision: str = "DEFAULT") -> bytes:
    """A f32 matrix product that owes the passes of ``precision``."""
    left, right, out = tensor((m, k)), tensor((k, n)), tensor((m, n))
    text = (
        f"%0 = stablehlo.dot_general %a0, %a1, contracting_dims = [1] x [0], precision = [{precision}, {precision}] "
        f": ({left}, {right}) -> {out}\nret %0"
    )
    return function([left, right], [out], text, "aten.mm")
