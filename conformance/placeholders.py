"""Text with places for what is no text: as many placeholder tokens as the model's own encoder gives features.

Multimodal models replace the embeddings of placeholder tokens by features of an image or a sound, and refuse another number
of them. How many there are depends on patches, merging and resampling; the model itself knows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from emutpu.conformance.recipes import BATCH, Recipe

__all__ = ["companions", "placed"]

_AROUND = 4  # tokens of text before and after
_IMAGE, _VIDEO, _AUDIO = 1, 2, 3  # as mm_token_type_ids counts them
_CAMERAS = ("pi0",)  # families with an axis of cameras in their pictures, which their encoders have not
_VIDEOS_ALONE = ("instructblipvideo",)  # families whose pixel_values are videos
# What kind it is, the settings that name its placeholder, the method that makes its features, and what those are made of.
_KINDS = (
    (_IMAGE, ("image_token_id", "image_token_index", "img_token_id"), "get_image_features", "pixel_values"),
    (_VIDEO, ("video_token_id", "video_token_index"), "get_video_features", "pixel_values"),
    (_AUDIO, ("audio_token_id", "audio_token_index"), "get_audio_features", "input_features"),
    (_AUDIO, ("audio_token_id", "audio_token_index"), "get_audio_features", "input_values"),
)


def companions(recipe: Recipe, found: Mapping[str, Any]) -> list[str]:
    """Arguments of the forward without which the features of what was ``found`` cannot be made."""
    needed = {
        name
        for kind, _, method, argument in _KINDS
        if argument in found and kind != _VIDEO
        for encode in _methods(recipe.model, method)
        for name, known in inspect.signature(encode).parameters.items()
        if _is_needed(known)
    }
    return [name for name in recipe.parameters if name in needed and name not in found]


def _is_needed(parameter: inspect.Parameter) -> bool:
    collected = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
    return parameter.default is inspect.Parameter.empty and parameter.kind not in collected


def placed(recipe: Recipe, found: dict[str, Any]) -> None:
    """Put placeholders into the text of ``found``, in place, with the masks that go with them."""
    if "input_ids" not in found:
        return
    seen = found | {"pixel_values": found["pixel_values"].flatten(0, 1)} if recipe.family in _CAMERAS else found
    parts: dict[int, Tensor] = {}
    for kind, settings, method, argument in _KINDS:
        token = recipe.size(*settings, default=-1)
        if argument not in found or token < 0 or (kind == _VIDEO and not recipe.family.startswith(_VIDEOS_ALONE)):
            continue
        count = _count(recipe.model, method, argument, seen)
        if kind == _AUDIO:  # some pad what they hear
            count = max(count, BATCH * recipe.size("audio_soft_tokens_per_image", default=0))
        if count % BATCH == 0 and count:
            parts[kind] = torch.full((BATCH, count // BATCH), token)
    if not parts:
        return
    begun = [_begun(recipe, kind, part) for kind, part in parts.items()]
    ids = torch.cat([recipe.tokens(_AROUND), *begun, recipe.tokens(_AROUND)], 1)
    found["input_ids"] = ids
    if "attention_mask" in recipe.parameters:
        found["attention_mask"] = torch.ones_like(ids)
    kinds = sum(((ids == part[0, 0]) * kind for kind, part in parts.items()), torch.zeros_like(ids))
    if "mm_token_type_ids" in recipe.parameters:
        found["mm_token_type_ids"] = kinds
    if "token_type_ids" in recipe.parameters:
        found["token_type_ids"] = (kinds > 0).long()


def _begun(recipe: Recipe, kind: int, part: Tensor) -> Tensor:
    """Placeholders after the token by which some models know that they begin, and before a token that ends them."""
    start = recipe.size("vision_start_token_id" if kind == _IMAGE else "audio_start_token_id", default=-1)
    return part if start < 0 else torch.cat([torch.full((BATCH, 1), start), part, recipe.tokens(1)], 1)


def _count(model: Any, method: str, argument: str, found: Mapping[str, Any]) -> int:
    """How many places of the text of all of the batch are for features; 0 where the model does not tell."""
    encoders = _methods(model, method)
    if encoders and not _is_needed_by(encoders[0], "input_ids"):
        return _features(encoders, argument, found)
    codec = getattr(model, "codec_model", None)
    if argument == "input_values" and codec is not None:
        # A copy: codebooks keep on the CPU what they make of their weights at their first use.
        return BATCH * int(copy.deepcopy(codec).encode(found[argument]).audio_codes.shape[-1])
    mask = next((found[name] for name in ("input_features_mask", "feature_attention_mask") if name in found), None)
    lengths = getattr(_part(model, "audio_tower"), "_get_feat_extract_output_lengths", None)
    if mask is None or lengths is None:
        return 0
    return int(lengths(mask.sum(-1))[-1].sum())


def _is_needed_by(encode: Callable[..., Any], name: str) -> bool:
    known = inspect.signature(encode).parameters.get(name)
    return known is not None and _is_needed(known)


def _part(model: Any, name: str) -> Any:
    return getattr(model, name, None) or getattr(getattr(model, "model", None), name, None)


def _methods(model: Any, name: str) -> list[Callable[..., Any]]:
    """Those of that name of the model and of the models within it, the outermost first."""
    inner = [getattr(model, place, None) for place in ("model", "encoder", "thinker", "vlm")]
    within = [getattr(inner[0], place, None) for place in ("encoder", "vlm")]
    owners = (model, *inner, getattr(inner[-1], "model", None), *within)
    return [getattr(owner, name) for owner in owners if getattr(owner, name, None) is not None]


@torch.no_grad()
def _features(encoders: list[Callable[..., Any]], argument: str, found: Mapping[str, Any]) -> int:
    """How many vectors the first encoder gives for all of the batch; it hands on what those within it know."""
    known = {argument, *(name for encode in encoders for name in inspect.signature(encode).parameters)} - {"input_ids"}
    made = encoders[0](**{name: value for name, value in found.items() if name in known})
    for name in ("pooler_output", "last_hidden_state", "deepstack_features"):
        vectors = getattr(made, name, None)
        if vectors is not None:
            made = vectors if name != "deepstack_features" else vectors[0]  # the same places in several layers
            break
    return sum(leaf.numel() // leaf.shape[-1] for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
