"""FLOP accounting: published utilisations, and what follows from the formula."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emutpu.simulator.chips import UnknownFigure, chip
from emutpu.simulator.mfu import MODELS, ConfigError, Model, components, from_hugging_face, load_model, mfu, peak_flops

_TINY = {"name": "tiny", "layers": 2, "width": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 16}


@pytest.mark.parametrize(
    ("name", "sequence", "tokens", "per", "causal", "lm_head", "training", "published"),
    [
        ("muse-glimmer-30b", 5120, 25_700, "chip", True, False, False, 57.8),
        ("muse-glimmer-30b", 10240, 22_400, "chip", True, False, False, 51.1),
        ("muse-glimmer-30b", 5120, 5_600, "chip", True, False, True, 37.8),
        ("muse-glimmer-30b", 10240, 4_600, "chip", True, False, True, 31.5),
        ("qwen3-235b-a22b", 4096, 2_236, "core", True, True, True, 28.8),
        ("qwen3-235b-a22b", 4096, 2_104, "core", True, True, True, 27.1),
        ("qwen3-235b-a22b", 4096, 2_236, "core", False, True, True, 32.4),
        ("qwen3-235b-a22b", 4096, 2_104, "core", False, True, True, 30.5),
        ("llama-3-405b", 8192, 500, "chip", True, True, True, 54.7),
        ("llama-3-405b", 8192, 500, "chip", False, True, True, 56.9),
    ],
)
def test_published(
    name: str, sequence: int, tokens: float, per: str, causal: bool, lm_head: bool, training: bool, published: float
) -> None:
    """Every published figure on v7 follows within a tenth of a point from the one formula."""
    flops = components(MODELS[name], sequence).total(causal=causal, lm_head=lm_head, training=training)
    assert 100 * mfu(flops, tokens, peak_flops(chip("v7"), per=per)) == pytest.approx(published, abs=0.1)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-3-405b", 405.8),
        ("mixtral-8x7b", 12.88),
        ("qwen3-235b-a22b", 22.2),
    ],
)
def test_active_parameters(name: str, billions: float) -> None:
    """Matrices, LM head and the embedding (as large, if it is not shared) are the active parameters of the model cards."""
    parts = components(MODELS[name], 1)
    embedding = MODELS[name].width * MODELS[name].vocabulary
    counted = (parts.attention_projections + parts.mlp + parts.lm_head) / 2 + embedding
    assert counted / 1e9 == pytest.approx(billions, rel=0.005)


def test_glimmer_from_its_sizes() -> None:
    """The given 25.16 B parameters are those of the sizes when the attention's output is gated."""
    given = MODELS["muse-glimmer-30b"]
    sizes = Model(
        name="sizes", layers=52, width=6656, heads=32, kv_heads=2, head_dim=128, ffn=19968, window=2048,
        windowed_layers=39, attention_gate=True,
    )  # fmt: skip
    total = [components(model, 5120).total(causal=True, lm_head=False, training=False) for model in (given, sizes)]
    assert total[1] == pytest.approx(total[0], rel=2e-4)


def test_counted_by_hand() -> None:
    """A tiny model, every product written out."""
    parts = components(Model(**_TINY, vocabulary=10), 6)
    assert parts.attention_projections == 2 * 2 * (8 * 16 + 8 * 8 + 8 * 8 + 16 * 8)  # q, k, v: 4 and 2 heads of 4; o
    assert parts.mlp == 2 * 2 * (3 * 8 * 16)
    assert parts.lm_head == 2 * 8 * 10
    assert parts.attention_full == 2 * (2 * 4 * 4 * 6) * 2  # scores and values, per layer
    assert parts.attention_causal == parts.attention_full / 2
    assert parts.total(causal=False, lm_head=True, training=True) == 3 * parts.total(
        causal=False, lm_head=True, training=False
    )


