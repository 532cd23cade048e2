"""Train an image classifier of timm on made-up images.

    python examples/timm_training.py --device tpu

Each class is a colour with noise, so that a few steps suffice to see the loss fall. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4
BATCH = 16
SIZE = 32


def make_model(name: str, seed: int) -> nn.Module:
    """A model of timm with random weights that depend on ``seed`` alone."""
    import timm

    torch.manual_seed(seed)
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES)
    return model


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images f32[16, 3, 32, 32] and labels i64[16], on the CPU."""
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    colours = torch.eye(CLASSES, 3).sub(0.5)
    noise = torch.randn(BATCH, 3, SIZE, SIZE, generator=generator)
    return colours[labels][:, :, None, None] + 0.3 * noise, labels


def train(device: str | torch.device, steps: int, seed: int, name: str = "resnet18") -> list[float]:
    """The loss of every step."""
    model = make_model(name, seed).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        images, labels = make_batch(generator)
        loss = F.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Train and print the first and the last loss."""
    parser = argparse.ArgumentParser(description="Train an image classifier of timm on made-up images.")
    parser.add_argument("--device", default="tpu", help="where to train (default: %(default)s)")
    parser.add_argument("--model", default="resnet18", help="a model of timm (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="batches (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and images (default: %(default)s)")
    options = parser.parse_args()
    losses = train(options.device, options.steps, options.seed, options.model)
    print(f"{options.model}: loss {losses[0]:.4f} -> {losses[-1]:.4f} after {options.steps} steps on {options.device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
