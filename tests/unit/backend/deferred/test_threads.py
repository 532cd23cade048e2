"""Threads that share streams, while the cache is cleared beneath them."""

from __future__ import annotations

import io
import sys
import threading
import time
import traceback
from collections.abc import Callable

import pytest
import torch

from emutpu.backend.deferred import queue
from emutpu.backend.options import EagerMode, override
from emutpu.backend.runtime import runtime
from emutpu.backend.streams import set_stream

THREADS = 8
STALL_SECONDS = 120.0
"""Longest time without any region done: a compilation takes some 50 ms, on a machine that others use too."""


class Crew:
    """Threads with a job each. :meth:`watch` waits while they get on, and says why when they do not."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.problems: list[str] = []
        self.threads: list[threading.Thread] = []

    def add(self, name: str, job: Callable[[Callable[[], None]], None]) -> None:
        """Start ``job`` on a thread; it calls what it is given for every unit of work that it has done."""
        self.done[name] = 0

        def step() -> None:
            self.done[name] += 1

        def run() -> None:
            try:
                job(step)
            except Exception:  # noqa: BLE001  # told with its stack, in the assertion
                self.problems.append(f"{name}, after {self.done[name]}:\n{traceback.format_exc()}")

        thread = threading.Thread(target=run, name=name, daemon=True)
        self.threads.append(thread)
        thread.start()

    def watch(self, stall: float = STALL_SECONDS) -> None:
        """Wait for all. Raises AssertionError with every stack if nobody gets anything done for ``stall`` seconds."""
        moved, seen = time.monotonic(), dict(self.done)
        while any(thread.is_alive() for thread in self.threads):
            time.sleep(0.05)
            if seen != self.done:
                moved, seen = time.monotonic(), dict(self.done)
            if time.monotonic() - moved > stall:
                raise AssertionError(f"nothing happened for {stall:g} s\n{self.report()}")

    def report(self) -> str:
        """What everybody did, what they failed with, and where they are."""
        text = io.StringIO()
        cache = runtime().cache
        print(f"done: {self.done}; compiled: {cache.misses} in {cache.seconds:.1f} s", file=text)
        print(f"in flight: {[str(key) for key in list(cache._flights)]}", file=text)
        print(f"locks: {[(stream, each.lock) for stream, each in list(queue._queues.items())]}", file=text)
        print(*self.problems, sep="\n", file=text)
        frames = sys._current_frames()
        for thread in self.threads:
            if thread.is_alive():
                print(f"{thread.name} ({thread.ident}) is at", file=text)
                traceback.print_stack(frames.get(thread.ident or 0), file=text)
        return text.getvalue()


def test_the_watchdog_says_why() -> None:
    """Who hangs and who failed is in the message, with the line."""
    crew, release = Crew(), threading.Event()
    crew.add("hanging", lambda _step: release.wait() and None)
    crew.add("failing", lambda step: (step(), {}["key"])[0])
    try:
        with pytest.raises(
            AssertionError, match=r"(?s)nothing happened for 0\.5 s.*'failing': 1.*KeyError.*hanging"
        ) as told:
            crew.watch(stall=0.5)
        assert "release.wait()" in str(told.value)
    finally:
        release.set()


def _regions(number: int, regions: int, stream: torch.Stream | None, step: Callable[[], None]) -> None:
    """Two programs in turn, each read; values shared by all threads among them."""
    if stream is not None:
        set_stream(stream)
    with override(mode=EagerMode.DEFER_AND_FUSE):
        x = torch.full((4,), float(number), device="tpu")
        total = torch.zeros((), device="tpu")
        for turn in range(regions):
            y = (x * 2 + turn) if turn % 2 else (x - turn).abs()
            expected = 2.0 * number + turn if turn % 2 else abs(number - turn)
            total.add_(y[1])
            found = y.sum().item()
            if found != 4 * expected:
                raise AssertionError(f"turn {turn} of thread {number}: {found}, expected {4 * expected}")
            step()
        wanted = sum(2.0 * number + t if t % 2 else abs(number - t) for t in range(regions))
        if total.item() != wanted:
            raise AssertionError(f"thread {number} added up {total.item()}, expected {wanted}")


@pytest.mark.filterwarnings("ignore:.*Stream is experimental")  # TorchTPU's own warning
@pytest.mark.parametrize(
    "regions",
    [60, pytest.param(1000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])],
)
def test_threads_defer_while_the_cache_is_cleared(regions: int) -> None:
    """Eight threads, half of them on one stream, record and read at once: every value is right, and nobody waits forever."""
    crew, stop, cleared = Crew(), threading.Event(), [0]
    streams = [None] * (THREADS // 2) + [torch.tpu.Stream() for _ in range(THREADS // 2)]
    for number, stream in enumerate(streams):
        crew.add(f"worker {number}", lambda step, n=number, s=stream: _regions(n, regions, s, step))

    def clear() -> None:
        while not stop.wait(0.01):
            # By work done, not by time: on a slow machine all would be compiled anew between any two regions.
            if sum(crew.done.values()) >= 50 * cleared[0]:
                torch.tpu._clear_cache()
                cleared[0] += 1

    cleaner = Crew()
    cleaner.add("cleaner", lambda _step: clear())
    try:
        crew.watch()
    finally:
        stop.set()
    cleaner.watch(stall=30)
    assert crew.problems + cleaner.problems == []
    assert list(crew.done.values()) == [regions] * THREADS
    assert cleared[0] >= THREADS * regions // 100
