"""``flex_attention`` on the device, as TorchTPU 0.2.0 has it: what only masks becomes ``scaled_dot_product_attention`` with an
additive mask; a ``score_mod``, other dtypes and auxiliary results go through PyTorch's own composition.

Dynamo traces the functions that :func:`install` puts in place of PyTorch's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from emutpu.backend.storage import DEVICE

__all__ = ["install"]

_ROUTED = frozenset({torch.bfloat16, torch.float32})
_CACHE = "_tpu_sdpa_mask_cache"  # TorchTPU's own name


def _mask(flex: Any, block_mask: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The additive mask ``[B or 1, H or 1, L, S]`` of a block mask; kept on it outside of graphs."""
    wanted = (query.dtype, query.shape[-2], key.shape[-2])
    if not torch.compiler.is_dynamo_compiling():
        kept = getattr(block_mask, _CACHE, None)
        if kept is not None and kept[0] == wanted:
            made: torch.Tensor = kept[1]
            return made
    batch, heads = block_mask.shape[:2]
    allowed = flex.create_mask(block_mask.mask_mod, batch, heads, query.shape[-2], key.shape[-2], query.device)
    made = torch.where(allowed, 0.0, -math.inf).to(query.dtype)
    if not torch.compiler.is_dynamo_compiling():
        setattr(block_mask, _CACHE, (wanted, made))
    return made


def install(flex: Any) -> None:
    """Replace ``flex_attention`` and its device check in the module ``torch.nn.attention.flex_attention``."""
    original, validate = flex.flex_attention, flex._validate_device

    @functools.wraps(original)
    def flex_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        plain = score_mod is None and not return_lse and return_aux is None
        if plain and query.device.type == DEVICE.type and query.dtype in _ROUTED:
            mask = None if block_mask is None else _mask(flex, block_mask, query, key)
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
            )
        return original(
            *(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options),
            return_aux=return_aux,
        )

    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != DEVICE.type:
            validate(query, key, value)

    flex.flex_attention = flex_attention
    flex._validate_device = _validate_device
    from torch._dynamo import trace_rules
    from torch._dynamo.variables import UserFunctionVariable

    # By name: the table that is made of them may be made again, also while this module is being imported for it.
    for function in (f"{flex.__name__}.flex_attention", f"{flex.__name__}._validate_device", f"{__name__}._mask"):
        trace_rules.manual_torch_name_rule_map[function] = UserFunctionVariable
    trace_rules.clear_lru_cache()
