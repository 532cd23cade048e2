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


FAMILIES = (
    Family("resnet18", _timm("resnet18"), smoke=True),
    Family("bert", _transformers("BertForSequenceClassification", "BertConfig", _classified, **_ENCODER), smoke=True),
)
CASES = {family.name: family for family in FAMILIES}
