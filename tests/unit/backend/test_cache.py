"""Tier 1 of the compile cache: one compilation per key, whatever the threads do, and its controls and log lines."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from emutpu.backend.cache import COMPILED, CompileCache
from emutpu.backend.compile_pool import CompilePool, default_threads
from emutpu.backend.keys import STEM, Key, Versions

WATCHDOG = 60.0


class Fake:
    """Stands for an executable; ``key`` tells whose it is."""

    def __init__(self, key: Key) -> None:
        self.key = key


def key(number: int) -> Key:
    """One of many keys."""
    return Key.of(f"op{number}", f"dims{number}", "O1", Versions())


def together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """Run every job on a thread of its own; fails, instead of hanging, when one does not end."""
    results: list[Any] = [None] * len(jobs)

    def run(index: int) -> None:
        try:
            results[index] = jobs[index]()
        except BaseException as error:  # noqa: BLE001 (judged by the caller)
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + WATCHDOG
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "deadlock"
    return results


def test_where_an_executable_came_from() -> None:
    """The first request compiles and says what it took, the second finds it in this process."""
    cache = CompileCache()
    first = cache.request(key(1), lambda: time.sleep(0.01) or Fake(key(1)))
    second = cache.request(key(1), lambda: pytest.fail("compiled twice"))
    assert (first.tier, first.hit, second.tier, second.hit) == (COMPILED, False, 1, True)
    assert first.seconds >= 0.01
    assert second.seconds == 0
    assert second.executable is first.executable is cache.get(key(1), lambda: pytest.fail("compiled twice"))
    entry = cache.entries()[key(1)]
    assert (entry.reads, entry.compile_seconds) == (2, first.seconds)
    assert abs(entry.last_read - time.time()) < 60


def test_concurrent_requests_compile_once() -> None:
    """Eight threads that want one key get one executable of one compilation."""
    cache = CompileCache()
    gate = threading.Barrier(8)
    compiled = []

    def compile_module() -> Fake:
        compiled.append(1)
        time.sleep(0.05)
        return Fake(key(1))

    def ask() -> Fake:
        gate.wait(WATCHDOG)
        return cache.get(key(1), compile_module)

    results = together([ask] * 8)
    assert len(compiled) == 1
    assert len({id(result) for result in results}) == 1
    assert (cache.hits, cache.misses) == (7, 1)


def test_a_failure_is_not_remembered() -> None:
    """A failed compilation raises in its own caller only; whoever waited tries again."""
    cache = CompileCache()
    gate = threading.Barrier(2)
    attempts = Counter[str]()

    def failing() -> Fake:
        gate.wait(WATCHDOG)
        attempts["failing"] += 1
        time.sleep(0.05)
        raise ValueError("no")

    def waiting() -> Fake:
        gate.wait(WATCHDOG)
        time.sleep(0.01)
        return cache.get(key(1), lambda: Fake(key(1)))

    failed, got = together([lambda: cache.get(key(1), failing), waiting])
    assert isinstance(failed, ValueError)
    assert isinstance(got, Fake)
    assert cache.misses == 1


def test_clear_waits_for_what_is_in_flight() -> None:
    """Clearing while a key compiles ends after it, and forgets it."""
    cache = CompileCache()
    begun, order = threading.Event(), []

    def compile_module() -> Fake:
        begun.set()
        time.sleep(0.05)
        order.append("compiled")
        return Fake(key(1))

    def clear() -> None:
        begun.wait(WATCHDOG)
        cache.clear()
        order.append("cleared")

    together([lambda: cache.get(key(1), compile_module), clear])
    assert order == ["compiled", "cleared"]
    assert len(cache) == 0


def test_clear_does_not_wait_for_later_compilations() -> None:
    """Under compilations without end, clearing still ends."""
    cache = CompileCache()
    stop = threading.Event()
    numbers = iter(range(10**9))

    def compile_always() -> None:
        while not stop.is_set():
            number = next(numbers)
            cache.get(key(number), lambda: time.sleep(0.002) or Fake(key(number)))  # noqa: B023 (used at once)

    def clear() -> float:
        time.sleep(0.05)
        started = time.monotonic()
        for _ in range(5):
            cache.clear()
        stop.set()
        return time.monotonic() - started

    results = together([*[compile_always] * 8, clear])
    assert all(result is None for result in results[:-1])
    assert results[-1] < 10


def test_threads_and_clearing() -> None:
    """Eight threads ask for 1,000 keys each while the cache is cleared all the time: right, once, no deadlock."""
    cache = CompileCache()
    stop = threading.Event()

    def work(seed: int) -> int:
        order = random.Random(seed)
        wrong = 0
        for _ in range(1000):
            wanted = key(order.randrange(200))
            pause = 0.0002 * order.random()
            wrong += cache.get(wanted, lambda: time.sleep(pause) or Fake(wanted)).key != wanted  # noqa: B023 (used at once)
        return wrong

    def clear() -> int:
        cleared = 0
        while not stop.is_set():
            cache.clear()
            cleared += 1
        return cleared

    def workers() -> list[Any]:
        try:
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(work, range(8)))
        finally:
            stop.set()

    wrong, cleared = together([workers, clear])
    assert wrong == [0] * 8
    assert cleared > 10
    assert cache.hits + cache.misses == 8000


def test_a_compilation_that_needs_itself() -> None:
    """Asking for a key while it is being compiled on the same thread is an error, not a hang; other keys may nest."""
    cache = CompileCache()
    with pytest.raises(RuntimeError, match="asks for its own result"):
        cache.get(key(1), lambda: cache.get(key(1), lambda: Fake(key(1))))
    assert cache.get(key(1), lambda: cache.get(key(2), lambda: Fake(key(2)))).key == key(2)
    assert cache.get(key(3), lambda: cache.clear() or Fake(key(3))).key == key(3)


def test_cache_only_and_allow() -> None:
    """Cache-only refuses to compile and serves the rest; without the cache nothing is kept."""
    cache = CompileCache()
    cache.get(key(1), lambda: Fake(key(1)))
    cache.set_only(True)
    assert cache.get(key(1), lambda: pytest.fail("compiled")).key == key(1)
    with pytest.raises(RuntimeError, match=f"yet compilation is needed for key: {key(2)}"):
        cache.get(key(2), lambda: Fake(key(2)))
    cache.set_only(False)
    cache.set_allow(False)
    tiers = [cache.request(key(3), lambda: Fake(key(3))).tier for _ in range(2)]
    assert tiers == [COMPILED, COMPILED]
    assert key(3) not in cache.entries()


def test_submit_compiles_on_the_pool() -> None:
    """A scheduled compilation runs on the pool's threads, and the request after it hits."""
    cache = CompileCache(threads=2)
    names: list[str] = []

    def compile_module() -> Fake:
        names.append(threading.current_thread().name)
        return Fake(key(1))

    assert cache.submit(key(1), compile_module).result(WATCHDOG).tier == COMPILED
    assert cache.request(key(1), lambda: pytest.fail("compiled twice")).tier == 1
    assert names[0].startswith("tt_compile")


