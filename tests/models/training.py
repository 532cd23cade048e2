"""A training step on a device, and the comparison of two devices."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any

import torch
from families import Case, float_results
from torch import Tensor, nn

from emutpu.backend.kernels import _kernels
from emutpu.backend.registration import load
from emutpu.backend.runtime import runtime

__all__ = ["MOMENTUM", "Step", "assert_close", "assert_same_step", "compiled", "misses", "move", "sgd", "train_step"]

LOGITS = 1e-4
GRADIENTS = 1e-3
# Gradients that vanish mathematically (of a key's bias, say) are rounding noise: they are held against the largest one.
NOISE = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a training step leaves, on the CPU: results, loss, gradients and updated parameters by name."""

    results: list[Tensor]
    loss: Tensor
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def move(case: Case, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """A copy of the model and its inputs on ``device``."""
    model = copy.deepcopy(case.model).to(device)
    return model, {name: value.to(device) for name, value in case.inputs.items()}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Linear in the gradients, unlike Adam, so that parameters can be compared after a step."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_step(
    model: nn.Module, inputs: dict[str, Any], case: Case, optimizer: torch.optim.Optimizer, *, read: bool = True
) -> Step | None:
    """Forward, backward, update; with ``read`` everything is brought to the CPU."""
    outputs = model(**inputs)
    loss = case.loss(outputs)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if not read:
        return None
    named = list(model.named_parameters())
    return Step(
        [result.detach().cpu() for result in float_results(outputs)],
        loss.detach().cpu(),
        {name: p.grad.cpu() for name, p in named if p.grad is not None},
        {name: p.detach().cpu() for name, p in named},
    )


# PyTorch's SGD makes its momentum by cloning the first gradient; only from the second step on it scales and adds.
MOMENTUM = frozenset({"_foreach_mul_.Scalar", "_foreach_add_.List"})


def compiled() -> collections.Counter[str]:
    """Loaded executables by overload."""
    load()
    return collections.Counter({name: len(kernel.entries) for name, kernel in _kernels.items() if kernel.entries})


def misses() -> int:
    """Modules compiled so far."""
    return runtime().cache.misses


def assert_close(actual: Tensor, expected: Tensor, relative: float, what: str, *, floor: float = 0.0) -> None:
    """The largest difference is at most ``relative`` times the largest expected magnitude, plus ``floor``."""
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, expected {expected.dtype}"
    if not expected.numel():
        return
    difference = (actual.double() - expected.double()).abs().max().item()
    bound = relative * expected.double().abs().max().item() + floor
    assert difference <= bound, f"{what}: differs by {difference:.3g}, allowed {bound:.3g}"


def assert_same_step(actual: Step, expected: Step) -> None:
    """Results, loss, gradients of all parameters and the updated parameters agree."""
    assert len(actual.results) == len(expected.results)
    for index, (a, e) in enumerate(zip(actual.results, expected.results, strict=True)):
        assert_close(a, e, LOGITS, f"result {index}")
    assert_close(actual.loss, expected.loss, LOGITS, "loss")
    assert actual.gradients.keys() == expected.gradients.keys()
    assert expected.gradients
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        assert_close(actual.gradients[name], gradient, GRADIENTS, f"gradient of {name}", floor=NOISE * largest)
    for name, parameter in expected.parameters.items():
        assert_close(actual.parameters[name], parameter, GRADIENTS, f"{name} after the step", floor=NOISE * largest)
