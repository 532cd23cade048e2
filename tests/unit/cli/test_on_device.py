"""The command line with the real backend: what the other tests of this folder do with a fake one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command, child_environment

Write = Callable[[str], str]
Valid = Callable[[Any, str], dict[str, Any]]

PARITY_STEPS = 50
# float32 arithmetic in another order moves the loss of seed 1 by 3e-7 relative over 20 steps, 4e-7 over 50 (measured).
# Later, or on a few other seeds, some input of a ReLU is closer to 0 than that, and the two trainings part for good.
PARITY_TOLERANCE = 1e-4
LOSSES = """
import json, torch
torch.set_float32_matmul_precision("highest")
from emutpu.examples.digits_cnn import train
print(json.dumps([train(device, {steps}, 1) for device in ("cpu", "tpu")]))
"""


def test_doctor_runs_an_op(emutpu: Command, valid: Valid) -> None:
    """In a fit installation the smoke check passes."""
    document = valid(emutpu("doctor", "--json", "-").stdout, "doctor")
    (smoke,) = [check for check in document["checks"] if check["name"] == "smoke"]
    assert smoke["status"] == "ok", smoke


def test_run_counts_what_the_program_did(emutpu: Command, program: Write, valid: Valid, tmp_path: Path) -> None:
    """Ten equal additions are ten launches and at most one compilation of the addition."""
    text = "import torch\nx = torch.ones(64, device='tpu')\nfor _ in range(10):\n    x = x + x\nprint(x[0].item())\n"
    result = emutpu("run", "--chip", "v5p", "--json", "report.json", program(text))
    assert (result.returncode, result.stdout) == (0, "1024.0\n"), result.stderr
    document = valid((tmp_path / "report.json").read_text(), "run")
    assert document["chip"] == "v5p"
    assert document["client"] == "cpu"
    assert document["ops"]["by_name"]["aten.add.Tensor"] == 10
    assert document["compiles"]["requests"] == document["compiles"]["hits"] + document["compiles"]["misses"]
    assert document["compiles"]["hits"] >= 9
    assert document["peak_hbm_bytes"] >= 2 * 64 * 4
    assert document["fallbacks"] == []


def test_run_counts_regions(emutpu: Command, program: Write, valid: Valid, tmp_path: Path) -> None:
    """DEFER_AND_FUSE: one row a reason with launches, ops and hits; Strict has no regions."""
    text = (
        "import torch\nx = torch.ones(4).to('tpu')\nfor _ in range(3):\n    print((x * 2).sin().sum().item())\n"
        "y = x + 1\ntorch.accelerator.synchronize()\n"
    )
    result = emutpu("run", "--mode", "defer", "--json", "report.json", program(text))
    assert result.returncode == 0, result.stderr
    assert "3 for .cpu(): 9 ops" in result.stderr + result.stdout
    assert valid((tmp_path / "report.json").read_text(), "run")["regions"] == [
        {"reason": ".cpu()", "count": 3, "ops": 9, "hits": 2},
        {"reason": "synchronize()", "count": 1, "ops": 1, "hits": 0},
    ]
    result = emutpu("run", "--mode", "strict", "--json", "report.json", program(text))
    assert valid((tmp_path / "report.json").read_text(), "run")["regions"] == []


def test_host_without_a_tpu(emutpu: Command, program: Write) -> None:
    """``--chip none`` rejects the device, as a host without a TPU does."""
    result = emutpu("run", "--chip", "none", program("import torch\ntorch.ones(1, device='tpu')\n"))
    assert result.returncode == 1
    assert "RuntimeError" in result.stderr


@pytest.mark.parametrize(
    ("mode", "expected"), [("strict", "DEFER_NEVER"), ("debug", "DEFER_NEVER_AND_LAUNCH_BLOCKING")]
)
def test_mode_reaches_the_program(emutpu: Command, program: Write, mode: str, expected: str) -> None:
    """``--mode`` is the eager mode that the program ends in."""
    result = emutpu("run", "--mode", mode, "--json", "-", program("import torch\ntorch.ones(1, device='tpu') + 1\n"))
    assert json.loads(result.stdout)["mode"] == expected


@pytest.mark.parametrize(("precision", "expected"), [("default", "medium"), ("high", "high"), ("highest", "highest")])
def test_precision_reaches_the_program(emutpu: Command, program: Write, precision: str, expected: str) -> None:
    """``--precision`` is what torch reports in the program."""
    text = "import torch\nprint(torch.get_float32_matmul_precision())\n"
    assert emutpu("run", "--precision", precision, program(text)).stdout == f"{expected}\n"


def test_demo_reaches_its_goal(emutpu: Command, valid: Valid, tmp_path: Path) -> None:
    """The demo trains to 97 % on the device and nearly never compiles twice."""
    result = emutpu("demo")
    assert result.returncode == 0, result.stderr
    document = valid((tmp_path / "emutpu-demo.json").read_text(), "run")
    assert document["fallbacks"] == []
    assert document["ops"]["by_name"]["aten.convolution.default"] >= 2 * 184
    assert document["compiles"]["hits"] > 0.98 * document["compiles"]["requests"]


def test_loss_curve_equals_the_cpus(tmp_path: Path) -> None:
    """At highest precision the device trains as the CPU does, for as long as float32 noise stays noise."""
    result = subprocess.run(
        [sys.executable, "-c", LOSSES.format(steps=PARITY_STEPS)],
        env=child_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    cpu, tpu = json.loads(result.stdout)
    assert tpu == pytest.approx(cpu, rel=PARITY_TOLERANCE)
    assert cpu[-1] < 0.5 * cpu[0]
