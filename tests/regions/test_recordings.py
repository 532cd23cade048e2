"""What DeferAndFuse does with the recorded programs equals the recordings of TorchTPU 0.2.0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "regions"
RECORDINGS = sorted(path.stem for path in (DATA / "goldens").glob("*.json"))

_PROGRAM = """
import json, runpy, sys
import torch
from emutpu.backend.deferred.log import LOG
from emutpu.backend.runtime import runtime
program, out = sys.argv[1:]
sys.argv = [program]
runpy.run_path(program, run_name="__main__")
compiles = runtime().statistics().compiles
regions = [
    {
        "reason": region.reason,
        "cache_hit": region.hit,
        "ops": [part for op in region.ops for part in op.parts],
        "n_outputs": len(region.outputs) + region.undefined,
    }
    for region in LOG.records()
]
with open(out, "w") as file:
    json.dump({"regions": regions, "cache": {n: getattr(compiles, n) for n in ("requests", "hits", "misses")}}, file)
"""

# What the program prints depends on the device's random numbers, which are not emulated bit for bit.
DRAWS = frozenset({"16_dropout"})


def run(program: str, setting: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The program's regions and counters, and what it printed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMUTPU_", "TORCH_TPU_"))}
    # The recording computed matmuls in float32.
    kept |= {"PYTHONPATH": str(ROOT), "EMUTPU_PRECISION": "highest", "TORCH_TPU_DEFER_AND_FUSE": "1"}
    if setting in ("aggressive", "off"):
        kept["TORCH_TPU_INTERNAL_DETECT_REPEATED_OPS"] = setting
    out = folder / "regions.json"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, str(DATA / "programs" / f"{program}.py"), str(out)],
        env=kept,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(out.read_text()), result.stdout


@pytest.mark.parametrize("recording", [name for name in RECORDINGS if not name.endswith(".strict")])
def test_recording(recording: str, tmp_path: Path) -> None:
    """Number of regions, reasons, hits and misses, ops in order, outputs, counters, and what was printed."""
    program, _, setting = recording.partition(".")
    expected = json.loads((DATA / "goldens" / f"{recording}.json").read_text())
    found, printed = run(program, setting or "safe", tmp_path)
    assert program in DRAWS or printed == expected["result"]
    assert found["cache"] == expected["cache"]
    assert len(found["regions"]) == len(expected["regions"])
    for number, (ours, theirs) in enumerate(zip(found["regions"], expected["regions"], strict=True)):
        assert ours["reason"] == theirs["reason"], number
        assert ours["cache_hit"] == theirs["cache_hit"], number
        if not theirs["graph_from"].startswith("unknown"):
            assert ours["ops"] == theirs["ops"], number
            if theirs["n_outputs"] is not None and "inferred" not in theirs["graph_from"]:
                assert ours["n_outputs"] == theirs["n_outputs"], number
