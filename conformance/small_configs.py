"""Tables of :mod:`.shrink`: the sizes of small configurations, and what no rule over the names of fields can know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "EXPERTS",
    "FEED_FORWARD",
    "FOR_MODELS",
    "HEADS",
    "HEAD_DIM",
    "POSITIONS",
    "STARTS",
    "TOGETHER",
    "VOCABULARY",
    "WIDTH",
    "WINDOW",
    "Inner",
]

WIDTH, HEADS, HEAD_DIM, FEED_FORWARD = 64, 4, 16, 128
VOCABULARY, POSITIONS, EXPERTS, WINDOW = 512, 128, 4, 8


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
# The library's own default is another backbone, of text lines: its last map alone, and none of them half as high as the one before.
_PYRAMID = {
    "backbone_config": Inner(
        out_indices=[1, 2, 3, 4],
        out_features=["stage1", "stage2", "stage3", "stage4"],
        stem_channels=[3, 16, 32],
        block_configs=[
            [[3, 32, 32, 1, True]],
            [[3, 32, 48, 2, False], [3, 48, 48, 1, False]],
            [[3, 48, 64, 2, False], [3, 64, 64, 1, True]],
            [[3, 64, 96, 2, False], [3, 96, 96, 1, True]],
        ],
    ),
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
TOGETHER: Mapping[str, Mapping[str, Any]] = {
    # With drawn weights a sound lasts as long as an exponential says, and its noise is the device's own.
    "VitsConfig": {"speaking_rate": 64.0, "noise_scale": 0.0, "noise_scale_duration": 0.0},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "BambaConfig": {"attn_layer_indices": [1]},
    "EsmConfig": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": False},
    "DPTConfig": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Data2VecVisionConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "Sam2VisionConfig": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    # Rotary embeddings are at least 32 wide.
    "ClvpConfig": {
        "speech_config": Inner(vocab_size=VOCABULARY, num_attention_heads=2),
        "text_config": Inner(num_attention_heads=2),
    },
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
    "VisionTextDualEncoderConfig": {"vision_config": Inner(pooler_output_size=WIDTH)},
    # What is quantised is what sounds like and what is said, beside each other.
    "XcodecConfig": {"codebook_dim": 2 * WIDTH},
    # Channels double at each of five strides.
    "Xcodec2Config": {"quantization_dim": 2 * WIDTH, "encoder_hidden_size": 8},
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
        "vision_config": Inner(image_size=128),  # every other patch is taken: of an even number
        "image_grid_pinpoints": [[128, 256], [256, 128], [256, 256]],
    },
    "GraniteSpeechConfig": {"window_size": 15},
    "GraniteSpeechPlusConfig": {"window_size": 15},
    "MllamaVisionConfig": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * WIDTH},
    "LwDetrConfig": {"projector_scale_factors": [1.0], "backbone_config": Inner(window_block_indices=[0, 2])},
    "Molmo2Config": {
        "adapter_config": Inner(vision_feature_layer=[1, 0]),
        "vision_config": Inner(num_position_embeddings=16),
        "image_patch_id": VOCABULARY - 1,
    },
    "MoonshineStreamingConfig": {"num_key_value_heads": HEADS},
    "MuseGlimmerConfig": {"out_hidden_size": 4 * WIDTH},
    "MuseSparkConfig": {"out_hidden_size": 4 * WIDTH},
    "PerceptionLMConfig": {"vision_config": _SMALL_VIT},
    "PPDocLayoutV2Config": {"class_thresholds": [0.5] * 25, "class_order": list(range(25))},
    "PaddleOCRTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [2, 3, 3]},
    },
    "PPOCRV5ServerDetConfig": _TEXT_LINES,
    "PPOCRV6MediumDetConfig": _TEXT_LINES | _PYRAMID,
    "PPOCRV6SmallDetConfig": {"layer_list_out_channels": [32, 48, 64, 96], **_PYRAMID},
    "UVDocConfig": {"backbone_config": Inner(out_indices=[1, 2, 3, 4, 5, 6])},
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
    "NemotronH_Omni_Reasoning_V3_Config": {
        "audio_config": Inner(projection_hidden_size=WIDTH, projection_bias=False),
        "image_token_id": VOCABULARY - 2,
        "video_token_id": VOCABULARY - 2,
        "audio_token_id": VOCABULARY - 1,
    },
    # By default one expert, of which nothing has to be chosen; those that were published have 64.
    "HunYuanMoEV1Config": {"num_experts": 4, "moe_topk": 2},
    "NeuCodecConfig": {"quantization_dim": 2 * WIDTH, "encoder_hidden_size": 8},
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
    "TimesFm2_5Config": {"context_length": 256},  # the statistics of its patches are a loop
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
        "fusion_hidden_size": 16,
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

# Settings without which a class refuses to be made: its own defaults do not fit each other.
STARTS: Mapping[str, Mapping[str, Any]] = {
    "Gemma4AssistantConfig": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "Gemma4UnifiedAssistantConfig": {},
}

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
