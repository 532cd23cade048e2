"""``nn.LSTM`` and ``nn.GRU``: one launch per layer and direction, forward and backward.

PyTorch composes both of cells, some three launches per time step and seven backward. The device has kernels for whole
sequences. So the ops have kernels of ours above and below autograd; where something else than values is asked for
(a trace, a transform, forward-mode derivatives), or something rare, they hand over to PyTorch's composition.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

from emutpu.backend.lowering.recurrent import GRU, LSTM
from emutpu.backend.storage import DEVICE

__all__ = ["COMPOSITES", "gru", "lstm"]

Tensor = torch.Tensor
_C: Any = torch._C
_KEYS = _C.DispatchKeySet(_C.DispatchKey.PrivateUse1)
_composed = {
    mode: torch.library.get_kernel(f"aten::{name}", "PrivateUse1").call_boxed
    for mode, name in ((LSTM, "lstm.input"), (GRU, "gru.input"))
}
_GATES = {LSTM: 4, GRU: 3}
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _launch(name: str, *args: Any) -> Any:
    from emutpu.backend.registration import kernel

    return kernel(name).function(*args)


def _composition(mode: int, x: Tensor, states: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    """PyTorch's own, of cells."""
    found: tuple[Tensor, ...] = _composed[mode](_KEYS, x, list(states) if mode == LSTM else states[0], *arguments)
    return found


class _Layer(torch.autograd.Function):
    """One direction of one layer: x [T, B, I], states [B, H], weights (with biases, or none) -> states [T, B, H], last ones."""

    @staticmethod
    def forward(ctx: Any, mode: int, reverse: bool, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        count = 2 if mode == LSTM else 1
        states, weights = rest[:count], rest[count:]
        train = any(ctx.needs_input_grad)
        output, h, c, workspace = _launch("mkldnn_rnn_layer", *_operands(x, states, weights), reverse, (), mode, _hidden_size(weights), 1, len(weights) == 4, False, False, train)  # fmt: skip
        ctx.mode, ctx.reverse = mode, reverse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, *rest, workspace)
        return (output, h, c) if mode == LSTM else (output, h)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        mode, reverse = ctx.mode, ctx.reverse
        count = 2 if mode == LSTM else 1
        x, *rest, workspace = ctx.saved_tensors
        states, weights = rest[:count], rest[count:]
        if all(grad is None for grad in grads):
            return (None,) * (3 + count + len(weights))
        if torch.is_grad_enabled():
            return (None, None, *_differentiable(ctx.needs_input_grad[2:], mode, reverse, x, states, weights, grads))
        unread = (states[0],) * 3  # the results, which the caller may have written into since
        grad_x, w_ih, w_hh, b_ih, b_hh, grad_h, grad_c = _launch(
            "mkldnn_rnn_layer_backward", *_operands(x, states, weights), *unread,
            *grads, *((None,) if mode == GRU else ()), reverse, mode, _hidden_size(weights), 1, len(weights) == 4, True, False, (), False, workspace,
        )  # fmt: skip
        first = (grad_h, grad_c) if mode == LSTM else (grad_h,)
        return (None, None, grad_x, *first, w_ih, w_hh, *((b_ih, b_hh) if len(weights) == 4 else ()))


def _hidden_size(weights: Sequence[Tensor]) -> int:
    """The hidden size, from the weights of a layer."""
    return weights[1].shape[1]


