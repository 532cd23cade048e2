"""Small models of the libraries that are built from settings in the manifest: open_clip, segmentation_models, litgpt,
sentence-transformers. What is small was decided when the manifest was written (``tools/manifest_libraries.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from emutpu.conformance import inputs, narrowing
from emutpu.conformance.manifest import Program

__all__ = ["litgpt", "open_clip", "segmentation_models", "sentence_transformers"]

Parts = tuple[nn.Module, dict[str, Any]]
_FIRST_TOKEN = 5


def _tokens(program: Program, high: int, length: int = inputs.LENGTH) -> Tensor:
    generator = torch.Generator().manual_seed(program.seed)
    return torch.randint(_FIRST_TOKEN, high, (inputs.BATCH, length), generator=generator)


def litgpt(program: Program) -> Parts:
    """Litgpt's GPT of a small configuration, and ids."""
    from litgpt import GPT, Config

    config = Config(**program.options["config"])
    return GPT(config), {"idx": _tokens(program, config.vocab_size)}


def open_clip(program: Program) -> Parts:
    """An image tower and a text tower of open_clip, and what they compare. CoCa's text decoder is part of it."""
    from open_clip.coca_model import CoCa
    from open_clip.model import CLIP, CustomTextCLIP

    settings: dict[str, Any] = dict(program.options["config"])
    kind: Any = CustomTextCLIP if settings.pop("custom_text", False) else CLIP
    kind = CoCa if "multimodal_cfg" in settings else kind
    vision, text = settings["vision_cfg"], settings["text_cfg"]
    side = vision["image_size"]
    arguments = {
        "image": inputs.image(3, side, program.seed),
        "text": _tokens(program, text["vocab_size"], text["context_length"]),
    }
    model = kind(**settings)
    narrowing.shorten(model.visual)  # towers of timm come as they are
    return model, arguments


def segmentation_models(program: Program) -> Parts:
    """A decoder of segmentation_models_pytorch on one of its encoders."""
    import segmentation_models_pytorch

    model: Any = segmentation_models_pytorch.create_model(encoder_weights=None, classes=3, **program.options["config"])
    narrowing.shrink(model, program.shrink, model.encoder, program.options.get("divide"))
    return model, {"x": inputs.image(3, program.options.get("side", inputs.SIDE), program.seed)}


class _Encoder(nn.Module):
    """A transformers model as sentence-transformers has it at the head of its modules, without a tokenizer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        """Adds an embedding, or logits over the vocabulary, for each token."""
        answer = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {**features, "token_embeddings": answer[0]}


class _Pipeline(nn.Module):
    """The modules of a SentenceTransformer in their order; the answer is the embedding that they end with."""

    def __init__(self, modules: list[nn.Module], answer: str) -> None:
        super().__init__()
        self.modules_in_order = nn.ModuleList(modules)
        self.answer = answer

    def forward(self, input_ids: Tensor, attention_mask: Tensor, sentence_lengths: Tensor) -> Tensor:
        """f32[batch, features]; of late interaction f32[batch, tokens, features]."""
        features = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "sentence_lengths": sentence_lengths,
        }
        for module in self.modules_in_order:
            features = module(features)
        return features[self.answer]


def sentence_transformers(program: Program) -> Parts:
    """An encoder, and sentence-transformers' pooling, projecting and normalising modules after it. One text is shorter."""
    import transformers
    from sentence_transformers.base import modules as base
    from sentence_transformers.sentence_transformer import modules as dense
    from sentence_transformers.sparse_encoder import modules as sparse

    from emutpu.conformance.shrink import shrunk

    places = (base, dense, sparse)
    encoder = getattr(transformers, program.options["encoder"])
    small = shrunk(encoder.config_class())
    entries: list[Mapping[str, Any]] = program.options["modules"]
    parts: list[nn.Module] = [_Encoder(encoder(small))]
    for entry in entries:
        place = next(place for place in places if hasattr(place, entry["class"]))
        parts.append(getattr(place, entry["class"])(**entry["settings"]))
    mask = torch.ones(inputs.BATCH, inputs.LENGTH, dtype=torch.long)
    mask[1, -inputs.LENGTH // 4 :] = 0
    arguments = {
        "input_ids": _tokens(program, small.vocab_size // 2),
        "attention_mask": mask,
        "sentence_lengths": mask.sum(1),
    }
    return _Pipeline(parts, program.options["answer"]), arguments
