"""How the tables of small diffusers models say what an input is made of: what ``conformance.inputs.written`` reads."""

from __future__ import annotations

from typing import Any

__all__ = ["Row", "listed", "ones", "tensor", "tokens", "value", "zeros"]

Row = tuple[dict[str, Any], dict[str, Any]]


def ones(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    """Ones of a shape."""
    return {"ones": list(shape), "dtype": dtype}


def zeros(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    """Zeros of a shape."""
    return {"zeros": list(shape), "dtype": dtype}


def value(value: Any) -> dict[str, Any]:
    """The value itself."""
    return {"value": value}


def tensor(value: Any) -> dict[str, Any]:
    """A tensor of the values."""
    return {"tensor": value}


def tokens(*shape: int, high: int) -> dict[str, Any]:
    """Ids below ``high``, i64."""
    return {"tokens": list(shape), "high": high}


def listed(*entries: Any) -> dict[str, Any]:
    """A list of inputs."""
    return {"list": list(entries)}