def _operands(x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """As the kernels take them: what a layer does not have is any tensor, which they do not look at."""
    biases = weights[2:] or (weights[0], weights[0])
    return (x, *weights[:2], *biases, states[0], states[-1])


def _differentiable(
    needed: Sequence[bool],
    mode: int,
    reverse: bool,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    grads: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients that have gradients: those of PyTorch's composition, made anew.

    The operands are views of the saved ones, so that a path by which one of them depends on another is not counted here.
    """
    inputs = [t.view_as(t) for t in (x, *states, *weights)]
    x, states, weights = inputs[0], inputs[1 : 1 + len(states)], inputs[1 + len(states) :]
    first = [state.unsqueeze(0) for state in states]
    given = x.flip(0) if reverse else x
    output, *last = _composition(mode, given, first, list(weights), len(weights) == 4, 1, 0.0, False, False, False)
    results = [output.flip(0) if reverse else output, *[state.squeeze(0) for state in last]]
    pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    wanted = [t for t, wants in zip(inputs, needed, strict=True) if wants]
    outputs, given_grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, given_grads, create_graph=True, allow_unused=True))
    return [next(found) if wants else None for wants in needed]


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Values and reverse-mode gradients of ordinary tensors are all that is asked for."""
    return (
        all(type(t) in _PLAIN and t.device.type == DEVICE.type for t in tensors)
        and not torch.compiler.is_compiling()
        and not _C._len_torch_dispatch_stack()
        and not _C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled(DEVICE.type)
    )


def _fits(
    mode: int, x: Tensor, states: Sequence[Tensor], params: Sequence[Tensor], per: int, layers: int, directions: int
) -> bool:
    """Whether all sizes and dtypes are what they should be. If not, PyTorch's composition has the words for it."""
    tensors = (x, *states, *params)
    if x.dim() != 3 or not x.numel() or x.dtype not in _DTYPES or any(t.dtype != x.dtype for t in tensors):
        return False
    if len(params) != per * layers * directions or params[1].dim() != 2 or len(states) != (2 if mode == LSTM else 1):
        return False
    hidden, batch, gates = params[1].shape[1], x.shape[1], _GATES[mode]
    if not hidden or any(state.shape != (layers * directions, batch, hidden) for state in states):
        return False
    for index in range(layers * directions):
        width = x.shape[2] if index < directions else hidden * directions
        shapes = [(gates * hidden, width), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)]
        if [tuple(p.shape) for p in params[index * per : (index + 1) * per]] != shapes[:per]:
            return False
    return True


def _sequence(
    mode: int,
    x: Tensor,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """All layers and directions: the last layer's states, and the last states of each."""
    per, directions = 4 if has_biases else 2, 2 if bidirectional else 1
    in_time = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
    everything = (x, *states, *params)
    if not _plain(everything) or not _fits(mode, in_time, states, params, per, num_layers, directions):
        arguments = (list(params), has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return _composition(mode, x, states, *arguments)
    firsts = list(zip(*[state.unbind(0) for state in states], strict=True))
    weights = list(_batched(params, per))
    last: list[tuple[Tensor, ...]] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            output, *ends = _Layer.apply(mode, direction == 1, in_time, *firsts[index], *weights[index])  # type: ignore[no-untyped-call]  # of torch
            outputs.append(output)
            last.append(tuple(ends))
        in_time = torch.cat(outputs, 2) if bidirectional else outputs[0]
        if dropout and train and layer < num_layers - 1:
            in_time = F.dropout(in_time, dropout, training=True)
    output = in_time.transpose(0, 1) if batch_first else in_time
    return (output, *[torch.stack(ends) for ends in zip(*last, strict=True)])


def _batched(items: Sequence[Tensor], size: int) -> Iterator[tuple[Tensor, ...]]:
    iterator = iter(items)
    while batch := tuple(itertools.islice(iterator, size)):
        yield batch


def lstm(sequence: Tensor, hx: Sequence[Tensor], params: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    """``lstm.input``: states of the last layer, last hidden and last cell states of each layer and direction."""
    return _sequence(LSTM, sequence, hx, params, *arguments)


def gru(sequence: Tensor, hx: Tensor, params: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, ...]:
    """``gru.input``: states of the last layer, last hidden states of each layer and direction."""
    return _sequence(GRU, sequence, (hx,), params, *arguments)


COMPOSITES: dict[str, Callable[..., Any]] = {"lstm.input": lstm, "gru.input": gru}
