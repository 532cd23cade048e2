"""Which kernel ``scaled_dot_product_attention`` takes.

PyTorch asks a C++ table that a Python backend cannot fill, and would always choose the decomposition. So the op has a
kernel of ours above and below autograd: it hands over to the fused op, which has PyTorch's own autograd formula, or to
the decomposition where the fused op does not apply.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend

__all__ = ["COMPOSITES", "KERNELS"]

_C = torch._C
_decomposed = torch.library.get_kernel("aten::scaled_dot_product_attention", "PrivateUse1").call_boxed
_PRIVATE_KEYS = _C.DispatchKeySet(_C.DispatchKey.PrivateUse1)
_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def _fusable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    tensors = (query, key, value)
    if dropout_p or any(t.dim() != 4 or t.dtype not in _DTYPES or not t.numel() for t in tensors):
        return False
    batch, heads, length, width = query.shape
    shared = key.shape[1]
    grouped = heads % shared == 0 if enable_gqa else heads == shared
    fits = key.shape == (batch, shared, key.shape[2], width) and value.shape[:3] == key.shape[:3]
    if not (grouped and fits) or len({t.dtype for t in tensors}) > 1:
        return False
    if attn_mask is None:
        return True
    if is_causal or attn_mask.dim() > 4 or attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    padded = (*[1] * (4 - attn_mask.dim()), *attn_mask.shape)
    return all(m in (1, n) for m, n in zip(padded, (batch, heads, length, key.shape[2]), strict=True))


def _choose(*arguments: Any) -> SDPBackend:
    if _C._get_overrideable_sdp_enabled() and _fusable(*arguments):
        return SDPBackend.OVERRIDEABLE
    if _C._get_math_sdp_enabled():
        return SDPBackend.MATH
    raise RuntimeError(
        "no viable SDPBackend found: the fused kernel does not take these arguments or is disabled, and the math "
        "backend is disabled (torch.nn.attention.sdpa_kernel)"
    )


def choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """``_fused_sdp_choice``: the number of an ``SDPBackend``."""
    return int(_choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa).value)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``scaled_dot_product_attention``, as PyTorch's C++ composes it."""
    chosen = _choose(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if chosen is SDPBackend.MATH:
        result: torch.Tensor = _decomposed(
            _PRIVATE_KEYS, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        forbidden = torch.scalar_tensor(-math.inf, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, 0.0, forbidden)
    fused: torch.Tensor = torch.ops.aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_mask, 0.0, is_causal, False, scale=scale
    )[0]
    return fused


KERNELS: dict[str, Callable[..., Any]] = {"_fused_sdp_choice": choice}
COMPOSITES: dict[str, Callable[..., Any]] = {"scaled_dot_product_attention": attention}
