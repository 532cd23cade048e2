"""Host to device and back, beside one copy into fresh memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tools.bench.case import Case, Measurement, Plan, alternate
from tools.bench.launches import wait

__all__ = ["CASES"]

_ELEMENTS = 16 * 2**20  # float32: 64 MiB
_ROUNDS = 30


def _once(function: Callable[[], Any]) -> float:
    """Seconds of one call. Its result is freed after the clock has stopped."""
    started = time.perf_counter()
    kept = function()
    elapsed = time.perf_counter() - started
    del kept
    return elapsed


def _arrived(host: torch.Tensor) -> torch.Tensor:
    device = host.to("tpu")
    wait(device)
    return device


def _against_numpy(subject: Callable[[], Any], host: torch.Tensor, plan: Plan) -> Measurement:
    array = host.numpy()
    return Measurement(
        alternate(lambda: _once(subject), lambda: _once(lambda: np.copy(array)), plan.rounds(_ROUNDS), 1e3)
    )


def _h2d(plan: Plan) -> Measurement:
    host = torch.rand(_ELEMENTS)
    return _against_numpy(lambda: _arrived(host), host, plan)


def _d2h(plan: Plan) -> Measurement:
    host = torch.rand(_ELEMENTS)
    device = _arrived(host)
    return _against_numpy(device.cpu, host, plan)


def _h2d_subject() -> Callable[[], Any]:
    host = torch.rand(_ELEMENTS)
    return lambda: _arrived(host)


def _d2h_subject() -> Callable[[], Any]:
    return _arrived(torch.rand(_ELEMENTS)).cpu


CASES = (
    Case("h2d_64mib", "64 MiB to the device, waiting", "numpy.copy", "ms", 1.2, _h2d, _h2d_subject, calls=20),
    Case("d2h_64mib", "64 MiB from the device", "numpy.copy", "ms", 1.2, _d2h, _d2h_subject, calls=20),
)
