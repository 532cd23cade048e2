"""Single operations: what a launch costs, and what a compilation costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tools.bench.case import Case, Measurement, Plan, alternate, repeated_add, seconds_of

__all__ = ["CASES", "wait"]

# Rounds are shorter than a scheduler's time slice: on a busy machine most of them then run undisturbed.
_CALLS = 25
_HOST_CALLS = 400
_MEBIBYTE = 262_144  # float32 elements


def wait(tensor: torch.Tensor) -> None:
    """Wait for a tensor's value without reading it."""
    from emutpu.backend.storage import cell_of

    cell = cell_of(tensor)
    assert cell is not None
    assert cell.value is not None
    cell.value.block_until_ready()


def _add_1(plan: Plan) -> Measurement:
    host = torch.ones(1)
    device = host.to("tpu")

    def subject() -> float:
        elapsed = repeated_add(device, _CALLS)
        wait(device + device)
        return elapsed

    return Measurement(alternate(subject, lambda: repeated_add(host, _HOST_CALLS), plan.rounds(400), 1e6))


def _add_1_subject() -> Callable[[], Any]:
    device = torch.ones(1).to("tpu")
    return lambda: device + device


def _add_1mib(plan: Plan) -> Measurement:
    import jax

    host = torch.rand(_MEBIBYTE)
    device = host.to("tpu")
    array = jax.numpy.asarray(host.numpy())
    compiled = jax.jit(lambda a, b: a + b)

    def ours() -> None:
        wait(device + device)

    def theirs() -> None:
        compiled(array, array).block_until_ready()

    return Measurement(alternate(lambda: seconds_of(ours, 2), lambda: seconds_of(theirs, 2), plan.rounds(300), 1e6))


def _add_1mib_subject() -> Callable[[], Any]:
    device = torch.rand(_MEBIBYTE).to("tpu")
    return lambda: wait(device + device)


CASES = (
    Case("add_1", "one-element add, not waiting", "CPU eager", "us", 16.0, _add_1, _add_1_subject),
    Case("add_1mib", "1 MiB float32 add, waiting", "jax.jit", "us", 1.5, _add_1mib, _add_1mib_subject),
)
