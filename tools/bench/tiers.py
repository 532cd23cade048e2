"""Loading a region of DeferAndFuse from tier 2 of the compile cache, beside compiling it."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tools.bench.case import Case, Measurement, Plan, alternate, seconds_of

__all__ = ["CASES"]

_ENVIRONMENT = {"TORCH_TPU_DEFER_AND_FUSE": "1", "TORCH_TPU_INTERNAL_DETECT_REPEATED_OPS": "off"}
_LEAST_OPS = 100


def _pointwise(x: torch.Tensor) -> torch.Tensor:
    """The kindest code to a compiler: one fused loop."""
    for n in range(35):
        x = (x * 0.5 + n).tanh()
    return x


def _transformer(x: torch.Tensor) -> torch.Tensor:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 10, enable_nested_tensor=False).to("tpu")
    with torch.no_grad():
        result: torch.Tensor = model(x)
        return result


def _training(x: torch.Tensor) -> torch.Tensor:
    """Forward and backward, with every gradient."""
    layers = [(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(16)]
    model = nn.Sequential(*(m for pair in layers for m in (*pair, nn.GELU()))).to("tpu")
    gradients = torch.autograd.grad((model(x) ** 2).mean(), list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


_PROGRAMS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "pointwise": ("a pointwise chain", _pointwise),
    "transformer": ("a transformer's forward pass", _transformer),
    "training": ("forward and backward of 16 layers", _training),
}


def _region(name: str) -> tuple[bytes, int]:
    """The module of the program's one region, and how many ops it has."""
    from emutpu.backend.deferred.plan import recorded_region
    from emutpu.backend.deferred.queue import current_queue
    from emutpu.backend.deferred.values import Pending
    from emutpu.backend.storage import cell_of

    runs = torch.ones(8, 16, 64).to("tpu")
    torch.accelerator.synchronize()
    result = _PROGRAMS[name][1](runs)
    cell = cell_of(result)
    assert cell is not None
    value: Any = cell.value
    assert isinstance(value, Pending)
    assert value.batch is current_queue().batch
    region, nodes, _, _ = recorded_region(value.batch.state, [value.slot])
    if len(nodes) <= _LEAST_OPS:
        raise AssertionError(f"{name} has {len(nodes)} ops only")
    return region.build(), len(nodes)


def _load(plan: Plan, name: str) -> Measurement:
    from emutpu.backend.cache import COMPILED, CompileCache
    from emutpu.backend.cache_setup import TierSettings, make_tiers
    from emutpu.backend.keys import Key, Versions
    from emutpu.backend.pjrt import CompileOptions, Effort
    from emutpu.backend.runtime import runtime

    module, ops = _region(name)
    client = runtime().client
    options, key = CompileOptions(Effort.O2), Key.of(name, "1", "O2", Versions())

    with tempfile.TemporaryDirectory() as folder:
        settings = TierSettings(tier2="bench", shared_memory=Path(folder))

        def request() -> int:
            cache = CompileCache(lambda: make_tiers(settings, client, lambda: "0" * 16))
            return cache.request(key, lambda: client.compile(module, options), options).tier

        if request() != COMPILED or request() != 2:
            raise AssertionError("the second request does not come from tier 2")
        pairs = alternate(
            lambda: seconds_of(request, 1),
            lambda: seconds_of(lambda: client.compile(module, options), 1),
            plan.rounds(12),
            1e3,
        )
    return Measurement(pairs, {"ops": ops})


def _subject(name: str) -> Callable[[], Any]:
    from emutpu.backend.pjrt import CompileOptions, Effort
    from emutpu.backend.runtime import runtime

    module, _ = _region(name)
    executable = runtime().client.compile(module, CompileOptions(Effort.O2)).serialize()
    return lambda: runtime().client.deserialize(executable, CompileOptions(Effort.O2))


CASES = tuple(
    Case(
        f"tier_load_{name}",
        f"loading {what} of over 100 ops from tier 2",
        "compiling it",
        "ms",
        0.5,
        functools.partial(_load, name=name),
        functools.partial(_subject, name=name),
        environment=_ENVIRONMENT,
        calls=20,
    )
    for name, (what, _) in _PROGRAMS.items()
)
