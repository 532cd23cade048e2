"""Small, seeded, offline models of real families, with made-up inputs; nothing here knows of the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

__all__ = ["CASES", "Case", "Family", "float_results"]

VOCABULARY = 128
Outputs = Any


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model on the CPU, its keyword inputs, and the loss of what it returns."""

    model: nn.Module
    inputs: dict[str, Tensor]
    loss: Callable[[Outputs], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """A named builder; ``smoke`` families run with every change, the others at night."""

    name: str
    build: Callable[[], Case]
    smoke: bool = False


def float_results(outputs: Outputs) -> list[Tensor]:
    """The floating-point tensors of a model's result that take part in its loss or are its answer."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, Mapping) and isinstance(outputs.get("logits"), Tensor):
        return [outputs["logits"]]
    return [
        leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()
    ]


def _own_loss(outputs: Outputs) -> Tensor:
    """The loss that a transformers model computes from its labels."""
    loss: Tensor = outputs.loss
    return loss


def _mean_square(outputs: Outputs) -> Tensor:
    """For models without a loss of their own."""
    return torch.stack([result.square().mean() for result in float_results(outputs)]).sum()


def _tokens(batch: int, length: int, *, seed: int = 1) -> Tensor:
    """Token ids i64[batch, length] without the special ones (0-3)."""
    return torch.randint(4, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def _images(batch: int, size: int, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(2))


# ------------------------------------------------------------------------------------------------------- timm


def _timm(name: str, *, size: int = 32, batch: int = 4, **options: Any) -> Callable[[], Case]:
    def build() -> Case:
        import timm

        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False, num_classes=10, **options).train()
        labels = torch.arange(batch) % 10
        return Case(
            model, {"x": _images(batch, size)}, lambda logits: F.cross_entropy(logits, labels.to(logits.device))
        )

    return build


# ----------------------------------------------------------------------------------------------- transformers


def _transformers(
    model: str,
    config: str,
    inputs: Callable[[], dict[str, Tensor]],
    loss: Callable[[Outputs], Tensor] = _own_loss,
    **sizes: Any,
) -> Callable[[], Case]:
    def build() -> Case:
        import transformers

        torch.manual_seed(0)
        built = getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()
        return Case(built, inputs(), loss)

    return build


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    **_NO_DROPOUT,
}


def _classified() -> dict[str, Tensor]:
    """Two padded sentences and their classes."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 8:] = 0
    ids = torch.where(mask.bool(), _tokens(2, 12), torch.ones((), dtype=torch.long))
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1])}


