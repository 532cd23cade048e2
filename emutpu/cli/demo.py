"""``emutpu demo``: train a small CNN on the emulated device, through the same path as ``emutpu run``."""

from __future__ import annotations

import importlib.util

import click

from emutpu import _settings
from emutpu.cli._output import json_option
from emutpu.cli.run import run_program

__all__ = ["command"]

_STEPS_PER_EPOCH = 23
_EPOCHS = 8
_GOAL = 0.97


@click.command("demo", short_help="Train a small CNN on the emulated device.")
@click.option("--epochs", type=click.IntRange(min=1), help=f"Passes over the training set; {_EPOCHS} by default.")
@click.option("--steps", type=click.IntRange(min=1), help="Training steps, instead of --epochs.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the weights, the split and the batches.")
@click.option("--chip", type=click.Choice(_settings.CHIPS[:-1]), help="The emulated chip.")
@json_option("Where to write the report; '-' is standard output.", default="emutpu-demo.json")
def command(epochs: int | None, steps: int | None, seed: int, chip: str | None, json_path: str) -> int:
    """Train a CNN on scikit-learn's handwritten digits and report what ran on the emulated device.

    Exits with 1 when a training of full length stays below 97 % on the held-out digits.
    """
    if epochs is not None and steps is not None:
        raise click.UsageError("--epochs and --steps exclude each other")
    if importlib.util.find_spec("sklearn") is None:
        raise click.ClickException("the demo trains on scikit-learn's digits: pip install scikit-learn")
    count = steps or (epochs or _EPOCHS) * _STEPS_PER_EPOCH
    arguments = [_example("digits_cnn"), "--device", "tpu", "--steps", str(count), "--seed", str(seed)]
    if count >= _EPOCHS * _STEPS_PER_EPOCH:
        arguments += ["--goal", str(_GOAL)]
    return run_program(arguments, {"EMUTPU_CHIP": chip} if chip else {}, json_path)


def _example(name: str) -> str:
    found = importlib.util.find_spec(f"emutpu.examples.{name}")
    if found is None or found.origin is None:
        raise click.ClickException(
            "the examples are not installed with this copy of emutpu: pip install --force-reinstall emutpu"
        )
    return found.origin
