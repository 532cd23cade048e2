"""Signals and finalizers that come in the middle of recording, planning and launching."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from emutpu.backend.deferred import queue
from emutpu.backend.deferred.values import Batch, Pending
from emutpu.backend.runtime import runtime
from emutpu.backend.wrapped import WrappedClient

OPS = 12


@pytest.fixture(autouse=True)
def _no_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only reads materialise."""
    monkeypatch.setattr(queue.current_queue(), "repeats", queue.Repeats.OFF)


@contextmanager
def alarms(handler: Callable[[], None], after: float, interval: float = 0.0) -> Iterator[None]:
    """``handler`` runs on this thread at any bytecode ``after`` seconds, and then every ``interval`` if that is not 0."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, after, interval)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def chain(x: torch.Tensor) -> list[torch.Tensor]:
    """Values that differ in every element, so that a mixed-up number shows."""
    values = [x]
    for n in range(OPS):
        values.append(values[-1] * 0.5 + n)
    return values


def test_a_handler_that_computes() -> None:
    """What a signal's handler records and reads is right, and so is what it interrupted."""
    x = torch.arange(4.0)
    expected, device = torch.stack(chain(x)), x.to("tpu")
    torch.stack(chain(device)).cpu()
    own = device + 1
    read: list[list[float]] = []
    refused: list[str] = []
    turn = itertools.count()

    def handler() -> None:
        nonlocal own
        try:
            own = own * 0.5 + 1
            if next(turn) % 7 == 0:
                read.append(own.tolist())
        except RuntimeError as error:
            refused.append(str(error))

    with alarms(handler, 0.0003, 0.0003):
        found = [torch.stack(chain(device)).cpu() for _ in range(8)]
    assert all(torch.equal(values, expected) for values in found)
    assert all(1 <= value <= 4 for values in read for value in values)
    assert len(read) > 3
    assert all("is being computed by this thread" in text for text in refused)


# An interrupt that comes inside of a __del__ is told, and ends there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_leave_the_list_consistent() -> None:
    """KeyboardInterrupt at any bytecode of recording: what was recorded before and what comes after is right."""
    x = torch.arange(4.0)
    expected, device = chain(x), x.to("tpu")
    lost = 0

    def handler() -> None:
        raise KeyboardInterrupt

    for turn in range(200):
        kept: list[torch.Tensor] = []
        try:
            with alarms(handler, 0.00005 + 0.000005 * (turn % 61)):
                value = device
                for n in range(OPS):
                    kept.append(value)
                    value = value * 0.5 + n
        except KeyboardInterrupt:
            lost += 1
        if turn % 10 == 0:
            later = chain(device)[-1]
            assert all(torch.equal(v.cpu(), e) for v, e in zip(kept, expected, strict=False))
            assert torch.equal(later.cpu(), expected[-1])
        del kept
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # an interrupt may have kept it from being put back
    assert lost > 50


class _Finalized:
    """A member of a cycle whose finalizer uses the device."""

    def __init__(self, value: torch.Tensor, results: list[Any]) -> None:
        self.value, self.results, self.itself = value, results, self

    def __del__(self) -> None:
        self.results.append((self.value * 3 - 1).tolist())


def test_finalizers_in_the_middle_of_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection inside of the recorder, of an object whose finalizer records and reads, mixes nothing up."""
    x = torch.arange(4.0)
    device = x.to("tpu")
    results: list[Any] = []
    made = Pending.__init__
    added = Batch.add_input
    call = itertools.count()

    def collecting(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            found = function(*arguments)
            if gc.isenabled() and next(call) % 7 == 0:  # what was disturbed is tried again
                gc.disable()
                _Finalized(device, results)
                gc.collect()
                gc.enable()
            return found

        return run

    monkeypatch.setattr(Pending, "__init__", collecting(made))
    monkeypatch.setattr(Batch, "add_input", collecting(added))
    values = chain(device)
    found = [value.cpu() for value in values]
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(found, chain(x), strict=True))
    assert results == [[-1.0, 2.0, 5.0, 8.0]] * len(results)
    assert len(results) >= 2


# What the finalizer cannot read is told, and ends there.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(120)
def test_finalizers_on_the_thread_that_compiles() -> None:
    """A finalizer there uses the device while its caller holds the list and waits: nobody waits for ever."""
    x = torch.arange(4.0)
    device = x.to("tpu")
    results: list[Any] = []
    collected: list[str] = []

    class Collecting(WrappedClient):
        def compile(self, module: bytes, options: Any) -> Any:
            gc.collect()
            collected.append(threading.current_thread().name)
            return super().compile(module, options)

    real = runtime().client
    runtime().replace_client(Collecting(real))
    gc.disable()
    try:
        pending = device + 1
        _Finalized(device, results)  # a value that is there
        _Finalized(pending, results)  # a value that the list computes
        assert (pending * 7).tolist() == [7, 14, 21, 28]
    finally:
        gc.enable()
        runtime().replace_client(real)
    assert results == [[-1.0, 2.0, 5.0, 8.0]]
    assert collected[0].startswith("tt_compile")
    assert pending.tolist() == [1, 2, 3, 4]


def test_an_interrupted_plan_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value whose materialisation was interrupted before its launch names the interruption at every read."""

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    value = torch.ones(2).to("tpu") * 2
    monkeypatch.setattr(queue, "make_plan", interrupted)
    with pytest.raises(KeyboardInterrupt):
        (value + 7).cpu()
    monkeypatch.undo()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"(?s)KeyboardInterrupt interrupted.*\.cpu\(\) at .*test_interruptions"):
            value.cpu()
    assert (torch.ones(2).to("tpu") + 1).tolist() == [2, 2]
