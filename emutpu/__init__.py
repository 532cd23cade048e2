"""emutpu: run and test PyTorch-on-TPU programs without a TPU.

Importing this package imports neither torch nor jax; ``torch`` itself activates it through the ``torch.backends``
entry point (:mod:`emutpu._activation`).
"""

from __future__ import annotations

import os
from typing import Any

__version__ = "0.1.0"

# In a checkout ./emutpu shadows an installed copy, and the subpackages live beside it rather than inside it.
_root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if os.path.isfile(os.path.join(_root, "backend", "pjrt.py")):
    __path__.append(_root)

_LAZY = {"FallbackMode": "emutpu._tpu", "fallback_mode": "emutpu._tpu", "is_emulated": "emutpu._activation"}


def __getattr__(name: str) -> Any:
    """``is_emulated``, ``fallback_mode`` and ``FallbackMode``, imported when they are asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'emutpu' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
