"""``emutpu run --dry-run``: nothing is computed, everything is accounted for."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, child_environment

Command = Callable[..., "subprocess.CompletedProcess[str]"]
GIB = 2**30
LLAMA = str(ROOT / "examples" / "llama_8b_dry_run.py")

READER = """
import torch
x = torch.ones(4, device="tpu")
print("value", (x + 1).sum().item())
"""


def test_a_read_is_one_clear_error(emutpu: Command, program: Callable[[str], str]) -> None:
    """The value that is not there: the user's line and the remedy; ``--dry-values`` gives one, the same for a seed."""
    failed = emutpu("run", "--dry-run", program(READER))
    assert failed.returncode == 1
    error = failed.stderr
    assert (
        "NotImplementedError: local_scalar_dense(): a dry run computes no values, so float32[] cannot be read" in error
    )
    assert "program.py:4: print(" in error
    assert "--dry-values" in error
    integer = emutpu("run", "--dry-run", "--dry-values", "1", program(READER.replace("4, ", "4, dtype=torch.int64, ")))
    assert integer.stdout.strip() in {"value 0", "value 1"}, integer.stderr
    program(READER)
    values = [emutpu("run", "--dry-run", "--dry-values", seed, "program.py").stdout for seed in ("1", "1", "2")]
    assert values[0].startswith("value ")
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-values", "1"], "--dry-values is for --dry-run"),
        (["--hbm", "lots"], "EMUTPU_HBM='lots' is not valid: expected bytes such as 16GiB, or unlimited"),
        (["--host-issue", "soon"], "EMUTPU_HOST_ISSUE='soon' is not valid"),
        (["--trace", "trace.pdf"], "expected FILE.json"),
    ],
)
def test_wrong_usage(emutpu: Command, program: Callable[[str], str], arguments: list[str], message: str) -> None:
    """Bad options are named before anything runs."""
    result = emutpu("run", *arguments, program(READER))
    assert result.returncode == 2
    assert message in result.stderr


def test_memory_report(emutpu: Command, program: Callable[[str], str], valid: Any, tmp_path: Path) -> None:
    """Without a limit the report says how much is missing, who holds it, and at which line; with one the read raises."""
    text = (
        "import torch\nx = torch.ones(3 << 30, device='tpu')\ny = x + 1\nz = y * 2\ntorch.accelerator.synchronize()\n"
    )
    done = emutpu("run", "--dry-run", "--hbm", "unlimited", "--json", "r.json", program(text))
    assert done.returncode == 0, done.stderr
    report = valid((tmp_path / "r.json").read_text(), "run")
    assert report["peak_hbm_bytes"] >= 36 * GIB
    assert report["hbm"]["missing_bytes"] == report["peak_hbm_bytes"] - 16 * GIB
    assert report["hbm"]["limit_bytes"] is None
    assert [(held["bytes"], held["line"].split(": ")[1]) for held in report["hbm"]["largest"][:2]] == [
        (12 * GIB, "x = torch.ones(3 << 30, device='tpu')"),
        (12 * GIB, "y = x + 1"),
    ]
    assert "20 GiB are missing" in done.stderr
    assert report["modelled"]["seconds"] > 3 * 12 * GIB / 819e9
    assert report["modelled"]["hbm_use"] > 0
    failed = emutpu("run", "--dry-run", "program.py")
    assert failed.returncode == 1
    assert "torch.OutOfMemoryError" in failed.stderr
    assert "Attempting to allocate 12.00G. That was not possible. There are 4.00G free." in failed.stderr
    assert "program.py:3: y = x + 1" in failed.stderr


def test_trace_option(emutpu: Command, program: Callable[[str], str], tmp_path: Path) -> None:
    """``--trace`` writes the modelled device's rows."""
    text = "import torch\nx = torch.ones(4, device='tpu') + 1\n"
    assert emutpu("run", "--dry-run", "--trace", "t.json", program(text)).returncode == 0
    names = [event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]]
    assert "aten.add.Tensor" in names


def _llama(tmp_path: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "emutpu", "run", "--dry-run", "--chip", "v5p", "--json", str(report)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=tmp_path,
        env=child_environment(**variables),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done, json.loads(report.read_text())


@pytest.mark.slow
def test_llama_3_8b_sharded(tmp_path: Path) -> None:
    """Batch 8 x 4,096 with checkpointing and FSDP over 16 v5p fits: 2 minutes of processor time, 4 GiB, real figures."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done, report = _llama(tmp_path, LLAMA, "--steps", "2")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert after.ru_utime - before.ru_utime < 120, time.perf_counter() - started
    assert after.ru_maxrss * 1024 < 4 * GIB
    assert 40 * GIB < report["peak_hbm_bytes"] < 95 * GIB
    tokens, parameters = 8 * 4096, 8.03e9 - 128_256 * 4096
    needed = 2 * tokens * (8 * parameters - 2 * 128_256 * 4096)  # two steps: forward, recomputed forward, backward
    attention = 2 * 32 * 16 * 8 * 4096**2 * 4096  # layers, 4 + 4 + 8 products of whole squares
    assert report["modelled"]["flops"] == pytest.approx(needed + attention, rel=0.05)
    assert report["modelled"]["steps"] == 2
    assert 0.02 < report["modelled"]["step_mfu_causal"] < report["modelled"]["step_mfu"] < 1
    assert report["modelled"]["masked_flops"] == attention / 16 * 9  # half of two, two and five products
    # Weights in bf16 before both passes, gradients in float32, of which 15 ranks in 16 are elsewhere.
    moved = 2 * (2 + 2 + 4) * 8.03e9 * 15 / 16
    assert report["modelled"]["ici_bytes"] == pytest.approx(moved, rel=0.05)


@pytest.mark.slow
def test_llama_3_8b_on_one_chip_does_not_fit(tmp_path: Path) -> None:
    """Unsharded on one v5p it is out of memory; with ``--hbm unlimited`` it says how much is missing."""
    done, _ = _llama(tmp_path, LLAMA, "--chips", "1", "--steps", "1")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError" in done.stderr
    assert "the largest live tensors" in done.stderr
    done, report = _llama(tmp_path, "--hbm", "unlimited", LLAMA, "--chips", "1", "--steps", "1")
    assert done.returncode == 0, done.stderr
    assert report["hbm"]["missing_bytes"] > 30 * GIB
