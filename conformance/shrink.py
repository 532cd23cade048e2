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

__all__ = ["FEED_FORWARD", "HEADS", "HEAD_DIM", "VOCABULARY", "WIDTH", "default", "shrunk", "text_part"]

WIDTH, HEADS, HEAD_DIM, FEED_FORWARD = 64, 4, 16, 128
VOCABULARY, POSITIONS, EXPERTS, WINDOW = 512, 128, 4, 8
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


_PATTERNS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types", "indexer_types")


def _needed(config: Config) -> int:
    needed = 2
    for name in _PATTERNS:
        types = getattr(config, name, None)
        if isinstance(types, (list, tuple)) and len(types) > 1:
            needed = max(needed, *(list(types).index(kind) + 1 for kind in dict.fromkeys(types)))
    return min(needed, _MOST_LAYERS)


def _pattern(value: Any, config: Config) -> Any:
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
        (r"index_topk$", _at_most(WINDOW)),
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


class Inner(dict[str, Any]):
    """Settings of a nested configuration."""


# Kernels, strides and paddings of blocks that look along lines of text, as the published models have them.
_TEXT_LINES = {
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0],
        "return_channel": [1, 1, 0],
        **{
            f"{kind}_{ratio}": [[height or long, width or long], [1, 1], [(height or long) // 2, (width or long) // 2]]
            for ratio, long in (("longratio", 7), ("midratio", 5), ("shortratio", 3))
            for kind, height, width in (
                ("vertical_long_to_small_conv", None, 1),
                ("horizontal_small_to_long_conv", 1, None),
                ("symmetric_conv_long", None, None),
            )
        },
    },
}
# Two layers share a transformer.
_SHARED = {
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid"],
    "num_hidden_layers": 5,
}
_SMALL_VIT = Inner(
    architecture="vit_pe_core_large_patch14_336",
    model_args={"embed_dim": WIDTH, "depth": 2, "num_heads": HEADS, "img_size": 56},
)
_ASSISTANT = {"text_config": Inner(hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=6)}

