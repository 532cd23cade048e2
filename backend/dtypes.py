"""PyTorch's dtypes as numpy and StableHLO know them, and the precision that arithmetic is done in."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch

__all__ = [
    "DTYPES",
    "category",
    "check_supported",
    "dtype_name",
    "mlir_name",
    "numpy_dtype",
    "opmath",
    "scalar_type",
    "torch_dtype",
]

# torch dtype -> (StableHLO element type, numpy or ml_dtypes name). complex128 is refused: see docs/limits.md.
DTYPES: dict[torch.dtype, tuple[str, str]] = {
    torch.bool: ("i1", "bool"),
    torch.uint8: ("ui8", "uint8"),
    torch.uint16: ("ui16", "uint16"),
    torch.uint32: ("ui32", "uint32"),
    torch.uint64: ("ui64", "uint64"),
    torch.int8: ("i8", "int8"),
    torch.int16: ("i16", "int16"),
    torch.int32: ("i32", "int32"),
    torch.int64: ("i64", "int64"),
    torch.float8_e4m3fn: ("f8E4M3FN", "float8_e4m3fn"),
    torch.float8_e5m2: ("f8E5M2", "float8_e5m2"),
    torch.float8_e4m3fnuz: ("f8E4M3FNUZ", "float8_e4m3fnuz"),
    torch.float8_e5m2fnuz: ("f8E5M2FNUZ", "float8_e5m2fnuz"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("f16", "float16"),
    torch.float32: ("f32", "float32"),
    torch.float64: ("f64", "float64"),
    torch.complex64: ("complex<f32>", "complex64"),
}

_NARROW_FLOATS = frozenset(d for d in DTYPES if d.is_floating_point and d.itemsize <= 2)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``: how the device's error texts print a dtype."""
    return str(dtype).removeprefix("torch.")


_CPP_NAMES = {
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bfloat16: "BFloat16",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def scalar_type(dtype: torch.dtype) -> str:
    """``Long`` for ``torch.int64``: how C++ error texts print a dtype."""
    return _CPP_NAMES.get(dtype) or dtype_name(dtype)


def check_supported(dtype: torch.dtype, op: str) -> None:
    """Raise NotImplementedError, in the device's words, for a dtype that it has not."""
    if dtype not in DTYPES:
        raise NotImplementedError(
            f"{op}(): {dtype_name(dtype)} dtype is not yet supported on TPU. Supported dtypes are: "
            + ", ".join(sorted(dtype_name(d) for d in DTYPES))
        )


@functools.cache
def mlir_name(dtype: torch.dtype) -> str:
    """The StableHLO element type: ``f32`` for ``torch.float32``."""
    return DTYPES[dtype][0]


@functools.cache
def numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The buffer dtype; bf16 and fp8 come from ml_dtypes."""
    name = DTYPES[dtype][1]
    scalar: Any = getattr(np, name, None) or getattr(importlib.import_module("ml_dtypes"), name)
    found: np.dtype[Any] = np.dtype(scalar)
    return found


@functools.cache
def _by_numpy_name() -> dict[str, torch.dtype]:
    return {name: dtype for dtype, (_, name) in DTYPES.items()}


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of a buffer dtype; KeyError for one that the device has not."""
    return _by_numpy_name()[dtype.name]


def opmath(dtype: torch.dtype) -> torch.dtype:
    """The dtype pointwise arithmetic on ``dtype`` is done in: float32 for the 8- and 16-bit floats, itself otherwise."""
    return torch.float32 if dtype in _NARROW_FLOATS else dtype


def category(value: complex) -> str:
    """A Python scalar's promotion category, the part of it that belongs to a cache key."""
    return type(value).__name__
