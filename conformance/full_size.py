"""The memory that a program takes at full size: the library's own configuration, forward at batch 1, in a dry run.

Nothing is computed and no weight is made: a worker with the dry client launches every op of the whole depth, and the model
of the chip's memory says what was alive at most. Models whose weights are published in half precision are taken in
bfloat16, the others in float32. Where the forward cannot run without values the weights alone are counted, with the reason.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from emutpu.conformance import inputs
from emutpu.conformance.building import NoRecipe
from emutpu.conformance.estimates import MODE
from emutpu.conformance.manifest import Program
from emutpu.conformance.torchvision_schemas import declare

__all__ = ["Estimate", "answer", "estimate"]

DEVICE = "tpu"
_LIGHT = {"torchvision"}  # no model is too large to be made with its weights
_PUBLISHED = {"transformers": torch.bfloat16, "diffusers": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """``parameters`` and the bytes that the chip must hold at least. ``forward`` is False where only the weights are counted,
    and ``note`` then says why; ``seconds`` is how long it took.
    """

    program: str
    parameters: int
    weight_bytes: int
    bytes: int
    dtype: str
    forward: bool
    note: str | None
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Whole:
    """A model on the meta device, and how to make its inputs on the CPU; raises where there is no recipe."""

    model: nn.Module
    inputs: Callable[[], Mapping[str, Any]]


def estimate(program: Program, peak: Callable[[], int]) -> Estimate:
    """Of one program. ``peak`` gives the most bytes that were alive since it was called last.

    Raises NoRecipe for what has no full size here, and what a library raises where its model cannot be made.
    """
    started = time.perf_counter()
    declare()
    builder = _BUILDERS.get(program.builder)
    if builder is None:
        raise NoRecipe(f"no full size is known of programs of {program.builder}")
    dtype = _PUBLISHED.get(program.builder, torch.float32)
    try:
        with torch.device("meta"):
            whole = builder(program)
    except RuntimeError:
        if program.builder not in _LIGHT:
            raise
        whole = builder(program)  # it reads values while it is made
    model = whole.model.to(dtype).eval()
    _tie(model)
    sizes = [parameter.numel() for parameter in model.parameters()]
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    note = None
    peak()
    try:
        largest = _forward(model, whole.inputs(), dtype, peak)
    except Exception as error:  # noqa: BLE001  # kept: the weights alone are a lower bound
        largest, note = weights, f"weights alone: {type(error).__name__}: {error}".partition("\n")[0][:200]
    took = time.perf_counter() - started
    name = str(dtype).removeprefix("torch.")
    return Estimate(program.name, sum(sizes), weights, max(largest, weights), name, note is None, note, took)


def _forward(model: nn.Module, given: Mapping[str, Any], dtype: torch.dtype, peak: Callable[[], int]) -> int:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        cut = leaf[:1] if leaf.dim() and leaf.shape[0] == inputs.BATCH else leaf
        return (cut.to(dtype) if cut.is_floating_point() else cut).to(DEVICE)

    placed = model.to_empty(device=DEVICE)
    _tie(placed)
    with torch.no_grad():
        outputs = placed(**tree_map(one, dict(given)))
    found = peak()
    del outputs
    return found


def _tie(model: nn.Module) -> None:
    """A module without values has lost that two of its layers share their weights."""
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()


def answer(program: Program, peak: Callable[[], int]) -> dict[str, Any]:
    """What a worker answers: the outcome, and the estimate."""
    told: dict[str, Any] = {"program": program.name, "mode": MODE, "error": None, "estimate": None}
    try:
        found = estimate(program, peak)
    except NoRecipe as error:
        return told | {"outcome": "not run", "error": str(error)}
    except Exception as error:  # noqa: BLE001  # a library that cannot make its own default model
        return told | {"outcome": "corpus bug", "error": f"{type(error).__name__}: {error}"[:300]}
    return told | {"outcome": "pass", "estimate": dataclasses.asdict(found)}


# -------------------------------------------------------------------------------------------------- full sizes


def _transformers(program: Program) -> _Whole:
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, program.architecture)
    config_class = model_class.config_class or transformers.CONFIG_MAPPING[program.options["model_type"]]
    model = model_class(config_class())

    def made() -> Mapping[str, Any]:
        try:
            return inputs.for_signature(model, program.seed)
        except inputs.UnknownArgument as error:
            raise NoRecipe(str(error)) from error

    return _Whole(model, made)


def _timm(program: Program) -> _Whole:
    import timm

    model: Any = timm.create_model(program.architecture, pretrained=False)
    channels, height, width = timm.get_pretrained_cfg(program.architecture).input_size
    return _Whole(model, lambda: {"x": torch.zeros(1, channels, height, width)})


def _torchvision(program: Program) -> _Whole:
    from torchvision import models

    backbone = {"weights_backbone": None} if program.task == "semantic-segmentation" else {}
    model = models.get_model(program.architecture, weights=None, **backbone)

    def made() -> Mapping[str, Any]:
        if program.inputs != "image":
            raise NoRecipe(f"no recipe for inputs of the kind {program.inputs!r}")
        return {"x": torch.zeros(1, 3, 224, 224)}

    return _Whole(model, made)


def _diffusers(program: Program) -> _Whole:
    import diffusers

    def made() -> Mapping[str, Any]:
        raise NoRecipe("inputs of the default configuration of a diffusers class are not known")

    return _Whole(getattr(diffusers, program.architecture)(), made)


_BUILDERS: Mapping[str, Callable[[Program], _Whole]] = {
    "transformers": _transformers,
    "timm": _timm,
    "torchvision": _torchvision,
    "diffusers": _diffusers,
}
