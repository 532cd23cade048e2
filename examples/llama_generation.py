"""Continue two prompts with a small Llama.

    python examples/llama_generation.py --device tpu

The cache of keys and values has a fixed length, so that every step after the first has the same shapes and runs what is
already compiled. The weights are random, so the tokens mean nothing, but they are the same on every device.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor, nn

VOCABULARY = 128
PROMPT = 8


def make_model(seed: int) -> nn.Module:
    """A decoder of two layers whose weights depend on ``seed`` alone, wide enough apart that rounding decides no token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.eval()


@torch.no_grad()
def generate(device: str | torch.device, tokens: int, seed: int) -> list[list[int]]:
    """Greedy continuations of two random prompts: ``tokens`` ids each."""
    model = make_model(seed).to(device)
    prompts = torch.randint(2, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(seed)).to(device)
    made: Tensor = model.generate(  # type: ignore[operator]  # transformers' mixin
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        do_sample=False,
        cache_implementation="static",
        disable_compile=True,
    )
    continuations: list[list[int]] = made[:, PROMPT:].tolist()
    return continuations


def main() -> int:
    """Generate and print the token ids."""
    parser = argparse.ArgumentParser(description="Continue two prompts with a small Llama.")
    parser.add_argument("--device", default="tpu", help="where to run (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=12, help="how many to add (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: %(default)s)")
    options = parser.parse_args()
    for tokens in generate(options.device, options.tokens, options.seed):
        print(*tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
