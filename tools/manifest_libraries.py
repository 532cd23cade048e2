"""The manifest's rows of open_clip, segmentation_models_pytorch, litgpt and sentence-transformers.

Their configurations are made small here, so that what differs in sizes only is one program with several models.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from emutpu.conformance.small_configs import FEED_FORWARD, HEAD_DIM, HEADS, VOCABULARY, WIDTH, WINDOW

__all__ = ["Entry", "litgpt", "open_clip", "segmentation_models", "sentence_transformers"]

# Architecture, family, task, options, and (id, kind) of its models.
Entry = tuple[str, str, str, dict[str, Any], list[tuple[str, str]]]


# --------------------------------------------------------------------------------------------------------- litgpt


def litgpt() -> Iterator[Entry]:
    """Litgpt's list of configurations, each with the hub id that it is of."""
    from litgpt.config import configs

    merged: dict[str, tuple[str, str, dict[str, Any], list[tuple[str, str]]]] = {}
    for config in configs:
        small = _small_gpt(config)
        family = str(config["hf_config"]["org"])
        identity = f"{config['hf_config']['org']}/{config['hf_config']['name']}"
        key = json.dumps(small, sort_keys=True)
        merged.setdefault(key, (config["name"], family, small, []))[3].append((identity, "hub"))
    for name, family, small, models in merged.values():
        yield name, family, "causal-lm", {"config": small}, models


def _small_gpt(config: Mapping[str, Any]) -> dict[str, Any]:
    small = {name: copy.deepcopy(value) for name, value in config.items() if name not in {"name", "hf_config"}}
    heads, groups = config.get("n_head", 32), config.get("n_query_groups")
    layers = _layers(small)
    fixed = {
        "n_layer": layers,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "block_size": 64,
        "vocab_size": 500,
        "padding_multiple": 64,
    }
    present = {
        "head_size": HEAD_DIM,
        "intermediate_size": FEED_FORWARD,
        "moe_intermediate_size": WIDTH,
        "padded_vocab_size": VOCABULARY,
        "sliding_window_size": WINDOW,
        "attention_scores_scalar": HEAD_DIM,
        "n_expert": 4,
        "n_expert_per_token": 2,
    }
    small |= fixed | {name: value for name, value in present.items() if small.get(name)}
    if groups is not None:
        small["n_query_groups"] = 1 if groups == 1 else HEADS if groups == heads else HEADS // 2
    for name in ("sliding_window_indices", "rope_indices"):
        if isinstance(small.get(name), list):
            small[name] = small[name][:layers]
    return small


def _layers(config: Mapping[str, Any]) -> int:
    """Two, or as many as it takes for each kind of layer to occur."""
    patterns = [
        config[name] for name in ("sliding_window_indices", "rope_indices") if isinstance(config.get(name), list)
    ]
    places: list[int] = [pattern.index(kind) + 1 for pattern in patterns for kind in set(pattern)]
    return max([2, *places])


# ------------------------------------------------------------------------------------------------------ open_clip

_SIDE = 64
# timm's image towers, by how their names begin, and the smallest of their kind.
_TOWERS = (
    ("vit_base_patch32_siglip", "vit_base_patch32_siglip_256"),
    ("vit_base_mci", "vit_base_mci_224"),
    ("vit_pe_core", "vit_pe_core_tiny_patch16_384"),
    ("vit_relpos", "vit_relpos_small_patch16_224"),
    ("vit_medium_patch16_gap", "vit_medium_patch16_gap_256"),
    ("vit_large_patch14_clip", "vit_base_patch32_clip_224"),
    ("vit_", "vit_base_patch16_siglip_224"),
    ("eva", "eva02_base_patch16_clip_224"),
    ("convnext_", "convnext_atto"),
    ("fastvit_mci0", "fastvit_mci0"),
    ("fastvit_mci1", "fastvit_mci0"),
    ("fastvit_mci2", "fastvit_mci0"),
    ("fastvit_", "fastvit_mci3"),
    ("swin_", "swin_tiny_patch4_window7_224"),
    ("vitamin_", "vitamin_small_224"),
)
_FIXED_SIDE = re.compile(r"^(?:vit|eva02|swin|vitamin)_.*_(\d{3})$")  # transformers of timm take images of one size


