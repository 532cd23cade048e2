"""The fused cells that nn.LSTM and nn.GRU call once a step, with their gradients."""

from __future__ import annotations

from typing import Any

import torch

from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

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
