"""The fused cells that nn.LSTMCell and nn.GRUCell call, and whole layers of nn.LSTM and nn.GRU: a loop over time.

A layer is ``mkldnn_rnn_layer``, which PyTorch's CPU traces of models show, too; :mod:`emutpu.backend.recurrent` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._matrices import INDEX
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.matmul import contract

__all__ = ["GRU", "LSTM"]

LSTM, GRU = 2, 3
"""PyTorch's numbers of modes."""

Meta = torch.Tensor


def _lstm_meta(
    input_gates: Meta, hidden_gates: Meta, cx: Meta, input_bias: Meta | None, hidden_bias: Meta | None
) -> Any:
    """PyTorch's own meta kernel cannot do without biases."""
    return (
        torch.empty_like(cx),
        torch.empty_like(cx),
        torch.empty_like(input_gates, memory_format=torch.contiguous_format),
    )


def _gru_meta(
    input_gates: Meta, hidden_gates: Meta, hx: Meta, input_bias: Meta | None, hidden_bias: Meta | None
) -> Any:
    return torch.empty_like(hx), hx.new_empty(hx.shape[0], hx.shape[1] * 5)


def _gru_backward_meta(grad_hy: Meta, workspace: Meta, has_bias: bool) -> Any:
    batch, hidden = workspace.shape[0], workspace.shape[1] // 5
    gates = [workspace.new_empty(batch, 3 * hidden) for _ in range(2)]
    biases = [workspace.new_empty(3 * hidden) if has_bias else None for _ in range(2)]
    return (*gates, torch.empty_like(grad_hy), *biases)


def _parts(gates: Value, count: int) -> list[Value]:
    """The gates of [batch, count * hidden], each [batch, hidden]."""
    hidden = gates.shape[1] // count
    return [gates.slice_dim(1, index * hidden, (index + 1) * hidden) for index in range(count)]


def _sum(*values: Value | None) -> Value:
    """In float32 at least; biases broadcast."""
    present = [value for value in values if value is not None]
    total = _wide(present[0])
    for value in present[1:]:
        total = total + _wide(value)
    return total


def _wide(value: Value) -> Value:
    return value if value.dtype == torch.float64 else value.convert(torch.float32)


def _as_outputs(cx: Context, *values: Value) -> list[Value | None]:
    """The values in their results' dtypes; None where the result is undefined."""
    return [None if spec is None else value.convert(spec.dtype) for spec, value in zip(cx.outputs, values, strict=True)]


@lowering(
    "_thnn_fused_lstm_cell(Tensor input_gates, Tensor hidden_gates, Tensor cx, Tensor? input_bias=None, "
    "Tensor? hidden_bias=None) -> (Tensor, Tensor, Tensor)",
    meta=_lstm_meta,
)
def _lstm_cell(
    context: Context,
    input_gates: Value,
    hidden_gates: Value,
    cx: Value,
    input_bias: Value | None,
    hidden_bias: Value | None,
) -> list[Value | None]:
    """The new hidden and cell states; the workspace holds the activated gates: input, forget, cell, output."""
    i, f, g, o = _parts(_sum(input_gates, hidden_gates, input_bias, hidden_bias), 4)
    i, f, g, o = i.logistic(), f.logistic(), g.tanh(), o.logistic()
    cy = f * _wide(cx) + i * g
    workspace = context.builder.concatenate([i, f, g, o], 1)
    return _as_outputs(context, o * cy.tanh(), cy, workspace)


@lowering(
    "_thnn_fused_lstm_cell_backward_impl(Tensor? grad_hy, Tensor? grad_cy, Tensor cx, Tensor cy, Tensor workspace, "
    "bool has_bias) -> (Tensor, Tensor, Tensor)",
)
def _lstm_cell_backward(
    context: Context,
    grad_hy: Value | None,
    grad_cy: Value | None,
    cx: Value,
    cy: Value,
    workspace: Value,
    has_bias: bool,
) -> list[Value | None]:
    if grad_hy is None and grad_cy is None:
        return [None, None, None]
    i, f, g, o = _parts(_wide(workspace), 4)
    squashed = _wide(cy).tanh()
    grad = _wide(grad_cy) if grad_cy is not None else squashed * 0.0
    grad_o = squashed * 0.0
    if grad_hy is not None:
        grad_h = _wide(grad_hy)
        grad_o = grad_h * squashed * (1 - o) * o
        grad = grad_h * o * (1 - squashed * squashed) + grad
    pieces = [grad * g * (1 - i) * i, grad * _wide(cx) * (1 - f) * f, grad * i * (1 - g * g), grad_o]
    gates = context.builder.concatenate(pieces, 1)
    return _as_outputs(context, gates, grad * f, gates.sum([0]))