@pytest.mark.parametrize(
    ("nproc", "hardware", "least", "most"), [(None, 8, 6, 7), (2, 64, 6, 7), (None, 1, 1, 1), (None, 2, 1, 1)]
)
def test_size_of_the_pool(nproc: int | None, hardware: int, least: int, most: int) -> None:
    """All hardware threads but one core's (one or two threads), or four per unit of NPROC; never none."""
    assert least <= default_threads(nproc, hardware) <= most
    assert CompilePool(5).threads == 5


def test_shutdown() -> None:
    """After the end what is loaded still runs, and a miss is refused with the device's words."""
    cache = CompileCache()
    cache.get(key(1), lambda: Fake(key(1)))
    cache.shutdown()
    cache.shutdown()
    assert cache.get(key(1), lambda: pytest.fail("compiled")).key == key(1)
    with pytest.raises(RuntimeError, match="Cannot use CompilationCache after it has been shut down"):
        cache.get(key(2), lambda: Fake(key(2)))


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """The lines that people search their logs for are TorchTPU's."""
    caplog.set_level(logging.DEBUG, "emutpu.cache")
    cache = CompileCache(threads=1)
    cache.submit(key(1), lambda: Fake(key(1))).result(WATCHDOG)
    cache.get(key(1), lambda: Fake(key(1)))
    cache.clear()
    cache.set_allow(True)
    cache.set_only(False)
    cache.set_dump(False)
    cache.shutdown()
    said = "\n".join(caplog.messages)
    for line in (
        f"[TtPerf] Scheduled compilation for key: {key(1)}",
        "Compilation cache STATIC MISS #1",
        "[TtPerf] Compilation cache MISS #1",
        f"Compilation cache STATIC HIT for key: {key(1)}",
        "Compilation cache evicted.",
        "CompilationCache allow-cache mode set to: ",
        "CompilationCache cache-only mode set to: ",
        "CompilationCache dump-on-miss mode set to: ",
        "CompilationCache final stats: num_cache_reqs: 2, num_cache_hits: 1 (50.00%), num_compilations: 1",
    ):
        assert line in said


