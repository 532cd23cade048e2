"""Random programs: DEFER_AND_FUSE equals Strict bit for bit on the interpreter, and CPU within rounding."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emutpu.backend.options import EagerMode, Precision, override
from emutpu.backend.runtime import runtime
from emutpu.simulator.clients import make_client
from emutpu.simulator.topology import single_chip

Step = Callable[[dict[str, torch.Tensor]], None]


def _raise(v: dict[str, torch.Tensor]) -> None:
    with pytest.raises(RuntimeError):
        v["a"] + torch.ones(7, device=v["a"].device)


def _branch(v: dict[str, torch.Tensor]) -> None:
    v["b"] = v["a"] * 2 if v["a"].sum() > 0 else v["a"] - 1


def _backward(v: dict[str, torch.Tensor]) -> None:
    x = v["a"].detach().clone().requires_grad_()
    ((x * v["b"].detach()).tanh() + x[1:2]).square().sum().backward()
    v["b"] = x.grad


def _swap(v: dict[str, torch.Tensor]) -> None:
    v["a"], v["b"] = v["b"], v["a"]


STEPS: tuple[Step, ...] = (
    lambda v: v.update(a=v["a"] * 0.5 + v["b"]),
    lambda v: v.update(b=v["a"].tanh()),
    lambda v: v.update(b=v["a"].t().contiguous()),
    lambda v: v.update(c=v["a"][1:]),
    lambda v: v["a"].mul_(0.75),
    lambda v: v["a"][0].add_(1),
    lambda v: v["b"].t()[1].copy_(v["a"][2]),
    lambda v: v["a"].view(-1)[2:5].fill_(0.25),
    lambda v: v["c"].sub_(0.5),
    lambda v: v["a"].diagonal().add_(v["b"][:, 1]),
    lambda v: v.update(a=torch.where(v["a"] > 0, v["a"], v["b"])),
    lambda v: v.pop("d", None),
    lambda v: v.update(d=v["a"].cos()),
    lambda v: v["a"].cpu(),
    lambda v: v["b"].sum().item(),
    _branch,
    _backward,
    _raise,
    _swap,
)

# A draw is the same in all modes, but not the CPU's.
DRAWS: tuple[Step, ...] = (
    lambda v: v.update(b=torch.rand_like(v["b"])),
    lambda v: v["a"][1].uniform_(),
    lambda v: v.update(a=torch.nn.functional.dropout(v["a"], 0.5)),
    lambda v: torch.manual_seed(5),
)


def run(steps: list[int], device: str) -> list[torch.Tensor]:
    """All variables at the end, on the host."""
    start = torch.arange(9, dtype=torch.float32).reshape(3, 3) / 8 - 0.5
    values = {"a": start.to(device), "b": start.flip(0).to(device), "c": torch.full((2, 3), 0.5, device=device)}
    torch.manual_seed(1)
    for step in steps:
        (*STEPS, *DRAWS)[step](values)
    return [values[name].detach().cpu() for name in sorted(values)]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Every launch of this module's programs runs on the reference interpreter."""
    before = runtime().client
    runtime().replace_client(make_client("interpreter", single_chip("v5e")))
    yield
    runtime().replace_client(before)


PROGRAMS = st.lists(st.integers(0, len(STEPS) + len(DRAWS) - 1), max_size=14)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS)
def test_modes_agree(interpreter: None, steps: list[int]) -> None:
    """Strict, Debug and DEFER_AND_FUSE bit for bit; CPU, unless numbers are drawn, within float32's rounding."""
    agree(steps)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(PROGRAMS)
def test_modes_agree_at_night(interpreter: None, steps: list[int]) -> None:
    """A thousand programs."""
    agree(steps)


def agree(steps: list[int]) -> None:
    """Run the program everywhere."""
    with override(precision=Precision.HIGHEST):
        deferred = run(steps, "tpu")
        with override(mode=EagerMode.DEFER_NEVER):
            strict = run(steps, "tpu")
        with override(mode=EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING):
            debug = run(steps, "tpu")
    for ours, theirs, blocking in zip(deferred, strict, debug, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(ours, blocking)
    if all(step < len(STEPS) for step in steps):
        for ours, oracle in zip(deferred, run(steps, "cpu"), strict=True):
            assert torch.allclose(ours, oracle, atol=1e-5, rtol=1e-5)
