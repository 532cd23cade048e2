"""Language models over forty sequence lengths under one bound: one executable forward, two with the backward, and CPU's results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import misses

LENGTHS = [3 + 7 * n % 40 for n in range(40)]  # each of 3 to 42 once
MOST = 48


def bert() -> nn.Module:
    """Two layers, with a padding mask."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=MOST,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def llama() -> nn.Module:
    """Two layers, causal, with fewer key heads than query heads and a padding mask."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=MOST,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(length: int) -> dict[str, Tensor]:
    """Two sequences, the second shorter by half."""
    generator = torch.Generator().manual_seed(length)
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[1, (length + 1) // 2 :] = 0
    tokens = torch.randint(0, 64, (2, length), generator=generator)
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def marked(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the device, with the sequence length bounded."""
    moved = {name: tensor.to("tpu") for name, tensor in given.items()}
    for tensor in moved.values():
        torch._dynamo.mark_dynamic(tensor, 1, min=3, max=MOST)
    return moved


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled before; full precision."""
    torch._dynamo.reset()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(precision)


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """The same model on the CPU and on the device."""
    torch.manual_seed(0)
    theirs = build()
    return theirs, copy.deepcopy(theirs).to("tpu")


@pytest.mark.filterwarnings("ignore:emutpu. TorchTPU")
@pytest.mark.parametrize("build", [bert, llama])
def test_inference_over_forty_lengths(build: Callable[[], nn.Module]) -> None:
    """The logits are the CPU's at every length, from one executable."""
    theirs, mine = pair(build)
    theirs.eval(), mine.eval()
    compiled = torch.compile(mine, backend="tpu", fullgraph=True, options={"bucket_size": 16})
    before = misses()
    for length in LENGTHS:
        given = batch(length)
        del given["labels"]
        with torch.no_grad():
            found, expected = compiled(**marked(given)).logits, theirs(**given).logits
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert misses() - before == 1


@pytest.mark.filterwarnings("ignore:emutpu. TorchTPU")
@pytest.mark.parametrize("build", [bert, llama])
def test_training_over_forty_lengths(build: Callable[[], nn.Module]) -> None:
    """Loss and all gradients are the CPU's at every length, from two executables."""
    theirs, mine = pair(build)
    graphs: list[Any] = []
    options = {"bucket_size": 16, "debug_callback": graphs.append}
    compiled = torch.compile(lambda **given: mine(**given).loss, backend="tpu", options=options)
    for length in LENGTHS:
        given = batch(length)
        found, expected = compiled(**marked(given)), theirs(**given).loss
        for model, loss in ((mine, found), (theirs, expected)):
            model.zero_grad()
            loss.backward()
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
        for ours, reference in zip(mine.parameters(), theirs.parameters(), strict=True):
            if reference.grad is not None:
                assert ours.grad is not None
                torch.testing.assert_close(ours.grad.cpu(), reference.grad, rtol=1e-4, atol=1e-5)
        if length == LENGTHS[0]:
            before = misses()
    assert len(graphs) == 2
    assert misses() == before
