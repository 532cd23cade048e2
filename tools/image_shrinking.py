"""How the manifest makes image networks small: what is not narrowed, with the reason, and images of another side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BATCHES", "FACTORS", "GAINS", "SHORT", "SIDES", "SMALLER", "as_vit", "gain_of", "options_of", "shrink_of"]

_SIDE = 64
# What keeps its channels, and why: how ``builder/family`` or ``builder/architecture`` begins.
SHORT: Mapping[str, str] = {
    "segmentation_models_pytorch/dpn68": "each block adds channels that its forward counts by numbers of its own",
    "timm/coat_": "its positions are convolved in groups of heads, in parts that are no multiple of anything",
    "timm/convit_base": "a gate for each of 16 heads, which is a number of channels too",
    "timm/csatv2": "its first layers take as many channels as a cosine transform gives",
    "timm/deepseek_vit": "the rotary embedding has the width of a head, and is a table already",
    "timm/densenetblur": "its kernels of blurring are made for a number of channels",
    "timm/dla60_res2": "channels are split into as many parts as there are scales",
    "timm/dpn": "each block adds channels that its forward counts by numbers of its own",
    "timm/efficientvim_m4": "a state has as many numbers as there are channels elsewhere",
    "timm/fasternet_m": "a quarter of 144 channels is no multiple of anything",
    "timm/fasternet_t0": "a quarter of 40 channels is no multiple of anything",
    "timm/fastvit_ma36": "a projection of 76 channels in groups",
    "timm/gemma4_vit": "the rotary embedding has the width of a head, and is a table already",
    "timm/ghostnetv3": "half of the channels are cut off behind a sum",
    "timm/hiera_large": "a window's queries are counted from the width of a head",
    "timm/inception_next_atto": "a quarter of 40 channels is no multiple of anything",
    "timm/mambaout_base": "channels are split into parts that are no multiple of anything",
    "timm/mixnet_m": "channels are split into a part for each size of kernel",
    "timm/mixnet_s": "channels are split into a part for each size of kernel",
    "timm/mobilenetv4_conv_blur": "its kernels of blurring are made for a number of channels",
    "timm/mobilevitv2": "a projection gives keys, values and one weight more in one",
    "timm/nasnet": "halves of 42 channels are joined",
    "timm/qwen3_vit": "the rotary embedding has the width of a head, and is a table already",
    "timm/rdnet_large": "each block adds channels that are no multiple of anything",
    "timm/res2net": "channels are split into as many parts as there are scales",
    "timm/res2next": "channels are split into as many parts as there are scales",
    "timm/resnetblur": "its kernels of blurring are made for a number of channels",
    "timm/resnetv2_50d_evos": "variances are of groups of a fixed size",
    "timm/rexnet": "each block adds channels that its forward counts by numbers of its own",
    "timm/samvit": "relative positions have the width of a head",
    "timm/sequencer": "an LSTM keeps its weights in a list of its own",
    "timm/shvit_s2": "channels are split into parts that are no multiple of anything",
    "timm/shvit_s3": "channels are split into parts that are no multiple of anything",
    "timm/shvit_s4": "channels are split into parts that are no multiple of anything",
    "timm/tf_efficientnet_cc": "kernels are mixed from tables of them",
    "timm/tf_mixnet_m": "channels are split into a part for each size of kernel",
    "timm/tf_mixnet_s": "channels are split into a part for each size of kernel",
    "timm/tresnet": "space becomes channels in it",
    "timm/vit_5b_patch16_sapiens2": "its constructor makes it narrow",
    "timm/vit_base_patch16_sapiens2": "its constructor makes it narrow",
    "timm/vit_giant_patch16_sapiens2": "its constructor makes it narrow",
    "timm/vit_huge_patch16_sapiens2": "its constructor makes it narrow",
    "timm/vit_large_patch16_sapiens2": "its constructor makes it narrow",
    "timm/vit_dpwee": "the difference of two attentions is normalised by head",
    "timm/volo": "an attention's weights, of every pair of places in a window, are a number of features",
    "timm/xcit_nano": "its encoding of positions is as wide as some channels",
}
# What channels are divided by where the network itself does not tell, and why.
FACTORS: Mapping[str, tuple[int, str]] = {
    "segmentation_models_pytorch/unet-dpn1": (4, "each block adds channels"),
    "segmentation_models_pytorch/unet-dpn9": (4, "each block adds channels"),
    "timm/hrnet": (8, "few of its narrowest channels are multiples of anything, the others are"),
    "timm/mixnet_l": (4, "a part for each size of kernel"),
    "timm/mixnet_xl": (4, "a part for each size of kernel"),
    "timm/mvitv2": (8, "heads of 96 channels, more of them in every stage"),
    "timm/pnasnet": (9, "halves of 54 channels are joined"),
    "timm/tf_mixnet_l": (4, "a part for each size of kernel"),
}
# What wants other images than those of 64 pixels, and why.
SIDES: Mapping[str, tuple[int, str]] = {
    "segmentation_models_pytorch/pan": (256, "it halves eight times"),
    "timm/bat_resnext": (256, "attention in blocks of 8x8 places after five halvings"),
    "timm/crossvit": (120, "patches of 12 pixels, and of 16 in an image of 14/15"),
    "timm/deepseek_vit": (70, "patches of 14 pixels"),
    "timm/eca_halonext": (256, "attention in blocks of 8x8 places after five halvings"),
    "timm/efficientformer_": (224, "attention of 7x7 places after five halvings"),
    "timm/gemma4_vit": (96, "patches of 16 pixels, three of them pooled"),
    "timm/haloregnetz": (224, "attention in blocks of 7x7 places after five halvings"),
    "timm/halo2botnet": (256, "attention in blocks of 8x8 places after five halvings"),
    "timm/halonet": (256, "attention in blocks of 8x8 places after five halvings"),
    "timm/inception_v": (96, "kernels without padding"),
    "timm/inception_resnet": (96, "kernels without padding"),
    "timm/lamhalobotnet": (256, "attention in blocks of 8x8 places after five halvings"),
    "timm/sehalonet": (256, "attention in blocks of 8x8 places after five halvings"),
    "torchvision/inception": (299, "a second classifier convolves 5x5 places of what is left"),
    "torchvision/quantized_inception": (299, "a second classifier convolves 5x5 places of what is left"),
    "torchvision/maxvit": (224, "windows of 7x7 places after five halvings"),
}
# What wants more than two images, and why: a normalisation of two values in training gives their signs, whatever they are.
BATCHES: Mapping[str, tuple[int, str]] = {
    "timm/efficientvit_m": (4, "normalises one place of each image"),
    "timm/hgnetv2_b5": (8, "normalises four places of each image, half of them zero"),
    "timm/inception_v3": (8, "normalises one place of each image"),
    "timm/inception_v4": (8, "normalises one place of each image"),
    "timm/rexnet": (4, "normalises what its gates pool"),
}

# What wants wider weights, and why: of a signal that every layer makes smaller the answer, which the offsets make, says nothing.
GAINS: Mapping[str, tuple[float, str]] = {
    "timm/lcnet": (2.0, "an activation after each kernel lets half of a signal pass"),
    "timm/repvgg": (2.8, "three branches of each layer are normalised with the variance of one"),
    "timm/tf_efficientnet_cc": (2.8, "kernels are mixed of several, and the mean of them is smaller"),
    "transformers/PPLCNetBackbone": (2.0, "an activation after each kernel lets half of a signal pass"),
    "transformers/PPLCNetForImageClassification": (2.0, "an activation after each kernel lets half of a signal pass"),
}
_GAIN = 1.4

# Vision transformers of timm that are not made from other depth, width and heads: what their names contain, a side, and why.
_NO_VIT: Mapping[str, tuple[int, str]] = {
    "naflexvit": (64, "settings are in an object"),
    "_sapiens2": (64, "heads are given for each block"),
    "vit_giant_patch14_": (70, "width and feed-forward have a ratio that is for its own width"),
    "pwee_patch16": (64, "its blocks have no attention of the usual name"),
    "_r_s16_p8": (256, "patches of what is halved four times before"),
    "_mci_": (64, "convolutions come first"),
}
_TWO_EACH = [2, 2, 2, 2]
_VIT = {"embed_dim": 64, "depth": 2, "num_heads": 4}
_DPN = {"k_sec": _TWO_EACH, "k_r": 40, "groups": 10, "inc_sec": [8, 16, 16, 32]}
_COAT = {"embed_dims": [16, 32, 32, 32], "serial_depths": _TWO_EACH, "parallel_depth": 2}


def _dense(growth: list[int]) -> dict[str, Any]:
    """RDNet with an eighth of the channels that each block adds, and two layers a block."""
    return {"num_init_features": 16, "growth_rates": growth, "num_blocks_list": [2] * len(growth)}


# Settings of the constructors of what is not narrowed after it is built, and takes them: a part of the name.
SMALLER: Mapping[str, Mapping[str, Any]] = {
    "_sapiens2": _VIT | {"depth": 3, "num_kv_heads": [4, 2, 4]},  # of some blocks the queries are grouped
    "timm/coat_lite": {"embed_dims": [16, 32, 80, 128], "serial_depths": _TWO_EACH},
    "timm/coat_mini": _COAT,
    "timm/coat_tiny": _COAT | {"embed_dims": [32, 32, 32, 32]},
    "timm/convit_base": {"embed_dim": 4, "depth": 3, "num_heads": 16, "local_up_to_layer": 2},
    "timm/deepseek_vit_412m": _VIT,
    "timm/deepseek_vit_412m_": _VIT | {"out_features": 64},
    "timm/dpn107": _DPN,
    "timm/dpn131": _DPN,
    "timm/dpn68": {"k_sec": _TWO_EACH},
    "timm/dpn92": _DPN | {"k_r": 24, "groups": 8},
    "timm/dpn98": _DPN,
    "timm/gemma4_vit": _VIT | {"head_dim": 16},
    "timm/hiera_large": {"embed_dim": 32, "stages": _TWO_EACH},
    "timm/mambaout_base": {"dims": [32, 64, 128, 192], "depths": _TWO_EACH},
    "timm/nasnetalarge": {"num_features": 768, "stem_size": 16},
    "timm/qwen3_vit": _VIT,
    "timm/rdnet_base": _dense([12, 16, *[24] * 7, 42, 42]),
    "timm/rdnet_large": _dense([16, 24, *[32] * 8, 44, 44]),
    "timm/rdnet_small": _dense([8, 16, *[16] * 7, 30, 30]),
    "timm/rdnet_tiny": _dense([8, 16, *[16] * 4, 28]),
    "timm/regnety_2560": {"w0": 40, "wa": 14.4, "group_size": 23},
    "timm/res2ne": {"channels": [16, 32, 64, 128], "layers": _TWO_EACH},
    "timm/samvit": _VIT | {"depth": 4, "global_attn_indexes": [1, 3], "neck_chans": 32},
    "timm/sequencer2d_s": {"embed_dims": [32, 64, 64, 64], "layers": _TWO_EACH, "hidden_sizes": [8, 16, 16, 16]},
    "timm/tresnet": {"layers": _TWO_EACH, "width_factor": 0.25},
}


def as_vit(architecture: str, fits: bool) -> bool:
    """Whether an architecture of timm is given other depth, width and heads; its family ``fits`` that in general."""
    return fits and not any(part in architecture for part in _NO_VIT)


def shrink_of(builder: str, *names: str) -> str:
    """The shrinking of an architecture, ``short`` or ``narrow``, by its name or its family's."""
    return "short" if any(f"{builder}/{name}".startswith(tuple(SHORT)) for name in names) else "narrow"


