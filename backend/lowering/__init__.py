"""ATen lowerings, a module per family. Importing this package fills the table."""

from emutpu.backend.lowering import (  # noqa: F401  # rows register themselves
    convolution,
    grid_sampling,
    indexing,
    losses,
    matmul,
    movement,
    normalization,
    pointwise,
    pooling,
    random,
    reductions,
    resampling,
    selection,
    softmax,
)
from emutpu.backend.lowering._registry import LOWERINGS

__all__ = ["LOWERINGS"]
