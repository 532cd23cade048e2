"""Tier 1 of the compile cache: one compilation per key, whatever the threads do, and its controls and log lines."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from emutpu._modules import RecordingClient, recorded
from emutpu.backend.cache import COMPILED, CompileCache
from emutpu.backend.compile_pool import CompilePool, default_threads
from emutpu.backend.keys import STEM, Key, Versions
from emutpu.backend.pjrt import Fault, FaultInjectingClient, FaultSite, InternalError, ResourceExhausted
from emutpu.backend.runtime import runtime

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


def test_the_compiler_runs_on_the_pool() -> None:
    """The module is built on the caller's thread, and compiled on one of the pool's."""
    cache = CompileCache()
    names: list[str] = []

    def build() -> bytes:
        names.append(threading.current_thread().name)
        return b"module"

    def compile_module(module: bytes) -> Fake:
        names.append(threading.current_thread().name)
        assert module == b"module"
        return Fake(key(1))

    assert cache.request(key(1), compile_module, build=build).tier == COMPILED
    assert names[0] == threading.current_thread().name
    assert names[1].startswith("tt_compile")
    assert cache.request(key(1), compile_module, build=build).tier == 1
    assert len(names) == 2


def test_different_keys_compile_beside_each_other() -> None:
    """Two threads that want two keys are compiled for at once, also where the pool has one thread."""
    cache = CompileCache(threads=1)
    gate = threading.Barrier(2)

    def ask(number: int) -> int:
        def compile_module() -> Fake:
            return Fake(key(gate.wait(WATCHDOG)))  # passes only when both are there

        return cache.request(key(number), compile_module).tier

    assert together([lambda: ask(1), lambda: ask(2)]) == [COMPILED, COMPILED]


def test_the_compilers_error_is_everybodys() -> None:
    """One compilation fails, and each who waited for it raises an exception of its own; the next request tries again."""
    cache = CompileCache()
    begun, attempts = threading.Event(), []

    def failing() -> Fake:
        attempts.append(1)
        begun.set()
        while cache_waiters() < 4:
            time.sleep(0.001)
        raise ResourceExhausted("no room", op="add")

    def cache_waiters() -> int:
        return sum(
            frame.f_code is CompileCache._join.__code__
            for top in sys._current_frames().values()
            for frame in stack(top)
        )

    def ask() -> Fake:
        begun.wait(WATCHDOG)
        return cache.get(key(1), lambda: pytest.fail("compiled twice"))

    errors = together([lambda: cache.get(key(1), failing), *[ask] * 4])
    assert len(attempts) == 1
    assert [type(error) for error in errors] == [ResourceExhausted] * 5
    assert {(error.message, error.op) for error in errors} == {("no room", "add")}
    assert len({id(error) for error in errors}) == 5
    assert cache.request(key(1), lambda: Fake(key(1))).tier == COMPILED
    assert cache.misses == 1


def stack(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """A frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def test_whoever_waits_can_be_interrupted() -> None:
    """Ctrl-C arrives while a key compiles; the compilation goes on, and is what later requests get."""
    cache = CompileCache()
    release = threading.Event()
    attempts = []

    def compile_module() -> Fake:
        attempts.append(1)
        assert release.wait(WATCHDOG)
        return Fake(key(1))

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.get(key(1), compile_module)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < WATCHDOG / 2
    asking = ThreadPoolExecutor(1).submit(cache.get, key(1), lambda: pytest.fail("compiled twice"))
    release.set()
    assert asking.result(WATCHDOG).key == key(1)
    assert cache.get(key(1), lambda: pytest.fail("compiled twice")).key == key(1)
    assert (len(attempts), cache.misses) == (1, 1)