@lowering(
    "_thnn_fused_gru_cell(Tensor input_gates, Tensor hidden_gates, Tensor hx, Tensor? input_bias=None, "
    "Tensor? hidden_bias=None) -> (Tensor, Tensor)",
    meta=_gru_meta,
)
def _gru_cell(
    context: Context,
    input_gates: Value,
    hidden_gates: Value,
    hx: Value,
    input_bias: Value | None,
    hidden_bias: Value | None,
) -> list[Value | None]:
    """The new hidden state; the workspace holds reset, update and new gate, the old state, and the hidden part of new."""
    input_r, input_z, input_n = _parts(_sum(input_gates, input_bias), 3)
    hidden_r, hidden_z, hidden_n = _parts(_sum(hidden_gates, hidden_bias), 3)
    r, z = (input_r + hidden_r).logistic(), (input_z + hidden_z).logistic()
    n = (input_n + r * hidden_n).tanh()
    old = _wide(hx)
    workspace = context.builder.concatenate([r, z, n, old, hidden_n], 1)
    return _as_outputs(context, n + z * (old - n), workspace)


@lowering(
    "_thnn_fused_gru_cell_backward(Tensor grad_hy, Tensor workspace, bool has_bias) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
    meta=_gru_backward_meta,
)
def _gru_cell_backward(context: Context, grad_hy: Value, workspace: Value, has_bias: bool) -> list[Value | None]:
    r, z, n, old, hidden_n = _parts(_wide(workspace), 5)
    grad = _wide(grad_hy)
    grad_z = grad * (old - n) * (1 - z) * z
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hidden_n * (1 - r) * r
    input_gates = context.builder.concatenate([grad_r, grad_z, grad_n], 1)
    hidden_gates = context.builder.concatenate([grad_r, grad_z, grad_n * r], 1)
    return _as_outputs(context, input_gates, hidden_gates, grad * z, input_gates.sum([0]), hidden_gates.sum([0]))


# ------------------------------------------------------------------------------------------------ whole layers

# What a step leaves for the backward pass, in units of the hidden size, and how many gates it has.
_KEPT = {LSTM: 5, GRU: 5}  # i, f, g, o, c; r, z, n, the hidden part of n, h before
_GATES = {LSTM: 4, GRU: 3}
Step = Callable[[Value, list[Value]], list[Value]]


def _layer_meta(**given: Any) -> Any:
    x, hidden = given["input"], given["hidden_size"]
    time, batch, _ = x.shape
    last = x.new_empty(batch, hidden)
    return (
        x.new_empty(time, batch, hidden),
        last,
        torch.empty_like(last) if given["mode"] == LSTM else x.new_empty(0),
        x.new_empty((time, batch, _KEPT[given["mode"]] * hidden) if given["train"] else (0,), dtype=opmath(x.dtype)),
    )


def _layer_backward_meta(**given: Any) -> Any:
    first = given["hx_"].new_empty(given["hx_"].shape)
    return (
        *[given[name].new_empty(given[name].shape) for name in ("input", "weight1", "weight2")],
        *[given[name].new_empty(given[name].shape) if given["has_biases"] else None for name in ("weight3", "weight4")],
        first,
        torch.empty_like(first) if given["mode"] == LSTM else None,
    )


