"""DeferAndFuse: what recording an op costs, and what finding a known region costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from tools.bench.case import Bounded, Case, Measurement, Plan, alternate, repeated_add

__all__ = ["CASES"]

_OPS = 1000
_HOST_CALLS = 400
_ENVIRONMENT = {"TORCH_TPU_DEFER_AND_FUSE": "1", "TORCH_TPU_INTERNAL_DETECT_REPEATED_OPS": "off"}


def _chain(x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The last of a thousand adds, and seconds per add."""
    y = x
    turns = range(_OPS)
    started = time.perf_counter()
    for _ in turns:
        y = y + x
    return y, (time.perf_counter() - started) / _OPS


def _done() -> None:
    from emutpu.backend.deferred.queue import current_queue

    current_queue().materialize("synchronize()")


def _recording(plan: Plan) -> Measurement:
    host = torch.ones(1)
    device = host.to("tpu")
    _chain(device)
    _done()

    def subject() -> float:
        _last, seconds = _chain(device)
        _done()
        return seconds

    return Measurement(alternate(subject, lambda: repeated_add(host, _HOST_CALLS), plan.rounds(120), 1e6))


def _lookup(plan: Plan) -> Measurement:
    """Until the region's launch, which is the baseline: from the last op to the launch's return, over the launch."""
    from emutpu.backend.deferred import queue

    device = torch.ones(1).to("tpu")
    started: list[float] = []
    run = queue._Run.run

    def noted(self: Any) -> None:
        started.append(time.perf_counter())
        run(self)

    def subject() -> float:
        _last, _ = _chain(device)
        begun = time.perf_counter()
        queue.current_queue().materialize("synchronize()")
        return started[-1] - begun

    def baseline() -> float:
        _last, _ = _chain(device)
        queue.current_queue().materialize("synchronize()")
        return time.perf_counter() - started[-1]

    queue._Run.run = noted  # type: ignore[method-assign]  # put back below
    try:
        return Measurement(alternate(subject, baseline, plan.rounds(120), 1e6))
    finally:
        queue._Run.run = run  # type: ignore[method-assign]  # timed in its place


def _subject() -> Callable[[], Any]:
    device = torch.ones(1).to("tpu")

    def chain() -> None:
        _last, _ = _chain(device)
        _done()

    return chain


CASES = (
    Case(
        "defer_record",
        "recording a one-element add in DeferAndFuse",
        "CPU eager",
        "us",
        10.0,
        _recording,
        _subject,
        bounded=Bounded.VALUE,
        environment=_ENVIRONMENT,
        calls=20,
    ),
    Case(
        "defer_lookup",
        "finding a known region of 1,000 ops after its last op",
        "its launch",
        "us",
        50.0,
        _lookup,
        _subject,
        bounded=Bounded.VALUE,
        environment=_ENVIRONMENT,
        calls=20,
    ),
)
