"""Published Whisper weights in CTranslate2's format, as a transformers model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["whisper_tiny"]

_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
_LAYERS, _WIDTH, _WORDS = 4, 384, 51864
_START, _END = 50257, 50256  # of the English vocabulary


def _read(path: Path) -> dict[str, Tensor]:
    """The variables by name: a count, then for each its name, rank, dimensions, type and bytes, all little-endian."""
    found = {}
    with path.open("rb") as stream:

        def numbers(layout: str) -> tuple[Any, ...]:
            return struct.unpack("<" + layout, stream.read(struct.calcsize("<" + layout)))

        def text() -> str:
            return stream.read(numbers("H")[0])[:-1].decode()

        version, specification, _ = numbers("I")[0], text(), numbers("I")
        if (version, specification) != (6, "WhisperSpec"):
            raise ValueError(f"{path}: expected a Whisper model of format 6, got {specification} of {version}")
        for _ in range(numbers("I")[0]):
            name, rank = text(), numbers("B")[0]
            dims = numbers("I" * rank)
            kind, count = numbers("BI")
            found[name] = torch.from_numpy(np.frombuffer(stream.read(count), _TYPES[kind]).reshape(dims).copy()).float()
    return found


def _parts(weights: dict[str, Tensor], source: str, target: str, names: str) -> dict[str, Tensor]:
    """Projections that are stacked there. Keys have no bias here; there it is zero."""
    parts = {}
    split = names.split()
    for name, weight, bias in zip(
        split,
        weights[f"{source}/weight"].chunk(len(split)),
        weights[f"{source}/bias"].chunk(len(split)),
        strict=True,
    ):
        parts[f"{target}.{name}.weight"] = weight
        if name != "k_proj":
            parts[f"{target}.{name}.bias"] = bias
        elif bias.any():
            raise ValueError(f"{source}: expected keys without bias")
    return parts


def _norm(weights: dict[str, Tensor], source: str, target: str) -> dict[str, Tensor]:
    return {f"{target}.weight": weights[f"{source}/gamma"], f"{target}.bias": weights[f"{source}/beta"]}


def _layer(weights: dict[str, Tensor], side: str, index: int) -> dict[str, Tensor]:
    there, here = f"{side}/layer_{index}", f"model.{side}.layers.{index}"
    state = _norm(weights, f"{there}/self_attention/layer_norm", f"{here}.self_attn_layer_norm")
    state |= _parts(weights, f"{there}/self_attention/linear_0", f"{here}.self_attn", "q_proj k_proj v_proj")
    state |= _parts(weights, f"{there}/self_attention/linear_1", f"{here}.self_attn", "out_proj")
    if side == "decoder":
        state |= _norm(weights, f"{there}/attention/layer_norm", f"{here}.encoder_attn_layer_norm")
        for linear, names in enumerate(("q_proj", "k_proj v_proj", "out_proj")):
            state |= _parts(weights, f"{there}/attention/linear_{linear}", f"{here}.encoder_attn", names)
    state |= _norm(weights, f"{there}/ffn/layer_norm", f"{here}.final_layer_norm")
    for linear in (0, 1):
        state |= _parts(weights, f"{there}/ffn/linear_{linear}", here, f"fc{linear + 1}")
    return state


def _state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    state = {}
    for side in ("encoder", "decoder"):
        state[f"model.{side}.embed_positions.weight"] = weights[f"{side}/position_encodings/encodings"]
        state |= _norm(weights, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for index in range(_LAYERS):
            state |= _layer(weights, side, index)
    for convolution in ("conv1", "conv2"):
        state |= _parts(weights, f"encoder/{convolution}", "model.encoder", convolution)
    words = weights["decoder/embeddings/weight"]
    return state | {"model.decoder.embed_tokens.weight": words, "proj_out.weight": words}


def whisper_tiny(path: Path) -> Any:
    """``transformers.WhisperForConditionalGeneration``, English, float32, from a ``model.bin``."""
    import transformers

    heads, inner = 6, 4 * _WIDTH
    config = transformers.WhisperConfig(
        vocab_size=_WORDS,
        d_model=_WIDTH,
        encoder_layers=_LAYERS,
        decoder_layers=_LAYERS,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        decoder_start_token_id=_START,
        bos_token_id=_END,
        eos_token_id=_END,
        pad_token_id=_END,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.load_state_dict(_state(_read(path)), strict=True)
    return model
