"""Fine-tune a small BERT to tell which sentences begin with a given word.

    python examples/bert_finetuning.py --device tpu

Sentences are made up of random token ids and padded to one length, because a new length is a new compilation on a TPU.
The model is small and starts from random weights; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

VOCABULARY = 64
LENGTH = 16
BATCH = 16
PADDING = 0
WORD = 7


def make_model(seed: int) -> nn.Module:
    """A classifier of two layers whose initial weights depend on ``seed`` alone; without dropout, so devices compare."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model: nn.Module = BertForSequenceClassification(config)
    return model


def make_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """Padded token ids and mask i64[16, 16]; the label i64[16] tells whether the first token is the word."""
    ids = torch.randint(WORD + 1, VOCABULARY, (BATCH, LENGTH), generator=generator)
    labels = torch.randint(2, (BATCH,), generator=generator)
    ids[:, 0] = torch.where(labels.bool(), WORD, ids[:, 0])
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (BATCH, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids.where(mask.bool(), PADDING), "attention_mask": mask, "labels": labels}


def train(device: str | torch.device, steps: int, seed: int) -> list[float]:
    """The loss of every step, with warm-up, weight decay and clipped gradients."""
    model = make_model(seed).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.2, total_iters=5)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        batch = {name: value.to(device) for name, value in make_batch(generator).items()}
        loss = model(**batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def main() -> int:
    """Train and print the first and the last loss."""
    parser = argparse.ArgumentParser(description="Fine-tune a small BERT on made-up sentences.")
    parser.add_argument("--device", default="tpu", help="where to train (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="batches (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and sentences (default: %(default)s)")
    options = parser.parse_args()
    losses = train(options.device, options.steps, options.seed)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} after {options.steps} steps on {options.device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
