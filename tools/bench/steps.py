"""Training steps in DeferAndFuse, beside a ``jax.jit`` of the step written by hand, and beside Strict."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tools.bench.case import Case, Measurement, Plan, alternate, seconds_of

__all__ = ["CASES", "ENVIRONMENT", "NATIVE", "RATE", "jax_step"]

_ROUNDS = 15
RATE = 1e-3
# Both sides compute matmuls in float32, in one native product, so that the arithmetic is the same.
ENVIRONMENT = {"EMUTPU_PRECISION": "highest"}
NATIVE = {"emutpu_native_highest": "true"}
_WHAT = {
    "mlp": "a two-layer MLP",
    "residual": "six residual blocks with layer norms",
    "convnet": "three convolutions",
    "transformer": "a two-layer transformer",
    "rnn": "24 steps of a recurrent network",
}


def _model(name: str) -> Any:
    from tools.bench.step_models import MODELS  # imports jax

    return next(model for model in MODELS if model.name == name)


def _ours(name: str, mode: str) -> Callable[[], float]:
    """A step of SGD with momentum in an eager mode, whose loss is read."""
    model = _model(name)
    arrays, data = model.make()
    parameters = [torch.from_numpy(array.copy()).to("tpu").requires_grad_() for array in arrays]
    batch = [torch.from_numpy(array.copy()).to("tpu") for array in data]
    optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9)

    def step() -> float:
        tpu: Any = torch.tpu  # type: ignore[attr-defined]  # made at activation
        with tpu.compiler.custom_compiler_options(NATIVE), tpu.set_eager_mode(tpu.EagerMode[mode]):
            loss = model.torch_loss(parameters, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return float(loss.item())

    return step


def jax_step(model: Any) -> Callable[[], float]:
    """The same step of a :class:`step_models.Model` as one ``jax.jit`` that gives its parameters up."""
    import jax
    import numpy as np

    arrays, data = model.make()
    batch = [jax.numpy.asarray(array) for array in data]

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(parameters: Any, momenta: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(model.jax_loss)(parameters, batch)
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        return [p - RATE * m for p, m in zip(parameters, momenta, strict=True)], momenta, loss

    state = [[jax.numpy.asarray(a) for a in arrays], [jax.numpy.asarray(np.zeros_like(a)) for a in arrays]]

    def step() -> float:
        *state[:], loss = update(*state, batch)
        return float(loss)

    return step


def _against_jit(plan: Plan, name: str) -> Measurement:
    ours, theirs = _ours(name, "DEFER_AND_FUSE"), jax_step(_model(name))
    losses = [[step() for _ in range(4)] for step in (ours, theirs)]
    if not all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(*losses, strict=True)):
        raise AssertionError(f"the two steps compute different losses: {losses}")
    pairs = alternate(lambda: seconds_of(ours, 2), lambda: seconds_of(theirs, 2), plan.rounds(_ROUNDS), 1e3)
    return Measurement(pairs, {"regions per step": _regions(ours)})


def _against_strict(plan: Plan, name: str) -> Measurement:
    ours, strict = _ours(name, "DEFER_AND_FUSE"), _ours(name, "DEFER_NEVER")
    for step in (ours, strict):
        for _ in range(4):
            step()
    return Measurement(alternate(lambda: seconds_of(ours, 2), lambda: seconds_of(strict, 2), plan.rounds(_ROUNDS), 1e3))


def _regions(step: Callable[[], Any]) -> float:
    from emutpu.backend.deferred.log import LOG

    before = LOG.launched
    step()
    return float(LOG.launched - before)


def _cases(name: str, what: str) -> tuple[Case, Case]:
    subject = functools.partial(_ours, name, "DEFER_AND_FUSE")
    shared: dict[str, Any] = {"environment": ENVIRONMENT, "calls": 20}
    title = f"training step of {what} in DeferAndFuse, loss read"
    return (
        Case(
            f"defer_{name}",
            title,
            "the step in jax.jit by hand",
            "ms",
            1.25,
            functools.partial(_against_jit, name=name),
            subject,
            **shared,
        ),
        Case(
            f"defer_{name}_strict",
            title,
            "Strict",
            "ms",
            1.0,
            functools.partial(_against_strict, name=name),
            subject,
            **shared,
        ),
    )


CASES = tuple(case for name, what in _WHAT.items() for case in _cases(name, what))
