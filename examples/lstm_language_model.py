"""Train an LSTM to spell: a language model over the characters of a short text.

    python examples/lstm_language_model.py --device tpu

PyTorch's own modules only. States are carried from one window of the text to the next, detached.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEXT = "the quick brown fox jumps over the lazy dog while the five boxing wizards jump quickly. " * 16
ALPHABET = sorted(set(TEXT))
BATCH = 4
WINDOW = 16
State = tuple[Tensor, Tensor]


class CharacterModel(nn.Module):
    """Ids i64[n, t] and the states -> logits f32[n, t, alphabet] and the new states."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET), 16)
        self.lstm = nn.LSTM(16, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, len(ALPHABET))

    def forward(self, ids: Tensor, state: State | None) -> tuple[Tensor, State]:
        hidden, state = self.lstm(self.embedding(ids), state)
        return self.head(hidden), state


def text_ids() -> Tensor:
    """The text as i64[4, n]: four readers, each at another place."""
    ids = torch.tensor([ALPHABET.index(character) for character in TEXT])
    return ids[: len(ids) // BATCH * BATCH].view(BATCH, -1)


def train(device: str | torch.device, steps: int, seed: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = CharacterModel().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = text_ids()
    windows = (ids.shape[1] - 1) // WINDOW
    losses = []
    state: State | None = None
    for step in range(steps):
        at = step % windows * WINDOW
        if at == 0:
            state = None
        window = ids[:, at : at + WINDOW + 1].to(device)
        logits, (hidden, cell) = model(window[:, :-1], state)
        state = hidden.detach(), cell.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Train and print the first and the last loss."""
    parser = argparse.ArgumentParser(description="Train an LSTM language model over characters.")
    parser.add_argument("--device", default="tpu", help="where to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="windows of text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: %(default)s)")
    options = parser.parse_args()
    losses = train(options.device, options.steps, options.seed)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {options.steps} steps on {options.device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
