"""Training steps: a small network whose loss is read every step, and the host's share of a convolutional one."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tools.bench.case import Bounded, Case, Measurement, Plan, alternate, repeated_add, seconds_of

__all__ = ["CASES"]

_BATCH = 32


def _mlp(width: int, device: str) -> Callable[[], float]:
    """One step of a two-layer network: forward, backward, SGD, and the loss on the host."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs, targets = (torch.randn(_BATCH, width).to(device) for _ in range(2))

    def step() -> float:
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _settled(step: Callable[[], Any], steps: int) -> float:
    """Seconds per step, after half as many that are not timed.

    OpenMP's threads go on spinning for some 20 ms after a CPU step, and XLA's that have slept wake up late. Either slows
    the next steps on the device, as it would in no program that uses one of the two; a pause trades one for the other.
    So the steps that are not timed should take longer than that.
    """
    for _ in range((steps + 1) // 2):
        step()
    return seconds_of(step, steps)


def _mlp_step(plan: Plan, width: int, steps: int, rounds: int) -> Measurement:
    device, host = _mlp(width, "tpu"), _mlp(width, "cpu")
    pairs = alternate(lambda: _settled(device, steps), lambda: _settled(host, steps), plan.rounds(rounds), 1e3)
    unsettled = alternate(lambda: seconds_of(device, 1), lambda: seconds_of(host, 1), plan.rounds(20))
    extra = {"launches per step": _launches(device), "ratio taking turns step by step": Measurement(unsettled).ratio}
    return Measurement(pairs, extra)


def _launches(step: Callable[[], Any]) -> float:
    return _launched(step)[0]


def _launched(step: Callable[[], Any]) -> tuple[float, float]:
    """Launches of a step, and how many distinct modules they are of."""
    from emutpu.backend.runtime import runtime

    step()
    tallies = list(runtime().meter.tallies)
    before = [tally.calls for tally in tallies]
    step()
    counts = [tally.calls - calls for tally, calls in zip(tallies, before, strict=True)]
    return float(sum(counts)), float(sum(count > 0 for count in counts))


class _Dispatched(TorchDispatchMode):
    """Counts every op that reaches a backend, views and allocations included, and those of them on device tensors.

    The others are an optimizer's, which keeps its step counts on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.total = 0
        self.on_device = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        self.total += 1
        self.on_device += any(isinstance(leaf, torch.Tensor) and leaf.device.type == "tpu" for leaf in leaves)
        return result


def _resnet18(device: str) -> Callable[[], Any]:
    """One step of timm's ResNet-18 on two small images, SGD with momentum. The loss is not read."""
    from tests.support import torchvision_schemas  # type: ignore[import-not-found]  # tests are not checked

    torchvision_schemas.declare()
    import timm

    model = timm.create_model("resnet18", num_classes=10).to(device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    images = torch.zeros(2, 3, 64, 64).to(device)
    labels = torch.zeros(2, dtype=torch.int64).to(device)

    def step() -> None:
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _bert(device: str) -> Callable[[], Any]:
    """One step of a two-layer BERT classifier on four sentences of 16 tokens, AdamW. The loss is not read.

    No padding mask: transformers would read whether it masks anything, and a dry run has no values.
    """
    from tests.support import torchvision_schemas  # tests are not checked

    torchvision_schemas.declare()
    import transformers

    config = transformers.BertConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    model: nn.Module = transformers.BertForSequenceClassification(config)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.ones(4, 16, dtype=torch.int64).to(device)
    labels = torch.zeros(4, dtype=torch.int64).to(device)

    def step() -> None:
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def _host(plan: Plan, make: Callable[[str], Callable[[], Any]]) -> Measurement:
    """Time per op that reaches a backend, views included; a launch may be a whole list of tensors.

    Beside a one-element add on the CPU, which tells how fast this machine runs right now. The same step on the CPU is
    PyTorch's and the program's own work and the arithmetic.
    """
    step, host = make("tpu"), torch.ones(1)
    for _ in range(2):
        step()
    launches, modules = _launched(step)
    with _Dispatched() as dispatched:
        step()
    total = float(dispatched.total)
    processor: list[float] = []

    def subject() -> float:
        started = time.process_time()
        elapsed = seconds_of(step, 1)
        processor.append((time.process_time() - started) / total * 1e6)
        return elapsed / total

    pairs = alternate(subject, lambda: repeated_add(host, 800), plan.rounds(100), 1e6)
    on_cpu = make("cpu")
    extra = {
        "launches per step": launches,
        "modules per step": modules,
        "ops per step": total,
        "of them on device tensors": float(dispatched.on_device),
        "us per op on device tensors": Measurement(pairs).value * total / dispatched.on_device,
        "us per launch": Measurement(pairs).value * total / launches,
        "us per launch, the step on the CPU with its arithmetic": _settled(on_cpu, 10) / launches * 1e6,
        "us per op, fastest round": min(value for value, _ in pairs),
        "us of processor time per op": statistics.median(processor),
    }
    return Measurement(pairs, extra)


def _mlp_case(width: int, bound: float, steps: int, rounds: int, calls: int) -> Case:
    return Case(
        f"mlp_step_{width}",
        f"training step of a 2-layer MLP of width {width}, loss read",
        "CPU eager",
        "ms",
        bound,
        functools.partial(_mlp_step, width=width, steps=steps, rounds=rounds),
        functools.partial(_mlp, width, "tpu"),
        calls=calls,
    )


CASES = (
    _mlp_case(256, 2.0, steps=100, rounds=20, calls=300),
    _mlp_case(2048, 1.2, steps=2, rounds=15, calls=10),
    Case(
        "resnet18_host",
        "host time per op of a ResNet-18 training step, nothing computed",
        "one-element add, CPU eager",
        "us",
        22.0,
        functools.partial(_host, make=_resnet18),
        functools.partial(_resnet18, "tpu"),
        Bounded.VALUE,
        {"EMUTPU_CLIENT": "dry_run"},
        calls=20,
    ),
    Case(
        "bert_host",
        "host time per op of a BERT training step, nothing computed",
        "one-element add, CPU eager",
        "us",
        22.0,
        functools.partial(_host, make=_bert),
        functools.partial(_bert, "tpu"),
        Bounded.VALUE,
        {"EMUTPU_CLIENT": "dry_run"},
        calls=40,
    ),
)