def options_of(builder: str, *names: str, sized: bool = False) -> dict[str, Any]:
    """Settings of a program beside its shrinking. ``sized`` is for a constructor that asks for the side of the image."""
    prefixes = tuple(f"{builder}/{name}" for name in names)
    smaller: dict[str, Any] = {}
    for part, settings in SMALLER.items():  # a longer part comes after a shorter one
        if any(part in prefix for prefix in prefixes):
            smaller |= settings
    sides = _told(SIDES, prefixes)
    others = [side for part, (side, _) in _NO_VIT.items() if any(part in name for name in names)]
    side = max(sides + others, default=_SIDE)
    for option, table in (("batch", BATCHES), ("factor", FACTORS)):
        told = _told(table, prefixes)
        if told:
            smaller[option] = max(told)
    sized = (sized or bool(others)) and not any("naflexvit" in name for name in names)
    if sized:
        return {"img_size": side} | smaller
    return ({"side": side} if sides else {}) | smaller


def gain_of(name: str) -> float:
    """How wide the weights of a program are drawn (``conformance/weights.py``)."""
    return next((gain for start, (gain, _) in GAINS.items() if name.startswith(start)), _GAIN)


def _told(table: Mapping[str, tuple[int, str]], prefixes: tuple[str, ...]) -> list[int]:
    """What a table has for names that begin so."""
    return [number for start, (number, _) in table.items() if any(prefix.startswith(start) for prefix in prefixes)]
