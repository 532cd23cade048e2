"""Bounds checks of index tensors, on the host, before a launch.

The device does not look: a gather clamps and a scatter drops. The checks (``TORCH_TPU_ENABLE_DEBUG_CHECKS``, or Debug
mode) read every index tensor, so each of them waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend.errors import describe, op_label
from emutpu.backend.location import capture
from emutpu.backend.options import LOCAL, EagerMode

__all__ = ["check", "checked", "enabled"]

Kernel = Callable[..., Any]


def enabled() -> bool:
    """True when index tensors are to be looked at, in this thread."""
    options = LOCAL.state.options
    return options.bounds_checks or options.mode is EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING


def check(op: str, index: torch.Tensor, extent: int, dim: int, *, wraps: bool) -> None:
    """Raise IndexError when ``index`` reaches outside ``extent``; negative values are inside if ``wraps``."""
    values = index.detach().cpu()
    if values.numel() == 0:
        return
    for value in (int(values.min()), int(values.max())):
        if not (-extent if wraps else 0) <= value < extent:
            raise IndexError(
                f"{op_label(op)}(): index {value} is out of bounds for dimension {dim} with size {extent}\n"
                f"  issued at {describe(*capture())}\n"
                "  the device itself does not check: without the bounds checks it reads or writes elsewhere"
            )


def checked(
    index: str, dim: str | None = None, *, rows: str | None = None, wraps: bool = False
) -> Callable[[Any], Kernel]:
    """For a row's ``around``: check argument ``index`` against dimension ``dim`` of ``self``.

    Without ``dim`` against all of ``self``, and with ``rows`` against the first dimension of that argument.
    """

    def around(made: Any) -> Kernel:
        function: Kernel = made.function
        names = [a.name for a in made.op._schema.arguments]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if enabled():
                given = dict(zip(names, args, strict=False)) | kwargs
                source = given[rows or "self"]
                at = given[dim] % max(1, source.dim()) if dim else 0
                extent = source.numel() if not rows and not dim else source.shape[at] if source.dim() else 1
                check(made.name, given[index], extent, at, wraps=wraps)
            return function(*args, **kwargs)

        return kernel

    return around
