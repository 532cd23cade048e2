"""What a worker makes of a program beside the gates: that the compiled modes compile."""

from __future__ import annotations

import torch

from emutpu.conformance import gates, worker
from emutpu.conformance.gates import Outcome, Report


class Several(torch.nn.Module):
    """More ops than one, which would run as an op."""

    def __init__(self, size):
        super().__init__()
        self.inner = torch.nn.Linear(size, size)

    def forward(self, x):
        return torch.tanh(self.inner(x).exp()) + x


def passes(run):
    """An examination in which the program is ``run``, and passes."""

    def examine(program, mode, fallbacks):
        run()
        return Report(program.name, mode, Outcome.PASS, tier1=True, tier2=True)

    return examine


def test_a_program_that_ran_eagerly_is_no_pass_of_compile(monkeypatch):
    """torch.compile leaves to eager execution what it gives up, and says so nowhere."""
    monkeypatch.setattr(gates, "examine", passes(lambda: torch.ones(3).to("tpu").sum().item()))
    answer = worker._answer("timm/resnet18", "compile")
    assert (answer["outcome"], answer["tier1"], answer["stage"]) == ("crash", False, "compile")
    assert "nothing of the program ran compiled" in answer["error"]
    assert worker._answer("timm/resnet18", "strict")["outcome"] == "pass"


def test_earlier_programs_do_not_use_up_the_limit_of_recompilations(monkeypatch):
    """All compiled modules enter through one frame, and Dynamo compiles a frame anew eight times only."""
    sizes = iter(range(2, 30))

    def compiled():
        size = next(sizes)
        model = Several(size).to("tpu")
        model.compile(backend="tpu")
        model(torch.ones(2, size).to("tpu")).cpu()

    monkeypatch.setattr(gates, "examine", passes(compiled))
    told = [worker._answer("timm/resnet18", "compile") for _ in range(torch._dynamo.config.recompile_limit + 2)]
    assert {answer["error"] for answer in told} == {None}
    assert all(answer["region_reasons"]["compile_mode_execution"] for answer in told)