def test_an_interrupted_build_leaves_nothing_behind() -> None:
    """Ctrl-C before the compiler has the module: the next request compiles."""
    cache = CompileCache()

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.get(key(1), lambda _: pytest.fail("compiled"), build=interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache.begin(key(1), lambda _: pytest.fail("compiled"), interrupted)
    assert not cache.expects(key(1))
    assert cache.request(key(1), lambda: Fake(key(1))).tier == COMPILED


def test_a_handler_that_wants_what_it_interrupts() -> None:
    """A signal's handler that asks for the key its own thread waits for waits for it, too."""
    cache = CompileCache()
    release = threading.Event()
    got: list[Fake] = []

    def compile_module() -> Fake:
        assert release.wait(WATCHDOG)
        return Fake(key(1))

    def handler(*_: object) -> None:
        threading.Timer(0.05, release.set).start()
        got.append(cache.get(key(1), lambda: pytest.fail("compiled twice")))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        assert cache.get(key(1), compile_module) is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert [one.key for one in got] == [key(1)]


def test_beginning_ahead() -> None:
    """What was begun is compiled once, by whoever comes for it; there is nothing to begin twice, nor where none may be."""
    cache = CompileCache(threads=1)
    assert cache.ahead == 2
    flights = [cache.begin(key(number), lambda n=number: Fake(key(n))) for number in (1, 2)]
    results = [flight.wait() for flight in flights if flight is not None]
    assert [(one.executable.key, one.tier) for one in results] == [(key(1), COMPILED), (key(2), COMPILED)]
    assert cache.begin(key(1), lambda: pytest.fail("compiled twice")) is None
    assert (cache.hits, cache.misses) == (0, 2)
    failing = cache.begin(key(3), lambda: 1 // 0)
    assert failing is not None
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    cache.set_only(True)
    assert cache.begin(key(4), lambda: pytest.fail("compiled")) is None


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


def test_each_waiter_has_its_own_line() -> None:
    """A compilation that two threads wait for fails once, and each names its own line."""

    class Slow(FaultInjectingClient):
        def compile(self, module: bytes, options: Any) -> Any:
            time.sleep(0.3)
            return super().compile(module, options)

    real = runtime().client
    x = torch.ones(5, 23, device="tpu")
    fault = Fault(FaultSite.COMPILE, InternalError("no such luck"), nth=0)
    gate = threading.Barrier(2)
    runtime().replace_client(Slow(real, [fault]))
    try:

        def first() -> None:
            gate.wait(WATCHDOG)
            x.sinh()  # first

        def second() -> None:
            gate.wait(WATCHDOG)
            x.sinh()  # second

        errors = together([first, second])
    finally:
        runtime().replace_client(real)
    assert all("no such luck" in str(error) for error in errors)
    assert "x.sinh()  # first" in str(errors[0])
    assert "x.sinh()  # second" in str(errors[1])
    assert fault.calls == 1


def test_a_client_sees_the_users_line(tmp_path: Path) -> None:
    """A client that writes down who wanted what it compiles has the line, though it runs on another thread."""
    real = runtime().client
    x = torch.ones(5, 29, device="tpu")
    runtime().replace_client(RecordingClient(real, str(tmp_path)))
    try:
        x.cosh()  # asked for here
    finally:
        runtime().replace_client(real)
    assert [facts["code"] for _, facts in recorded(tmp_path)] == ["x.cosh()  # asked for here"]


_FORK = """
import atexit, os, threading, time
import torch
from emutpu.backend.runtime import runtime
from emutpu.backend.wrapped import WrappedClient

begun, release = threading.Event(), threading.Event()

class Slow(WrappedClient):
    def compile(self, module, options):
        begun.set()
        assert release.wait(60)
        return super().compile(module, options)

x = torch.ones(3, device="tpu")
atexit.register(lambda: print("at exit", (x * 5).tolist()))
runtime().replace_client(Slow(runtime().client))
found = []
thread = threading.Thread(target=lambda: found.append((x + 1).tolist()))
thread.start()
begun.wait(60)
child = os.fork()
if child == 0:
    try:
        x * 2
    except RuntimeError as error:
        os._exit(40 + ("forked subprocess" in str(error)))
    os._exit(1)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
release.set()
thread.join(60)
print("parent", found, (x * 2).tolist())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_forks_and_the_end_of_the_program() -> None:
    """A child forked while the pool compiles is told, and ends; the parent goes on, and compiles until it ends."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FORK], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "child 41",
        "parent [[2.0, 2.0, 2.0]] [2.0, 2.0, 2.0]",
        "at exit [5.0, 5.0, 5.0]",
    ]
