"""ATen lowerings, a module per family. Importing this package fills the table."""

from emutpu.backend.lowering import (  # noqa: F401  # rows register themselves
    activations,
    factories,
    indexing,
    losses,
    movement,
    normalization,
    pointwise,
    random,
    reductions,
    selection,
    softmax,
    sorting,
    statistics,
)
from emutpu.backend.lowering._registry import LOWERINGS

__all__ = ["LOWERINGS"]
