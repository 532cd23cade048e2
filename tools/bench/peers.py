"""Beside other ways of running PyTorch on JAX, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tools.bench.case import Case, Measurement, Plan, alternate, repeated_add
from tools.bench.launches import wait
from tools.layout import ROOT

__all__ = ["CASES"]

_CALLS = 25


@contextmanager
def _torchax() -> Iterator[Callable[[], float]]:
    """A function that makes the peer add, and gives the peer's seconds per call. The peer sleeps meanwhile."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", "tools.bench.torchax_peer"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as peer:
        assert peer.stdin is not None
        assert peer.stdout is not None
        requests, answers = peer.stdin, peer.stdout
        if answers.readline().strip() != "ready":
            raise RuntimeError("torchax did not start; its own message stands above")

        def ask() -> float:
            requests.write(f"{_CALLS}\n")
            requests.flush()
            return float(answers.readline())

        yield ask
        requests.close()


def _add_1(plan: Plan) -> Measurement:
    device = torch.ones(1).to("tpu")

    def subject() -> float:
        elapsed = repeated_add(device, _CALLS)
        wait(device + device)
        return elapsed

    with _torchax() as peer:
        return Measurement(alternate(subject, peer, plan.rounds(200), 1e6))


def _add_1_subject() -> Callable[[], Any]:
    device = torch.ones(1).to("tpu")
    return lambda: device + device


CASES = (Case("add_1_torchax", "one-element add, not waiting", "torchax eager", "us", 1 / 6, _add_1, _add_1_subject),)
