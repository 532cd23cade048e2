"""``emutpu demo`` and the program it runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Command, child_environment

from emutpu.cli import demo
from emutpu.examples import digits_cnn


def test_wrong_usage(emutpu: Command) -> None:
    """Contradicting and impossible lengths are wrong usage."""
    assert emutpu("demo", "--epochs", "1", "--steps", "1").returncode == 2
    assert emutpu("demo", "--steps", "0").returncode == 2
    assert emutpu("demo", "--chip", "none").returncode == 2


def test_command_runs_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo is ``run`` of the example on the device, with the goal only when the training is long enough."""
    calls: list[tuple[Any, ...]] = []

    def record(*arguments: Any) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_program", record)
    demo.command.main(["--seed", "3"], standalone_mode=False)
    demo.command.main(["--epochs", "2", "--json", "x.json", "--chip", "v5p"], standalone_mode=False)
    (full, no_variables, default_path), (short, variables, path) = calls
    assert Path(full[0]) == ROOT / "examples" / "digits_cnn.py"
    assert full[1:] == ["--device", "tpu", "--steps", "184", "--seed", "3", "--goal", "0.97"]
    assert (no_variables, default_path) == ({}, "emutpu-demo.json")
    assert short[1:] == ["--device", "tpu", "--steps", "46", "--seed", "0"]
    assert (variables, path) == ({"EMUTPU_CHIP": "v5p"}, "x.json")


def test_epoch_of_the_command_is_that_of_the_example() -> None:
    """The command counts steps without importing torch, so the two numbers must agree."""
    assert demo._STEPS_PER_EPOCH == digits_cnn.STEPS_PER_EPOCH
    assert demo._EPOCHS * demo._STEPS_PER_EPOCH == digits_cnn.STEPS


def test_example_reaches_its_goal_on_the_cpu(tmp_path: Path) -> None:
    """The example is an ordinary program: on the CPU it reaches 97 % within the demo's length."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "digits_cnn.py"), "--device", "cpu", "--goal", "0.97"],
        env=child_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "held-out accuracy" in result.stdout


def test_loss_curve_depends_on_the_seed_alone() -> None:
    """Two trainings from one seed agree to the last bit; another seed gives another curve."""
    first = digits_cnn.train("cpu", 3, 1)
    assert first == digits_cnn.train("cpu", 3, 1)
    assert first != digits_cnn.train("cpu", 3, 2)


def test_short_training_is_the_beginning_of_a_long_one() -> None:
    """The learning rate of a step does not depend on how many steps follow."""
    assert digits_cnn.train("cpu", 5, 0)[:3] == digits_cnn.train("cpu", 3, 0)


def test_every_batch_has_the_same_shape() -> None:
    """No batch is shorter than the others, across epochs: a second shape would be a second compilation."""
    batches = list(digits_cnn.Digits(0).batches(2 * digits_cnn.STEPS_PER_EPOCH))
    assert {(images.shape, labels.shape) for images, labels in batches} == {((64, 1, 8, 8), (64,))}
    first_epoch = torch.cat([images for images, _ in batches[: digits_cnn.STEPS_PER_EPOCH]])
    assert len(torch.unique(first_epoch, dim=0)) == len(first_epoch)
