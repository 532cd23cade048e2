"""Small configurations of transformers models that keep the code path of the full-size ones.

A configuration of the library's default is walked, nested ones included, and every field goes through a table of rules: the
first rule whose pattern matches its name decides. Depth and heads stay at least two (one stays one), the ratio of query to
key-value heads keeps its kind, experts stay several, windows become shorter than the sequence, odd sizes stay odd, and
kernels, strides, patches and what is no size at all stays as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from emutpu.conformance.small_configs import (
    EXPERTS,
    FEED_FORWARD,
    FOR_MODELS,
    HEAD_DIM,
    HEADS,
    POSITIONS,
    STARTS,
    TOGETHER,
    VOCABULARY,
    WIDTH,
    WINDOW,
    Inner,
)

__all__ = ["default", "shrunk", "text_part"]

_MOST_LAYERS = 8  # a pattern of layer types is kept until each type occurred, up to here
_BANDS = 4  # patches along an image's side

Config = Any
Rule = Callable[[Any, Config], Any]


@functools.cache
def _at_most(limit: int) -> Rule:
    """Integers, and those of lists, become at most ``limit``; an odd one becomes an odd one."""

    def rule(value: Any, config: Config) -> Any:
        if isinstance(value, (list, tuple)):
            return [rule(entry, config) for entry in value]
        if not _is_size(value) or value <= limit:
            return value
        return limit - 1 if value % 2 and limit % 2 == 0 else limit

    return rule


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _none(value: Any, config: Config) -> Any:
    return None


def _zero(value: Any, config: Config) -> Any:
    return 0.0


def _keep(value: Any, config: Config) -> Any:
    return value


def _width(value: Any, config: Config) -> Any:
    """Widths; those of a list of stages keep their ratios, a narrowest stage of 16."""
    if not isinstance(value, (list, tuple)):
        return min(value, WIDTH) if _is_size(value) else value
    sizes = [entry for entry in value if _is_size(entry) and entry]
    if len(sizes) != len(value) or not sizes:
        return value
    if len(set(sizes)) == 1:
        return [min(entry, WIDTH) for entry in value]
    factor = max(1, min(sizes) // 16)
    return [entry // factor if entry % factor == 0 else max(8, entry // factor // 8 * 8) for entry in value]


def _heads(value: Any, config: Config) -> Any:
    """Query heads; in a list of stages at most eight, in their ratios."""
    if isinstance(value, (list, tuple)):
        first = max(1, value[0]) if value and _is_size(value[0]) else 1
        return [max(1, min(8, entry // first)) if _is_size(entry) else entry for entry in value]
    return min(value, HEADS) if _is_size(value) else value


def _shared_heads(value: Any, config: Config) -> Any:
    """Key-value heads: one stays one, fewer than the query heads become half of them."""
    if not _is_size(value) or value == 1:
        return value
    queries = getattr(config, "num_attention_heads", None)
    grouped = _is_size(queries) and value < queries
    return HEADS // 2 if grouped else min(value, HEADS)


def _layers(value: Any, config: Config) -> Any:
    """Depth: two, or as many as it takes for each type of layer to occur."""
    if isinstance(value, (list, tuple)):
        return [min(entry, 2) if _is_size(entry) else entry for entry in value]
    return min(value, _needed(config)) if _is_size(value) else value


_PATTERNS = (
    "layer_types",
    "layers_block_type",
    "mlp_layer_types",
    "block_types",
    "indexer_types",
    "hybrid_override_pattern",
)


def _needed(config: Config) -> int:
    needed = 2
    for name in _PATTERNS:
        types = getattr(config, name, None)
        if isinstance(types, (list, tuple)) and len(types) > 1:
            needed = max(needed, *(list(types).index(kind) + 1 for kind in dict.fromkeys(types)))
    return min(needed, _MOST_LAYERS)


def _pattern(value: Any, config: Config) -> Any:
    if isinstance(value, str):  # a letter for each layer
        return value[: _needed(config)]
    return list(value)[: _needed(config)] if isinstance(value, (list, tuple)) else value


def _image(value: Any, config: Config) -> Any:
    """Side of an image: four patches, three where the number of patches is odd; pairs stay pairs in their ratio."""
    if isinstance(value, (list, tuple)) and value and all(_is_size(entry) for entry in value):
        small = _image(min(value), config)
        return [small * (entry // min(value)) for entry in value]  # of whole numbers: patches have to fit
    if isinstance(value, (list, tuple)):
        return [_image(entry, config) for entry in value]
    if not _is_size(value):
        return value
    patch: Any = getattr(config, "patch_size", None)
    patch = patch[0] if isinstance(patch, (list, tuple)) and patch else patch
    windows: Any = getattr(config, "num_windows_side", getattr(config, "num_windows", None))
    if _is_size(patch) and _is_size(windows):
        return min(value, patch * windows)
    if not _is_size(patch) or patch < 8:
        return min(value, 64)
    return min(value, patch * (_BANDS - 1 if value // patch % 2 else _BANDS))


def _pinpoints(value: Any, config: Config) -> Any:
    """Resolutions of pictures that are cut into tiles: as many tiles of the small image."""
    seen = getattr(config, "vision_config", None)
    side = getattr(seen, "image_size", None)
    if not _is_size(side):
        return value
    small = _image(side, seen)
    return [[extent // side * small for extent in pair] for pair in value]


def _window(value: Any, config: Config) -> Any:
    """Width of a window: in pixels, a square of patches that become one token, where patches are merged."""
    merged, patch = getattr(config, "spatial_merge_size", None), getattr(config, "patch_size", None)
    if _is_size(value) and isinstance(merged, int) and isinstance(patch, int) and value >= patch * merged:
        return patch * merged
    return _at_most(WINDOW)(value, config)


def _sections(value: Any, config: Config) -> Any:
    """Parameters of rotary embeddings: the sections of multimodal ones add up to half of the small head."""
    if not isinstance(value, dict):
        return value
    if any(isinstance(entry, dict) for entry in value.values()):
        return {name: _sections(entry, config) for name, entry in value.items()}
    if "mrope_section" not in value and "mrope_section" not in getattr(config, "ignore_keys_at_rope_validation", ()):
        return value
    turned = HEAD_DIM // 2 if hasattr(config, "qk_rope_head_dim") else HEAD_DIM
    half = int(turned * (value.get("partial_rotary_factor") or 1.0)) // 2
    outer = half * 3 // 8
    sections = [half - 2 * outer, outer, outer]
    # Ernie's come in the order height, width, time, and height and width have to be alike.
    return value | {"mrope_section": sections[::-1] if type(config).__name__.startswith("Ernie") else sections}


# The first pattern that is found in a field's name decides.
_RULES: tuple[tuple[re.Pattern[str], Rule], ...] = tuple(
    (re.compile(pattern), rule)
    for pattern, rule in (
        (r"^(num_labels|id2label|label2id|chunk_size_feed_forward|type_vocab_size|num_channels)$", _keep),
        (r"^rope_(parameters|scaling)$", _sections),
        # Drawn anew in every training step; in a compiled one numpy's numbers are not those that eager execution draws.
        (r"^pos_embed_rescale$", _none),
        (r"^mask_(time|feature)_prob$", _zero),
        (r"vocab_size|^n_words$|_vocab$", _at_most(VOCABULARY)),
        (r"^(" + "|".join(_PATTERNS) + ")$", _pattern),
        (r"max_position|n_positions|max_source_pos|max_target_pos|^n_ctx$|max_seq|position_embeddings$|max_pos", _at_most(POSITIONS)),
        (r"^window_size$", _window),
        (r"sliding_window|attention_window|attention_chunk_size|local_attention$", _at_most(WINDOW)),
        (r"^(chunk_size|mamba_chunk_size)$", _at_most(16)),
        (r"(first_k_dense_replace|moe_layer_start_index|num_dense_layers|num_nextn_predict_layers|max_window_layers)$", _at_most(1)),
        (r"(experts_per_tok(en)?|top_k_experts|moe_k|moe_topk|num_selected_experts|n_group|num_expert_group)$", _at_most(2)),
        (r"topk_group$|n_shared_experts$|num_shared_experts$", _at_most(1)),
        (r"index_topk$|^max_text_length$", _at_most(WINDOW)),
        (r"mm_tokens_per_image$|index_kpool$", _at_most(4)),
        (r"^image_grid_pinpoints$", _pinpoints),
        (r"^canvas_length$|^context_size$|^audio_chunk|^image_seq_length$", _at_most(16)),
        (r"experts$", _at_most(EXPERTS)),
        (r"feature_layer|select_layer|feat_extract|kv_shared|conv_layers|subsampling_conv|adapter|^num_fpn|per_layer$|no_rope|mlp_only|random_blocks|^num_encoder_blocks$", _keep),
        (r"(^|_)(layers?|depths?|blocks?)$|n_layers?$|num_layers?$|hidden_layers$|_depths$|layer_depths|num_block_repeats", _layers),
        (r"(key_value_heads|n_head_kv|num_kv_heads|n_kv_heads|kv_heads)$", _shared_heads),
        (r"qk_rope_head_dim$|index_head_dim$|rotary_dim$", _at_most(8)),
        (r"(^|_)(head_dim|dim_head|d_kv|d_head|kv_channels|head_size|attention_head_size)$", _at_most(HEAD_DIM)),
        (r"(q|kv)_lora_rank$|_lora_rank$", _at_most(32)),
        (r"^mamba_n_heads$|^mamba_num_heads$", _at_most(8)),
        # Scores are sums of rectified ones over these heads: of few, equal zeros are common, and which is taken is open.
        (r"^index_n_heads$", _at_most(16)),
        (r"(heads?|n_head)$|attention_heads", _heads),
        (r"^num_filters$", _at_most(8)),  # of the first stage: each of the next has twice as many
        (r"state_size$|d_state$|ssm_state", _at_most(8)),
        (r"time_step_rank$|dt_rank$", _at_most(4)),
        (r"image_size$|^resolution$|^img_size$", _image),
        (r"num_queries$|num_query_tokens$|latent_query_num$|num_latents$|n_latents$", _at_most(8)),
        (r"codebook_size$|num_codevectors", _at_most(32)),
        (r"relative_attention_num_buckets$", _at_most(8)),
        (r"num_conv_pos_embeddings$", _at_most(16)),
        (r"num_conv_pos_embedding_groups$", _at_most(2)),
        (r"^upsample_groups$", _width),
        (r"num_frames$", _at_most(4)),
        (r"intermediate|ffn|mlp_dim|d_ff$|d_inner|feed_?forward|inner_dim|mlp_hidden", _at_most(FEED_FORWARD)),
        (r"in_channels$|input_dim$|num_mel|latent_channels|kernel|stride|feature_size$|^channels$|_dim_ratio|partial", _keep),
        (
            r"hidden_size|d_model|n_embd|embed_dim|embedding_size|_dim$|_dimension$|^dim$|_proj_dims$|_channels$|width$|projection|^hidden_dims$",
            _width,
        ),
    )
)  # fmt: skip

_NARROWING = frozenset({_width, _heads, _shared_heads, _at_most(HEAD_DIM), _at_most(FEED_FORWARD)})


_IGNORED = "ignore_keys_at_rope_validation"
_LOOKED_AT = frozenset({"out_indices", "out_features"})  # as deep as the small backbone is
_PLACEHOLDERS = frozenset(
    {"image_token_id", "image_token_index", "audio_token_id", "video_token_id", "video_token_index"}
)
# Not made from other fields, though there is none by default.
_DERIVED = frozenset({"model_args", "image_grid_pinpoints", "image_size"})
_LEFT_OUT = object()
_UNSET = 1 << 30  # stands for a placeholder that has no id by default
_TOKEN = re.compile(r"(token_ids?|token_index|token_idx)$|^(pad|bos|eos|unk|mask|cls|sep)_(index|id)$")
_NOT_SETTINGS = frozenset({"transformers_version", "architectures", "dtype", "torch_dtype", "model_type"})


def default(config_class: Callable[..., Config]) -> Config:
    """The library's own configuration of a class, nearly."""
    return config_class(**copy.deepcopy(dict(STARTS.get(config_class.__name__, {}))))


