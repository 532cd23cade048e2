"""How an argument of each name is made, from the sizes in a model's configuration. Integers are i64, everything else f32."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from emutpu.conformance.shrink import text_part

__all__ = ["BATCH", "LENGTH", "MAKERS", "SIDE", "TARGETS", "Maker", "Recipe"]

BATCH, LENGTH, TARGETS = 2, 16, 8
SIDE = 64
FRAMES = 64  # of a spectrum
SAMPLES = 4000
_FIRST_TOKEN = 5  # the special ones come before

_NESTED = (
    "text_config", "vision_config", "audio_config", "encoder", "decoder", "encoder_config", "decoder_config", "asr_config", "diarization_config",
    "video_config", "semantic_config", "semantic_model_config",
    "backbone_config", "thinker_config", "vlm_config", "vision_encoder_config", "prompt_encoder_config",
)  # fmt: skip


# Of families that read one line of text, or put two pictures above each other.
_SIDES = {"pp_ocrv5_mobile_rec": (96, 96), "seggpt": (64, 64), "depth_pro": (256, 256)}


def _is_config(value: Any) -> bool:
    return hasattr(value, "model_type") and not isinstance(value, type)


class Recipe:
    """What makers draw from: the model, its configuration, a generator, and the sizes."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model: Any = model
        self.config: Any = model.config
        self.generator = torch.Generator().manual_seed(seed)
        self.parameters: Mapping[str, inspect.Parameter] = inspect.signature(model.forward).parameters

    @property
    def family(self) -> str:
        """The model type of the configuration."""
        kind: str = self.config.model_type
        return kind

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether a decoder wants ids of its own."""
        return bool(getattr(self.config, "is_encoder_decoder", False))

    def normal(self, *shape: int) -> Tensor:
        """f32 of that shape."""
        return torch.randn(*shape, generator=self.generator)

    def below(self, high: int, *shape: int) -> Tensor:
        """i64 of that shape, from zero to below ``high``."""
        return torch.randint(0, high, shape, generator=self.generator)

    def size(self, *names: str, default: int) -> int:
        """The first of these settings that is an integer, here or in a nested configuration."""
        for name in names:
            for config in self.configs():
                value = getattr(config, name, None)
                value = value[0] if isinstance(value, (list, tuple)) and value else value
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return default

    def configs(self) -> Iterator[Any]:
        """This configuration, the nested ones, and those nested in them."""
        yield self.config
        nested = [found for name in _NESTED if _is_config(found := getattr(self.config, name, None))]
        yield from nested
        for outer in nested:
            yield from (inner for inner in vars(outer).values() if _is_config(inner))

    @property
    def vision(self) -> Any:
        """The configuration of the part that sees."""
        for name in ("vision_config", "vision_encoder_config", "thinker_config", "vlm_config"):
            nested = getattr(self.config, name, None)
            if nested is not None and not isinstance(nested, dict):
                return getattr(nested, "vision_config", nested)
        return self.config

    @property
    def vocabulary(self) -> int:
        """Of the text part."""
        text = self.config.encoder_config if self.family == "dia" else text_part(self.config)
        size = getattr(text, "vocab_size", None)
        return size if isinstance(size, int) else self.size("vocab_size", default=64)

    def tokens(self, length: int = LENGTH) -> Tensor:
        """Ids i64[BATCH, length] without the special ones at both ends of the vocabulary."""
        high = max(_FIRST_TOKEN + 1, min(self.vocabulary, 2 * self.vocabulary // 3))
        return torch.randint(_FIRST_TOKEN, high, (BATCH, length), generator=self.generator)

    @property
    def channels(self) -> int:
        """Of an image."""
        found = getattr(self.vision, "num_channels", None)
        return found if isinstance(found, int) else self.size("num_channels", "in_channels", "in_chans", default=3)

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of an image."""
        if self.family in _SIDES:
            return _SIDES[self.family]
        for config in (self.vision, *self.configs()):
            made = getattr(config, "model_args", None) or {}  # of a timm model
            for name in ("image_size", "img_size"):
                value = made.get(name, getattr(config, name, None))
                if isinstance(value, int) and value:
                    return value, value
                if isinstance(value, (list, tuple)) and value:
                    return int(value[0]), int(value[-1])
        return SIDE, SIDE

    def pixels(self) -> Tensor:
        """f32[BATCH, channels, height, width]."""
        return self.normal(BATCH, self.channels, *self.sides)


