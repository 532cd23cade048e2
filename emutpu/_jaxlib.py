"""Everything that differs between jaxlib releases, and the process's one MLIR context. Nothing else imports jaxlib.

A leaf: both the backend (which builds modules) and the simulator (which runs them) use it.
"""

from __future__ import annotations

import functools
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, func, stablehlo

__all__ = ["chlo", "context", "func", "ir", "stablehlo"]


@functools.cache
def context() -> Any:
    """The MLIR context of this process (making one costs up to 2 ms), with StableHLO, CHLO and func loaded."""
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    made = ir.Context()
    made.append_dialect_registry(registry)
    made.load_all_available_dialects()
    stablehlo.register_dialect(made)
    chlo.register_dialect(made)
    return made
