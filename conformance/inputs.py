"""Inputs that fit a model, made from the names in its signature and the sizes in its configuration.

A table says how to make an argument of each name. Every argument without a default is made, and those that belong to the
modality of the model: images where it takes pixels, waveforms or spectra where it takes sound. Seeded; integers are i64,
everything else f32.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["BATCH", "LENGTH", "Recipe", "UnknownArgument", "for_signature", "image"]

BATCH, LENGTH, TARGETS = 2, 16, 8
SIDE = 64
_FIRST_TOKEN = 5  # the special ones come before


class UnknownArgument(TypeError):
    """A model asks for an argument that no row of the table makes: a gap of the suite, not of the device."""


def image(channels: int, side: int, seed: int, batch: int = BATCH) -> Tensor:
    """Images f32[batch, channels, side, side]."""
    return torch.randn(batch, channels, side, side, generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass(slots=True)
class Recipe:
    """What makers draw from: the configuration, a generator, and the sizes."""

    config: Any
    seed: int
    generator: torch.Generator = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int) -> Tensor:
        """f32 of that shape."""
        return torch.randn(*shape, generator=self.generator)

    def size(self, *names: str, default: int) -> int:
        """The first of these settings that is an integer, here or in a nested configuration."""
        for name in names:
            for config in self._configs():
                value = getattr(config, name, None)
                value = value[0] if isinstance(value, (list, tuple)) and value else value
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    def _configs(self) -> Iterator[Any]:
        yield self.config
        for name in _NESTED:
            nested = getattr(self.config, name, None)
            if nested is not None and not isinstance(nested, (int, str, dict, list, tuple)):
                yield nested

    @property
    def vocabulary(self) -> int:
        """Of the text part."""
        text = self.config.get_text_config()
        size = getattr(text, "vocab_size", None)
        return size if isinstance(size, int) else self.size("vocab_size", default=64)

    def tokens(self, length: int = LENGTH) -> Tensor:
        """Ids i64[BATCH, length] without the special ones at both ends of the vocabulary."""
        high = max(_FIRST_TOKEN + 1, min(self.vocabulary, 2 * self.vocabulary // 3))
        return torch.randint(_FIRST_TOKEN, high, (BATCH, length), generator=self.generator)

    def pixels(self) -> Tensor:
        """f32[BATCH, channels, height, width]."""
        height, width = self._sides()
        return self.normal(BATCH, self.size("num_channels", "in_channels", "in_chans", default=3), height, width)

    def _sides(self) -> tuple[int, int]:
        for config in (getattr(self.config, "vision_config", None), *self._configs()):
            for name in ("image_size", "img_size"):
                value = getattr(config, name, None)
                if isinstance(value, int) and value:
                    return value, value
                if isinstance(value, (list, tuple)) and value:
                    return value[0], value[-1]
        return SIDE, SIDE


_NESTED = (
    "text_config", "vision_config", "audio_config", "encoder", "decoder", "encoder_config", "decoder_config",
    "backbone_config", "thinker_config", "vision_encoder_config", "prompt_encoder_config",
)  # fmt: skip


def _boxes(recipe: Recipe) -> Tensor:
    """Corners of text boxes, i64[BATCH, LENGTH, 4]."""
    corner = torch.randint(0, 50, (BATCH, LENGTH, 2), generator=recipe.generator)
    return torch.cat([corner, corner + 20], -1)


# Families whose spectra are f32[batch, bins, frames]; elsewhere frames come first.
_BINS_FIRST = (
    "whisper",
    "qwen2_audio",
    "qwen2_5_omni",
    "qwen3_omni",
    "voxtral",
    "audioflamingo3",
    "glmasr",
    "moonshine",
)


def _spectra(recipe: Recipe) -> Tensor:
    sizes = ("num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim")
    bins = recipe.size(*sizes, default=80)
    if not recipe.config.model_type.startswith(_BINS_FIRST):
        return recipe.normal(BATCH, 64, bins)
    frames = 2 * recipe.size("max_source_positions", default=32)
    return recipe.normal(BATCH, bins, min(frames, 256))


def _frames(recipe: Recipe) -> Tensor:
    """Videos f32[BATCH, frames, channels, height, width]."""
    count = recipe.size("num_frames", "frames_per_clip", default=4)
    return torch.stack([recipe.pixels() for _ in range(count)], 1)


_VIDEO = ("timesformer", "vivit", "videomae", "vjepa", "video", "tvp")


def _pixels(recipe: Recipe) -> Tensor:
    return _frames(recipe) if recipe.config.model_type.startswith(_VIDEO) else recipe.pixels()


def _hidden(recipe: Recipe, length: int = LENGTH) -> Tensor:
    return recipe.normal(BATCH, length, recipe.size("hidden_size", "d_model", "n_embd", default=64))


Maker = Callable[[Recipe], Any]
_MAKERS: dict[str, Maker] = {
    "input_ids": lambda r: r.tokens(),
    "decoder_input_ids": lambda r: r.tokens(TARGETS),
    "attention_mask": lambda r: torch.ones(BATCH, LENGTH, dtype=torch.long),
    "token_type_ids": lambda r: torch.zeros(BATCH, LENGTH, dtype=torch.long),
    "position_ids": lambda r: torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous(),
    "bbox": _boxes,
    "inputs_embeds": _hidden,
    "hidden_states": _hidden,
    "encoder_hidden_states": _hidden,
    "pixel_values": _pixels,
    "pixel_values_videos": _frames,
    "images": lambda r: r.pixels(),
    "pixel_mask": lambda r: torch.ones(BATCH, *r.pixels().shape[-2:], dtype=torch.long),
    "input_features": _spectra,
    "input_values": lambda r: r.normal(BATCH, 4000),
    "visual_feats": lambda r: r.normal(BATCH, 6, r.size("visual_feat_dim", default=64)),
    "visual_pos": lambda r: torch.rand(BATCH, 6, 4, generator=r.generator),
    "visual_embeds": lambda r: r.normal(BATCH, 6, r.size("visual_embedding_dim", default=64)),
    "flattened_patches": lambda r: r.normal(BATCH, LENGTH, 2 + r.size("patch_embed_hidden_size", default=768)),
}
_MODALITIES = ("pixel_values", "input_features", "input_values", "flattened_patches", "visual_feats", "visual_pos")
_GENERAL = "input_ids"


def for_signature(model: nn.Module, seed: int) -> dict[str, Any]:
    """Keyword arguments of ``model.forward``. Raises UnknownArgument for one that it needs and the table has not."""
    recipe = Recipe(model.config, seed)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", _GENERAL)
    wanted = [
        name
        for name, parameter in parameters.items()
        if (parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_KEYWORD)
        or name in {main, *_MODALITIES}
        or (name == _GENERAL and main == _GENERAL)
    ]
    if _GENERAL in wanted and "bbox" in parameters:
        wanted.append("bbox")
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        wanted.append("decoder_input_ids")
    found: dict[str, Any] = {}
    for name in dict.fromkeys(wanted):
        if name not in _MAKERS:
            raise UnknownArgument(f"{type(model).__name__}.forward needs {name!r}, for which the suite has no recipe")
        found[name] = _MAKERS[name](recipe)
    if "use_cache" in parameters:
        found["use_cache"] = False
    return found