def _over_time(
    time: int, every: list[Value], carry: list[Value], step: Step, *, backwards: bool = False
) -> list[Value]:
    """Call ``step(t, carry)``, which gives the carry and what to keep, for each time; ``every`` [T, …] takes what is kept."""
    builder = carry[0].builder
    held = len(carry)

    def body(count: Value, *state: Value) -> list[Value]:
        t = builder.full(time - 1, (), INDEX) - count if backwards else count
        made = step(t, list(state[:held]))
        kept = []
        for into, now in zip(state[held:], made[held:], strict=True):
            start = [t, *[builder.full(0, (), INDEX)] * now.ndim]
            kept.append(builder.dynamic_update_slice(into, now.reshape((1, *now.shape)), start))
        return [count + 1, *made[:held], *kept]

    start = [builder.full(0, (), INDEX), *carry, *every]
    return builder.while_loop(start, lambda count, *_: count < time, body)[1:]


def _at(every: Value, t: Value) -> Value:
    """Time ``t`` of [T, B, n]."""
    zero = every.builder.full(0, (), INDEX)
    return every.builder.dynamic_slice(every, [t, zero, zero], [1, *every.shape[1:]]).reshape(every.shape[1:])


def _before(first: Value, every: Value) -> Value:
    """What was there before each of the times of ``every`` [T, B, n]: ``first`` [B, n], then all but the last."""
    first = first.convert(every.dtype).reshape((1, *first.shape))
    return every.builder.concatenate([first, every.slice_dim(0, 0, every.shape[0] - 1)], 0)


def _lstm_step(given: Value, hidden: Value, _: Value, c: Value) -> tuple[Value, Value, list[Value]]:
    i, f, g, o = _parts(given + hidden, 4)
    i, f, g, o = i.logistic(), f.logistic(), g.tanh(), o.logistic()
    c = f * c + i * g
    return o * c.tanh(), c, [i, f, g, o, c]


def _gru_step(given: Value, hidden: Value, h: Value, c: Value) -> tuple[Value, Value, list[Value]]:
    (given_r, given_z, given_n), (hidden_r, hidden_z, hidden_n) = _parts(given, 3), _parts(hidden, 3)
    r, z = (given_r + hidden_r).logistic(), (given_z + hidden_z).logistic()
    n = (given_n + r * hidden_n).tanh()
    old = _wide(h)
    return n + z * (old - n), c, [r, z, n, hidden_n, old]


@lowering(
    "mkldnn_rnn_layer(Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx_, Tensor cx_, "
    "bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, bool bidirectional, "
    "bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)",
    meta=_layer_meta,
    dots=True,
    dispatched=False,
)
def _layer(
    context: Context, sequence: Value, w_ih: Value, w_hh: Value, b_ih: Value, b_hh: Value, hx: Value, cx: Value,
    reverse: bool, batch_sizes: Any, mode: int, hidden_size: int, num_layers: int, has_biases: bool,
    bidirectional: bool, batch_first: bool, train: bool,
) -> list[Value | None]:  # fmt: skip
    """One direction of one layer over [T, B, I]: all states [T, B, H], the last ones, and what backward needs."""
    x = sequence.reverse([0]) if reverse else sequence
    time, batch, _ = x.shape
    given = _wide(contract(x, w_ih, ((2,), (1,))))
    if has_biases:
        given = given + _wide(b_ih)
    step = _lstm_step if mode == LSTM else _gru_step

    def at(t: Value, carry: list[Value]) -> list[Value]:
        hidden = _wide(contract(carry[0], w_hh, ((1,), (1,))))
        if has_biases:
            hidden = hidden + _wide(b_hh)
        h, c, kept = step(_at(given, t), hidden, *carry)
        h = h.convert(x.dtype)  # as a cell's result would be rounded
        return [h, c, h, *([context.builder.concatenate(kept, 1)] if train else [])]

    builder = context.builder
    every = [builder.full(0, (time, batch, hidden_size), x.dtype)]
    if train:
        every.append(builder.full(0, (time, batch, _KEPT[mode] * hidden_size), given.dtype))
    h, c, output, *kept = _over_time(time, every, [hx, _wide(cx)], at)
    output = output.reverse([0]) if reverse else output
    nothing = builder.full(0, (0,), given.dtype)
    return _as_outputs(context, output, h, c if mode == LSTM else nothing, *(kept or [nothing]))


