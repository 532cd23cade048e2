"""What a program takes at full size: weights and forward, or the weights alone with the reason."""

import pytest
import torch
from torch import nn

from emutpu.conformance import full_size
from emutpu.conformance.full_size import _Whole
from emutpu.conformance.manifest import Program

PROGRAM = Program("toy/x", "toy", "x", "toy", "none", {}, "none", 1.4, 0, "toy/x", True, False, None, "pass")


class Toy(nn.Module):
    """Two layers; the second may share the first one's weight."""

    def __init__(self, tied=False, broken=False):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.tied, self.broken = tied, broken

    def tie_weights(self):
        if self.tied:
            self.second.weight = self.first.weight

    def forward(self, x):
        assert x.shape == (1, 64)
        if self.broken:
            raise ValueError("needs values\nmore")
        return self.second(self.first(x))


def answer(monkeypatch, build, peak=lambda: 70_000):
    """Of a toy."""
    monkeypatch.setitem(full_size._BUILDERS, "toy", lambda program: _Whole(build(), lambda: {"x": torch.zeros(2, 64)}))
    return full_size.answer(PROGRAM, peak)


def test_forward_at_batch_1(monkeypatch):
    """The most that was alive, and the parameters; inputs are cut to one example."""
    found = answer(monkeypatch, Toy)
    assert (found["outcome"], found["mode"]) == ("pass", "full-size")
    told = found["estimate"]
    assert (told["parameters"], told["weight_bytes"], told["bytes"]) == (8192, 32768, 70_000)
    assert (told["forward"], told["note"], told["dtype"]) == (True, None, "float32")


def test_shared_weights_count_once(monkeypatch):
    """A model without values has to be tied again."""
    assert answer(monkeypatch, lambda: Toy(tied=True))["estimate"]["parameters"] == 4096


def test_weights_alone(monkeypatch):
    """Of a forward that cannot run without values, with its error's first line."""
    told = answer(monkeypatch, lambda: Toy(broken=True))["estimate"]
    assert (told["forward"], told["bytes"]) == (False, 32768)
    assert told["note"] == "weights alone: ValueError: needs values"


def test_a_model_that_reads_values_while_it_is_made(monkeypatch):
    """It is made with them where no model is too large for that."""

    def build():
        torch.ones(2).sum().item()
        return Toy()

    assert answer(monkeypatch, build)["outcome"] == "corpus bug"
    monkeypatch.setattr(full_size, "_LIGHT", {"toy"})
    assert answer(monkeypatch, build)["outcome"] == "pass"


def test_no_full_size(monkeypatch):
    """Another builder, or a library that cannot make its own default."""
    unknown = full_size.answer(PROGRAM, lambda: 0)
    assert (unknown["outcome"], unknown["estimate"]) == ("not run", None)
    assert "no full size is known of programs of toy" in unknown["error"]

    def broken():
        raise TypeError("no default")

    assert answer(monkeypatch, broken)["error"] == "TypeError: no default"
    assert answer(monkeypatch, broken)["outcome"] == "corpus bug"


@pytest.mark.parametrize("program", ["transformers/LlamaForCausalLM", "transformers/MixtralForCausalLM"])
def test_estimates_come_with_the_package(program, tmp_path):
    """Of the programs that most models are."""
    from emutpu.conformance import estimates

    found = estimates.memory(tmp_path, 1).estimates[program]
    assert found["forward"]
    assert found["bytes"] >= found["weight_bytes"] == 2 * found["parameters"] > 10**10
