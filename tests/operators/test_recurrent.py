"""Recurrent modules against CPU: whole sequences and single cells, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import assert_same, highest
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves

from emutpu.backend.kernels import op_counts

SEQUENCES = {
    "lstm": nn.LSTM(5, 6, num_layers=2),
    "lstm-no-bias": nn.LSTM(5, 6, bias=False, batch_first=True),
    "lstm-bidirectional": nn.LSTM(5, 6, bidirectional=True),
    "lstm-projection": nn.LSTM(5, 6, proj_size=3),
    "lstm-deep-bidirectional": nn.LSTM(5, 6, num_layers=2, bidirectional=True, batch_first=True),
    "lstm-dropout-of-all": nn.LSTM(5, 6, num_layers=2, dropout=1.0),
    "gru": nn.GRU(5, 6, num_layers=2),
    "gru-deep-bidirectional": nn.GRU(5, 6, num_layers=2, bidirectional=True, batch_first=True),
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


LAYERS = {"lstm": nn.LSTM(5, 6, num_layers=2), "gru": nn.GRU(5, 6, num_layers=2, bidirectional=True)}
LAYERED = pytest.mark.parametrize("module", [pytest.param(m, id=n) for n, m in LAYERS.items()])


def _launched(function) -> dict[str, int]:
    before = op_counts()
    function()
    return {name: calls - before.get(name, 0) for name, calls in op_counts().items() if calls != before.get(name, 0)}


@LAYERED
def test_a_layer_is_one_launch(module):
    """However long the sequence: one launch per layer and direction, one more backward."""
    count = module.num_layers * (1 + module.bidirectional)
    for time in (3, 9):
        x = torch.randn(time, 2, 5)
        counts = _launched(lambda x=x: _run(module, x, "tpu"))
        assert counts["aten.mkldnn_rnn_layer.default"] == counts["aten.mkldnn_rnn_layer_backward.default"] == count
        assert not any("thnn" in name or "mm" in name or "linear" in name for name in counts)


@LAYERED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_gradients_in_other_dtypes(module, dtype):
    """float64 equals CPU's; 16-bit ones are as near to float32's as rounding of the states allows."""
    x = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    results, gradients = _run(copy.deepcopy(module).to(dtype), x.to(dtype), "tpu")
    exact, expected = _run(copy.deepcopy(module).double(), x.double(), "cpu")
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 5e-2, "atol": 5e-2}
    for a, e in zip(results + gradients, exact + expected, strict=True):
        assert a.dtype == dtype
        scale = max(1.0, e.abs().max().item())
        torch.testing.assert_close(a.detach().cpu().double() / scale, e.detach() / scale, **tolerance)


@LAYERED
def test_given_states_and_frozen_weights(module):
    """First states get gradients, frozen weights none; a loss of the last states alone."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 3, 5, generator=generator)
    count = module.num_layers * (1 + module.bidirectional)
    states = [torch.randn(count, 3, 6, generator=generator) for _ in range(2 if module.mode == "LSTM" else 1)]

    def run(device: str) -> list[torch.Tensor | None]:
        layers = copy.deepcopy(module).to(device)
        layers.weight_hh_l0.requires_grad_(False)
        given = [s.to(device).requires_grad_() for s in states]
        last = layers(x.to(device), tuple(given) if len(given) == 2 else given[0])[1]
        last = last if isinstance(last, torch.Tensor) else last[1]
        last.square().sum().backward()
        assert layers.weight_hh_l0.grad is None
        return [*[s.grad for s in given], *[p.grad for p in layers.parameters() if p.grad is not None]]

    with highest():
        assert_same(run("tpu"), run("cpu"), what=str(module))


@LAYERED
def test_gradients_of_gradients(module):
    """A penalty on the input's gradient, where the same weights are used twice, one use fed by the other."""
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))

    def run(device: str) -> list[torch.Tensor]:
        layers = copy.deepcopy(module).to(device)
        given = x.to(device).requires_grad_()
        again = layers(layers(given)[0][..., :5])[0]
        (gradient,) = torch.autograd.grad(again.square().sum(), given, create_graph=True)
        gradient.square().sum().backward()
        return [given.grad, *[p.grad for p in layers.parameters()]]

    with highest():
        assert_same(run("tpu"), run("cpu"), what=str(module))


@LAYERED
def test_results_may_be_written_into(module):
    """What backward needs is not in the results."""
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))

    def run(device: str) -> list[torch.Tensor]:
        layers = copy.deepcopy(module).to(device)
        output = layers(x.to(device))[0]
        kept = output.clone()
        output.mul_(2).relu_()
        (output * kept).sum().backward()
        return [p.grad for p in layers.parameters()]

    with highest():
        # PyTorch's CPU kernel for whole layers refuses this: the composition is the oracle.
        with torch.backends.mkldnn.flags(enabled=False):
            expected = run("cpu")
        assert_same(run("tpu"), expected, what=str(module))


@LAYERED
def test_transforms_take_the_composition(module):
    """torch.func.grad and forward-mode derivatives of cells equal CPU's: a layer's kernel has none."""
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))

    def run(device: str) -> torch.Tensor:
        layers = copy.deepcopy(module).to(device).requires_grad_(False)
        return torch.func.grad(lambda given: layers(given)[0].square().sum())(x.to(device))

    with highest():
        assert_same(run("tpu"), run("cpu"), what=str(module))


@LAYERED
def test_deferred(module):
    """Recorded and fused, a layer gives the same."""
    x = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    with highest(), torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        assert_same(_run(module, x, "tpu"), _run(module, x, "cpu"), what=str(module))


@pytest.mark.parametrize("change", ["input", "state", "weight"])
def test_wrong_sizes_are_refused(change):
    """As on the CPU, a RuntimeError: by PyTorch's composition, which has the words."""
    x, h = torch.randn(3, 2, 5), torch.randn(1, 2, 6)
    weights = [torch.randn(18, 5), torch.randn(18, 6)]
    if change == "input":
        x = torch.randn(3, 2, 4)
    elif change == "state":
        h = torch.randn(1, 3, 6)
    else:
        weights[1] = torch.randn(18, 7)
    for device in ("cpu", "tpu"):
        moved = [w.to(device) for w in weights]
        with pytest.raises(RuntimeError):
            torch.gru(x.to(device), h.to(device), moved, False, 1, 0.0, False, False, False)
