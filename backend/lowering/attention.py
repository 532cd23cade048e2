"""Scaled dot product attention in one module, its gradient, and the inference kernels of the transformer modules.

Scores, softmax and sums are float32 for 16-bit inputs; the probabilities are rounded to the inputs' dtype before they
meet the values, as in fused kernels. Fewer key heads than query heads share by groups (GQA). A row whose scores are all
-inf gives zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.lowering.matmul import contract

__all__: list[str] = []

_HEADS = ((0, 1), (0, 1))


def _grouped(x: Value, heads: int) -> Value:
    """[B, groups · heads, L, E] → [B, heads, groups · L, E]: the queries that share a key head, one below the other."""
    return x.reshape((x.shape[0], heads, x.shape[1] // heads * x.shape[2], x.shape[3]))


def _scores(q: Value, k: Value, bias: Value | None, causal: bool, scale: float | None) -> tuple[Value, float]:
    """[B, H, L, S], float32 or float64, biased and masked with -inf; and what they are still to be multiplied with.

    Scaled after the largest is subtracted: a product that is subtracted from becomes one instruction with it, which does
    not round the product, and the largest, which was rounded, would no longer be the largest of large scores.
    """
    builder = q.builder
    shape = (*q.shape[:3], k.shape[2])
    scores = contract(_grouped(q, k.shape[1]), k, ((3,), (3,)), _HEADS).reshape(shape)
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    if factor <= 0 or (bias is not None and bias.dtype != torch.bool):
        scores, factor = scores * factor, 1.0
    if bias is not None and bias.dtype == torch.bool:
        scores = builder.select(bias.broadcast(shape), scores, -math.inf)
    elif bias is not None:
        scores = scores + bias.convert(scores.dtype).broadcast(shape)
    if causal:
        square = shape[2:]
        seen = builder.iota(square, 0, torch.int32) >= builder.iota(square, 1, torch.int32)
        scores = builder.select(seen.broadcast(shape), scores, -math.inf)
    return scores, factor


def _shares(scores: Value, factor: float) -> tuple[Value, Value, Value]:
    """What a softmax is made of: the exponentials, their sum (0 in a row that is all -inf) and the largest score."""
    top = scores.max([3], keepdim=True)
    top = scores.builder.select(top.eq(-math.inf), 0, top)
    weights = ((scores - top) * factor).exp()
    return weights, weights.sum([3], keepdim=True), top


def _divisor(total: Value) -> Value:
    return total.builder.select(total.eq(0), 1, total)


def _weigh(scores: Value, factor: float, v: Value) -> tuple[Value, Value, Value]:
    """Output, logsumexp [B, H, L] and probabilities, all in computation precision."""
    weights, total, top = _shares(scores, factor)
    divisor = _divisor(total)
    shape = (*scores.shape[:3], v.shape[3])
    output = contract(_grouped(weights.convert(v.dtype), v.shape[1]), v, ((3,), (2,)), _HEADS).reshape(shape)
    return output / divisor, (top * factor + total.log()).reshape(scores.shape[:3]), weights / divisor


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p > 0:
        raise NotImplementedError(
            "scaled_dot_product_fused_attention_overrideable(): dropout_p > 0 is not supported on TPU"
        )


@lowering(
    "_scaled_dot_product_fused_attention_overrideable(Tensor query, Tensor key, Tensor value, Tensor? attn_bias=None, "
    "float dropout_p=0., bool is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, "
    "Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor philox_seed, "
    "Tensor philox_offset, Tensor debug_attn_mask)",
    dots=True,
)
def _attention(
    cx: Context,
    q: Value,
    k: Value,
    v: Value,
    bias: Value | None,
    dropout_p: float,
    causal: bool,
    return_debug_mask: bool,
    scale: float | None,
) -> list[Value | None]:
    _refuse_dropout(dropout_p)
    output, logsumexp, _ = _weigh(*_scores(q, k, bias, causal, scale), v)
    unused = cx.builder.full(0, (), torch.int64)
    return [output.convert(q.dtype), logsumexp.convert(torch.float32), None, None, unused, unused, None]


def _backward_meta(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    grad_input_mask: Sequence[bool],
    **_: Any,
) -> tuple[torch.Tensor | None, ...]:
    inputs = zip((query, key, value, attn_bias), grad_input_mask, strict=True)
    return tuple(torch.empty_like(t) if wanted and t is not None else None for t, wanted in inputs)


@lowering(
    "_scaled_dot_product_fused_attention_overrideable_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, "
    "Tensor attn_bias, bool[4] grad_input_mask, Tensor out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, Tensor philox_offset, *, "
    "float? scale=None) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_attn_bias)",
    meta=_backward_meta,
    dots=True,
)
def _attention_backward(
    cx: Context,
    grad: Value,
    q: Value,
    k: Value,
    v: Value,
    bias: Value | None,
    wanted: Sequence[bool],
    out: Value,
    logsumexp: Value,
    *rest: Any,
) -> list[Value | None]:
    _, _, _, _, dropout_p, causal, _, _, scale = rest
    _refuse_dropout(dropout_p)
    heads = k.shape[1]
    # From the scores again: of large ones the logsumexp, which is rounded, says less than their differences.
    weights, total, _ = _shares(*_scores(q, k, bias, causal, scale))
    weights = weights / _divisor(total)
    compute = weights.dtype
    results: list[Value | None] = [None] * 4
    if wanted[2]:
        shares = _grouped(weights.convert(v.dtype), heads)
        results[2] = contract(shares, _grouped(grad, heads), ((2,), (2,)), _HEADS).convert(v.dtype)
    delta = (grad.convert(compute) * out.convert(compute)).sum([3], keepdim=True)
    slopes = contract(_grouped(grad, heads), v, ((3,), (3,)), _HEADS).reshape(weights.shape)
    slopes = weights * (slopes - delta)
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    shared = _grouped((slopes * factor).convert(q.dtype), heads)
    if wanted[0]:
        results[0] = contract(shared, k, ((3,), (2,)), _HEADS).reshape(q.shape).convert(q.dtype)
    if wanted[1]:
        results[1] = contract(shared, _grouped(q, heads), ((2,), (2,)), _HEADS).convert(k.dtype)
    if wanted[3] and bias is not None:
        results[3] = _summed_to(slopes, bias.shape).convert(bias.dtype)
    return results


def _summed_to(x: Value, shape: Sequence[int]) -> Value:
    """The transpose of a broadcast."""
    padded = (*[1] * (x.ndim - len(shape)), *shape)
    return x.sum([d for d, n in enumerate(padded) if n != x.shape[d]], keepdim=True).reshape(shape)


# ------------------------------------------------------------------------------------- transformer modules


def _linear(x: Value, weight: Value, bias: Value) -> Value:
    """X [B, L, I], weight [O, I] → [B, L, O], rounded once."""
    product = contract(x, weight, ((2,), (1,)))
    return (product + bias.convert(product.dtype)).convert(x.dtype)


def _multi_head(
    q: Value,
    k: Value,
    v: Value,
    heads: int,
    packed: tuple[Value, Value],
    projection: tuple[Value, Value],
    mask: Value | None,
    mask_type: int | None,
) -> tuple[Value, Value]:
    """Result [B, L, E] and probabilities [B, H, L, S]. A mask is true (non-zero) where attention is forbidden."""
    width = q.shape[2]
    parts = []
    for index, x in enumerate((q, k, v)):
        first, last = index * width, (index + 1) * width
        weight, bias = (t.slice_dim(0, first, last) for t in packed)
        split = _linear(x, weight, bias).reshape((*x.shape[:2], heads, width // heads))
        parts.append(split.transpose((0, 2, 1, 3)))
    allowed = None if mask is None else ~_mask(mask.convert(torch.bool), mask_type)
    output, _, weights = _weigh(*_scores(parts[0], parts[1], allowed, False, None), parts[2])
    joined = output.convert(q.dtype).transpose((0, 2, 1, 3)).reshape(q.shape)
    return _linear(joined, *projection), weights


def _mask(mask: Value, mask_type: int | None) -> Value:
    """Type 0 is [L, S], 1 a padding mask [B, S], 2 [B, H, L, S]."""
    return mask.reshape((mask.shape[0], 1, 1, mask.shape[1])) if mask_type == 1 else mask


def _native_meta(
    query: torch.Tensor, key: torch.Tensor, num_head: int, need_weights: bool, average_attn_weights: bool, **_: Any
) -> tuple[torch.Tensor | None, ...]:
    if not need_weights:
        return torch.empty(query.shape, dtype=query.dtype, device="meta"), None
    lead = query.shape[:1] if average_attn_weights else (query.shape[0], num_head)
    return torch.empty(query.shape, dtype=query.dtype, device="meta"), query.new_empty(
        (*lead, query.shape[1], key.shape[1])
    )


@lowering(
    "_native_multi_head_attention(Tensor query, Tensor key, Tensor value, int embed_dim, int num_head, "
    "Tensor qkv_weight, Tensor qkv_bias, Tensor proj_weight, Tensor proj_bias, Tensor? mask=None, "
    "bool need_weights=True, bool average_attn_weights=True, int? mask_type=None) -> (Tensor, Tensor)",
    meta=_native_meta,
    dots=True,
)
def _native_attention(
    cx: Context,
    q: Value,
    k: Value,
    v: Value,
    embed_dim: int,
    heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    mask: Value | None,
    need_weights: bool,
    average: bool,
    mask_type: int | None,
) -> list[Value | None]:
    result, weights = _multi_head(q, k, v, heads, (qkv_weight, qkv_bias), (proj_weight, proj_bias), mask, mask_type)
    if not need_weights:
        return [result, None]
    return [result, (weights.sum([1]) / heads if average else weights).convert(q.dtype)]


def _layer_norm(x: Value, affine: Sequence[Value], eps: float) -> Value:
    weight, bias = affine
    wide = x.convert(opmath(x.dtype))
    count = x.shape[-1]
    centered = wide - wide.sum([x.ndim - 1], keepdim=True) / count
    variance = (centered * centered).sum([x.ndim - 1], keepdim=True) / count
    scaled = centered * (variance + eps).rsqrt() * weight.convert(wide.dtype)
    return (scaled + bias.convert(wide.dtype)).convert(x.dtype)


def _activated(x: Value, gelu: bool) -> Value:
    if not gelu:
        return x.maximum(0)
    wide = x.convert(opmath(x.dtype))
    return (wide * 0.5 * ((wide * math.sqrt(0.5)).unary("chlo.erf") + 1)).convert(x.dtype)


def _encoder_meta(src: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.empty(src.shape, dtype=src.dtype, device="meta")


@lowering(
    "_transformer_encoder_layer_fwd(Tensor src, int embed_dim, int num_heads, Tensor qkv_weight, Tensor qkv_bias, "
    "Tensor proj_weight, Tensor proj_bias, bool use_gelu, bool norm_first, float eps, Tensor norm_weight_1, "
    "Tensor norm_bias_1, Tensor norm_weight_2, Tensor norm_bias_2, Tensor ffn_weight_1, Tensor ffn_bias_1, "
    "Tensor ffn_weight_2, Tensor ffn_bias_2, Tensor? mask=None, int? mask_type=None) -> Tensor",
    meta=_encoder_meta,
    dots=True,
)
def _encoder_layer(
    cx: Context,
    src: Value,
    embed_dim: int,
    heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    gelu: bool,
    norm_first: bool,
    eps: float,
    *rest: Any,
) -> Value:
    first, second = rest[0:2], rest[2:4]
    inner, outer = rest[4:6], rest[6:8]
    mask, mask_type = rest[8:]

    def attend(x: Value) -> Value:
        return _multi_head(x, x, x, heads, (qkv_weight, qkv_bias), (proj_weight, proj_bias), mask, mask_type)[0]

    def feed(x: Value) -> Value:
        return _linear(_activated(_linear(x, *inner), gelu), *outer)

    if norm_first:
        x = src + attend(_layer_norm(src, first, eps))
        return x + feed(_layer_norm(x, second, eps))
    x = _layer_norm(src + attend(src), first, eps)
    return _layer_norm(x + feed(x), second, eps)