def shrunk(config: Config, *, narrow: bool = True, model: str = "") -> Config:
    """The small counterpart of a configuration, of the same class. Raises what the class raises for what it refuses.

    ``model`` is the name of the class that is made of it. Without ``narrow`` the widths stay as they are: for image networks whose stages have to fit each other.
    """
    return _Walk(narrow=narrow).visit(config, FOR_MODELS.get(model))


def text_part(config: Config) -> Config:
    """The configuration of the part that reads text; of the encoder where an encoder and a decoder have one each."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(encoder=True)


class _Walk:
    """One walk: special tokens that do not fit the small vocabulary get new, distinct ids from its end downwards."""

    def __init__(self, *, narrow: bool) -> None:
        self._tokens: dict[int, int] = {}
        self._narrow = narrow

    def visit(self, config: Config, together: Mapping[str, Any] | None = None) -> Config:
        """A small copy. ``together`` are settings that a configuration around this one wants of it."""
        together = {**TOGETHER.get(type(config).__name__, {}), **(together or {})}
        inner = {name: value for name, value in together.items() if isinstance(value, Inner)}
        config.allow_global_per_layer_attribute_access = True  # layers that differ get the sizes of the first
        vocabulary = self._vocabulary(config)
        kept: dict[str, Any] = {}
        for field in dataclasses.fields(config):
            if field.name.startswith("_") or field.name in _NOT_SETTINGS:
                continue
            found = self._setting(field, config, vocabulary, inner)
            if found is not _LEFT_OUT:
                kept[field.name] = found
        if getattr(config, "head_dim", 0) is None and "num_attention_heads" in kept:
            kept["head_dim"] = HEAD_DIM
        kept |= _stages(kept, config)
        kept |= {name: value for name, value in together.items() if name not in inner}
        kept |= _one_for_each_layer(kept, config)
        if getattr(config, "pad_token_id", 0) is None and "pad_token_id" in kept:
            kept["pad_token_id"] = 0
        small = type(config)(**kept)
        if getattr(small, "is_encoder_decoder", False) and getattr(small, "decoder_start_token_id", None) is None:
            small.decoder_start_token_id = 0  # generation asks for one
        return small

    def _setting(
        self, field: dataclasses.Field[Any], config: Config, vocabulary: int, inner: Mapping[str, Inner]
    ) -> Any:
        """The small value of a field, or ``_LEFT_OUT`` for what the class makes from the others."""
        name, value = field.name, getattr(config, field.name, None)
        if value is None:
            value = _part_left_out(config, name)
        given = {key: self._ruled(key, own, value) for key, own in _additional(config, name, value).items()}
        nested = self._nested(value, given | inner.get(name, {}))
        if nested is not None:
            return nested
        if isinstance(value, float) and "drop" in name:
            return 0.0
        if value is None and name in _PLACEHOLDERS:
            return self._token(_UNSET, vocabulary)
        if _TOKEN.search(name):
            return self._token(value, vocabulary)
        if name == "rope_parameters" and "mrope_section" in getattr(config, _IGNORED, ()):
            return _sections(value or {"rope_type": "default", "rope_theta": 10000.0}, config)
        if value is None or (field.default is None and not isinstance(value, (int, str)) and name not in _DERIVED):
            return _LEFT_OUT
        return self._ruled(name, value, config)

    def _nested(self, value: Any, together: Mapping[str, Any] | None) -> Any:
        """Small configurations of one, or of a list of them; None for anything else."""
        from transformers import PreTrainedConfig

        if isinstance(value, PreTrainedConfig):
            return self.visit(value, together)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], PreTrainedConfig):
            return [self.visit(entry) for entry in value]
        return None

    @staticmethod
    def _vocabulary(config: Config) -> int:
        size: Any = getattr(config, "vocab_size", None)
        if not _is_size(size):
            size = getattr(text_part(config), "vocab_size", None)
        return min(size, VOCABULARY) if _is_size(size) else VOCABULARY

    def _token(self, value: Any, vocabulary: int) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._token(entry, vocabulary) for entry in value]
        if not _is_size(value) or value < vocabulary // 2:
            return value
        return self._tokens.setdefault(value, vocabulary - 4 - len(self._tokens))

    def _ruled(self, name: str, value: Any, config: Config) -> Any:
        for pattern, rule in _RULES:
            if pattern.search(name):
                return rule(value, config) if self._narrow or rule not in _NARROWING else copy.deepcopy(value)
        return copy.deepcopy(value)


def _part_left_out(config: Config, name: str) -> Config | None:
    """The configuration of a part that is optional and not there by default: an encoder of images, or of sounds."""
    spec: Any = getattr(type(config), "sub_configs_defaults", {}).get(name)
    if name not in {"vision_config", "audio_config"} or not getattr(spec, "optional", False):
        return None
    return spec.get_config_class(spec.model_type)(**spec.init_kwargs)


def _additional(config: Config, name: str, value: Any) -> dict[str, Any]:
    """Settings that a configuration gives to one within it, and which the class of that one does not declare."""
    spec = getattr(type(config), "sub_configs_defaults", {}).get(name)
    given = getattr(spec, "init_kwargs", None) or {}
    declared = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    unfit = declared | (_LOOKED_AT if hasattr(value, "num_hidden_layers") else set())
    kept = (key for key in given if key not in unfit)
    return {key: getattr(value, key) for key in kept if hasattr(value, key)}


def _stages(kept: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """The layers of a backbone that are looked at: as many as before, of the layers that are left."""
    looked = vars(config).get("_out_indices")
    if not isinstance(looked, (list, tuple)) or len(looked) < 2:  # the last one alone is the default
        return {}
    if "num_hidden_layers" not in kept:
        return {"out_indices": list(looked)}
    return {"num_hidden_layers": len(looked), "out_indices": list(range(1, len(looked) + 1))}


def _one_for_each_layer(kept: Mapping[str, Any], config: Config) -> dict[str, Any]:
    """Lists that had an entry for each layer, cut to the layers that are left."""
    before, after = getattr(config, "num_hidden_layers", None), kept.get("num_hidden_layers")
    if not isinstance(before, int) or not isinstance(after, int) or after >= before:
        return {}
    whole = {name: value for name, value in kept.items() if isinstance(value, (list, tuple)) and len(value) == before}
    return {name: list(value)[:after] for name, value in whole.items()}
