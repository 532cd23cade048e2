"""Image networks made small after they are built: fewer of the modules that repeat, and fewer channels.

Every number of channels that is a multiple of a power of two is divided by it, wherever it occurs, so that what fits
together still does; sums fit as well, since all terms are divided. Heads, kernels, strides and windows stay, groups stay
several. What a network computes from its settings and keeps to itself (sizes of a split, of a head) is found by its name.
Values are of no account: ``weights.draw`` comes after it. What cannot be narrowed so is a row of the manifest with the
shrinking ``short`` (``tools/image_shrinking.py`` says why): only the depth of it becomes small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from emutpu.conformance import weights

__all__ = ["KINDS", "factor", "narrow", "shorten", "shrink"]

NARROW, SHORT = "narrow", "short"
KINDS = frozenset((NARROW, SHORT))


def shrink(model: nn.Module, kind: str, repeating: nn.Module | None = None, by: int | None = None) -> None:
    """In place: ``short`` takes repeated modules away, ``narrow`` divides the channels too; any other kind changes nothing.

    ``repeating`` is the part of the model whose depth may change, all of it where it is None. Channels are divided ``by``
    what the model allows, unless it is told.
    """
    if kind not in KINDS:
        return
    shorten(model if repeating is None else repeating)
    if kind == NARROW:
        narrow(model, by)
    weights.fill(model)


# ------------------------------------------------------------------------------------------------------ depth

_LONGEST_PERIOD = 4
_CHANCE = re.compile(r"\b(p|prob|drop_prob|drop_path)=[\d.e-]+")
_PLACES = ("drop", "idx", "index", "rate", "layer_id", "depth", "keep", "name", "prob")
# Their forward counts on the length of their lists, or joins what all entries give.
_COUNTED = frozenset(
    (
        "HighResolutionNet", "HighResolutionNetFeatures", "HighPerfGpuBlock", "SequentialAppendList", "CascadedGroupAttention",
        "Twins", "CoaT", "SplitTransposeBlock", "Bottle2neck", "DlaBottle2neck",
    )
)  # fmt: skip
_HALVING = frozenset(("FeatureBlock",))  # the image is halved as often as it has parts
_CHAINS = frozenset(("RegStage",))  # no list, but go through their children in order
_DENSE = frozenset(("_DenseBlock", "DenseBlock"))


def shorten(model: nn.Module) -> None:
    """Of modules that repeat in a list keep two, in place: one where the module before them is of the same class."""
    counted = {
        id(part)
        for module in model.modules()
        if type(module).__name__ in _COUNTED | _HALVING
        for part in _lists_of(module)
    }
    for module in list(model.modules()):
        if type(module).__name__ in _DENSE:
            _shorten_dense(module)
        elif id(module) not in counted and _is_chain(module):
            children = list(module.children())
            kept = list(_kept([_signature(child) for child in children], [type(child) for child in children]))
            if len(kept) < len(children):
                _keep(module, kept)
                _renumber(model, module, kept)


def _renumber(model: nn.Module, shortened: nn.Module, kept: list[int]) -> None:
    """An encoder names the modules whose answers it gives by their places: the last of a run stands for it."""
    for owner in model.modules():
        places = getattr(owner, "_out_indexes", None)
        if places is not None and any(child is shortened for child in owner.children()):
            moved: Any = [max(n for n, index in enumerate(kept) if index <= place) for place in places]
            owner._out_indexes = moved


def _lists_of(module: nn.Module) -> Iterator[nn.Module]:
    whole = type(module).__name__ in _HALVING
    for part in module.modules():
        if isinstance(part, nn.ModuleList) or (isinstance(part, nn.Sequential) and (whole or part is module)):
            yield part


def _is_chain(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList)) or type(module).__name__ in _CHAINS


def _shorten_dense(block: nn.Module) -> None:
    """Two layers: the second gives the channels of those that went as well, so that what follows stays."""
    layers: list[Any] = list(block.children())
    for name in list(block._modules)[2:]:
        del block._modules[name]
    if len(layers) > 2:
        old = layers[1].conv2
        outs = old.out_channels * (len(layers) - 1)
        layers[1].conv2 = nn.Conv2d(old.in_channels, outs, old.kernel_size, old.stride, old.padding, bias=False)


def _keep(module: nn.Module, kept: list[int]) -> None:
    entries = list(module._modules.items())
    module._modules.clear()
    renumbered = isinstance(module, nn.ModuleList)
    for place, index in enumerate(kept):
        name, child = entries[index]
        module._modules[str(place) if renumbered else name] = child


def _kept(signatures: list[Any], kinds: list[type]) -> Iterator[int]:
    start = 0
    while start < len(signatures):
        period, end = _repeats(signatures, start)
        follows = start > 0 and kinds[start - 1] is kinds[start]
        stay = period if period > 1 or follows else min(2, end - start)
        yield from range(start, start + stay)
        start = end


def _repeats(signatures: list[Any], start: int) -> tuple[int, int]:
    """The shortest period that repeats from ``start`` on, and where its repetitions end."""
    for period in range(1, _LONGEST_PERIOD + 1):
        end = start + period
        while signatures[end : end + period] == signatures[start : start + period]:
            end += period
        if end > start + period:
            return period, end
    return 1, start + 1


def _signature(module: nn.Module) -> Any:
    plain = tuple(
        (name, key, value)
        for name, part in module.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, (bool, int, str, tuple)) and not any(word in key for word in _PLACES)
    )
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return _CHANCE.sub("", repr(module)), shapes, plain


# ------------------------------------------------------------------------------------------------------ width

_NARROWEST, _LARGEST_FACTOR = 12, 16
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm)
_ATTRIBUTES = re.compile(
    r"(^|_)(dims?|chs|channels|features|width|planes|hidden|inner|d|c|shape|indices|indexes|splits?)(_|$)|^(c|channel|d)\d*$"
)
_HEADS = re.compile(
    r"^(head_dim|key_dim|val_dim|value_dim|head_size|dim_head|dim_per_head|key_dims|attn_dim|d_head|inc|num_1x1_c|state_dim|pdim|dim_conv3|dim_untouched|o_proj_inpdim|dh|dim(_head|_out)?_(qk?|v))$"
)
# What has a width that is no number of channels: of tokens, of heads, of coordinates.
_TOKENS = re.compile(r"ba\.conv_[pq]$|linear_tokens|mlp_tokens|meta_mlp|cpb_mlp|rel_pos|attn\.proj_[lw]$")
_HEAD_NORMS = re.compile(r"(^|\.)[qk]_norm$")
_HEAD_POSITIONS = re.compile(r"(^|\.)self_attn\.pos_emb(ed\.(height|width)_rel)?$")
_BY_HEAD = re.compile(
    r"bias_table|attention_bias|relative_position|temperature|logit_scale|gating|^pos_emb$|(height|width)_rel$"
)


def _widths(model: nn.Module) -> set[int]:
    found: set[int] = set()
    for name, module in model.named_modules():
        if _TOKENS.search(name):
            continue
        if isinstance(module, _ConvNd):
            found |= {module.in_channels, module.out_channels}
        elif isinstance(module, nn.Linear):
            found |= {module.in_features, module.out_features}
        elif isinstance(module, nn.MultiheadAttention):
            found |= {module.embed_dim, 3 * module.embed_dim}
        elif isinstance(module, _NORMS):
            found.add(_features(module))
    return found


def _features(module: nn.Module) -> int:
    if isinstance(module, nn.LayerNorm):
        return module.normalized_shape[-1]
    features: Any = module.num_channels if isinstance(module, nn.GroupNorm) else module.num_features
    return int(features)


_PROJECTIONS = re.compile(r"token_projection$")  # of an encoding whose size is no number of channels
# Splits into parts that a larger factor would not divide.
_LARGEST = {"MetaNeXt": 2, "ShuffleNetV2": 2, "PSPNet": 1}


def _heads(model: nn.Module) -> Iterator[tuple[int, int]]:
    """Widths that are heads times the width of a head, and how many heads there are."""
    for module in model.modules():
        count = getattr(module, "num_heads", None)
        if not isinstance(count, int) or count < 2:
            continue
        for child in module.children():
            width = child.in_features if isinstance(child, nn.Linear) else getattr(child, "in_channels", None)
            if isinstance(width, int) and width % count == 0 and width > count:
                yield width, count


def factor(model: nn.Module) -> int:
    """The power of two that channels are divided by: the narrowest convolution that mixes channels keeps 12 or more."""
    mixing = sorted(
        m.out_channels if isinstance(m, _ConvNd) else m.out_features
        for name, m in model.named_modules()
        if not _TOKENS.search(name)
        and ((isinstance(m, _ConvNd) and m.groups < m.in_channels) or isinstance(m, nn.Linear))
    )
    mixing = [width for width in mixing if width >= _NARROWEST]
    usual, least = (mixing[len(mixing) // 4], mixing[0]) if mixing else (0, 0)
    found = 1
    largest = min(
        _LARGEST.get(kind.__name__, _LARGEST_FACTOR) for module in model.modules() for kind in type(module).__mro__
    )
    heads = list(_heads(model))
    while (
        found < largest
        and all(width % (2 * found * count) == 0 for width, count in heads)
        and usual // (2 * found) >= 16
        and least // (2 * found) >= 4
    ):
        found *= 2
    return found


@torch.no_grad()
def narrow(model: nn.Module, by: int | None = None) -> int:
    """Divide every number of channels that is a multiple of the factor by it, in place. Gives the factor."""
    by = factor(model) if by is None else by
    if by == 1:
        return by
    widths = {width for width in _widths(model) if width % by == 0 and width >= _NARROWEST}
    sums = {size: parts for size, parts in _sums(model) if size not in widths}
    done: dict[int, nn.Parameter] = {}
    first = next(m for m in model.modules() if isinstance(m, (_ConvNd, nn.Linear)))

    def narrowed(size: int) -> int:
        if size in sums:
            return sum(part // by if part in widths else part for part in sums[size])
        return size // by if size in widths else size

    def divided(size: int) -> int:
        return size // by if size % by == 0 else size

    for path, module in model.named_modules():
        if not _TOKENS.search(path):
            small = divided if _HEAD_NORMS.search(path) else narrowed
            outer = module is first or _PROJECTIONS.search(path) is not None
            _parameters(module, small, outer, done)
            _positions(module, path, divided)
            _attributes(module, small, by, outer)
    return by


def _sums(model: nn.Module) -> Iterator[tuple[int, tuple[int, ...]]]:
    """What a layer gives to be split into parts, and these: channels, and numbers that are none."""
    for module in model.modules():
        parts = getattr(module, "input_split", None)
        if parts is not None:
            yield sum(parts), tuple(parts)


def _parameters(module: nn.Module, small: Callable[[int], int], outer: bool, done: dict[int, nn.Parameter]) -> None:
    """Its own parameters, those that it shares with another module once, and vectors that are beside them."""
    shapes = _shapes(module, small, outer)
    for name, parameter in list(module._parameters.items()):
        if parameter is None or _BY_HEAD.search(name):
            continue
        if id(parameter) not in done:
            done[id(parameter)] = _cut(parameter, shapes.get(name) or _resized(module, parameter, small))
        module._parameters[name] = done[id(parameter)]
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.dim() == 1 and buffer.is_floating_point():
            module._buffers[name] = buffer[: small(len(buffer))].clone()


def _positions(module: nn.Module, path: str, divided: Callable[[int], int]) -> None:
    """Relative positions, whose last dimension is as wide as a head."""
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and _HEAD_POSITIONS.search(f"{path}.{name}"):
            module._parameters[name] = _cut(parameter, (*parameter.shape[:-1], divided(parameter.shape[-1])))


def _resized(module: nn.Module, parameter: nn.Parameter, small: Callable[[int], int]) -> tuple[int, ...]:
    shape = tuple(parameter.shape)
    if len(shape) < 2 or isinstance(module, (nn.Linear, nn.MultiheadAttention)) or math.prod(shape) == max(shape):
        return tuple(map(small, shape))
    if len(shape) == 4 and shape[0] == 1:
        return (1, small(shape[1]), *shape[2:]) if small(shape[1]) != shape[1] else (*shape[:3], small(shape[3]))
    return (*shape[:-1], small(shape[-1]))


def _cut(parameter: nn.Parameter, shape: tuple[int, ...]) -> nn.Parameter:
    kept = parameter[tuple(slice(0, size) for size in shape)].clone()
    return nn.Parameter(kept, requires_grad=parameter.requires_grad)


def _shapes(module: nn.Module, small: Callable[[int], int], first: bool) -> dict[str, tuple[int, ...]]:
    if first and isinstance(module, nn.Linear):
        return {"weight": (small(module.out_features), module.in_features)}
    if not isinstance(module, _ConvNd):
        return {}
    ins, outs = module.in_channels if first else small(module.in_channels), small(module.out_channels)
    groups = module.groups
    if groups == module.in_channels:
        groups = ins
    else:
        groups = math.gcd(groups, ins, outs)
        if groups == ins:  # several channels of a group stay several, where the groups can stay so too
            groups = next((groups // divisor for divisor in range(2, groups) if groups % divisor == 0), groups)
    module.groups = groups
    kernel = tuple(module.kernel_size)
    pair = (ins, outs // groups) if isinstance(module, _ConvTransposeNd) else (outs, ins // groups)
    return {"weight": (*pair, *kernel)}


def _attributes(module: nn.Module, small: Callable[[int], int], by: int, first: bool) -> None:
    """What the module keeps of its own widths. The width of what comes into the ``first`` stays."""
    if isinstance(module, nn.GroupNorm):
        channels = small(module.num_channels)
        groups = math.gcd(module.num_groups, channels)
        module.num_groups = groups if groups == 1 or channels // groups > 1 else groups // 2
    kept = ("_", "bias_", "in_channels", "in_features") if first else ("_", "bias_")
    for name, value in list(vars(module).items()):
        if not name.startswith(kept):
            setattr(module, name, _attribute(name, value, small, by))


def _attribute(name: str, value: Any, small: Callable[[int], int], by: int) -> Any:
    if type(value) is int and _HEADS.search(name):
        return value // by if value % by == 0 else value
    if not _ATTRIBUTES.search(name):
        return value
    if type(value) is int:
        return small(value)
    if type(value) in (list, tuple) and value and all(type(entry) is int for entry in value):
        parts = small(sum(value)) != sum(value) and all(entry % by == 0 for entry in value)  # of a split
        return type(value)(entry // by if parts else small(entry) for entry in value)
    return value
