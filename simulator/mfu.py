"""FLOP accounting of transformer language models, and model FLOP utilisation (MFU). One formula, used by every report.

Per token, forward, counting a multiply-add as two:

* 2 x parameters of every matrix the token is multiplied with: query, key, value and output projections (and the gate of a
  gated attention), the MLP or the active experts with their router, and, if asked for, the LM head. An embedding is a
  lookup and costs nothing; norms, activations, rotary embeddings and softmax are not counted.
* attention: 4 x heads x head_dim x context for the two products with keys and values. The context is the sequence S in
  full attention, on the average S/2 when causal. In a layer with window w < S it is w, and w - w^2/2S when causal (the
  first w tokens see less). Grouped key and value heads change the projections only.

Training costs three times forward (the backward pass is two products for each one); recomputation is not useful work and
does not count. MFU = FLOP per token x tokens per second / peak. This reproduces the published figures of Llama-3-405B,
Qwen3-235B-A22B and Muse Glimmer 30B in ``tests/unit/simulator/test_mfu.py`` within their rounding.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .chips import Chip

__all__ = ["MODELS", "Components", "ConfigError", "Model", "components", "load_model", "mfu", "peak_flops"]

BACKWARD = 2.0


class ConfigError(ValueError):
    """A model cannot be accounted for: names the field and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder. Sizes in elements; ``ffn`` is the width of the MLP, or of one expert where there are ``experts``.

    ``gated`` MLPs have three matrices (SwiGLU), others two. ``dense_layers`` of a mixture have one MLP of ``dense_ffn``
    instead; ``shared_ffn`` is the width of experts that every token visits. ``window`` applies to ``windowed_layers``.
    ``attention_gate``: a projection as large as the query's gates the attention's output. ``matmul_parameters``, when
    given, replaces what is computed from the sizes (active parameters without the LM head).
    """

    name: str
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int = 0
    gated: bool = True
    experts: int = 0
    active_experts: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    window: int = 0
    windowed_layers: int = 0
    attention_gate: bool = False
    matmul_parameters: float | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for sizes that no model can have."""
        for field in ("layers", "width", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{self.name}: {field} must be positive, not {getattr(self, field)}")
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.name}: {self.heads} query heads cannot share {self.kv_heads} key and value heads")
        if self.active_experts > self.experts:
            raise ConfigError(f"{self.name}: a token cannot visit {self.active_experts} of {self.experts} experts")
        if self.experts and not self.active_experts:
            raise ConfigError(f"{self.name}: active_experts is missing: how many experts a token visits")
        for field in ("windowed_layers", "dense_layers"):
            if not 0 <= getattr(self, field) <= self.layers:
                raise ConfigError(f"{self.name}: {field} is {getattr(self, field)}, of {self.layers} layers")
        if self.windowed_layers and self.window < 1:
            raise ConfigError(f"{self.name}: windowed layers need a window")


@dataclasses.dataclass(frozen=True, slots=True)
class Components:
    """Forward FLOP per token by part. ``attention_causal`` and ``attention_full`` are alternatives."""

    attention_projections: float
    mlp: float
    lm_head: float
    attention_causal: float
    attention_full: float

    def total(self, *, causal: bool, lm_head: bool, training: bool) -> float:
        """FLOP per token of a forward pass, or of a training step."""
        forward = self.attention_projections + self.mlp + (self.lm_head if lm_head else 0.0)
        forward += self.attention_causal if causal else self.attention_full
        return forward * (1 + BACKWARD) if training else forward


def components(model: Model, sequence: int) -> Components:
    """The parts of one token's forward pass in a sequence of that many tokens. Raises ConfigError for an empty one."""
    if sequence < 1:
        raise ConfigError(f"the sequence must have at least one token, not {sequence}")
    query = model.width * model.heads * model.head_dim
    keys_values = 2 * model.width * model.kv_heads * model.head_dim
    attention = model.layers * ((3 if model.attention_gate else 2) * query + keys_values)
    mlp = float(_mlp_parameters(model))
    if model.matmul_parameters is not None:
        mlp = model.matmul_parameters - attention
        if mlp < 0:
            raise ConfigError(
                f"{model.name}: matmul_parameters={model.matmul_parameters:.4g} is less than the attention's projections, "
                f"{attention:.4g}"
            )
    causal, full = (_attention(model, sequence, causal=causal) for causal in (True, False))
    return Components(2.0 * attention, 2.0 * mlp, 2.0 * model.width * model.vocabulary, causal, full)


def _mlp_parameters(model: Model) -> int:
    matrices = (3 if model.gated else 2) * model.width
    if not model.experts:
        return model.layers * matrices * model.ffn
    router = model.width * model.experts
    mixture = matrices * (model.active_experts * model.ffn + model.shared_ffn) + router
    dense = matrices * (model.dense_ffn or model.ffn)
    return (model.layers - model.dense_layers) * mixture + model.dense_layers * dense


def _attention(model: Model, sequence: int, *, causal: bool) -> float:
    window = min(model.window, sequence) if model.windowed_layers else sequence
    everywhere = sequence / 2 if causal else float(sequence)
    windowed = window - window * window / (2 * sequence) if causal else float(window)
    context = (model.layers - model.windowed_layers) * everywhere + model.windowed_layers * windowed
    return 4.0 * model.heads * model.head_dim * context


