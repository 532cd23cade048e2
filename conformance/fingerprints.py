"""The fingerprint of a model's forward: its ops, their order, dtypes and edges, without any shape.

Two models with one fingerprint are one program at other sizes; what they differ in is no new evidence about a device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["fingerprint"]

_DIGITS = 16


class _Recorder(TorchDispatchMode):
    """Hashes every op with where its arguments come from."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self.digest = hashlib.sha256()
        self._made: dict[int, int] = {}
        self._alive: list[Tensor] = []  # an id means a tensor only as long as the tensor lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        parts = [self._word(leaf) for leaf in tree_leaves((args, kwargs or {}))]
        self.digest.update(f"{func}({','.join(parts)});".encode())
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._made.setdefault(id(leaf), len(self._made))
                self._alive.append(leaf)
        return result

    def _word(self, leaf: Any) -> str:
        if isinstance(leaf, Tensor):
            return f"{self._made.get(id(leaf), 'given')}:{leaf.dtype}"
        if isinstance(leaf, (bool, str, torch.dtype)) or leaf is None:
            return str(leaf)
        return type(leaf).__name__  # integers may be sizes, and a number's value is no part of a program


def fingerprint(model: nn.Module, inputs: Mapping[str, Any]) -> str:
    """Of a forward in evaluation mode on the CPU, as 16 hexadecimal digits."""
    model.eval()
    with torch.no_grad(), _Recorder() as recorder:
        model(**inputs)
    digest: str = recorder.digest.hexdigest()
    return digest[:_DIGITS]