# What no rule over names can know: fields that belong together.
_TOGETHER: Mapping[str, Mapping[str, Any]] = {
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "BambaConfig": {"attn_layer_indices": [1]},
    "EsmConfig": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": False},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Sam2VisionConfig": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "ClvpConfig": {"speech_config": Inner(vocab_size=VOCABULARY)},
    # Otherwise no two places of such small images match, and the answer is empty.
    "EfficientLoFTRConfig": {"coarse_matching_threshold": 0.0, "coarse_matching_border_removal": 0},
    "CvtConfig": {"depth": [1, 2, 3]},
    "EfficientNetConfig": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "AlignVisionConfig": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "AlignConfig": {"projection_dim": 80},  # the width of the last stage
    "VipLlavaConfig": {"vision_feature_layers": [-2, -1, 0, 1, 2]},
    "ZambaConfig": {**_SHARED, "attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD_DIM},
    "Zamba2Config": _SHARED,
    "ZoeDepthConfig": {"bottleneck_features": WIDTH},
    "XmodConfig": {"default_language": "en_XX"},
    "DeepseekV2Config": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2, "mamba_n_heads": 8},
    "BitConfig": {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "num_groups": 4},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "DoryConfig": {"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "FalconH1Config": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "AriaConfig": {"projector_patch_to_query_dict": {"9": 4, "16": 8}},
    "AyaVisionConfig": {"vision_config": Inner(image_size=56)},
    "DonutSwinConfig": {"image_size": [128, 128], "window_size": 4},
    "Gemma3nTextConfig": {
        "intermediate_size": FEED_FORWARD,
        "activation_sparsity_pattern": None,
        "num_hidden_layers": 5,
        "num_kv_shared_layers": 0,
    },
    "Gemma3nConfig": {"audio_soft_tokens_per_image": 6, "audio_config": Inner(vocab_size=64, vocab_offset=448)},
    "Gemma3nVisionConfig": {
        "hidden_size": 2048,
        "model_args": {"channel_multiplier": 0.25},
        "vocab_size": 64,
        "vocab_offset": 384,
    },
    "EdgeTamVisionConfig": {
        "backbone_config": Inner(architecture="repvit_m1"),
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "FunAsrNanoAdaptorConfig": {"intermediate_size": WIDTH // 4},
    "Granite4VisionConfig": {
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 0], [-1, 1]],
        "spatial_target_layers": [0, 1, 2, 3],
        "text_config": Inner(num_hidden_layers=4),
    },
    "GraniteSpeechConfig": {"window_size": 15},
    "GraniteSpeechPlusConfig": {"window_size": 15},
    "MllamaVisionConfig": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * WIDTH},
    "LwDetrConfig": {"projector_scale_factors": [1.0], "backbone_config": Inner(window_block_indices=[0, 2])},
    "Molmo2Config": {"adapter_config": Inner(vision_feature_layer=[1, 0])},
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS},
    "MuseGlimmerConfig": {"out_hidden_size": 4 * WIDTH},
    "MuseSparkConfig": {"out_hidden_size": 4 * WIDTH},
    "PerceptionLMConfig": {"vision_config": _SMALL_VIT},
    "PPDocLayoutV2Config": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))},
    "PaddleOCRTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 3, 3]},
    },
    "PPOCRV5ServerDetConfig": _TEXT_LINES,
    "PPOCRV6MediumDetConfig": _TEXT_LINES,
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": HEAD_DIM,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ngram_vocab_size_base": 64,
        "ple_embed_dim": 32,
        "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "hc_lowrank": 8,
    },
    "Step3p7TextConfig": {
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        "num_hidden_layers": 4,
        "sliding_window": WINDOW,
    },
    "Gemma4AssistantConfig": _ASSISTANT,
    "Gemma4UnifiedAssistantConfig": _ASSISTANT,
    "GroundingDinoConfig": {"num_queries": 4},
    "TimmBackboneConfig": {"backbone": "resnet26"},
    "HieraConfig": {"decoder_hidden_size": WIDTH, "decoder_depth": 2, "decoder_num_heads": 2},
    "InformerConfig": {"prediction_length": 4},
    "AutoformerConfig": {"prediction_length": 4, "label_length": 2},
    "TimeSeriesTransformerConfig": {"prediction_length": 4},
    "ChameleonConfig": {
        "vq_config": Inner(num_embeddings=64),
        "vocabulary_map": {
            "<image>": 508,
            **{f"IMGIMG{''.join(chr(65 + int(d)) for d in str(code))}Z": 10 + code for code in range(64)},
        },
    },
    "DeepseekOcr2TextConfig": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
    },
    "DiffusionGemmaTextConfig": {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": WIDTH},
    "CohereCompassTextConfig": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "NemotronH_Omni_Reasoning_V3_Config": {"audio_config": Inner(projection_hidden_size=WIDTH, projection_bias=False)},
    "NemotronConfig": {"num_key_value_heads": 2, "head_dim": HEAD_DIM},
    "LayoutLMv3Config": {"coordinate_size": 12, "shape_size": 8, "input_size": 64},
    "LiltConfig": {"hidden_size": 96},
    "Llama4VisionConfig": {
        "vision_output_dim": WIDTH,
        "projector_input_dim": WIDTH,
        "projector_output_dim": WIDTH,
        "intermediate_size": 256,
        "pixel_shuffle_ratio": 0.5,
    },
    "LongcatFlashConfig": {"head_dim": 8, "qk_head_dim": 24},
    "Mamba2Config": {"num_heads": 8, "head_dim": HEAD_DIM},
    "MMGroundingDinoConfig": {"num_queries": 4},
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 400},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 400},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": WIDTH},
    "ReformerConfig": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 48]},
    "Sam3TrackerConfig": {"vision_config": Inner(backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]])},
    "SegGptConfig": {
        "num_hidden_layers": 4,
        "intermediate_hidden_state_indices": [0, 1, 2, 3],
        "merge_index": 0,
        "pretrain_image_size": 64,
    },
    "ShieldGemma2Config": {"yes_token_index": 5, "no_token_index": 6},
    "SwinConfig": {"window_size": 2},
    "MaskFormerSwinConfig": {"window_size": 2},
    "SuperPointConfig": {"keypoint_decoder_dim": 65},
    "T5Gemma2TextConfig": {"dropout_rate": 0.0},
    "UdopConfig": {"relative_attention_num_buckets": 32},
    "TvpConfig": {"max_img_size": 64, "visual_prompt_size": 8},
    "FastVlmConfig": {"vision_config": Inner(architecture="fastvit_mci0", hidden_size=1024)},
    "PeVideoEncoderConfig": {
        "vision_config": Inner(
            architecture="vit_pe_core_tiny_patch16_384",
            model_args={"img_size": 64, "depth": 2, "embed_dim": WIDTH, "num_heads": HEADS},
        ),
    },
    "PerceiverConfig": {
        "num_latents": 16,
        "d_latents": WIDTH,
        "d_model": WIDTH,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 1,
        "num_cross_attention_heads": 1,
        "image_size": 56,
        "train_size": [56, 56],
    },
    "SmolVLMConfig": {"vision_config": Inner(image_size=128)},
    "Idefics3Config": {"vision_config": Inner(image_size=128)},
    "Apertus1p5Config": {
        "vision_config": Inner(codebook_size=64),
        "image_token_offset": 128,
        "audio_token_offset": 192,
    },
    "CHMv2Config": {"reassemble_factors": [4, 2, 1, 0.5], "post_process_channels": [16, 32, 64, 64]},
    "ClapAudioConfig": {"hidden_size": 32, "patch_embeds_hidden_size": 16},
    "MPNetConfig": {"relative_attention_num_buckets": 32},
    "DeepseekOcr2SamVisionConfig": {"downsample_channels": [32, WIDTH]},
    "UnlimitedOcrSamVisionConfig": {"downsample_channels": [32, WIDTH]},
    "Dots3NoteAudioConfig": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    "Dots3NoteVisionConfig": {
        "mlp_layer_types": ["dense", "sparse"],
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "adapter_in_dim": WIDTH,
        "adapter_out_dim": WIDTH,
    },
    "DeepseekVLHybridConfig": {"high_res_vision_config": Inner(global_attn_indexes=[0])},
    "DepthProConfig": {
        "patch_size": 64,
        "intermediate_hook_ids": [1, 0],
        "intermediate_feature_dims": [32, 32],
        "scaled_images_feature_dims": [WIDTH, WIDTH, 32],
        **{f"{part}_model_config": Inner(image_size=64) for part in ("image", "patch", "fov")},
    },
    "DetrConfig": {"encoder_attention_heads": 8, "decoder_attention_heads": 8},
    "Emu3Config": {
        "vq_config": Inner(hidden_size=256, codebook_size=64),
        "vocabulary_map": {
            "<image>": 508,
            "<|extra_200|>": 507,
            **{f"<|visual token {code:06d}|>": 10 + code for code in range(64)},
        },
    },
}

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