# ------------------------------------------------------------------------------------------------ on the device


def test_dump_on_cache_miss(caplog: pytest.LogCaptureFixture) -> None:
    """With the switch on, the StableHLO of what must be compiled is logged, and only of that."""
    tpu: Any = torch.tpu
    assert tpu._get_dump_on_cache_miss() is False
    x = torch.ones(13, 17, device="tpu")
    tpu._set_dump_on_cache_miss(True)
    try:
        assert tpu._get_dump_on_cache_miss() is True
        x * x
        x * x
    finally:
        tpu._set_dump_on_cache_miss(False)
    dumps = [text for text in caplog.messages if "Dumping StableHLO module due to cache miss for key: " in text]
    assert len(dumps) == 1
    assert "stablehlo.multiply" in dumps[0]
    assert "tensor<13x17xf32>" in dumps[0]


def test_statistics_of_the_namespace() -> None:
    """Entries are named by their keys and say what they took; the summary of memory counts them."""
    tpu: Any = torch.tpu
    x = torch.ones(7, 19, device="tpu")
    before = time.time()
    x - 2 * x
    stats = tpu._get_cache_stats()
    assert stats.peak_compilation_host_memory_bytes is None
    assert stats.per_entry_stats
    for name, entry in stats.per_entry_stats.items():
        assert STEM.fullmatch(name)
        assert entry.compilation_duration > 0
        assert entry.read_count >= 0
    assert max(entry.last_read for entry in stats.per_entry_stats.values()) >= before
    assert f"B for {len(stats.per_entry_stats)} executables." in tpu._hbm_usage_summary()
    tpu._clear_cache()
    assert tpu._hbm_usage_summary() == "CompilationCache HBM usage: 0B for 0 executables."


def test_device_threads_and_clearing() -> None:
    """Threads that compute on the device while its cache is cleared get right values, and nobody hangs."""
    tpu: Any = torch.tpu
    stop = threading.Event()

    def work(seed: int) -> list[float]:
        results = []
        for step in range(6):
            x = torch.full((seed + 1, 3), float(step), device="tpu")
            results.append(float((x * 2 + 1).sum()) / (3 * (seed + 1)))
        return results

    def clear() -> int:
        cleared = 0
        while not stop.wait(0.02):
            tpu._clear_cache()
            cleared += 1
        return cleared

    def workers() -> list[Any]:
        try:
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(work, range(8)))
        finally:
            stop.set()

    got, cleared = together([workers, clear])
    assert got == [[2.0 * step + 1 for step in range(6)]] * 8
    assert cleared > 0