def open_clip() -> Iterator[Entry]:
    """The configurations of open_clip, with the hub ids of their published weights. Text towers from the hub have no settings here."""
    import open_clip as library

    published: dict[str, list[tuple[str, str]]] = {}
    for name, tag in library.list_pretrained():
        weights = library.get_pretrained_cfg(name, tag)
        hub = weights.get("hf_hub", "").partition("/")[0] and weights["hf_hub"].rstrip("/")
        identity = ("/".join(hub.split("/")[:2]), "hub") if hub else (f"open_clip:{name}.{tag}", "weights")
        published.setdefault(name, []).append(identity)
    merged: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {}
    for name in library.list_models():
        config = library.get_model_config(name)
        if "hf_model_name" in config["text_cfg"]:
            continue
        small = _small_clip(config)
        models = published.get(name) or [(f"open_clip:{name}", "architecture")]
        merged.setdefault(json.dumps(small, sort_keys=True), (name, small, []))[2].extend(models)
    for name, small, models in merged.values():
        yield name, _clip_family(small), "zero-shot-image-classification", {"config": small}, models


def _clip_family(config: Mapping[str, Any]) -> str:
    if "multimodal_cfg" in config:
        return "coca"
    vision = config["vision_cfg"]
    if "timm_model_name" in vision:
        return str(vision["timm_model_name"]).partition("_")[0]
    return "resnet" if isinstance(vision["layers"], list) else "vit"


