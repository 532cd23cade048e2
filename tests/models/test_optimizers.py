"""Optimisers on a whole model: each implementation takes the steps that CPU takes, and compiles once."""

from __future__ import annotations

import pytest
import torch
from families import CASES
from training import assert_close, misses, move, train_step

OPTIMIZERS = {
    "adamw-foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True}),
    "adamw-loop": (torch.optim.AdamW, {"foreach": False}),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adam-fused": (torch.optim.Adam, {"fused": True, "weight_decay": 0.01}),
    "sgd-fused": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}
SMOKE = {"adamw-foreach", "adamw-fused"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SMOKE else [pytest.mark.nightly]) for n in OPTIMIZERS]
)
def test_steps_follow_the_cpu(name):
    """Parameters after four steps agree; the second step compiles nothing (SGD's momentum: the last)."""
    kind, options = OPTIMIZERS[name]
    # An eps well above rounding noise keeps gradients that vanish mathematically from becoming full steps.
    options = options if kind is torch.optim.SGD else options | {"eps": 1e-3}
    case = CASES["llama"].build()
    finals = []
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        for device in ("cpu", "tpu"):
            model, inputs = move(case, device)
            optimizer = kind(model.parameters(), lr=1e-3, **options)
            counts = []
            for _ in range(4):
                counts.append(misses())
                step = train_step(model, inputs, case, optimizer)
            finals.append(step.parameters)
            # Steps are numbered from 0; only SGD's momentum first runs in the second.
            assert counts[2 if kind is not torch.optim.SGD else 3] == misses()
            if kind is not torch.optim.SGD:
                assert counts[1] == counts[2], "the second step compiled"
    for key, expected in finals[0].items():
        assert_close(finals[1][key], expected, 1e-4, key)
