"""The TensorCore cost model: what a canonical StableHLO module would cost on a chip. Modelled, never measured.

``estimate(module, chip, level)`` is a pure function, as are its halves, ``read`` and ``estimate_graph``; everything else here
is its mechanism: :mod:`.graph` reads the module, :mod:`.simplify` and :mod:`.kernels` fuse it as XLA:TPU does,
:mod:`.schedule` places values in VMEM, :mod:`.memory`, :mod:`.work` and :mod:`.units` count bytes, flops and cycles with the
constants of :mod:`.rates`.
"""

from __future__ import annotations

from .estimate import Collective, Estimate, FusionCost, Level, estimate, estimate_graph
from .graph import Graph, read

__all__ = ["Collective", "Estimate", "FusionCost", "Graph", "Level", "estimate", "estimate_graph", "read"]
