"""Inputs that fit a model, made from the names in its signature and the sizes in its configuration.

A table says how to make an argument of each name. Every argument without a default is made, and those that belong to the
modality of the model: images where it takes pixels, waveforms or spectra where it takes sound. Seeded; integers are i64,
everything else f32.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from emutpu.conformance.placeholders import companions, placed
from emutpu.conformance.recipes import BATCH, LENGTH, MAKERS, SIDE, Recipe

__all__ = ["BATCH", "LENGTH", "SIDE", "Recipe", "UnknownArgument", "for_signature", "image", "labels", "written"]


class UnknownArgument(TypeError):
    """A model asks for an argument that no row of the table makes: a gap of the suite, not of the device."""


def image(channels: int, side: int, seed: int, batch: int = BATCH) -> Tensor:
    """Images f32[batch, channels, side, side]."""
    return torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(seed))


def written(entry: Any, generator: torch.Generator) -> Any:
    """The input that a row of the manifest describes: a shape, or a mapping with one of the keys that are here."""
    if isinstance(entry, list):
        return torch.randn(entry, generator=generator)
    dtype = getattr(torch, entry.get("dtype", "float32"))
    if "ones" in entry:
        return torch.ones(entry["ones"], dtype=dtype)
    if "zeros" in entry:
        return torch.zeros(entry["zeros"], dtype=dtype)
    if "tokens" in entry:
        return torch.randint(0, entry["high"], entry["tokens"], generator=generator)
    if "places" in entry:  # of every point of a grid, f32[points, axes], the last two axes counted
        rows, columns = entry["places"]
        grid = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
        return torch.cat([torch.zeros(len(grid), entry["axes"] - 2), grid], 1)
    if "list" in entry:
        return [written(one, generator) for one in entry["list"]]
    return torch.tensor(entry["tensor"]) if "tensor" in entry else entry["value"]


_MODALITIES = (
    "pixel_values", "input_features", "input_values", "flattened_patches", "visual_feats", "visual_pos", "past_values",
    "audio_codes", "states", "spectrogram", "task_inputs",
)  # fmt: skip
_GENERAL = "input_ids"
# Arguments that go with another one: a grid with its patches, boxes with their words.
_COMPANIONS = {
    "input_ids": ("bbox", "qformer_input_ids", "protein_input_ids"),
    "pixel_values": (
        "image_grid_thw", "image_grid_hws", "image_grid_hw", "grid_thw", "spatial_shapes", "pixel_position_ids", "image_position_ids",
        "high_res_pixel_values", "aspect_ratio_ids", "aspect_ratio_mask", "image_attention_mask", "pixel_attention_mask", "prompt_pixel_values", "prompt_masks", "image_sizes",
        "target_sizes",
    ),
    "input_features": ("input_features_mask", "feature_attention_mask"),
    "past_values": (
        "past_time_features", "past_observed_mask", "future_time_features", "future_values", "past_values_padding",
    ),
    "query_embeds": ("encoder_hidden_states",),
    "states": ("actions", "rewards", "returns_to_go", "timesteps"),
}  # fmt: skip
# Families that refuse one argument beside another.
_INSTEAD = {
    "flava": (("image_attention_mask", "pixel_values"),),  # of patches, and its encoder has one more token
    "perceiver": (("inputs", "input_ids"), ("inputs", "pixel_values")),
    "pop2piano": (("input_ids", "input_features"),),
}
# Families whose arguments all have defaults, and which refuse to run without these.
_ASKED = {
    "gemma4_assistant": ("inputs_embeds", "shared_kv_states"),
    "gemma4_unified_assistant": ("inputs_embeds", "shared_kv_states"),
}
# Classes that use an argument, though its default is None.
_ALSO = {
    "Blip2ForImageTextRetrieval": ("attention_mask",),
    "ColQwen2ForRetrieval": ("image_grid_thw",),
    "CsmForConditionalGeneration": ("input_values_cutoffs",),
    "FastSpeech2ConformerModel": ("spectrogram_labels", "duration_labels", "pitch_labels", "energy_labels"),
    "FlavaForPreTraining": ("codebook_pixel_values", "bool_masked_pos"),
    "TapasForQuestionAnswering": ("token_type_ids",),  # else it has one cell, and chooses no other
    "SpeechT5Model": ("decoder_input_values",),
    "SpeechT5ForTextToSpeech": ("decoder_input_values", "speaker_embeddings"),
    "HieraForPreTraining": ("noise",),  # else the device hides other patches than the CPU
    "ViTMAEForPreTraining": ("noise",),
    "ViTMAEModel": ("noise",),
    "PI0ForConditionalGeneration": ("noise", "timestep", "pixel_attention_mask"),
    "PI0Model": ("pixel_attention_mask",),
    "PeAudioVideoEncoder": ("pixel_values_videos",),
    "Kosmos2Model": ("image_embeds_position_mask",),
    "Kosmos2ForConditionalGeneration": ("image_embeds_position_mask",),
}
_FROM_THE_INPUT = ("ForSequenceClassification", "ForQuestionAnswering")  # their decoders start from the input itself


def for_signature(model: nn.Module, seed: int) -> dict[str, Any]:
    """Keyword arguments of ``model.forward``. Raises UnknownArgument for one that it needs and the table has not."""
    recipe = Recipe(model, seed)
    found: dict[str, Any] = {}
    _make(recipe, _wanted(recipe), found)
    _make(recipe, companions(recipe, found), found)
    placed(recipe, found)
    if "input_values" in found and "audio_codes" not in _needed(recipe):
        found.pop("audio_codes", None)  # what a codec made of them earlier
    for name, other in _INSTEAD.get(recipe.family, ()):
        if other in found:
            found.pop(name, None)
    if type(model).__name__.endswith("ForMultipleChoice"):
        found = {name: value.unsqueeze(1).repeat(1, 2, *[1] * (value.dim() - 1)) for name, value in found.items()}
    if recipe.family == "tvp":  # its positions fit a batch of one alone
        found = {name: value[:1] for name, value in found.items()}
    if "use_cache" in recipe.parameters:
        found["use_cache"] = False
    return found


def labels(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    """The targets of a language model: the ids that it reads; with codebooks last, i64[BATCH, length, books], where it has several."""
    ids = arguments.get("decoder_input_ids", arguments.get("input_ids"))
    if type(model).__name__ in {"MusicgenForCausalLM", "MusicgenMelodyForCausalLM"}:
        return ids.reshape(BATCH, -1, ids.shape[-1]).transpose(1, 2)
    return ids


def _make(recipe: Recipe, names: list[str], found: dict[str, Any]) -> None:
    """Add arguments of these names to those that were ``found``."""
    for name in names:
        if name not in MAKERS:
            owner = type(recipe.model).__name__
            raise UnknownArgument(f"{owner}.forward needs {name!r}, for which the suite has no recipe")
        made = MAKERS[name](recipe)
        if made is not None:
            found[name] = made


def _needed(recipe: Recipe) -> set[str]:
    return {
        name
        for name, parameter in recipe.parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }


def _wanted(recipe: Recipe) -> list[str]:
    """Names of arguments: those without a default, those of the model's modalities, and what goes with them."""
    parameters, model = recipe.parameters, recipe.model
    main = getattr(model, "main_input_name", _GENERAL)
    needed = _needed(recipe)
    asked = _ASKED.get(recipe.family)
    if asked is not None:
        return [name for name in asked if name in parameters]
    mains = {main} if isinstance(main, str) else set(main)
    wanted = [name for name in parameters if name in needed or name in mains | {*_MODALITIES, _GENERAL}]
    wanted += [name for name in _ALSO.get(type(model).__name__, ()) if name in parameters]
    for name in list(wanted):
        wanted += [companion for companion in _COMPANIONS.get(name, ()) if companion in parameters]
    starts = type(model).__name__.endswith(_FROM_THE_INPUT) and "decoder_input_ids" not in needed
    asks = type(model).__name__ == "BlipForQuestionAnswering" or recipe.family == "diffusion_gemma"  # it draws its own
    decodes = (recipe.is_encoder_decoder and not starts) or asks
    if decodes and "decoder_input_ids" in parameters:
        wanted.append("decoder_input_ids")
    return list(dict.fromkeys(wanted))