# --------------------------------------------------------------------------------------------------------- images


def _patch(recipe: Recipe) -> int:
    value = getattr(recipe.vision, "patch_size", None)
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return value if isinstance(value, int) else 16


def _merged(recipe: Recipe) -> int:
    """Patches along a side of the square that becomes one token."""
    for name in ("spatial_merge_size", "merge_size", "merge_kernel_size", "downsample_factor"):
        value = getattr(recipe.vision, name, None) or getattr(recipe.config, name, None)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if isinstance(value, int):
            return value
    return 2


def _grid_side(recipe: Recipe) -> int:
    return 2 * _merged(recipe)


def _grid(recipe: Recipe) -> Tensor:
    """Time, height and width in patches of each image, i64[BATCH, 3]."""
    return torch.tensor([[1, _grid_side(recipe), _grid_side(recipe)]] * BATCH)


def _gridded(recipe: Recipe) -> Tensor:
    """The patches of all images in one row, flattened: f32[patches, channels * times * side * side]."""
    times = getattr(recipe.vision, "temporal_patch_size", getattr(recipe.vision, "patch_temporal", None))
    size = recipe.channels * (times if isinstance(times, int) else 1) * _patch(recipe) ** 2
    return recipe.normal(BATCH * _grid_side(recipe) ** 2, size)


_GRIDS = frozenset({"image_grid_thw", "grid_thw", "image_grid_hws", "image_grid_hw"})
_LISTED = frozenset({"spatial_shapes", "pixel_position_ids", "image_position_ids"})
_VIDEO = ("instructblipvideo", "timesformer", "vivit", "videomae", "vjepa", "videomt", "videoprism", "tvp")
# Families that cut an image into tiles, f32[batch, tiles, channels, height, width].
_TILED = (
    "idefics", "smolvlm", "modernvbert", "ultra", "colmodernvbert", "inkling", "llava_next", "llava_onevision", "granite4_vision",
    "cohere2_vision", "aya_vision", "granite_docling", "perception_lm", "pi0",
)  # fmt: skip
_TOLD = ("emu3", "apertus1p5")  # sizes of whole pictures
_SIZED = ("llava_next", "llava_onevision", "granite4_vision", "phi4_multimodal")
_PAIRS = ("superglue", "lightglue", "efficientloftr")
_BARE_TILES = ("cohere2_vision", "aya_vision")  # tiles of all images in one row, as other families have whole images


def _is_sized(recipe: Recipe) -> bool:
    """Whether pictures of several sizes come padded to one: the sizes are told only then."""
    return recipe.family.startswith(_SIZED + _TOLD) or getattr(recipe.vision, "model_type", None) == "pixtral"


def _frames(recipe: Recipe) -> Tensor:
    """Videos f32[BATCH, frames, channels, height, width]."""
    count = recipe.size("num_frames", "frames_per_clip", default=4)
    return recipe.normal(BATCH, count, recipe.channels, *recipe.sides)


def _patches(recipe: Recipe) -> Tensor:
    """The patches of all images in one row, f32[patches, channels, side, side]."""
    side = _patch(recipe)
    return _gridded(recipe).reshape(-1, recipe.channels, side, side)


def _squares(recipe: Recipe) -> Tensor:
    """What becomes one token each, colours last: f32[tokens, side, side, channels]."""
    side = _patch(recipe) * _merged(recipe)
    return recipe.normal(BATCH * _grid_side(recipe) ** 2, side, side, recipe.channels)


