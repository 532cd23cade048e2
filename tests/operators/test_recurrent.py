"""Recurrent modules against CPU: whole sequences and single cells, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import assert_same, highest
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

SEQUENCES = {
    "lstm": nn.LSTM(5, 6, num_layers=2),
    "lstm-no-bias": nn.LSTM(5, 6, bias=False, batch_first=True),
    "lstm-bidirectional": nn.LSTM(5, 6, bidirectional=True),
    "lstm-projection": nn.LSTM(5, 6, proj_size=3),
    "gru": nn.GRU(5, 6, num_layers=2),
    "gru-no-bias": nn.GRU(5, 6, bias=False),
    "rnn-tanh": nn.RNN(5, 6),
    "rnn-relu": nn.RNN(5, 6, nonlinearity="relu"),
}
CELLS = {"lstm": nn.LSTMCell(5, 6), "gru": nn.GRUCell(5, 6), "gru-no-bias": nn.GRUCell(5, 6, bias=False)}


def _run(module: nn.Module, x: torch.Tensor, device: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and gradients of the input and of every parameter, for a loss that weighs all results."""
    module = copy.deepcopy(module).to(device)
    given = x.to(device).requires_grad_()
    results = tree_leaves(module(given))
    sum((result.float().square() * (index + 1)).sum() for index, result in enumerate(results)).backward()
    return results, [given.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("module", [pytest.param(m, id=n) for n, m in SEQUENCES.items()])
def test_sequences(module):
    """All outputs, last states and gradients of a sequence of four steps."""
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    with highest():
        assert_same(_run(module, x, "tpu"), _run(module, x, "cpu"), what=str(module))


@pytest.mark.parametrize("module", [pytest.param(m, id=n) for n, m in CELLS.items()])
def test_cells(module):
    """One step from the zero state."""
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    with highest():
        assert_same(_run(module, x, "tpu"), _run(module, x, "cpu"), what=str(module))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_bfloat16(kind):
    """In bfloat16 the result is as near to float32 as rounding of the states allows."""
    module = getattr(nn, kind)(5, 6)
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    expected = module(x)[0]
    actual = module.to("tpu", torch.bfloat16)(x.to("tpu", torch.bfloat16))[0]
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.detach().cpu().float(), expected.detach(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("read", [0, 1], ids=["hidden", "cell"])
def test_gradient_through_one_state(read):
    """Only the hidden or only the cell state of an LSTM cell takes part in the loss."""
    module = CELLS["lstm"]
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))

    def gradients(device: str) -> list[torch.Tensor]:
        cell = copy.deepcopy(module).to(device)
        cell(x.to(device))[read].sum().backward()
        return [p.grad for p in cell.parameters()]

    with highest():
        assert_same(gradients("tpu"), gradients("cpu"), what=f"state {read}")


def test_packed_sequences():
    """Sentences of different lengths, packed: outputs, padding and last states."""
    module = nn.LSTM(5, 6, batch_first=True)
    x = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([2, 4, 3])

    def run(device: str) -> list[torch.Tensor]:
        packed = pack_padded_sequence(x.to(device), lengths, batch_first=True, enforce_sorted=False)
        output, states = copy.deepcopy(module).to(device)(packed)
        return [pad_packed_sequence(output, batch_first=True)[0], *states]

    with highest():
        assert_same(run("tpu"), run("cpu"), what="packed")
