"""What ``torch.compile(mode=…, options=…)`` takes with the backend ``"tpu"``: TorchTPU 0.2.0's names and errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CompileSettings", "parse"]

_MOST_BUCKETS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class CompileSettings:
    """Checked options.

    ``async_compile``   the first call submits and raises; ``serializable`` whether artifacts can be saved;
    ``buckets``, ``bucket_size``  of dimensions marked dynamic;
    ``debug_callback``  called with what was compiled; ``name`` names the modules.
    """

    async_compile: bool = False
    buckets: int = 1
    bucket_size: int = 128
    serializable: bool = True
    debug_callback: Callable[[Any], object] | None = None
    name: str | None = None


def parse(options: Mapping[str, Any] | None = None, **unexpected: Any) -> CompileSettings:
    """Check ``options``. Raises ValueError for numbers out of range, TypeError for unknown names and a bad callback."""
    given = dict(options or {})
    buckets = given.pop("num_dynamic_buckets", 1)
    if isinstance(buckets, bool) or not isinstance(buckets, int) or not 1 <= buckets <= _MOST_BUCKETS:
        raise ValueError(f"`num_dynamic_buckets` must be an integer between 1 and 8, got {buckets}")
    size = given.pop("bucket_size", 128)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"`bucket_size` must be a positive integer, got {size}")
    callback = given.pop("debug_callback", None)
    if callback is not None and not callable(callback):
        raise TypeError("'debug_callback' must be callable")
    asynchronous = given.pop("async_compile", False)
    serializable = given.pop("serializable", True)
    name = given.pop("custom_module_name", None)
    name = given.pop("name", name)
    left = given | unexpected
    if left:
        raise TypeError(f"Unexpected keyword arguments: {left}")
    return CompileSettings(bool(asynchronous), buckets, size, bool(serializable), callback, name)
