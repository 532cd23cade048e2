"""Faults in one call are put in, and the gate's limit catches them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from emutpu.conformance import building, manifest, mutation, runner
from emutpu.conformance.building import Built
from emutpu.conformance.gates import GRADIENTS, LOGITS
from emutpu.conformance.manifest import Program
from emutpu.conformance.mutation import Injected
from emutpu.conformance.torchvision_schemas import declare

declare()
PROGRAM = Program("toy/x", "toy", "x", "toy", "none", {}, "none", 1.4, 0, "toy/x", True, False, None, "pass")


class Layers(nn.Module):
    """Two layers of causal attention over a normalisation of what is scaled; ``weight`` scales what they add."""

    def __init__(self, weight=1.0):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.products = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.weight = weight

    def forward(self, x):
        x = self.scale * x
        for product, norm in zip(self.products, self.norms, strict=True):
            y = product(norm(x)).unflatten(-1, (2, 8)).transpose(1, 2)
            y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
            x = x + self.weight * y.transpose(1, 2).flatten(2)
        return x


def faults_of(monkeypatch, model):
    """By name, of a toy program."""
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(building._BUILDERS, "toy", lambda program: Built(model, {"x": x}, {}))
    return {fault.fault: fault for fault in mutation.inject(PROGRAM)}


def test_every_fault_with_a_place_is_put_in(monkeypatch):
    """And caught; a model without rotary embeddings has none to drop."""
    found = faults_of(monkeypatch, Layers())
    assert set(found) == {*mutation.FAULTS, "stale cache hit"}
    assert all(fault.caught and fault.error > 1e-3 for fault in found.values())


def test_a_fault_that_does_not_show_is_missed(monkeypatch):
    """The counts can come out badly: a branch that is off hides what is wrong with it."""
    found = faults_of(monkeypatch, Layers(weight=0.0))
    assert found["attention zeroed"] == Injected("attention zeroed", 0.0, caught=False, gradient_error=0.0)


def test_a_branch_that_is_nearly_off(monkeypatch):
    """The answer hides it, and the gradients of its own parameters do not."""
    found = faults_of(monkeypatch, Layers(weight=1e-7))["attention zeroed"]
    assert found.caught
    assert 0 < found.error < 1e-5
    assert found.gradient_error > 0.1


class Hidden(Layers):
    """What the layers add is not in the answer, and its gradients are."""

    def forward(self, x):
        y = super().forward(x)
        return self.scale * x + y - y.detach()


def test_gradients_show_what_the_answer_hides(monkeypatch):
    """Tier 2 compares both: a fault that does not reach the answer is caught by the training step."""
    found = faults_of(monkeypatch, Hidden())
    assert all(fault.caught and fault.error <= LOGITS for fault in found.values())
    assert all(fault.gradient_error > GRADIENTS for fault in found.values())


def test_nothing_to_train(monkeypatch):
    """Then the answer alone decides."""
    found = faults_of(monkeypatch, Layers(weight=1e-7).requires_grad_(False))
    assert (found["attention zeroed"].caught, found["attention zeroed"].gradient_error) == (False, None)


def test_the_model_is_as_before(monkeypatch):
    """Faults leave no trace: twice the same."""
    model = Layers()
    assert faults_of(monkeypatch, model) == faults_of(monkeypatch, model)


def test_a_rotary_embedding_is_dropped_in_one_layer():
    """Of a real Llama, whose every fault is caught."""
    pytest.importorskip("transformers", reason="the library is not installed")
    found = {fault.fault: fault for fault in mutation.inject(manifest.programs()["transformers/LlamaForCausalLM"])}
    assert found["rotary embedding dropped"].error > 0.01
    assert all(fault.caught for fault in found.values())
    assert len(found) == 6


def test_a_rotary_embedding_of_one_at_a_time():
    """Of Gemma 4's vision tower in timm, which rotates queries and keys apart."""
    pytest.importorskip("timm", reason="the library is not installed")
    found = {fault.fault: fault for fault in mutation.inject(manifest.programs()["timm/gemma4_vit_167m"])}
    assert found["rotary embedding dropped"].caught


def test_counts():
    """By fault, with the missed ones named."""
    answers = [
        {
            "program": "b",
            "outcome": "missed",
            "faults": [{"fault": "f", "error": 1e-9, "caught": False, "gradient_error": 2e-7}],
        },
        {"program": "a", "outcome": "pass", "faults": [{"fault": "f", "error": 1.0, "caught": True}]},
        {"program": "c", "outcome": "not run", "error": "no recipe", "faults": []},
    ]
    found = runner.mutations_of(answers)
    assert (found["programs"], found["injected"], found["caught"]) == (2, 2, 1)
    assert found["by_fault"] == {"f": {"injected": 2, "caught": 1}}
    assert found["missed"] == ["b: f (1.0e-09, gradients 2.0e-07)"]
    assert found["failed"] == {"c": "no recipe"}


def test_families():
    """More than sixty programs, none of a family twice but for smoke, of every package and many tasks."""
    chosen = mutation.families()
    names = {program.name for program in chosen}
    assert len(names) == len(chosen) >= 80
    assert {program.name for program in manifest.select("smoke")} <= names
    assert {program.builder for program in chosen} >= {"timm", "transformers", "diffusers", "torchvision"}
    assert len({program.task for program in chosen}) >= 30
    more = [program.group for program in chosen if not program.smoke]
    assert len(more) == len(set(more))
    assert [p.name for p in runner.chosen_for_faults("families", "timm/*")] == [
        p.name for p in chosen if p.builder == "timm"
    ]
