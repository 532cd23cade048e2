"""Pinned host memory. Nothing is locked: a pinned tensor is an ordinary CPU tensor whose storage is marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["KERNELS", "is_pinned"]


def is_pinned(self: torch.Tensor, device: torch.device | None = None) -> bool:
    """True for a CPU tensor, or a view of one, that ``pin_memory`` made."""
    return getattr(self.untyped_storage(), "pinned", False)


def _pin_memory(self: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    pinned = self.clone()
    pinned.untyped_storage().pinned = True  # type: ignore[attr-defined]  # our mark, shared by all views
    return pinned


# For key CPU: PyTorch asks the accelerator for an allocator of pinned memory, which takes C++.
KERNELS: dict[str, Callable[..., Any]] = {"_pin_memory": _pin_memory, "is_pinned": is_pinned}