# Settings without which a class refuses to be made: its own defaults do not fit each other.
_STARTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma4AssistantConfig": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "Gemma4UnifiedAssistantConfig": {},
}


def default(config_class: Callable[..., Config]) -> Config:
    """The library's own configuration of a class, nearly."""
    return config_class(**copy.deepcopy(dict(_STARTS.get(config_class.__name__, {}))))


_HEAD = Inner(
    upsample_out_channels=[32, 16], upsample_kernel_sizes=[4, 4], conv_out_channels=[16], conv_kernel_sizes=[1]
)
# What a model asks of its configuration, where others of its family ask for something else.
FOR_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Blip2ForImageTextRetrieval": {"qformer_config": Inner(use_qformer_text_input=True)},
    "Wav2Vec2BertForCTC": {"vocab_size": 32},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 32},
    "Sapiens2ForImageMatting": {"head_config": _HEAD},
    "Sapiens2ForNormalEstimation": {"head_config": _HEAD},
    "Sapiens2ForPointmapEstimation": {
        "head_config": Inner(
            _HEAD,
            scale_conv_out_channels=[16],
            scale_conv_kernel_sizes=[1],
            scale_final_input_size=WIDTH,
            scale_final_hidden_sizes=[16, 8],
        )
    },
    "Sapiens2ForPoseEstimation": {"head_config": _HEAD},
    "Sapiens2ForSemanticSegmentation": {"head_config": _HEAD},
    "ReformerModelWithLMHead": {"is_decoder": True, "local_num_chunks_after": 0, "lsh_num_chunks_after": 0},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
}


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
        together = {**_TOGETHER.get(type(config).__name__, {}), **(together or {})}
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
        nested = self._nested(value, _additional(config, name, value) | inner.get(name, {}))
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