def _moving_squares(recipe: Recipe) -> Tensor:
    """The same at two times: f32[tokens, times, side, side, channels]."""
    side = _patch(recipe)
    return recipe.normal(BATCH * 4, recipe.size("temporal_patch_size", default=2), side, side, recipe.channels)


def _strip(recipe: Recipe) -> Tensor:
    """The patches of all images beside each other: f32[1, channels, side, side * patches]."""
    count = sum(int(rows * columns) for rows, columns in MAKERS["target_sizes"](recipe))
    return recipe.normal(1, recipe.channels, _patch(recipe), _patch(recipe) * count)


# Families whose images come in a form of their own.
_OWN_PIXELS: tuple[tuple[str, Callable[[Recipe], Tensor]], ...] = (
    ("fuyu", lambda r: r.normal(BATCH, 4, r.channels * _patch(r) ** 2)),
    ("inkling2", _squares),
    ("inkling", _moving_squares),
    ("molmo2", lambda r: r.normal(BATCH, 16, r.channels * _patch(r) ** 2)),
    ("minicpmv4_6", _strip),
    ("minicpmv4_7", _strip),
    ("minicpm_ocr", _strip),
    ("neomme", lambda r: r.normal(BATCH * 16, r.channels * _patch(r) ** 2)),
    ("kimi", _patches),
    ("colqwen2", lambda r: _gridded(r).reshape(BATCH, _grid_side(r) ** 2, -1)),
    ("paddleocr_vl", _patches),
)


def _pixels(recipe: Recipe) -> Tensor:
    family, names = recipe.family, recipe.parameters.keys()
    for prefix, own in _OWN_PIXELS:
        if family.startswith(prefix):
            return own(recipe)
    if _GRIDS & names:
        return _gridded(recipe)
    if _LISTED & names:
        side = recipe.size("model_patch_size", default=_patch(recipe))
        return recipe.normal(BATCH, _listed_side(recipe) ** 2, recipe.channels * side**2)
    if "aspect_ratio_ids" in names:
        return recipe.normal(BATCH, 1, recipe.size("max_num_tiles", default=4), recipe.channels, *recipe.sides)
    if family.startswith(_VIDEO) or (family == "xclip" and "input_ids" in names):  # its encoder alone takes pictures
        return _frames(recipe)
    if family.startswith(_PAIRS):
        return recipe.normal(BATCH, 2, recipe.channels, *recipe.sides)
    if family.startswith(_TILED) and not family.startswith(_BARE_TILES) and "input_ids" in names:
        return recipe.normal(BATCH, 3 if family.startswith(_SIZED) else 1, recipe.channels, *recipe.sides)
    return recipe.pixels()


def _hidden(recipe: Recipe, length: int = LENGTH) -> Tensor:
    if _GRIDS & recipe.parameters.keys():
        return _gridded(recipe)
    return recipe.normal(BATCH, length, recipe.size("hidden_size", "d_model", "n_embd", default=64))


def _embedded(recipe: Recipe) -> Tensor:
    """Vectors in place of ids; an assistant gets a token's embedding and the larger model's state beside each other."""
    wide = getattr(recipe.config, "backbone_hidden_size", None)
    return recipe.normal(BATCH, 1, 2 * wide) if isinstance(wide, int) else _hidden(recipe)


# Parts of codecs whose vectors are f32[BATCH, channels, length].
_CHANNELS_FIRST = ("mimi", "pocket_tts", "vibevoice_acoustic")


def _states(recipe: Recipe) -> Tensor:
    if type(recipe.model).__name__.endswith("TokenizerEncoderModel"):  # the sound itself
        return recipe.normal(BATCH, 1, 3200)
    states = _hidden(recipe)
    return states.transpose(1, 2).contiguous() if recipe.family.startswith(_CHANNELS_FIRST) else states


