"""generate() of transformers gives the same tokens on the device as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from families import CASES, SPECTROGRAM
from training import misses

CAUSAL = ["gpt2", "llama", "qwen3", "gemma", "mixtral", "mamba"]
SMOKE = {"llama", "t5"}


def _parameters(names: list[str]) -> list:
    return [pytest.param(name, id=name, marks=[] if name in SMOKE else [pytest.mark.nightly]) for name in names]


def _model(name: str) -> torch.nn.Module:
    """An evaluated model whose logits are apart enough that rounding does not decide between two tokens."""
    model = CASES[name].build().model.eval()
    model.config.output_router_logits = False
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def _same_tokens(model: torch.nn.Module, inputs: dict[str, torch.Tensor], **options) -> torch.Tensor:
    """Generate on both devices at 'highest' and compare."""
    expected = model.generate(**inputs, **options)
    device_model = copy.deepcopy(model).to("tpu")
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        actual = device_model.generate(**{k: v.to("tpu") for k, v in inputs.items()}, **options)
    assert actual.device.type == "tpu"
    assert actual.cpu().tolist() == expected.tolist()
    return expected


@pytest.mark.parametrize("name", _parameters(CAUSAL))
def test_causal_models_continue_a_prompt(name):
    """Greedy decoding with the cache, one prompt left-padded, eight new tokens."""
    inputs = CASES[name].build().inputs
    inputs.pop("labels")
    tokens = _same_tokens(_model(name), inputs, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    assert tokens.shape == (2, 20)


@pytest.mark.parametrize("name", _parameters(["t5"]))
def test_encoder_decoder(name):
    """Greedy decoding after an encoder, with cross attention."""
    inputs = CASES[name].build().inputs
    inputs.pop("labels")
    tokens = _same_tokens(_model(name), inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert tokens.shape == (2, 7)


@pytest.mark.nightly
def test_beam_search():
    """Three beams: sorting, gathering of caches, and scores."""
    inputs = CASES["t5"].build().inputs
    inputs.pop("labels")
    _same_tokens(_model("t5"), inputs, max_new_tokens=5, num_beams=3, do_sample=False)


@pytest.mark.nightly
def test_speech():
    """Whisper from a spectrogram to tokens."""
    sound = torch.randn(*SPECTROGRAM, generator=torch.Generator().manual_seed(4))
    model = _model("whisper")
    model.generation_config.suppress_tokens = None
    model.generation_config.begin_suppress_tokens = None
    _same_tokens(model, {"input_features": sound}, max_new_tokens=6, do_sample=False)


@pytest.mark.nightly
def test_sampling_repeats_with_its_seed():
    """Equal seeds draw equal tokens on the device, other seeds other tokens."""
    inputs = CASES["llama"].build().inputs
    prompt = inputs["input_ids"].to("tpu")
    model = CASES["llama"].build().model.eval().to("tpu")

    def draw(seed: int) -> list:
        torch.manual_seed(seed)
        return model.generate(input_ids=prompt, max_new_tokens=8, do_sample=True, top_k=20, top_p=0.9).tolist()

    first = draw(0)
    assert draw(0) == first
    assert draw(1) != first


@pytest.mark.nightly
def test_static_cache_compiles_no_step_twice():
    """With a static cache all steps have one shape: the second generation compiles nothing."""
    inputs = CASES["llama"].build().inputs
    prompt = inputs["input_ids"]
    model = _model("llama")
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(input_ids=prompt, disable_compile=True, **options)
    device_model = copy.deepcopy(model).to("tpu")
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        actual = device_model.generate(input_ids=prompt.to("tpu"), disable_compile=True, **options)
        steady = misses()
        device_model.generate(input_ids=prompt.to("tpu"), disable_compile=True, **options)
    assert actual.tolist() == expected.tolist()
    assert misses() == steady
