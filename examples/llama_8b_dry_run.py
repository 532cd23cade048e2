"""A training step of a full-size Llama-3-8B, for a dry run: shapes, memory and modelled time, nothing computed.

    emutpu run --dry-run --chip v5p examples/llama_8b_dry_run.py            # sharded over 16 chips with FSDP
    emutpu run --dry-run --chip v5p examples/llama_8b_dry_run.py --chips 1  # does not fit: torch.OutOfMemoryError

The other ranks are not there: PyTorch's fake process group stands in for them, so this process runs the program of rank 0
and its collectives take no modelled time.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HIDDEN, HEADS, KEY_HEADS = 128_256, 4096, 14_336, 32, 8
HEAD = WIDTH // HEADS


class Attention(nn.Module):
    """Causal attention with grouped keys and rotary positions; inputs and results are [batch, length, width]."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD, bias=False)
        self.output = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Mix positions."""
        query, key, value = (
            part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        query, key = (rotated(t, cosine, sine) for t in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: torch.Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return result


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of [batch, heads, length, head]."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


class Layer(nn.Module):
    """One transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.attention = Attention()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
        """Attention and SwiGLU, each with a residual."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        y = self.norm(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """Llama 3 of ``layers`` blocks; tokens [batch, length] to logits [batch, length, vocabulary]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, with every layer recomputed in the backward pass."""
        x = self.embedding(tokens)
        positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.float32)
        rates = 500_000.0 ** (-torch.arange(0, HEAD, 2, device=tokens.device, dtype=torch.float32) / HEAD)
        angles = torch.outer(positions, rates).repeat(1, 2)
        cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, cosine, sine, use_reentrant=False)
        result: torch.Tensor = self.head(self.norm(x))
        return result


def model_on_device(layers: int, chips: int) -> Llama:
    """The model with its parameters on the device: whole, or this rank's shards of them."""
    with torch.device("meta"):
        model = Llama(layers)
    if chips > 1:
        mesh = init_device_mesh("tpu", (chips,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="tpu")
    for parameter in model.parameters():
        # The local shard: DTensor's own random state is compared by value, and a dry run has none.
        nn.init.normal_(parameter.to_local() if isinstance(parameter, DTensor) else parameter, std=0.02)
    return model


def main() -> None:
    """One optimizer step, as on a chip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", type=int, default=16)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="sequences per chip")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    if options.chips > 1:
        dist.init_process_group("cpu:fake,tpu:fake", store=FakeStore(), rank=0, world_size=options.chips)
    model = model_on_device(options.layers, options.chips)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.zeros(options.batch, options.length, dtype=torch.int64, device="tpu")
    for _ in range(options.steps):
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.accelerator.synchronize()
    print(f"peak HBM {torch.accelerator.max_memory_allocated() / 2**30:.1f} GiB")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