def _boxes(recipe: Recipe) -> Tensor:
    """Corners of text boxes, i64[BATCH, LENGTH, 4]."""
    corner = torch.randint(0, 50, (BATCH, LENGTH, 2), generator=recipe.generator)
    boxes = torch.cat([corner, corner + 20], -1)
    return boxes / 100 if recipe.family == "udop" else boxes  # a part of the page's side there


def _listed_side(recipe: Recipe) -> int:
    """Patches along a side of an image that comes as a list of them."""
    pooled = getattr(recipe.vision, "pooling_kernel_size", None)
    return 2 * pooled if isinstance(pooled, int) else 4


def _places(recipe: Recipe) -> Tensor:
    """Column and row of each patch, i64[BATCH, patches, 2]."""
    places = torch.arange(_listed_side(recipe))
    return torch.cartesian_prod(places, places).expand(BATCH, -1, -1).contiguous()


def _seen(recipe: Recipe) -> Tensor | None:
    """Which patches, or tiles, are none of the padding; None where images are not padded."""
    if recipe.family.startswith(("granite_docling", "pi0")):
        return torch.ones(BATCH, 1, dtype=torch.bool)
    return torch.ones(BATCH, 16, dtype=torch.long) if _LISTED & recipe.parameters.keys() else None


def _shared(recipe: Recipe) -> dict[str, tuple[Tensor, Tensor]]:
    """Keys and values that a larger model made, by type of layer: f32[BATCH, heads, LENGTH, head width] each."""
    text = text_part(recipe.config)
    layers = {kind: text.per_layer_config[place] for place, kind in enumerate(text.layer_types)}
    shapes = {kind: (layer.num_key_value_heads, layer.head_dim) for kind, layer in layers.items()}
    return {
        kind: (recipe.normal(BATCH, heads, LENGTH, width), recipe.normal(BATCH, heads, LENGTH, width))
        for kind, (heads, width) in shapes.items()
    }


def _flattened(recipe: Recipe) -> Tensor:
    """Row and column of each of 16 patches, counted from one, and its pixels."""
    pixels = recipe.normal(BATCH, LENGTH, recipe.size("patch_embed_hidden_size", default=768))
    return torch.cat([_places(recipe).float() + 1, pixels], -1)


