"""Models of many families: a training step equals CPU's, stays finite at default precision, and compiles once."""

from __future__ import annotations

import time

import pytest
import torch
from families import CASES, FAMILIES, Family
from training import MOMENTUM, assert_same_step, compiled, misses, move, sgd, train_step

PARAMETERS = [
    pytest.param(family, id=family.name, marks=[] if family.smoke else [pytest.mark.nightly]) for family in FAMILIES
]


@pytest.mark.parametrize("family", PARAMETERS)
def test_a_training_step(family: Family, record_property, capsys):
    """Forward, gradients and updates at 'highest' equal CPU's; the second step compiles nothing but the ops of SGD's
    momentum, which PyTorch first issues there; the third nothing at all.
    """
    case = family.build()
    expected_model, expected_inputs = move(case, "cpu")
    expected = train_step(expected_model, expected_inputs, case, sgd(expected_model))
    started, before = time.perf_counter(), misses()
    model, inputs = move(case, "tpu")
    optimizer = sgd(model)
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        actual = train_step(model, inputs, case, optimizer)
        record_property("modules", misses() - before)
        with capsys.disabled():
            print(
                f"\n{family.name}: {misses() - before} modules compiled by the first step (others may have compiled some)"
            )
        assert_same_step(actual, expected)
        first = compiled()
        train_step(model, inputs, case, optimizer)
        assert set(compiled() - first) <= MOMENTUM, "the second step compiled more than its new momentum"
        steady = misses()
        train_step(model, inputs, case, optimizer)
        assert misses() == steady, "the third identical step compiled again"
    record_property("device_seconds", round(time.perf_counter() - started, 2))


@pytest.mark.parametrize("family", PARAMETERS)
def test_default_precision_stays_finite(family: Family):
    """Two steps at the device's own matmul precision give finite results, gradients and parameters."""
    case = family.build()
    model, inputs = move(case, "tpu")
    optimizer = sgd(model)
    train_step(model, inputs, case, optimizer, read=False)
    step = train_step(model, inputs, case, optimizer)
    for tensor in (*step.results, step.loss, *step.gradients.values(), *step.parameters.values()):
        assert tensor.isfinite().all()


@pytest.mark.nightly
def test_experts_that_take_other_tokens_compile_nothing():
    """Routing that changes with the weights: how many tokens an expert takes is an input of the grouped product."""
    case = CASES["mixtral"].build()
    model, inputs = move(case, "tpu")
    taken = []
    for module in model.modules():
        if type(module).__name__ == "MixtralTopKRouter":
            module.register_forward_hook(
                lambda _, __, out: taken.append(out[-1].flatten().bincount(minlength=4).tolist())
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    counts = []
    for _ in range(3):
        train_step(model, inputs, case, optimizer)
        counts.append(misses())
    layers = len(taken) // 3
    assert layers
    assert taken[:layers] != taken[layers : 2 * layers] != taken[2 * layers :]
    assert counts[0] == counts[1] == counts[2]
