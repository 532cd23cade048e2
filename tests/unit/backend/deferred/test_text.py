"""The graph of a pending tensor, as text, graphviz and MLIR."""

from __future__ import annotations

import pytest
import torch

from emutpu import sync
from emutpu.backend.deferred.text import pending_dot, pending_mlir, pending_text, region_text


def test_graph_text(regions) -> None:
    """Header, inputs, one line an op with the user's line, and the return; the same of a launched region."""
    x = torch.ones(2, 3).to("tpu")
    y = (x * 2).t().sum(0)
    lines = pending_text(y).splitlines()
    assert lines[0] == "# Graph: 2 ops, 2 inputs, reason: pending"
    assert lines[1:3] == ["%0: f32[2, 3] = input", "%1: i64[] = input"]
    assert lines[3].startswith("%2: f32[2, 3] = mul.out(%0, %1)    # ")
    assert lines[3].endswith("in test_graph_text")
    assert lines[4].startswith("%3: f32[2] = as_strided+sum.IntList_out(%2)")
    assert lines[5] == "return %3"
    y.cpu()
    (region,) = regions()
    assert region_text(region).splitlines()[1:] == lines[1:]
    assert region_text(region).startswith("# Graph: 2 ops, 2 inputs, reason: .cpu()")
    with pytest.raises(ValueError, match="not pending"):
        pending_text(x)


def test_other_forms() -> None:
    """Graphviz names every op and edge; MLIR is the canonical module with the user's lines."""
    y = (torch.ones(2).to("tpu") * 2).sin()
    dot = pending_dot(y)
    assert dot.startswith("digraph pending {")
    assert "i0 -> n0" in dot
    assert "n0 -> n1" in dot
    assert "stablehlo.sine" in pending_mlir(y)


def test_the_devices_names(tmp_path) -> None:
    """``emutpu.sync`` has the functions of TorchTPU's, for one tensor, several, and lists; only synchronize computes."""
    x = torch.ones(2).to("tpu")
    y, z = x * 2, x.sin()
    assert sync.is_materialized(x)
    assert not sync.is_materialized(y)
    dot, mlir = sync.computation_graphviz(y, z), sync.computation_mlir([y, z])
    assert dot.count("peripheries=2") == 2
    assert "stablehlo.multiply" in mlir
    assert "stablehlo.sine" in mlir
    assert sync.computation_text(y).splitlines()[-1] == "return %2"
    sync.dump_computation_graphviz([y, z], str(tmp_path / "graph"))
    sync.dump_computation_mlir([y, z], str(tmp_path / "module"))
    assert (tmp_path / "graph").read_text() == dot
    assert (tmp_path / "module").read_text() == mlir
    assert not sync.is_materialized(z)
    sync.synchronize(y, wait=True)
    assert sync.is_materialized(y)
    assert sync.is_materialized(z)  # a read takes everything that is live
    with pytest.raises(ValueError, match="not pending"):
        sync.computation_mlir(y)
    w = y + 1
    sync.synchronize()
    assert w.tolist() == [3, 3]
    with pytest.raises(RuntimeError, match="not on the PrivateUse1 device"):
        sync.is_materialized(torch.ones(1))