def _masked(recipe: Recipe) -> Tensor:
    """Every other patch, bool[BATCH, patches]."""
    moves = recipe.family.startswith(_VIDEO)
    times = recipe.size("num_frames", default=4) // recipe.size("tubelet_size", default=2) if moves else 1
    count = times * (recipe.sides[0] // _patch(recipe)) * (recipe.sides[1] // _patch(recipe))
    return (torch.arange(count) % 2 == 0).expand(BATCH, -1).contiguous()


def _noise(recipe: Recipe) -> Tensor:
    """What decides which patches are hidden, f32[BATCH, patches or windows], where an encoder hides some; else of actions."""
    for module in recipe.model.modules():
        count: Any = getattr(module, "num_patches", None) if recipe.family == "vit_mae" else None
        if recipe.family == "hiera" and hasattr(module, "mask_spatial_shape"):
            count = math.prod(module.mask_spatial_shape)
        if count is not None:
            return torch.rand(BATCH, count, generator=recipe.generator)
    return recipe.normal(BATCH, recipe.size("chunk_size", default=16), recipe.size("max_action_dim", default=32))


# ---------------------------------------------------------------------------------------------------------- sound

# Families whose spectra are f32[batch, bins, frames]; elsewhere frames come first.
_BINS_FIRST = (
    "whisper", "qwen2_audio", "qwen2_5_omni", "qwen3_omni", "voxtral", "audioflamingo3", "glmasr", "moonshine", "clvp",
    "qwen3_asr", "musicflamingo", "moss_transcribe",
)  # fmt: skip
_BINS = (
    "num_mel_bins", "feature_size", "input_feat_per_channel", "feature_projection_input_dim", "input_dim", "n_mels",
    "input_feat_size",
)  # fmt: skip
_CODECS = (
    "dac",
    "encodec",
    "mimi",
    "xcodec",
    "snac",
    "higgs",
    "wavtokenizer",
    "vibevoice",
    "pe_audio",
    "omniasr",
    "csm",
    "neucodec",
    "pocket_tts",
)


# Of families that get something else in place of a spectrum: frames of the wave itself, pitches, vectors.
_BINS_ARE = {"gemma4_unified": "audio_embed_dim", "musicgen_melody": "num_chroma", "pop2piano": "d_model"}
_STACKED = {"granite_speech5": 4, "granite_speech5_ctc": 4}  # frames that become one
_BINS_OF = {"gemma4": 128, "embedding_gemma2": 128}  # of families without a setting for it


def _bins(recipe: Recipe) -> int:
    family = recipe.family.removesuffix("_audio").removesuffix("_encoder")
    if family in _BINS_ARE:
        return recipe.size(_BINS_ARE[family], default=80)
    stacked = recipe.size("num_stacked_frames", default=_STACKED.get(family, 1))
    return _BINS_OF[family] if family in _BINS_OF else stacked * recipe.size(*_BINS, default=80)


def _spectra(recipe: Recipe) -> Tensor:
    if recipe.family.startswith("clap"):
        return recipe.normal(BATCH, 1, FRAMES, _bins(recipe))
    if recipe.family == "xcodec2":  # as many as the wave beside them becomes
        return recipe.normal(BATCH, _waves(recipe).shape[-1] // recipe.config.hop_length, _bins(recipe))
    if not recipe.family.startswith(_BINS_FIRST):
        return recipe.normal(BATCH, FRAMES, _bins(recipe))
    if recipe.family == "voxtral_realtime":  # eight frames are heard while a token is read
        return recipe.normal(BATCH, _bins(recipe), 8 * LENGTH)
    if recipe.family.startswith("qwen3_asr"):
        return recipe.normal(BATCH, _bins(recipe), 200)  # two of its windows
    frames = 2 * recipe.size("max_source_positions", default=32)
    return recipe.normal(BATCH, _bins(recipe), min(frames, 256))


def _spectra_mask(recipe: Recipe) -> Tensor | None:
    spectra = _spectra(recipe)
    frames = spectra.shape[-1] if recipe.family.startswith(_BINS_FIRST) else spectra.shape[1]
    if recipe.family.startswith("granite_speech"):
        return None  # of the features, which are fewer
    indexes = recipe.family.startswith(("gemma", "embedding_gemma"))  # what is no padding
    return torch.ones(BATCH, frames, dtype=torch.bool if indexes else torch.long)


def _waves(recipe: Recipe) -> Tensor:
    if recipe.family == "audio-spectrogram-transformer":
        return recipe.normal(BATCH, recipe.size("max_length", default=FRAMES), _bins(recipe))
    if recipe.family.startswith(_CODECS):
        return recipe.normal(BATCH, recipe.size("audio_channels", default=1), 3200)
    if recipe.family.startswith("muse_spark"):
        return recipe.normal(BATCH, 40 * recipe.size("samples_per_token", default=96))
    if type(recipe.model).__name__ == "SpeechT5Model":  # what its prenets make of them
        return _hidden(recipe)
    long = "XVector" in type(recipe.model).__name__
    return recipe.normal(BATCH, 6 * SAMPLES if long else SAMPLES)


# --------------------------------------------------------------------------------------------------- other inputs


def _past(recipe: Recipe, features: int | None = None) -> Tensor:
    lags = max(getattr(recipe.config, "lags_sequence", None) or [0])
    length = recipe.size("context_length", default=16) + lags
    if features is not None:
        return recipe.normal(BATCH, length, features)
    if recipe.family.startswith("timesfm"):
        return recipe.normal(BATCH, 4 * recipe.size("patch_length", default=32))
    channels = recipe.size("num_input_channels", "input_size", default=1)
    plain = channels == 1 and hasattr(recipe.config, "lags_sequence")
    return recipe.normal(BATCH, length) if plain else recipe.normal(BATCH, length, channels)


def _time_features(recipe: Recipe) -> int:
    return getattr(recipe.config, "num_time_features", 0) or 0


def _future(recipe: Recipe) -> int:
    return recipe.size("prediction_length", "horizon_length", default=4)


def _decoder_ids(recipe: Recipe) -> Tensor:
    """Ids of the targets; models of several codebooks have a row, or a last dimension, for each."""
    books = recipe.size("num_codebooks", default=4)
    if recipe.family.startswith("musicgen"):
        return recipe.below(60, BATCH * books, TARGETS)
    if recipe.family == "dia":
        decoder = recipe.config.decoder_config
        return recipe.below(decoder.vocab_size // 2, BATCH, TARGETS, decoder.num_channels)
    return recipe.tokens(recipe.size("canvas_length", default=TARGETS))


_CODED = frozenset({"MusicgenForCausalLM", "MusicgenModel", "MusicgenMelodyForCausalLM", "MusicgenMelodyModel"})


def _ids(recipe: Recipe) -> Tensor:
    if type(recipe.model).__name__ in _CODED:
        return recipe.below(60, BATCH * recipe.size("num_codebooks", default=4), LENGTH)
    if recipe.family == "perceiver":
        return recipe.tokens(recipe.size("max_position_embeddings", default=LENGTH))
    if recipe.family == "kyutai_speech_to_text":  # a token of text, and one of each codebook
        return recipe.below(60, BATCH, LENGTH, recipe.size("num_codebooks", default=4) + 1)
    ids = recipe.tokens()
    name = type(recipe.model).__name__
    end = getattr(text_part(recipe.config), "eos_token_id", None)
    end = end[0] if isinstance(end, (list, tuple)) and end else end
    if recipe.is_encoder_decoder and "ForSequenceClassification" in name and isinstance(end, int):
        ids[:, -1] = end
    for family, token, places in _MARKED:
        mark = getattr(recipe.config, token, None)
        if recipe.family == family and isinstance(mark, int):
            ids[:, list(places)] = mark
    return ids


# Families that look for a token of theirs in the text, its setting, and where it stands.
_MARKED = (
    ("longformer", "sep_token_id", (3, 4, -1)),
    ("splinter", "question_token_id", (3,)),
    ("led", "eos_token_id", (-1,)),
)


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.long)


def _padding(recipe: Recipe) -> Tensor:
    """One for each sample of sound that is none of the padding; of text, where padding counts, false."""
    if "input_values" in recipe.parameters:
        return _ones(BATCH, _waves(recipe).shape[-1])
    return (
        _ones(BATCH, LENGTH) if "input_features" in recipe.parameters else torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    )


def _marked(count: int) -> Tensor:
    """Places of the text for features: the first ``count`` after the first token, i64[BATCH, LENGTH]."""
    place = torch.arange(LENGTH)
    return ((place > 0) & (place <= count)).long().expand(BATCH, -1).contiguous()


def _cells(recipe: Recipe) -> Tensor:
    """A question of four tokens, then a table of two columns and as many rows as fit: segment, column, row and ranks of each
    token, i64[BATCH, LENGTH, kinds].
    """
    cells = torch.arange(LENGTH - 4)
    types = torch.zeros(LENGTH, len(recipe.config.type_vocab_sizes), dtype=torch.long)
    types[4:, :3] = torch.stack([torch.ones_like(cells), cells % 2 + 1, cells // 2 + 1], 1)
    return types.expand(BATCH, -1, -1).contiguous()


Maker = Callable[[Recipe], Any]
MAKERS: dict[str, Maker] = {
    "input_ids": _ids,
    "decoder_input_ids": _decoder_ids,
    "question_ids": lambda r: r.tokens(),
    "qformer_input_ids": lambda r: r.below(100, BATCH, LENGTH),
    "qformer_attention_mask": lambda r: _ones(BATCH, LENGTH),
    "protein_input_ids": lambda r: r.below(20, BATCH, LENGTH),
    "protein_attention_mask": lambda r: _ones(BATCH, LENGTH),
    "task_inputs": lambda r: r.tokens(r.size("task_seq_len", default=77)),
    "attention_mask": lambda r: _ones(BATCH, LENGTH),
    "token_type_ids": lambda r: _cells(r) if r.family == "tapas" else torch.zeros(BATCH, LENGTH, dtype=torch.long),
    "position_ids": lambda r: torch.arange(LENGTH).expand(BATCH, LENGTH).contiguous(),
    "cache_position": lambda r: torch.arange(LENGTH),
    "padding_mask": _padding,
    "bbox": _boxes,
    "inputs_embeds": _embedded,
    "shared_kv_states": _shared,
    "hidden_states": _states,
    "features": _hidden,
    "x": _hidden,
    "query_embeds": lambda r: _hidden(r, 8),
    "latents": _states,
    "encoder_hidden_states": lambda r: r.normal(
        BATCH,
        LENGTH,
        r.size("encoder_hidden_size", "cross_attention_hidden_size", "hidden_size", "d_model", default=64),
    ),
    "inputs": lambda r: (
        r.normal(BATCH, SAMPLES)
        if r.family == "speech-encoder-decoder"
        else r.normal(BATCH, LENGTH, r.size("d_model", default=64))
    ),
    "aatype": lambda r: r.below(20, BATCH, LENGTH),
    # images
    "pixel_values": _pixels,
    "pixel_values_videos": _frames,
    "codebook_pixel_values": lambda r: r.normal(BATCH, r.channels, *(8 * (side // _patch(r)) for side in r.sides)),
    "pixel_values1": lambda r: r.pixels(),
    "pixel_values2": lambda r: r.pixels(),
    "lr_pixel_values": lambda r: r.pixels(),
    "high_res_pixel_values": lambda r: r.normal(BATCH, r.channels, *_high_sides(r)),
    "prompt_pixel_values": lambda r: r.pixels(),
    "prompt_masks": lambda r: r.pixels(),
    "conditional_pixel_values": lambda r: r.pixels(),
    "images": lambda r: r.pixels(),
    "pixel_mask": lambda r: _ones(BATCH, *r.sides),
    "image_grid_thw": _grid,
    "grid_thw": _grid,
    "image_grid_hws": lambda r: _grid(r)[:, 1:],
    "merge_sizes": lambda r: torch.full((BATCH,), _merged(r)),
    "image_merge_sizes": lambda r: torch.full((BATCH,), _merged(r)),
    "image_grid_hw": lambda r: _grid(r)[:, 1:],
    "spatial_shapes": lambda r: torch.tensor([[4, 4]] * BATCH),
    "pixel_attention_mask": _seen,
    "pixel_position_ids": _places,
    "image_position_ids": _places,
    "image_sizes": lambda r: torch.tensor([list(r.sides)] * BATCH) if _is_sized(r) else None,
    "target_sizes": lambda r: torch.tensor([[side // _patch(r) for side in r.sides]] * BATCH),
    "aspect_ratio_ids": lambda r: _ones(BATCH, 1),
    "aspect_ratio_mask": lambda r: _ones(BATCH, 1, r.size("max_num_tiles", default=4)),
    "bool_masked_pos": _masked,
    "image_token_pooling": lambda r: torch.arange(BATCH * 16).reshape(-1, 4),  # four patches for a token
    "image_grids": lambda r: torch.tensor([[2, 2, 0, 0]] * BATCH),
    "classes_input_ids": lambda r: torch.cat([r.tokens(), r.tokens()]),
    "classes_attention_mask": lambda r: _ones(2 * BATCH, LENGTH),
    "classes_structure": lambda r: torch.full((BATCH,), 2),
    "tasks_input_ids": lambda r: r.tokens(),
    "tasks_attention_mask": lambda r: _ones(BATCH, LENGTH),
    "flattened_patches": _flattened,
    "image_embeds_position_mask": lambda r: _marked(r.size("latent_query_num", default=8)),
    "input_values_cutoffs": lambda r: torch.full((BATCH, 1), _waves(r).shape[-1]),
    "image_attention_mask": lambda r: _ones(BATCH, LENGTH, 1),
    "visual_feats": lambda r: r.normal(BATCH, 6, r.size("visual_feat_dim", default=64)),
    "visual_pos": lambda r: torch.rand(BATCH, 6, 4, generator=r.generator),
    "visual_embeds": lambda r: r.normal(BATCH, 6, r.size("visual_embedding_dim", default=64)),
    "input_points": lambda r: torch.tensor([[[[5.0, 5.0]]]] * BATCH),
    "input_boxes": lambda r: torch.tensor([[[5.0, 5.0, 20.0, 20.0]]] * BATCH),
    # sound
    "input_features": _spectra,
    "input_features_mask": _spectra_mask,
    "feature_attention_mask": _spectra_mask,
    "audio_mel": _spectra,
    "audio_mel_mask": lambda r: torch.zeros(BATCH, FRAMES, dtype=torch.bool),
    "input_values": _waves,
    "decoder_input_values": lambda r: r.normal(
        BATCH,
        TARGETS,
        r.size("hidden_size" if type(r.model).__name__ == "SpeechT5Model" else "num_mel_bins", default=80),
    ),
    "speaker_embeddings": lambda r: r.normal(BATCH, r.size("speaker_embedding_dim", default=512)),
    "speech_inputs": lambda r: r.normal(BATCH, SAMPLES),
    "spectrogram": lambda r: r.normal(BATCH, LENGTH, r.size("model_in_dim", "num_mel_bins", default=80)),
    "spectrogram_labels": lambda r: r.normal(BATCH, 2 * LENGTH, r.size("num_mel_bins", default=80)),
    "duration_labels": lambda r: torch.full((BATCH, LENGTH), 2),
    "pitch_labels": lambda r: r.normal(BATCH, LENGTH, 1),
    "energy_labels": lambda r: r.normal(BATCH, LENGTH, 1),
    "audio_codes": lambda r: r.below(16, BATCH, r.size("num_codebooks", "num_quantizers", default=4), TARGETS),
    "codes": lambda r: r.below(16, BATCH, TARGETS),
    # time series, decisions
    "past_values": _past,
    "past_time_features": lambda r: _past(r, _time_features(r)),
    "past_observed_mask": lambda r: torch.ones_like(_past(r)),
    "past_values_padding": lambda r: torch.zeros(_past(r).shape[:2], dtype=torch.long),
    "future_time_features": lambda r: r.normal(BATCH, _future(r), _time_features(r)),
    "future_values": lambda r: r.normal(BATCH, _future(r)),
    "state": lambda r: r.normal(BATCH, r.size("max_state_dim", default=32)),
    "noise": _noise,
    "timestep": lambda r: torch.tensor([0.25, 0.75]),
    "action_embeds": lambda r: r.normal(BATCH, 8, r.config.dit_config.hidden_size),
    "states": lambda r: r.normal(BATCH, 4, r.size("state_dim", default=17)),
    "actions": lambda r: r.normal(BATCH, 4, r.size("act_dim", default=4)),
    "rewards": lambda r: r.normal(BATCH, 4, 1),
    "returns_to_go": lambda r: r.normal(BATCH, 4, 1),
    "freq": lambda r: torch.zeros(BATCH, 1, dtype=torch.long),
    "timesteps": lambda r: torch.arange(4).expand(BATCH, 4).contiguous(),
}


def _high_sides(recipe: Recipe) -> tuple[int, int]:
    """Of the second, larger picture that some families take."""
    side = getattr(getattr(recipe.config, "high_res_vision_config", None), "image_size", SIDE)
    return (side, side) if isinstance(side, int) else (SIDE, SIDE)