@pytest.mark.parametrize(("window", "sequence"), [(4, 16), (16, 16), (100, 16), (1, 7)])
def test_windows_counted_token_by_token(window: int, sequence: int) -> None:
    """The average context of a causal window is that of counting tokens, up to half a token each."""
    model = Model(**_TINY, window=window, windowed_layers=2)
    exact = sum(min(position + 0.5, window) for position in range(sequence)) / sequence
    per_context = 2 * 4 * 4 * 4
    assert components(model, sequence).attention_causal == pytest.approx(per_context * exact, rel=0.03)
    assert components(model, sequence).attention_full == per_context * min(window, sequence)


def test_mixture() -> None:
    """Active experts, shared experts, the router and dense layers each count once."""
    model = Model(**_TINY, experts=10, active_experts=3, shared_ffn=5, dense_layers=1, dense_ffn=7, gated=False)
    mixture = 2 * 8 * (3 * 16 + 5) + 8 * 10
    dense = 2 * 8 * 7
    assert components(model, 1).mlp == 2 * (mixture + dense)


def test_peaks() -> None:
    """Per chip, per device and per TensorCore; a chip without a published peak is an error."""
    assert peak_flops(chip("v7")) == 2307e12
    assert peak_flops(chip("v7"), per="core") == peak_flops(chip("v7"), per="device") == 1153.5e12
    assert peak_flops(chip("v5p"), per="core") == 229.5e12
    assert peak_flops(chip("v5p"), per="device") == 459e12
    assert peak_flops(chip("v7"), dtype="fp8") == 4614e12
    with pytest.raises(UnknownFigure, match="v8t has no published bf16 peak"):
        peak_flops(chip("v8t"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers must be positive"),
        ({"kv_heads": 3}, "4 query heads cannot share 3"),
        ({"experts": 2, "active_experts": 3}, "cannot visit 3 of 2"),
        ({"experts": 2}, "active_experts is missing"),
        ({"windowed_layers": 1}, "need a window"),
        ({"windowed_layers": 3, "window": 4}, "of 2 layers"),
    ],
)
def test_impossible_models(change: dict[str, int], message: str) -> None:
    """Sizes that contradict each other are errors, not figures."""
    with pytest.raises(ConfigError, match=message):
        Model(**(_TINY | change))  # type: ignore[arg-type]  # a table of mixed types


def test_too_few_given_parameters() -> None:
    """A given count below the projections' own is a mistake, and so is a sequence without tokens."""
    with pytest.raises(ConfigError, match="less than the attention's projections"):
        components(Model(**_TINY, matmul_parameters=10), 4)
    with pytest.raises(ConfigError, match="at least one token"):
        components(Model(**_TINY), 0)


_QWEN = {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
    "vocab_size": 151936, "mlp_only_layers": [], "sliding_window": None, "hidden_act": "silu",
}  # fmt: skip


def test_hugging_face_configurations() -> None:
    """Published config.json fields give the same model as the preset; windows come from layer_types."""
    found = from_hugging_face(_QWEN, "qwen")
    assert components(found, 4096) == components(MODELS["qwen3-235b-a22b"], 4096)
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    windowed = from_hugging_face(
        {
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "sliding_window": 8,
            "layer_types": kinds,
        },
        "windowed",
    )
    assert (windowed.window, windowed.windowed_layers, windowed.ffn) == (8, 3, 256)
    assert not from_hugging_face(_QWEN | {"hidden_act": "gelu"}, "plain").gated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no JSON object"),
        ('{"hidden_size": 8}', "lacks num_hidden_layers, num_attention_heads"),
        (json.dumps(_QWEN | {"kv_lora_rank": 512}), "multi-head latent attention"),
        (json.dumps({"layers": 1, "depth": 2}), "depth"),
    ],
)
def test_files_that_say_no_model(tmp_path: Path, text: str, message: str) -> None:
    """What a file lacks, or what is not covered, is named."""
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_model(str(path))


def test_files_in_our_own_words(tmp_path: Path) -> None:
    """A file with our field names is the model, named after the file; an unknown name guesses what was meant."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({key: value for key, value in _TINY.items() if key != "name"}))
    assert load_model(str(path)) == Model(**(_TINY | {"name": "mine"}))  # type: ignore[arg-type]  # a table of mixed types
    with pytest.raises(ConfigError, match="did you mean 'llama-3-8b'"):
        load_model("llama3-8b")