def peak_flops(chip: Chip, *, dtype: str = "bf16", per: str = "chip") -> float:
    """Peak of a ``chip``, or of one ``core`` (TensorCore) or ``device`` of it. Raises UnknownFigure without a peak."""
    parts = {"chip": 1, "device": chip.devices, "core": chip.figure("cores") if per == "core" else 1}
    return chip.peak(dtype) / int(parts[per])


def mfu(flops_per_token: float, tokens_per_second: float, peak: float) -> float:
    """Useful FLOP/s over peak FLOP/s, as a fraction."""
    return flops_per_token * tokens_per_second / peak


# --------------------------------------------------------------------------------------------------- models

_PRESETS = (
    Model(
        name="llama-3-8b", layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=128256
    ),
    Model(
        name="llama-3-70b", layers=80, width=8192, heads=64, kv_heads=8, head_dim=128, ffn=28672, vocabulary=128256
    ),
    Model(
        name="llama-3-405b", layers=126, width=16384, heads=128, kv_heads=8, head_dim=128, ffn=53248, vocabulary=128256
    ),
    Model(
        name="qwen3-235b-a22b", layers=94, width=4096, heads=64, kv_heads=4, head_dim=128, ffn=1536, vocabulary=151936,
        experts=128, active_experts=8,
    ),
    Model(
        name="mixtral-8x7b", layers=32, width=4096, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocabulary=32000,
        experts=8, active_experts=2,
    ),
    Model(
        name="muse-glimmer-30b", layers=52, width=6656, heads=32, kv_heads=2, head_dim=128, ffn=19968, window=2048,
        windowed_layers=39, matmul_parameters=25.16e9,
    ),
)  # fmt: skip
MODELS: dict[str, Model] = {model.name: model for model in _PRESETS}
_REQUIRED = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_NOT_COVERED = {"kv_lora_rank": "multi-head latent attention", "ssm_state_size": "a state-space layer"}
_UNGATED = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_GATED_TYPES = ("gemma", "gemma2", "gemma3", "gemma3_text")


def load_model(name_or_file: str) -> Model:
    """A model of :data:`MODELS`, or a JSON file: our own field names, or the ``config.json`` of a Hugging Face model.

    Raises ConfigError for an unknown name, an unreadable file, missing fields, and parts this accounting does not cover.
    """
    preset = MODELS.get(name_or_file.lower())
    if preset is not None:
        return preset
    path = Path(name_or_file)
    if not path.is_file():
        close = difflib.get_close_matches(name_or_file.lower(), MODELS, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{name_or_file!r} is neither a file nor a known model ({', '.join(MODELS)}){hint}")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{path} is no JSON object")
    return _from_ours(fields, path) if "layers" in fields else from_hugging_face(fields, path.parent.name or path.stem)


def _from_ours(fields: Mapping[str, Any], path: Path) -> Model:
    try:
        return Model(**{"name": path.stem, **fields})
    except TypeError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_hugging_face(fields: Mapping[str, Any], name: str) -> Model:
    """The model of a Hugging Face ``config.json``. Raises ConfigError as :func:`load_model`."""
    for field, what in _NOT_COVERED.items():
        if fields.get(field):
            raise ConfigError(f"{name}: {what} ({field}) is not covered; give our own fields with matmul_parameters")
    missing = [theirs for theirs in _REQUIRED.values() if not fields.get(theirs)]
    if missing:
        raise ConfigError(f"{name}: the configuration lacks {', '.join(missing)}")
    experts = next((int(fields[field]) for field in _EXPERTS if fields.get(field)), 0)
    heads, layers = int(fields["num_attention_heads"]), int(fields["num_hidden_layers"])
    dense_ffn = int(fields.get("intermediate_size") or 4 * fields["hidden_size"])
    ffn = int(fields.get("moe_intermediate_size") or dense_ffn) if experts else dense_ffn
    kinds = fields.get("layer_types") or ()
    window = int(fields.get("sliding_window") or 0) if fields.get("use_sliding_window", True) else 0
    windowed = sum(kind == "sliding_attention" for kind in kinds) if kinds else layers
    activation = str(fields.get("hidden_act") or fields.get("hidden_activation") or "silu")
    return Model(
        name=name,
        layers=layers,
        width=int(fields["hidden_size"]),
        heads=heads,
        kv_heads=int(fields.get("num_key_value_heads") or heads),
        head_dim=int(fields.get("head_dim") or fields["hidden_size"] // heads),
        ffn=ffn,
        vocabulary=int(fields.get("vocab_size") or 0),
        gated=activation not in _UNGATED or fields.get("model_type") in _GATED_TYPES,
        experts=experts,
        active_experts=int(fields.get("num_experts_per_tok") or 0) if experts else 0,
        shared_ffn=int(fields.get("shared_expert_intermediate_size") or 0) if experts else 0,
        dense_layers=len(fields.get("mlp_only_layers") or ()) if experts else 0,
        dense_ffn=dense_ffn if experts else 0,
        window=window,
        windowed_layers=windowed if window else 0,
    )
