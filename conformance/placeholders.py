"""Text with places for what is no text: as many placeholder tokens as the model's own encoder gives features.

Multimodal models replace the embeddings of placeholder tokens by features of an image or a sound, and refuse another number
of them. How many there are depends on patches, merging and resampling; the model itself knows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from emutpu.conformance.recipes import BATCH, Recipe

__all__ = ["placed"]

_AROUND = 4  # tokens of text before and after
# The settings that name a placeholder, the method that makes its features, and the argument that those are made of.
_KINDS = (
    (("image_token_id", "image_token_index", "img_token_id"), "get_image_features", "pixel_values"),
    (("audio_token_id", "audio_token_index"), "get_audio_features", "input_features"),
    (("audio_token_id", "audio_token_index"), "get_audio_features", "input_values"),
)


def placed(recipe: Recipe, found: dict[str, Any]) -> None:
    """Put placeholders into the text of ``found``, in place, with the masks that go with them."""
    if "input_ids" not in found:
        return
    parts = []
    for settings, method, argument in _KINDS:
        token = recipe.size(*settings, default=-1)
        encode = _method(recipe.model, method)
        if argument not in found or token < 0 or encode is None:
            continue
        count = _features(encode, found)
        if count % BATCH == 0 and count:
            parts.append(torch.full((BATCH, count // BATCH), token))
    if not parts:
        return
    ids = torch.cat([recipe.tokens(_AROUND), *parts, recipe.tokens(_AROUND)], 1)
    found["input_ids"] = ids
    if "attention_mask" in recipe.parameters:
        found["attention_mask"] = torch.ones_like(ids)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in recipe.parameters:
            found[name] = torch.isin(ids, torch.cat([part[0, :1] for part in parts])).long()


def _method(model: Any, name: str) -> Callable[..., Any] | None:
    inner = [getattr(model, place, None) for place in ("model", "thinker", "vlm")]
    for owner in (model, *inner, getattr(inner[-1], "model", None)):
        method = getattr(owner, name, None)
        if method is not None:
            found: Callable[..., Any] = method
            return found
    return None


@torch.no_grad()
def _features(encode: Callable[..., Any], found: dict[str, Any]) -> int:
    """How many vectors the encoder gives for all of the batch."""
    known = inspect.signature(encode).parameters
    made = encode(**{name: value for name, value in found.items() if name in known and name != "input_ids"})
    made = getattr(made, "pooler_output", made)
    return sum(leaf.numel() // leaf.shape[-1] for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
