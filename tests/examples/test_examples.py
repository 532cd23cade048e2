"""The example programs: CPU and device agree, and each runs from the command line."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from emutpu.backend.runtime import runtime
from emutpu.examples import bert_finetuning, digits_cnn, llama_generation, lstm_language_model, timm_training
from tools.layout import ROOT

# Rounding in another order, carried through a few optimiser steps; Adam amplifies it where gradients are small.
PARITY = 1e-3
LOGITS, GRADIENTS = 1e-4, 1e-3
TRAININGS = {
    "timm": (timm_training, 4),
    "bert": (bert_finetuning, 6),
    "lstm": (lstm_language_model, 6),
}


def _digits(device: str, steps: int, seed: int) -> list[float]:
    model = digits_cnn.make_model(seed, 0.0).to(device)
    return digits_cnn.fit(model, digits_cnn.Digits(seed), torch.device(device), steps, None)


TRAIN = {name: example.train for name, (example, _) in TRAININGS.items()} | {"digits": _digits}


class Watched:
    """What a training program does, seen through PyTorch's own hooks: the first step's logits and gradients on the CPU, all
    gradients that are not finite, and which executables each step launched.
    """

    def __init__(self) -> None:
        self.logits: Tensor | None = None
        self.gradients: list[Tensor] = []
        self.not_finite = 0
        self.launched: list[set[int]] = []
        self._output: Any = None
        self._calls = self._counts()

    @contextlib.contextmanager
    def watching(self, *, values: bool) -> Iterator[None]:
        handles = [register_optimizer_step_post_hook(self._stepped)]
        if values:
            handles += [register_module_forward_hook(self._forward), register_optimizer_step_pre_hook(self._gradients)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._output = output  # the outermost module comes last

    def _gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        found = [p.grad.cpu() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.not_finite += sum(not gradient.isfinite().all() for gradient in found)
        if self.logits is None:
            output = getattr(self._output, "logits", self._output)
            self.logits = (output[0] if isinstance(output, tuple) else output).detach().cpu()
            self.gradients = found

    def _stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        before, self._calls = self._calls, self._counts()
        self.launched.append({at for at, calls in self._calls.items() if calls != before.get(at, 0)})

    @staticmethod
    def _counts() -> dict[int, int]:
        return {at: tally.calls for at, tally in enumerate(runtime().meter.tallies)}


def _near(actual: Tensor, expected: Tensor, relative: float) -> None:
    """To ``relative`` of the largest number of the tensor; what is 0 but for rounding may be anything as small."""
    error = (actual - expected).abs().max().item()
    assert error <= relative * expected.abs().max().item() + 1e-7


@pytest.mark.parametrize("name", TRAIN)
def test_logits_and_gradients_equal_the_cpus(name):
    """Of the first step, every parameter's."""
    seen = {}
    for device in ("cpu", "tpu"):
        seen[device] = Watched()
        with seen[device].watching(values=True):
            TRAIN[name](device, 1, 0)
    expected, actual = seen["cpu"], seen["tpu"]
    _near(actual.logits, expected.logits, LOGITS)
    assert len(actual.gradients) == len(expected.gradients) > 0
    for a, e in zip(actual.gradients, expected.gradients, strict=True):
        _near(a, e, GRADIENTS)


@pytest.mark.parametrize("name", TRAIN)
def test_finite_at_default_precision(name):
    """Losses and gradients at the precision that the device has by itself."""
    seen = Watched()
    with torch.tpu.precision(torch.tpu.Precision.DEFAULT), seen.watching(values=True):
        losses = TRAIN[name]("tpu", 2, 0)
    assert torch.tensor(losses).isfinite().all()
    assert seen.gradients
    assert not seen.not_finite


@pytest.mark.parametrize("name", TRAIN)
def test_the_second_step_compiles_nothing(name):
    """Nor the third: they launch what the first launched, whatever other tests have compiled."""
    seen = Watched()
    with seen.watching(values=False):
        TRAIN[name]("tpu", 3, 0)
    first, second, third = seen.launched
    assert first
    assert second | third <= first


def test_the_second_generation_compiles_nothing():
    """Prompts of the same length, as many new tokens."""
    llama_generation.generate("tpu", 4, 0)
    before = runtime().cache.misses
    llama_generation.generate("tpu", 4, 1)
    assert runtime().cache.misses == before


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
