"""Small settings of diffusers' model classes, and their inputs: their constructors have no common names that rules could go by.

A row is (settings, inputs). An input is a shape, for normal numbers of it, or one of the makers of
``conformance.inputs.written``: ``ones``, ``zeros``, ``places``, ``tokens``, ``list``, ``tensor`` and ``value``. What takes a ``timestep``
gets one. A setting that is made of other models is a list of their classes and settings.
"""

from __future__ import annotations

from typing import Any

from tools.diffusers_inputs import Row, listed, ones, tensor, tokens, value
from tools.diffusers_transformers import TRANSFORMERS

__all__ = ["DIFFUSERS"]

_IMAGE = {"sample": [2, 3, 32, 32]}
_VIDEO = {"sample": [1, 3, 9, 16, 16]}
_TWO_DOWN = ["DownEncoderBlock2D", "DownEncoderBlock2D"]
_TWO_UP = ["UpDecoderBlock2D", "UpDecoderBlock2D"]
_KL = {"block_out_channels": [16, 32], "down_block_types": _TWO_DOWN, "up_block_types": _TWO_UP, "norm_num_groups": 4}

_HUNYUAN: Row = (
    {
        "latent_channels": 4,
        "block_out_channels": [32, 64],
        "layers_per_block": 1,
        "spatial_compression_ratio": 2,
        "temporal_compression_ratio": 2,
    },
    {"sample": [1, 3, 5, 16, 16]},
)
_AUTOENCODERS: dict[str, Row] = {
    "AutoencoderKL": (_KL, _IMAGE),
    "AutoencoderKLFlux2": (_KL | {"latent_channels": 4, "layers_per_block": 1}, _IMAGE),
    "VQModel": (_KL, _IMAGE),
    "AutoencoderKLTemporalDecoder": (
        {"block_out_channels": [32, 64], "down_block_types": _TWO_DOWN},
        _IMAGE | {"num_frames": value(2)},
    ),
    "AsymmetricAutoencoderKL": (
        {
            "down_block_types": _TWO_DOWN,
            "down_block_out_channels": [16, 32],
            "up_block_types": _TWO_UP,
            "up_block_out_channels": [16, 32],
            "norm_num_groups": 4,
        },
        _IMAGE,
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": [16, 16],
            "decoder_block_out_channels": [16, 16],
            "num_encoder_blocks": [1, 2],
            "num_decoder_blocks": [2, 1],
        },
        _IMAGE,
    ),
    "AutoencoderDC": (
        {
            "latent_channels": 4,
            "attention_head_dim": 8,
            "encoder_block_types": ["ResBlock", "EfficientViTBlock"],
            "decoder_block_types": ["ResBlock", "EfficientViTBlock"],
            "encoder_block_out_channels": [16, 16],
            "decoder_block_out_channels": [16, 16],
            "encoder_layers_per_block": [1, 1],
            "decoder_layers_per_block": [1, 1],
            "encoder_qkv_multiscales": [[], [5]],
            "decoder_qkv_multiscales": [[], [5]],
        },
        _IMAGE,
    ),
    "AutoencoderKLCogVideoX": (
        {"block_out_channels": [8, 8, 8, 8], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        _VIDEO,
    ),
    "AutoencoderKLCosmos": (
        {
            "latent_channels": 4,
            "encoder_block_out_channels": [8, 8, 8, 8],
            "decode_block_out_channels": [8, 8, 8, 8],
            "attention_resolutions": [8],
            "resolution": 64,
            "spatial_compression_ratio": 4,
            "temporal_compression_ratio": 4,
        },
        {"sample": [1, 3, 9, 32, 32]},
    ),
    "AutoencoderKLHunyuanVideo": (
        {"block_out_channels": [8, 8, 8, 8], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        _VIDEO,
    ),
    "AutoencoderKLHunyuanImage": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "latent_channels": 4,
            "block_out_channels": [32, 64],
            "layers_per_block": 1,
            "spatial_compression_ratio": 2,
            "sample_size": 16,
        },
        {"sample": [2, 3, 16, 16]},
    ),
    "AutoencoderKLHunyuanImageRefiner": _HUNYUAN,
    "AutoencoderKLHunyuanVideo15": _HUNYUAN,
    "AutoencoderKLKVAE": (
        {
            "channels": 32,
            "num_enc_blocks": 1,
            "num_dec_blocks": 1,
            "z_channels": 4,
            "ch_mult": [1, 2],
            "sample_size": 16,
        },
        {"sample": [2, 3, 16, 16]},
    ),
    "AutoencoderKLKVAEVideo": (
        {"ch": 32, "ch_mult": [1, 2], "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
        {"sample": [1, 3, 5, 16, 16]},
    ),
    "AutoencoderKLLTXVideo": (
        {
            "latent_channels": 8,
            "block_out_channels": [8, 8, 8, 8],
            "decoder_block_out_channels": [8, 8, 8, 8],
            "layers_per_block": [1, 1, 1, 1, 1],
            "decoder_layers_per_block": [1, 1, 1, 1, 1],
            "spatio_temporal_scaling": [True, True, False, False],
            "decoder_spatio_temporal_scaling": [True, True, False, False],
            "patch_size": 1,
        },
        _VIDEO,
    ),
    "AutoencoderKLLTX2Video": (
        {
            "latent_channels": 8,
            "block_out_channels": [8, 8, 8, 8],
            "decoder_block_out_channels": [16, 32, 64],
            "layers_per_block": [1, 1, 1, 1, 1],
            "decoder_layers_per_block": [1, 1, 1, 1],
            "patch_size": 1,
        },
        {"sample": [1, 3, 9, 32, 32]},
    ),
    "AutoencoderKLLTX2Audio": (
        {
            "base_channels": 16,
            "ch_mult": [1, 2],
            "num_res_blocks": 1,
            "resolution": 32,
            "latent_channels": 2,
            "mel_bins": 16,
        },
        {"sample": [2, 2, 5, 16]},
    ),
    "AutoencoderKLMagvit": (
        {"block_out_channels": [8, 8, 8, 8], "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2},
        _VIDEO,
    ),
    "AutoencoderKLMochi": (
        {
            "latent_channels": 4,
            "encoder_block_out_channels": [32, 32, 32, 32],
            "decoder_block_out_channels": [32, 32, 32, 32],
            "layers_per_block": [1, 1, 1, 1, 1],
        },
        {"sample": [1, 3, 7, 16, 16]},
    ),
    "AutoencoderKLQwenImage": (
        {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        {"sample": [1, 3, 1, 16, 16]},
    ),
    "AutoencoderKLQwenImage21": (
        {"base_dim": 8, "decoder_base_dim": 8, "dim_mult": [1, 1, 1, 1, 1], "num_res_blocks": 1},
        {"sample": [1, 4, 1, 32, 32]},
    ),
    "AutoencoderKLWan": ({"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}, _VIDEO),
    "AutoencoderVidTok": (
        {"ch": 32, "ch_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        {"sample": [1, 3, 17, 16, 16], "sample_posterior": value(False)},
    ),
    "AutoencoderOobleck": (
        {
            "encoder_hidden_size": 8,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
            "decoder_channels": 8,
            "decoder_input_channels": 4,
        },
        {"sample": [2, 2, 64]},
    ),
    "AutoencoderKLKVAEAudio": (
        {
            "encoder_dim": 8,
            "encoder_rates": [2, 3],
            "latent_dim": 32,
            "codebook_dim": 8,
            "decoder_dim": 32,
            "decoder_rates": [3, 2],
            "attn_num_heads": 2,
        },
        {"sample": [2, 1, 96]},
    ),
    "AutoencoderKLMiniMaxH3Audio": (
        {
            "encoder_dim": 8,
            "encoder_rates": [2, 4],
            "latent_dim": 32,
            "latent_channels": 8,
            "num_attention_heads": 2,
            "decoder_dim": 32,
            "decoder_rates": [4, 2],
            "decoder_kernel_sizes": [8, 4],
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
        },
        {"sample": [2, 1, 64]},
    ),
    "AutoencoderSAME": (
        {
            "patch_size": 4,
            "encoder_channels": 16,
            "encoder_c_mults": [2],
            "encoder_strides": [4],
            "encoder_transformer_depths": [2],
            "latent_dim": 8,
            "dim_heads": 8,
        },
        {"sample": [2, 2, 256]},
    ),
    "LongCatAudioDiTVae": (
        {
            "channels": 8,
            "c_mults": [1, 2],
            "strides": [2, 4],
            "latent_dim": 8,
            "encoder_latent_dim": 16,
            "downsampling_ratio": 8,
        },
        {"sample": [2, 1, 64]},
    ),
    "MMAudioVAE": (
        {
            "mel_bins": 16,
            "latent_channels": 8,
            "hidden_channels": 32,
            "channel_multipliers": [1, 2],
            "layers_per_block": 1,
        },
        {"sample": [1, 8192]},
    ),
    "MMAudioVocoder": (
        {
            "num_mels": 8,
            "upsample_initial_channel": 32,
            "upsample_rates": [4, 2],
            "upsample_kernel_sizes": [8, 4],
            "resblock_kernel_sizes": [3],
            "resblock_dilation_sizes": [[1, 3, 5]],
        },
        {"mel": [2, 8, 16]},
    ),
    "MiniMaxMusic3Vocoder": (
        {"latent_channels": 8, "decoder_input_dim": 16, "decoder_hidden_dim": 32, "upsampling_ratios": [4, 2]},
        {"latents": [2, 8, 16]},
    ),
}

_UNET = {
    "sample_size": 16,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
}
_CONDITIONED = {"sample": [2, 4, 16, 16], "encoder_hidden_states": [2, 8, 32]}
_CLIP = {"sample": [1, 4, 4, 16, 16], "encoder_hidden_states": [1, 4, 32]}


def _unet(down: str, up: str, **more: Any) -> dict[str, Any]:
    blocks = {"down_block_types": [f"CrossAttn{down}", down], "up_block_types": [up, f"CrossAttn{up}"]}
    return {"block_out_channels": [32, 64], "layers_per_block": 1, "cross_attention_dim": 32} | blocks | more


_UNETS: dict[str, Row] = {
    "UNet1DModel": ({"extra_in_channels": 64}, {"sample": [2, 2, 256]}),
    "UNet2DModel": (
        {
            "sample_size": 16,
            "block_out_channels": [16, 32],
            "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
            "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "attention_head_dim": 8,
        },
        {"sample": [2, 3, 16, 16]},
    ),
    "UNet2DConditionModel": (_UNET, _CONDITIONED),
    "UNet3DConditionModel": (_unet("DownBlock3D", "UpBlock3D", attention_head_dim=8, norm_num_groups=4), _CLIP),
    "I2VGenXLUNet": (
        _unet("DownBlock3D", "UpBlock3D", num_attention_heads=2, attention_head_dim=8, norm_num_groups=4),
        _CLIP | {"fps": tensor([8]), "image_latents": [1, 4, 4, 16, 16], "image_embeddings": [1, 32]},
    ),
    "UNetMotionModel": (
        _unet(
            "DownBlockMotion",
            "UpBlockMotion",
            num_attention_heads=2,
            norm_num_groups=4,
            motion_num_attention_heads=2,
            motion_max_seq_length=8,
        ),
        _CLIP | {"encoder_hidden_states": [4, 4, 32]},
    ),
    "UNetSpatioTemporalConditionModel": (
        _unet(
            "DownBlockSpatioTemporal",
            "UpBlockSpatioTemporal",
            num_attention_heads=[2, 4],
            addition_time_embed_dim=8,
            projection_class_embeddings_input_dim=24,
            num_frames=4,
        ),
        {"sample": [1, 4, 8, 16, 16], "encoder_hidden_states": [1, 1, 32], "added_time_ids": [1, 3]},
    ),
    "Kandinsky3UNet": (
        {
            "time_embedding_dim": 32,
            "groups": 2,
            "attention_head_dim": 4,
            "block_out_channels": [32, 64],
            "cross_attention_dim": 32,
            "encoder_hid_dim": 32,
        },
        _CONDITIONED | {"encoder_attention_mask": ones(2, 8)},
    ),
    "StableCascadeUNet": (
        {
            "in_channels": 4,
            "out_channels": 4,
            "conditioning_dim": 32,
            "block_out_channels": [32, 32],
            "num_attention_heads": [2, 2],
            "down_num_layers_per_block": [1, 1],
            "up_num_layers_per_block": [1, 1],
            "clip_text_pooled_in_channels": 16,
            "clip_seq": 2,
            "dropout": [0.0, 0.0],
        },
        {"sample": [2, 4, 8, 8], "timestep_ratio": tensor([0.25, 0.5]), "clip_text_pooled": [2, 1, 16]},
    ),
    "UVit2DModel": (
        {
            "hidden_size": 32,
            "cond_embed_dim": 32,
            "micro_cond_encode_dim": 4,
            "micro_cond_embed_dim": 20,
            "encoder_hidden_size": 32,
            "vocab_size": 64,
            "codebook_size": 60,
            "in_channels": 32,
            "block_out_channels": 32,
            "num_res_blocks": 1,
            "downsample": True,
            "upsample": True,
            "block_num_heads": 2,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "sample_size": 8,
        },
        {
            "input_ids": tokens(2, 8, 8, high=60),
            "encoder_hidden_states": [2, 8, 32],
            "pooled_text_emb": [2, 32],
            "micro_conds": ones(2, 5),
        },
    ),
    "ControlNetModel": (
        {name: value for name, value in _UNET.items() if name not in {"sample_size", "up_block_types"}}
        | {"conditioning_embedding_out_channels": [8, 16]},
        _CONDITIONED | {"controlnet_cond": [2, 3, 32, 32]},
    ),
    "SparseControlNetModel": (
        {
            "down_block_types": ["CrossAttnDownBlockMotion", "DownBlockMotion"],
            "block_out_channels": [32, 64],
            "norm_num_groups": 4,
            "layers_per_block": 1,
            "cross_attention_dim": 32,
            "attention_head_dim": 8,
            "conditioning_embedding_out_channels": [8, 16],
            "motion_max_seq_length": 8,
            "motion_num_attention_heads": 2,
        },
        {
            "sample": [1, 4, 4, 16, 16],
            "encoder_hidden_states": [4, 4, 32],
            "controlnet_cond": [1, 4, 4, 16, 16],
            "conditioning_mask": ones(1, 1, 4, 16, 16),
        },
    ),
    "UNetControlNetXSModel": (
        {
            "sample_size": 16,
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
            "block_out_channels": [16, 32],
            "norm_num_groups": 4,
            "cross_attention_dim": 32,
            "num_attention_heads": 2,
            "upcast_attention": False,
            "ctrl_block_out_channels": [4, 8],
            "ctrl_num_attention_heads": 2,
            "ctrl_max_norm_num_groups": 2,
            "ctrl_conditioning_embedding_out_channels": [4, 4],
        },
        _CONDITIONED | {"controlnet_cond": [2, 3, 32, 32]},
    ),
}

_ONE = {**_UNETS, **TRANSFORMERS}
# Several networks that look at a condition each; a condition of every network is of the one network's shape.
_SEVERAL = {
    "MultiControlNetModel": "ControlNetModel",
    "FluxMultiControlNetModel": "FluxControlNetModel",
    "SD3MultiControlNetModel": "SD3ControlNetModel",
    "HunyuanDiT2DMultiControlNetModel": "HunyuanDiT2DControlNetModel",
    "QwenImageMultiControlNetModel": "QwenImageControlNetModel",
}


def _several(one: str) -> Row:
    settings, inputs = _ONE[one]
    condition = inputs["controlnet_cond"]
    per_network = {
        "controlnet_cond": listed(condition, condition),
        "conditioning_scale": value([1.0, 0.5]),
        "return_dict": value(False),  # what they make of dictionaries are lists of their keys
    }
    if one == "FluxControlNetModel":
        per_network["controlnet_mode"] = listed(tensor([0]), tensor([0]))
    count = 1 if one == "QwenImageControlNetModel" else 2  # that one looks at all of the conditions itself
    return {"controlnets": [{"class": one, "config": settings}] * count}, inputs | per_network


_CONTROLNETS = {name: _several(one) for name, one in _SEVERAL.items()}

DIFFUSERS: dict[str, dict[str, Any]] = {
    name: {"config": settings, "inputs": inputs}
    for table in (_AUTOENCODERS, _UNETS, TRANSFORMERS, _CONTROLNETS)
    for name, (settings, inputs) in table.items()
}
