"""The bounded-dynamism tier passes what has one executable for all lengths, and nothing else."""

import copy

import pytest
import torch
from torch import nn

from emutpu.conformance import bounded, building, tiers
from emutpu.conformance.building import Built, NoRecipe
from emutpu.conformance.gates import Outcome
from emutpu.conformance.inputs import LENGTH
from emutpu.conformance.manifest import Program

PROGRAM = Program("toy/x", "toy", "x", "causal-lm", "none", {}, "none", 1.4, 0, "toy/x", True, False, None, "pass")


class Words(nn.Module):
    """Embeddings and a mixing of earlier positions, with something after it."""

    def __init__(self, after=lambda y: y):
        super().__init__()
        self.table = nn.Embedding(32, 8)
        self.head = nn.Linear(8, 32)
        self.after = after

    def forward(self, input_ids, use_cache=False):
        return self.after(self.head(self.table(input_ids).cumsum(1)))


def examine(monkeypatch, model, counts=(0, 1, 1)):
    """The report of a toy; ``counts`` are the executables before, with the first graph, and after."""

    def build(program):
        if model is None:
            raise NoRecipe("nobody wrote one")
        tokens = torch.randint(0, 32, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        return Built(copy.deepcopy(model), {"input_ids": tokens, "use_cache": False}, {})

    monkeypatch.setitem(building._BUILDERS, "toy", build)
    told = iter(counts)
    return bounded.examine(PROGRAM, fallbacks=lambda: 0, launched=lambda: next(told))


def test_one_executable_for_all_lengths(monkeypatch):
    """And the CPU's answers."""
    report = examine(monkeypatch, Words())
    assert report.outcome == Outcome.PASS, report.error
    assert (report.tier1, report.tier2, report.executables, report.stage) == (True, True, 1, None)
    assert report.logit_error < 1e-6


def test_too_many_executables(monkeypatch):
    """One for each length is what the bound should spare."""
    report = examine(monkeypatch, Words(), (0, 1, len(bounded.LENGTHS)))
    assert (report.outcome, report.tier1, report.tier2) == (Outcome.MISMATCH, True, False)
    assert "4 lengths took 4 executables" in report.error


def test_constants_of_the_trace_are_no_executables_of_the_lengths(monkeypatch):
    """``torch.tensor`` in a forward is launched by PyTorch while it traces."""
    report = examine(monkeypatch, Words(), (5, 8, 8))
    assert (report.outcome, report.executables) == (Outcome.PASS, 1)


def test_a_wrong_answer(monkeypatch):
    """One part in a thousand is a mismatch that names the length, and tier 1 is passed."""
    report = examine(monkeypatch, Words(lambda y: y * 1.001 if y.device.type == "tpu" else y))
    assert (report.outcome, report.tier1, report.tier2) == (Outcome.MISMATCH, True, False)
    assert "relative error 0.001 at length" in report.error


def test_refused_dynamism_is_told(monkeypatch):
    """An op that wants static dimensions has no rule: a crash with the compiler's words."""
    report = examine(monkeypatch, Words(lambda y: torch.fft.fft(y, dim=1).real))
    assert report.outcome in {Outcome.CRASH, Outcome.UNSUPPORTED}
    assert "dynamic shapes" in report.error


def test_what_pytorch_refuses_everywhere(monkeypatch):
    """A model that is written for one length has no bounded graph on the CPU either."""
    report = examine(monkeypatch, Words(lambda y: torch.stack([y[:, n] for n in range(y.shape[1])])))
    assert report.outcome == Outcome.CORPUS
    assert "fails on the CPU too: ConstraintViolationError" in report.error


def test_what_the_cpu_cannot_is_no_finding(monkeypatch):
    """A corpus bug, or not run."""

    def broken(y):
        raise ValueError("broken")

    assert examine(monkeypatch, Words(broken)).outcome == Outcome.CORPUS
    assert examine(monkeypatch, None).outcome == Outcome.NOT_RUN


@pytest.mark.parametrize(
    ("mode", "task", "runs"), [("bounded", "causal-lm", True), ("bounded", "base", False), ("strict", "base", True)]
)
def test_only_causal_language_models_are_bounded(mode, task, runs):
    """Other programs are no part of such a run."""
    import dataclasses

    assert tiers.applies(dataclasses.replace(PROGRAM, task=task), mode) is runs
