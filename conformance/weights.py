"""Weights that let a fault show: every matrix wide enough that logits differ, no branch of a network switched off.

Freshly initialised models hide faults. Their logits are nearly uniform, layer scales of 1e-5 and zero-initialised gates
switch whole branches off, and a normalisation's weights are all one. With weights drawn as here, the relative error of the
logits showed 87 of 87 injected faults; perplexity with default weights showed none of them.
"""

from __future__ import annotations

import math
import types
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

__all__ = ["Undrawn", "draw", "fill", "without_dropout"]

_SPREAD = 0.1  # of weights that are all one, relative
_OFFSET = 0.2  # of what is all zero: biases, offsets of normalisation weights
_FILLED = 0.02  # not zero: some libraries divide by norms while they build
_SCALE = 0.5  # what a small constant (a layer scale) becomes


_DRAWING = frozenset(
    (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, Tensor.erfinv_)
)
_LARGE = 1 << 16  # elements
_TOUCHING = frozenset((Tensor.mul_, Tensor.add_, Tensor.clamp_, Tensor.sub_, Tensor.div_))


class Undrawn(TorchFunctionMode):
    """While a model is built, its matrices are filled instead of drawn: ``draw`` replaces them anyway.

    The libraries' own initialisation took half of the time of building a model. Unless they are ``filled`` nothing is
    written to the large ones at all, so that a matrix of which little will stay takes no memory: ``fill`` has to follow.
    """

    def __init__(self, *, filled: bool = True) -> None:
        super().__init__()
        self._filled = filled

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DRAWING or (func in _TOUCHING and not self._filled and isinstance(args[0], nn.Parameter)):
            tensor = args[0] if args else (kwargs or {})["tensor"]
            if not self._filled and tensor.numel() >= _LARGE:
                return tensor  # also what ``parameter.data`` is
            if isinstance(tensor, nn.Parameter) and tensor.dim() > 1:
                with torch.no_grad():
                    return tensor.fill_(_FILLED)
        if func is Tensor.any and not self._filled and args[0].numel() >= _LARGE:
            return torch.tensor(False)  # trunc_normal_ draws until nothing is too large, and here nothing is drawn
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Give every matrix of ``model`` the one value that it has when ``Undrawn`` fills it, in place."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            parameter.fill_(_FILLED)


@torch.no_grad()
def draw(model: nn.Module, gain: float, seed: int) -> None:
    """Replace the weights of ``model`` in place. The values depend on ``seed`` and each parameter's name and shape alone.

    Matrices, kernels and tables are normal with standard deviation ``gain`` over the root of the fan-in. Constant vectors
    keep their size and lose their constancy; vectors with a shape of their own (decay rates, slopes) and scalars stay, but for the
    weights of batch normalisations, which some libraries draw around zero: they would hardly let a signal pass.
    Tables that are buffers and all zero, as codebooks are before training, are drawn too: the nearest of equal codes is
    always the first, and nothing before the choice matters.
    """
    scales = {id(module.weight) for module in model.modules() if isinstance(module, _BatchNorm)}
    for name, tensor, fan_in in _parameters(model):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(noise * (gain / math.sqrt(fan_in)))
        elif tensor.dim() == 1:
            tensor.copy_(_vector(torch.ones_like(tensor) if id(tensor) in scales and tensor.std() else tensor, noise))
    for name, buffer in model.named_buffers():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * _SPREAD)
        elif name.endswith("running_var"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + _SCALE)
        elif buffer.dim() > 1 and buffer.is_floating_point() and not buffer.any():
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * (gain / math.sqrt(buffer.shape[-1])))


def _parameters(model: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Every floating-point parameter once, with its fan-in."""
    convolutions = {id(m.weight): m for m in model.modules() if isinstance(m, _ConvNd)}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        if id(parameter) in convolutions:
            kernel = math.prod(parameter.shape[2:])
            yield (
                name,
                parameter,
                kernel * convolutions[id(parameter)].in_channels // convolutions[id(parameter)].groups,
            )
        elif parameter.dim() > 1 and parameter.shape[0] == 1:
            yield name, parameter, 4  # a token or a table of positions, added to what has a size of one
        else:
            yield name, parameter, parameter.shape[-1] if parameter.dim() else 1


def _vector(values: Tensor, noise: Tensor) -> Tensor:
    constant = float(values[0])
    if not bool((values == constant).all()):
        return values
    if constant == 0:
        return noise * _OFFSET
    size = constant if abs(constant) >= _SCALE else math.copysign(_SCALE, constant)
    return size * (1 + noise * _SPREAD)


# How the types of modules end that draw what they choose in training, and choose the best otherwise.
_CHOOSING = ("GumbelVectorQuantizer", "GroupViTAssignAttention", "PhimoeTopKRouter", "SwitchTransformersTop1Router")


def _stays(module: nn.Module, mode: bool = True) -> nn.Module:  # as nn.Module.train is called
    return module


def without_dropout(model: nn.Module) -> None:
    """Switch every kind of dropout off, in place, and leave in evaluation mode for good what draws its choice: the device's
    random numbers are not the CPU's.
    """
    module: Any
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and _DROP in name:
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd) or type(module).__name__ == "StochasticDepth":
            module.p = 0.0
        if isinstance(module, nn.RNNBase):
            module.dropout = 0.0
        if type(module).__name__.endswith(_CHOOSING):
            module.eval().train = types.MethodType(_stays, module)


_DROP = "drop"
