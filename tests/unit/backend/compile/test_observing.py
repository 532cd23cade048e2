"""Recompilations are attributed, traces and debug callbacks show what was compiled."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch

from emutpu.backend.compile.observe import recompilations
from emutpu.backend.runtime import runtime


def test_recompilations_name_the_dimension_and_the_line() -> None:
    """A changed size counts with its tensor, dimension, both extents and the function's line; a changed number with its guard."""
    runtime().recompiles.clear()

    def f(x, scale):
        return x * scale

    compiled = torch.compile(f, backend="tpu")
    compiled(torch.ones(8, device="tpu"), 2)
    assert recompilations() == []
    compiled(torch.ones(5, device="tpu"), 2)
    where = f"test_observing.py:{f.__code__.co_firstlineno + 1}"
    assert recompilations() == [f"recompiled 1×: dim 0 of `x`, 8→5, {where}"]
    compiled(torch.ones(5, device="tpu"), 3)
    assert any("scale" in line for line in recompilations())


def test_the_debug_callback_sees_graph_and_module() -> None:
    """Text of the ATen graph, of the module, and a fingerprint that does not depend on the run."""
    seen = []
    f = torch.compile(lambda x: x.sin() + 1, backend="tpu", options={"debug_callback": seen.append, "name": "mine"})
    f(torch.ones(3, device="tpu"))
    (debug,) = seen
    assert "aten.sin" in debug.graph_module_debug_str
    assert "stablehlo.sine" in debug.mlir_text
    assert debug.name == "mine_fwd"
    torch._dynamo.reset()
    f(torch.ones(3, device="tpu"))
    assert seen[1].fingerprint() == debug.fingerprint()


def test_structured_traces(passes, tmp_path) -> None:
    """``TORCH_TRACE`` gets TorchTPU's artifacts, readable by tlparse."""
    passes(
        """
        import torch
        torch.compile(lambda x: x.sin() + 1)(torch.ones(3, device="tpu")).cpu()
        """,
        TORCH_TRACE=str(tmp_path),
    )
    (log,) = tmp_path.glob("*.log")
    text = log.read_text()
    assert '"name": "torchtpu_fx_graph"' in text
    assert '"name": "torchtpu_stablehlo_graph"' in text
    assert "stablehlo.sine" in text
    reader = Path(sysconfig.get_path("scripts")) / "tlparse"
    if not reader.exists():
        pytest.skip("tlparse is not installed (emutpu[dev])")
    out = tmp_path / "parsed"
    done = subprocess.run(
        [reader, log, "-o", out, "--no-browser"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    index = (out / "index.html").read_text()
    for name in ("torchtpu_fx_graph", "torchtpu_stablehlo_graph"):
        assert name in index
        (file,) = out.rglob(f"{name}*")
        assert ("aten.sin" if "fx" in name else "stablehlo.sine") in file.read_text()
