"""Train a small CNN on scikit-learn's handwritten digits.

An ordinary PyTorch program: nothing in it knows of an emulator. On a TPU, real or emulated:

    python examples/digits_cnn.py --device tpu

Every batch has the same size (the last, shorter one is dropped), because a new shape is a new compilation on a TPU.
Weights and batches are made on the CPU from the seed, so two devices train on the same numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 64
HELD_OUT = 297
STEPS_PER_EPOCH = (1797 - HELD_OUT) // BATCH
STEPS = 8 * STEPS_PER_EPOCH
OnStep = Callable[[int, float], None]


class DigitsCNN(nn.Module):
    """Two convolution blocks and a linear layer: images f32[n, 1, 8, 8] in [0, 1] -> logits f32[n, 10]."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.features(images).flatten(1)))
        return logits


class Digits:
    """The 1,797 digits on the CPU, split by ``seed`` into a training part and a held-out part of 297."""

    def __init__(self, seed: int) -> None:
        from sklearn.datasets import load_digits

        bunch = load_digits()
        images = torch.from_numpy(bunch.images).to(torch.float32).div(16).unsqueeze(1)
        labels = torch.from_numpy(bunch.target).to(torch.int64)
        self._generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(labels), generator=self._generator)
        self.held_out = images[order[:HELD_OUT]], labels[order[:HELD_OUT]]
        self.training = images[order[HELD_OUT:]], labels[order[HELD_OUT:]]

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """``steps`` batches of 64 (images, labels), reshuffled at each epoch."""
        images, labels = self.training
        for step in range(steps):
            at = step % STEPS_PER_EPOCH * BATCH
            if at == 0:
                order = torch.randperm(len(labels), generator=self._generator)
            chosen = order[at : at + BATCH]
            yield images[chosen], labels[chosen]


def make_model(seed: int, dropout: float) -> DigitsCNN:
    """A model on the CPU whose initial weights depend on ``seed`` alone."""
    torch.manual_seed(seed)
    return DigitsCNN(dropout)


def fit(model: nn.Module, digits: Digits, device: torch.device, steps: int, on_step: OnStep | None) -> list[float]:
    """Train ``model``, already on ``device``, and return the loss of every step.

    The learning rate warms up and decays over ``STEPS``, so that a shorter training is the beginning of a full one.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2, foreach=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1e-2, total_steps=max(steps, STEPS), cycle_momentum=False
    )
    losses = []
    model.train()
    for step, (images, labels) in enumerate(digits.batches(steps)):
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if on_step is not None:
            on_step(step, losses[-1])
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits, device: torch.device) -> float:
    """The share of held-out digits that ``model`` names rightly."""
    model.eval()
    images, labels = digits.held_out
    right = model(images.to(device)).argmax(1) == labels.to(device)
    return float(right.sum().item() / len(labels))


def train(device: str | torch.device, steps: int, seed: int) -> list[float]:
    """The loss curve without dropout: it depends on the device's arithmetic only, so devices can be compared."""
    device = torch.device(device)
    return fit(make_model(seed, dropout=0.0).to(device), Digits(seed), device, steps, None)


@contextlib.contextmanager
def progress(steps: int) -> Iterator[OnStep]:
    """A progress bar on standard error, with the latest loss."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.4f}"), console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=steps, loss=float("nan"))
        yield lambda step, loss: bar.update(task, completed=step + 1, loss=loss)


def main() -> int:
    """Train, print the held-out accuracy, and return 0 when it reaches ``--goal``."""
    parser = argparse.ArgumentParser(description="Train a small CNN on scikit-learn's handwritten digits.")
    parser.add_argument("--device", default="tpu", help="where to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, help="batches (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, split and batches (default: %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="probability (default: %(default)s)")
    parser.add_argument("--goal", type=float, default=0.0, help="exit with 1 below this accuracy")
    options = parser.parse_args()

    device = torch.device(options.device)
    digits = Digits(options.seed)
    model = make_model(options.seed, options.dropout).to(device)
    with progress(options.steps) as on_step:
        losses = fit(model, digits, device, options.steps, on_step)
    reached = accuracy(model, digits, device)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {options.steps} steps on {device}")
    print(f"held-out accuracy {reached:.2%}")
    if reached < options.goal:
        print(f"below the goal of {options.goal:.0%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
