"""Pending tensors under the names of ``torch_tpu._internal.sync``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from emutpu import sync
from emutpu.backend.options import EagerMode, override


def test_graphs_of_a_pending_tensor(tmp_path: Path) -> None:
    """Text, graphviz and MLIR hold the ops; showing them computes nothing; afterwards there is no graph."""
    with override(mode=EagerMode.DEFER_AND_FUSE):
        y = (torch.ones(2, 3).to("tpu") * 2).sin()
        assert not sync.is_materialized(y)
        assert not sync.is_materializing(y)
        assert "f32[2, 3] = sin" in sync.computation_text(y)
        assert sync.computation_graphviz([y]).startswith("digraph")
        assert "stablehlo.sine" in sync.computation_mlir(y)
        sync.dump_computation_graphviz([y], str(tmp_path / "y.dot"))
        sync.dump_computation_mlir([y], str(tmp_path / "y.mlir"))
        assert (tmp_path / "y.dot").read_text() == sync.computation_graphviz(y)
        assert (tmp_path / "y.mlir").read_text() == sync.computation_mlir(y)
        assert not sync.is_materialized(y)
        y.cpu()
        assert sync.is_materialized(y)
        with pytest.raises(ValueError, match="not pending"):
            sync.computation_text(y)


def test_foreign_tensors() -> None:
    """A tensor on the CPU has no pending value."""
    with pytest.raises(RuntimeError, match="is_materialized\\(\\): tensor is not on the PrivateUse1 device"):
        sync.is_materialized(torch.ones(1))
