"""The example programs: CPU and device agree, and each runs from the command line."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from emutpu.examples import bert_finetuning, llama_generation, lstm_language_model, timm_training
from tools.layout import ROOT

# Rounding in another order, carried through a few optimiser steps; Adam amplifies it where gradients are small.
PARITY = 1e-3
TRAININGS = {
    "timm": (timm_training, 4),
    "bert": (bert_finetuning, 6),
    "lstm": (lstm_language_model, 6),
}


@pytest.fixture(autouse=True)
def _highest():
    """CPU is the oracle at six-pass matmuls."""
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        yield


@pytest.mark.parametrize(("example", "steps"), [pytest.param(*row, id=name) for name, row in TRAININGS.items()])
def test_losses_follow_the_cpu(example, steps):
    """Every loss agrees, and the losses fall."""
    expected, actual = (example.train(device, steps, 0) for device in ("cpu", "tpu"))
    assert actual == pytest.approx(expected, rel=PARITY)
    assert min(expected[1:]) < expected[0]


def test_generation_gives_equal_tokens():
    """The same token ids on both devices, not all alike."""
    expected, actual = (llama_generation.generate(device, 8, 0) for device in ("cpu", "tpu"))
    assert actual == expected
    assert [len(row) for row in actual] == [8, 8]
    assert len({token for row in actual for token in row}) > 2


@pytest.mark.parametrize(
    ("program", "arguments", "says"),
    [
        ("timm_training", ["--steps", "1"], "loss"),
        ("bert_finetuning", ["--steps", "1"], "loss"),
        ("lstm_language_model", ["--steps", "1"], "loss"),
        ("llama_generation", ["--tokens", "2"], " "),
    ],
)
def test_command_line(program, arguments, says):
    """The program runs as its docstring says, on the CPU, and prints its result."""
    prepare = "from tests.support import torchvision_schemas as t; t.declare(); import runpy, sys; "
    run = f"sys.argv[0] = '{program}'; runpy.run_path('examples/{program}.py', run_name='__main__')"
    command = [sys.executable, "-c", prepare + run, "--device", "cpu", *arguments]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