def _small_clip(config: Mapping[str, Any]) -> dict[str, Any]:
    small = copy.deepcopy(dict(config)) | {"embed_dim": WIDTH}
    vision, text = small["vision_cfg"], small["text_cfg"]
    if "timm_model_name" in vision:
        tower = next(tower for start, tower in _TOWERS if vision["timm_model_name"].startswith(start))
        fixed = _FIXED_SIDE.match(tower)
        vision |= {"timm_model_name": tower, "image_size": int(fixed[1]) if fixed else _SIDE}
        if vision.get("timm_proj") == "none":  # the tower's own width is the embedding's
            small["embed_dim"] = 768
    elif isinstance(vision["layers"], list):
        vision |= {"width": 16, "head_width": 16, "image_size": _SIDE}
    else:
        patches = vision["image_size"] // vision["patch_size"]
        side = vision["patch_size"] * (3 if patches % 2 else 4)
        vision |= {"width": WIDTH, "head_width": HEAD_DIM, "layers": max(2, vision["layers"] // 6), "image_size": side}
        if vision.get("attentional_pool"):
            vision["attn_pooler_heads"] = HEADS
    for part in (text, small.get("multimodal_cfg", {})):
        part.pop("hf_tokenizer_name", None)
        part.pop("tokenizer_kwargs", None)
        if part:
            part |= {"context_length": 16, "vocab_size": VOCABULARY, "width": WIDTH, "heads": HEADS}
            part["layers"] = max(2, part.get("layers", 12) // 6)
        if "attn_pooler_heads" in part:
            part["attn_pooler_heads"] = HEADS
    return small


# ---------------------------------------------------------------------------------- segmentation_models_pytorch

_DECODERS = (
    "unet",
    "unetplusplus",
    "manet",
    "linknet",
    "fpn",
    "pspnet",
    "pan",
    "deeplabv3",
    "deeplabv3plus",
    "upernet",
    "segformer",
)
# Encoders that every decoder is tried on, one of a kind.
_ENCODERS = ("resnet18", "mobilenet_v2", "efficientnet-b0", "mit_b0", "tu-convnext_atto")
_UNFIT = {
    ("unetplusplus", "mit_b0"),
    ("linknet", "mit_b0"),
    ("pan", "mit_b0"),
    ("deeplabv3", "mit_b0"),
    ("deeplabv3plus", "mit_b0"),
}
_UNFIT |= {
    (decoder, "tu-convnext_atto")
    for decoder in ("unetplusplus", "linknet", "pan", "deeplabv3", "deeplabv3plus", "manet")
}


# Encoders that differ from another one in the width of their blocks only, and those of half a thousand million weights.
_NARROWER = {f"resnext101_32x{width}d": "resnext101_32x8d" for width in (16, 32, 48)}
_LEFT_OUT = frozenset({"timm-efficientnet-l2"})


def segmentation_models() -> Iterator[Entry]:
    """Every decoder on an encoder of each kind, and Unet on every encoder, with the hub ids of the encoders' weights."""
    from segmentation_models_pytorch.encoders import encoders

    merged: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(encoders.keys() - _LEFT_OUT):
        settings = encoders[name].get("pretrained_settings") or {}
        models = [(str(entry["repo_id"]), "hub") for entry in settings.values() if "repo_id" in entry]
        models = models or [(f"segmentation_models_pytorch:{name}", "architecture")]
        merged.setdefault(_NARROWER.get(name, name), []).extend(models)
    for name, models in merged.items():
        yield _segmentation("unet", name, models)
    for decoder, encoder in itertools.product(_DECODERS[1:], _ENCODERS):
        if (decoder, encoder) not in _UNFIT:
            yield _segmentation(
                decoder, encoder, [(f"segmentation_models_pytorch:{decoder}-{encoder}", "architecture")]
            )


def _segmentation(decoder: str, encoder: str, models: list[tuple[str, str]]) -> Entry:
    options = {"config": {"arch": decoder, "encoder_name": encoder}}
    return f"{decoder}-{encoder}", decoder, "semantic-segmentation", options, models


# ------------------------------------------------------------------------------------------ sentence-transformers

_MODES = ("mean", "cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
# Encoders and the pooling that models of them are published with.
_EMBEDDERS = {
    "BertModel": "mean", "MPNetModel": "mean", "RobertaModel": "mean", "XLMRobertaModel": "cls", "DistilBertModel": "mean",
    "AlbertModel": "mean", "CamembertModel": "mean", "ElectraModel": "cls", "DebertaV2Model": "cls", "ModernBertModel": "cls",
    "T5EncoderModel": "mean", "MT5EncoderModel": "mean", "MistralModel": "lasttoken", "Qwen2Model": "lasttoken",
    "Qwen3Model": "lasttoken", "LlamaModel": "lasttoken", "Gemma3TextModel": "mean", "ErnieModel": "cls",
    "FunnelModel": "cls", "ConvBertModel": "mean", "BigBirdModel": "mean", "LongformerModel": "cls", "XLNetModel": "lasttoken",
}  # fmt: skip
_SPARSE = (
    "BertForMaskedLM",
    "DistilBertForMaskedLM",
    "RobertaForMaskedLM",
    "XLMRobertaForMaskedLM",
    "ModernBertForMaskedLM",
)
_LATE = ("BertModel", "ModernBertModel", "XLMRobertaModel", "DistilBertModel")


def _module(kind: str, **settings: Any) -> dict[str, Any]:
    return {"class": kind, "settings": settings}


def sentence_transformers() -> Iterator[Entry]:
    """Bi-encoders with each pooling, sparse encoders, and late interaction: the package records no ids with architectures."""
    normalize = _module("Normalize")

    def pool(mode: str, width: int = WIDTH) -> dict[str, Any]:
        return _module("Pooling", embedding_dimension=width, pooling_mode=mode)

    for encoder, mode in _EMBEDDERS.items():
        yield _sentences(encoder, mode, [pool(mode), normalize])
    for mode in _MODES[1:]:
        yield _sentences("BertModel", mode, [pool(mode), normalize])
    several = _module("Pooling", embedding_dimension=WIDTH, pooling_mode=["cls", "mean", "max"])
    dense = _module("Dense", in_features=WIDTH, out_features=32)
    chains = {
        "several": [several],
        "dense": [pool("mean"), dense, normalize],
        "layernorm": [pool("mean"), _module("LayerNorm", dimension=WIDTH)],
        "cnn": [_module("CNN", in_embedding_dimension=WIDTH, out_channels=16), pool("mean", 48)],
        "lstm": [_module("LSTM", embedding_dimension=WIDTH, hidden_dim=32), pool("max")],
    }
    for name, modules in chains.items():
        yield _sentences("BertModel", name, modules)
    for encoder in _SPARSE:
        for strategy in ("max", "sum"):
            yield _sentences(encoder, f"splade-{strategy}", [_module("SpladePooling", pooling_strategy=strategy)])
    project = _module(
        "Dense", in_features=WIDTH, out_features=32, bias=False, activation_function=None, module_input_name=_EACH
    )
    for encoder in _LATE:
        yield _sentences(encoder, "late", [project, _module("Normalize", module_input_name=_EACH)], _EACH)


_EACH = "token_embeddings"


def _sentences(encoder: str, what: str, modules: list[dict[str, Any]], answer: str = "sentence_embedding") -> Entry:
    name = f"{encoder}-{what}"
    options = {"encoder": encoder, "modules": modules, "answer": answer}
    family = what.partition("-")[0] if what.startswith(("splade", "late")) else "embedding"
    return name, family, "sentence-embedding", options, [(f"sentence-transformers:{name}", "architecture")]