_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXTRAL = _DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "state_size": 8,
    "conv_kernel": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_VIT = {
    "image_size": 32,
    "patch_size": 8,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    **_NO_DROPOUT,
}
_CLIP = {
    "text_config": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 16,
        "eos_token_id": 2,
    },
    "vision_config": {
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    },
    "projection_dim": 16,
}
_WHISPER = {
    "vocab_size": VOCABULARY,
    "num_mel_bins": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_source_positions": 24,
    "max_target_positions": 32,
    "decoder_start_token_id": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dropout": 0.0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
SPECTROGRAM = (2, 16, 48)


def _next_tokens() -> dict[str, Tensor]:
    """Two sentences, left-padded as for generation, each token the label of the one before."""
    ids = _tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def _unpadded_tokens() -> dict[str, Tensor]:
    ids = _tokens(2, 12)
    return {"input_ids": ids, "labels": ids}


def _translated() -> dict[str, Tensor]:
    inputs = _classified()
    return inputs | {"labels": _tokens(2, 7, seed=3)}


def _labelled_images() -> dict[str, Tensor]:
    return {"pixel_values": _images(2, 32), "labels": torch.tensor([0, 1])}


def _captioned() -> dict[str, Tensor]:
    ids = _tokens(2, 8)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": _images(2, 32)}


def _spoken() -> dict[str, Tensor]:
    sound = torch.randn(*SPECTROGRAM, generator=torch.Generator().manual_seed(4))
    return {"input_features": sound, "labels": _tokens(2, 7)}


def _contrastive(outputs: Outputs) -> Tensor:
    """CLIP's loss, from the similarities of texts and images."""
    target = torch.arange(2, device=outputs.logits_per_text.device)
    return F.cross_entropy(outputs.logits_per_text, target) + F.cross_entropy(outputs.logits_per_image, target)


# ------------------------------------------------------------------------------------------------ plain torch


class LstmLanguageModel(nn.Module):
    """Embedding, two LSTM layers, logits: ids i64[n, t] -> f32[n, t, vocabulary]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))
        logits: Tensor = self.head(states)
        return logits


def _lstm() -> Case:
    torch.manual_seed(0)
    ids = _tokens(3, 10)
    return Case(
        LstmLanguageModel(),
        {"ids": ids},
        lambda logits: F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten().to(logits.device)),
    )


# -------------------------------------------------------------------------------------------------- diffusers


def _unet() -> Case:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    model = UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=8,
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    text = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(5))
    inputs = {"sample": _images(2, 8, 4), "timestep": torch.tensor([3, 700]), "encoder_hidden_states": text}
    return Case(model.train(), inputs, _mean_square)


def _dit() -> Case:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
        norm_num_groups=8,
    )
    # In training the class is dropped at random, and CPU and device draw different numbers.
    inputs = {
        "hidden_states": _images(2, 8, 4),
        "timestep": torch.tensor([3, 700]),
        "class_labels": torch.tensor([1, 2]),
    }
    return Case(model.eval(), inputs, _mean_square)


FAMILIES = (
    Family("resnet18", _timm("resnet18"), smoke=True),
    Family("resnet50", _timm("resnet50", layers=(1, 1, 1, 1))),
    Family("convnext", _timm("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64))),
    Family("vit-timm", _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=48, num_heads=4)),
    Family(
        "swin",
        _timm(
            "swin_tiny_patch4_window7_224",
            img_size=32,
            window_size=4,
            embed_dim=16,
            depths=(2, 2),
            num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
    ),
    Family("efficientnet", _timm("test_efficientnet", drop_path_rate=0.0)),
    Family("bert", _transformers("BertForSequenceClassification", "BertConfig", _classified, **_ENCODER), smoke=True),
    Family("roberta", _transformers("RobertaForSequenceClassification", "RobertaConfig", _classified, **_ENCODER)),
    Family("gpt2", _transformers("GPT2LMHeadModel", "GPT2Config", _next_tokens, **_GPT2)),
    Family("llama", _transformers("LlamaForCausalLM", "LlamaConfig", _next_tokens, **_DECODER), smoke=True),
    Family("qwen3", _transformers("Qwen3ForCausalLM", "Qwen3Config", _next_tokens, head_dim=8, **_DECODER)),
    Family("gemma", _transformers("GemmaForCausalLM", "GemmaConfig", _next_tokens, head_dim=8, **_DECODER)),
    Family("mixtral", _transformers("MixtralForCausalLM", "MixtralConfig", _next_tokens, **_MIXTRAL)),
    Family("t5", _transformers("T5ForConditionalGeneration", "T5Config", _translated, **_T5), smoke=True),
    Family("vit", _transformers("ViTForImageClassification", "ViTConfig", _labelled_images, **_VIT), smoke=True),
    Family("clip", _transformers("CLIPModel", "CLIPConfig", _captioned, _contrastive, **_CLIP)),
    Family("whisper", _transformers("WhisperForConditionalGeneration", "WhisperConfig", _spoken, **_WHISPER)),
    Family("mamba", _transformers("MambaForCausalLM", "MambaConfig", _unpadded_tokens, **_MAMBA)),
    Family("lstm", _lstm, smoke=True),
    Family("unet", _unet),
    Family("dit", _dit),
)
CASES = {family.name: family for family in FAMILIES}
