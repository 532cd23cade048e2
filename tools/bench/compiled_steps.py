"""Compiled training steps of a BERT-like encoder and ResNet-18, beside ``jax.jit`` by hand and beside CPU eager."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tools.bench.case import Case, Measurement, Plan, alternate, seconds_of
from tools.bench.steps import ENVIRONMENT, NATIVE, RATE, jax_step

__all__ = ["CASES"]

_ROUNDS = 12
_BOUNDS = {"bert": 1.0, "resnet18": 1.6}  # of CPU eager
_WHAT = {"bert": "a BERT-like encoder", "resnet18": "ResNet-18"}


def _model(name: str) -> Any:
    from tools.bench.compiled_models import MODELS  # imports jax

    return next(model for model in MODELS if model.name == name)


def _steps(name: str, device: str) -> Callable[[], float]:
    """A step of SGD with momentum whose loss is read: compiled on the device, eager on the CPU."""
    model = _model(name)
    arrays, data = model.make()
    parameters = [torch.from_numpy(array.copy()).to(device).requires_grad_() for array in arrays]
    batch = [torch.from_numpy(array.copy()).to(device) for array in data]
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9)
    loss_of, update = model.torch_loss, optimizer.step
    if device == "tpu":
        loss_of, update = torch.compile(loss_of), torch.compile(update)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(parameters, batch)
        loss.backward()
        update()
        return float(loss.item())

    if device == "cpu":
        return step

    def native() -> float:
        tpu: Any = torch.tpu  # type: ignore[attr-defined]  # made at activation
        with tpu.compiler.custom_compiler_options(NATIVE):
            return step()

    return native


def _beside(plan: Plan, name: str, *, jax: bool) -> Measurement:
    ours = _steps(name, "tpu")
    theirs = jax_step(_model(name)) if jax else _steps(name, "cpu")
    losses = [[step() for _ in range(4)] for step in (ours, theirs)]
    if not all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(*losses, strict=True)):
        raise AssertionError(f"the two steps compute different losses: {losses}")
    return Measurement(alternate(lambda: seconds_of(ours, 2), lambda: seconds_of(theirs, 2), plan.rounds(_ROUNDS), 1e3))


def _cases(name: str) -> tuple[Case, Case]:
    subject = functools.partial(_steps, name, "tpu")
    shared: dict[str, Any] = {"environment": ENVIRONMENT, "calls": 20}
    title = f"compiled training step of {_WHAT[name]}, loss read"
    return (
        Case(
            f"compiled_{name}_jax",
            title,
            "jax.jit, written by hand",
            "ms",
            1.25,
            functools.partial(_beside, name=name, jax=True),
            subject,
            **shared,
        ),
        Case(
            f"compiled_{name}",
            title,
            "CPU eager",
            "ms",
            _BOUNDS[name],
            functools.partial(_beside, name=name, jax=False),
            subject,
            **shared,
        ),
    )


CASES = tuple(case for name in _BOUNDS for case in _cases(name))