def _lstm_step_back(kept: Value, _: Value, c_before: Value, grad: Value, grad_c: Value) -> list[Value]:
    """Gradients towards the two parts of the gates' sum, the state before but for its product, and the cell before."""
    i, f, g, o, c = _parts(kept, 5)
    squashed = c.tanh()
    grad_c = grad_c + grad * o * (1 - squashed * squashed)
    pieces = [grad_c * g * (1 - i) * i, grad_c * c_before * (1 - f) * f, grad_c * i * (1 - g * g)]
    gates = kept.builder.concatenate([*pieces, grad * squashed * (1 - o) * o], 1)
    return [gates, gates, grad * 0, grad_c * f]


def _gru_step_back(kept: Value, h_before: Value, c_before: Value, grad: Value, grad_c: Value) -> list[Value]:
    r, z, n, hidden_n, _ = _parts(kept, 5)
    grad_z = grad * (h_before - n) * (1 - z) * z
    grad_n = grad * (1 - z) * (1 - n * n)
    grad_r = grad_n * hidden_n * (1 - r) * r
    gates = [kept.builder.concatenate([grad_r, grad_z, last], 1) for last in (grad_n, grad_n * r)]
    return [*gates, grad * z, grad_c]


@lowering(
    "mkldnn_rnn_layer_backward(Tensor input, Tensor weight1, Tensor weight2, Tensor weight3, Tensor weight4, Tensor hx_, "
    "Tensor cx_tmp, Tensor output, Tensor hy_, Tensor cy_, Tensor? grad_output, Tensor? grad_hy, Tensor? grad_cy, "
    "bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, bool bidirectional, "
    "int[] batch_sizes, bool batch_first, Tensor workspace) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    meta=_layer_backward_meta,
    dots=True,
    dispatched=False,
)
def _layer_backward(
    context: Context, sequence: Value, w_ih: Value, w_hh: Value, b_ih: Value, b_hh: Value, hx: Value, cx: Value,
    output: Value, hy: Value, cy: Value, grad_output: Value | None, grad_hy: Value | None, grad_cy: Value | None,
    reverse: bool, mode: int, hidden_size: int, num_layers: int, has_biases: bool, train: bool, bidirectional: bool,
    batch_sizes: Any, batch_first: bool, workspace: Value,
) -> list[Value | None]:  # fmt: skip
    """Towards input, weights, biases (undefined without any) and first states.

    The states are made anew from the workspace: the caller may have written into the results.
    """
    builder, dtype = context.builder, sequence.dtype
    x = sequence.reverse([0]) if reverse else sequence
    grads = grad_output.reverse([0]) if reverse and grad_output is not None else grad_output
    time, batch, _ = x.shape
    zero = builder.full(0, (batch, hidden_size), workspace.dtype)
    o, last = [workspace.slice_dim(2, at * hidden_size, (at + 1) * hidden_size) for at in (3, 4)]
    h_before = _before(hx, (o * last.tanh()).convert(dtype)) if mode == LSTM else last.convert(dtype)
    c_before = _before(cx, last) if mode == LSTM else None
    step = _lstm_step_back if mode == LSTM else _gru_step_back

    def at(t: Value, carry: list[Value]) -> list[Value]:
        grad = carry[0] if grads is None else carry[0] + _wide(_at(grads, t))
        cell = zero if c_before is None else _at(c_before, t)
        given, hidden, direct, grad_c = step(_at(workspace, t), _wide(_at(h_before, t)), cell, grad, carry[1])
        through = contract(hidden.convert(dtype), w_hh, ((1,), (0,)))
        return [direct + _wide(through), grad_c, given, hidden]

    every = [builder.full(0, (time, batch, _GATES[mode] * hidden_size), workspace.dtype) for _ in range(2)]
    carry = [zero if grad is None else _wide(grad) for grad in (grad_hy, grad_cy)]
    grad_h, grad_c, given, hidden = _over_time(time, every, carry, at, backwards=True)
    grad_x = contract(given.convert(dtype), w_ih, ((2,), (0,)))
    return _as_outputs(
        context,
        grad_x.reverse([0]) if reverse else grad_x,
        contract(given.convert(dtype), x, ((0, 1), (0, 1))),
        contract(hidden.convert(dtype), h_before, ((0, 1), (0, 1))),
        given.sum([0, 1]),
        hidden.sum([0, 1]),
        grad_h,
        grad_c,
    )
