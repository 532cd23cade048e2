"""Trained language models: their perplexity, what is kept of them, and the gate that compares it with the CPU's."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

from emutpu.conformance import building, gates, manifest, trained
from emutpu.conformance.building import Built, NoRecipe
from emutpu.conformance.gates import Outcome
from emutpu.conformance.manifest import Program
from emutpu.conformance.torchvision_schemas import declare

declare()
PROGRAM = Program("toy/x", "toy", "x", "toy", "none", {}, "none", 1.4, 0, "toy/x", True, False, None, "pass")
FEW = trained.Settings(width=16, layers=2, heads=2, shared_heads=1, feed_forward=16, length=16, batch=2, steps=3)


def test_perplexity():
    """A uniform guess among n is n; a sure and right one is 1."""
    tokens = torch.tensor([[1, 2, 3, 1]])
    assert trained.perplexity(torch.zeros(1, 4, 8), tokens) == pytest.approx(8)
    sure = 100.0 * nn.functional.one_hot(tokens.roll(-1, 1), 8)
    assert trained.perplexity(sure, tokens) == pytest.approx(1)


def test_text_is_english():
    """Some hundred kilobytes of it."""
    words = trained.text()
    assert len(words) > 300_000
    assert words.count(b" the ") > 2000


def weights_of(model):
    """The weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_training_is_deterministic_and_kept(tmp_path):
    """Twice the same weights; the second time they are read, and other settings train anew."""
    pytest.importorskip("transformers", reason="the library is not installed")
    kept = tmp_path / "a" / "m.safetensors"
    first = weights_of(trained.language_model(FEW, kept))
    assert torch.equal(weights_of(trained.language_model(FEW, None)), first)
    assert [path.name for path in kept.parent.iterdir()] == ["m.safetensors"]
    never = dataclasses.replace(FEW, steps=0)
    assert torch.equal(weights_of(trained.language_model(never, kept)), first)
    assert not torch.equal(weights_of(trained.language_model(never, None)), first)


def test_where_it_is_kept(monkeypatch, tmp_path):
    """In the folder of the run, by the settings and the library's version; nowhere without one."""
    pytest.importorskip("transformers", reason="the library is not installed")
    monkeypatch.delenv(trained.FOLDER, raising=False)
    assert trained._kept(FEW) is None
    monkeypatch.setenv(trained.FOLDER, str(tmp_path))
    assert trained._kept(FEW).parent == tmp_path / "trained"
    assert trained._kept(FEW) != trained._kept(trained.SETTINGS)


class Biased(nn.Module):
    """Logits of a bigram table, with something after it."""

    def __init__(self, after):
        super().__init__()
        self.table = nn.Embedding(8, 8)
        self.after = after

    def forward(self, input_ids):
        return self.after(self.table(input_ids))


TOKENS = torch.randint(0, 8, (2, 32), generator=torch.Generator().manual_seed(0))


def examine(monkeypatch, spoil):
    """The report of a toy; ``spoil`` changes the logits of its perplexity alone, given how often it was measured."""
    torch.manual_seed(0)
    model = Biased(lambda y: y)
    times = 0

    def measured(model, place):
        nonlocal times
        times += 1
        with torch.no_grad():
            return trained.perplexity(spoil(model(place(TOKENS)).cpu(), times), TOKENS)

    monkeypatch.setitem(
        building._BUILDERS, "toy", lambda program: Built(model, {"input_ids": TOKENS}, {}, False, measured)
    )
    return gates.examine(PROGRAM, "strict", fallbacks=lambda: 0)


def test_the_same_perplexity_passes(monkeypatch):
    """On the CPU, at default precision and at `highest`."""
    report = examine(monkeypatch, lambda logits, times: logits)
    assert report.outcome == Outcome.PASS, report.error
    assert report.perplexity == pytest.approx(report.cpu_perplexity, rel=1e-5)
    assert report.default_perplexity == pytest.approx(report.cpu_perplexity, rel=0.05)
    assert report.tier3


@pytest.mark.parametrize(("when", "outcome", "tier3"), [(3, Outcome.MISMATCH, True), (2, Outcome.PASS, False)])
def test_another_perplexity(monkeypatch, when, outcome, tier3):
    """At `highest` a mismatch, at default precision a miss of tier 3 alone."""
    report = examine(monkeypatch, lambda logits, times: 0 * logits if times == when else logits)
    assert (report.outcome, report.tier3) == (outcome, tier3)
    told = report.error if outcome == Outcome.MISMATCH else report.tier3_error
    assert "perplexity 8, the CPU's" in told
    assert "allowed 0.1" in told


def test_not_a_number_is_no_perplexity(monkeypatch):
    """A comparison with NaN is not passed."""
    report = examine(monkeypatch, lambda logits, times: logits * math.nan if times == 3 else logits)
    assert report.outcome == Outcome.MISMATCH


def test_rows():
    """Three programs of the manifest, each with a row of its own; those of the smoke suite stay forty."""
    rows = [row for row in manifest.rows() if row.model.kind == "trained"]
    assert [row.program.name for row in rows] == [f"trained/{name}" for name in trained.PROGRAMS]
    assert all(row.program.representative and not row.program.smoke for row in rows)
    assert {row.source.name for row in rows} == set(trained.PACKAGES)


def test_weights_that_are_not_installed(monkeypatch):
    """Not run, with what to install."""
    pytest.importorskip("transformers", reason="the library is not installed")

    def absent(package, name):
        raise trained.importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(trained, "_file", absent)
    with pytest.raises(NoRecipe, match=r"emutpu\[speech\]"):
        building.build(manifest.programs()["trained/whisper-tiny.en"])


@pytest.mark.nightly
def test_the_llama_learns():
    """Below ten per byte of text that it never read; untrained it is near 256."""
    pytest.importorskip("transformers", reason="the library is not installed")
    built = building.build(manifest.programs()["trained/llama-bytes"])
    assert built.perplexity(built.model, lambda value: value) < 10
    untrained = trained.language_model(dataclasses.replace(trained.SETTINGS, steps=0), None)
    assert built.perplexity(untrained, lambda value: value) > 200
