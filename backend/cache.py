"""Tier 1 of the compile cache: logical key → loaded executable in this process, each compiled once.

Below it are the tiers that outlive a process (:mod:`emutpu.backend.cache_tiers`). Imports neither torch nor jax.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

from emutpu.backend.compile_pool import CompilePool
from emutpu.backend.keys import Key
from emutpu.backend.pjrt import PjrtError

if TYPE_CHECKING:
    from emutpu.backend.pjrt import CompileOptions, Executable
    from emutpu.backend.statistics import TierStatistics

__all__ = ["COMPILED", "Acquired", "CacheEntry", "CompileCache", "Flight", "LowerTiers"]

COMPILED = 0
"""The ``tier`` of an executable that no tier had."""

_LOG = logging.getLogger("emutpu.cache")


@dataclasses.dataclass(frozen=True, slots=True)
class Acquired:
    """An executable and where it came from.

    ``tier`` is 1 (this process had it), 2 (shared memory), 3 (persistent) or :data:`COMPILED`; ``seconds`` the wall time
    of the load or compilation, 0 in tier 1.
    """

    executable: Executable
    tier: int
    seconds: float

    @property
    def hit(self) -> bool:
        """True unless it had to be compiled."""
        return self.tier != COMPILED


@dataclasses.dataclass(slots=True)
class CacheEntry:
    """A loaded executable: ``compile_seconds`` of wall time it took here, ``last_read`` in seconds since the epoch."""

    executable: Executable
    compile_seconds: float
    tier: int = COMPILED
    reads: int = 0
    last_read: float = 0.0


class LowerTiers(Protocol):
    """What tier 1 asks when it has no entry."""

    def acquire(self, key: Key, compile_module: Callable[[], Executable], options: CompileOptions | None) -> Acquired:
        """Load ``key`` or compile it, and keep what was compiled."""
        ...

    def statistics(self) -> tuple[TierStatistics, ...]: ...

    def flush(self, seconds: float) -> None:
        """Wait for writes under way, no longer than ``seconds``."""
        ...


class Flight:
    """An executable that is being made: those who ask for the same key wait until it is ``done``, and share the result.

    ``owner`` is the thread that works on it, which cannot wait for it; 0 until a thread of the pool takes it up, from when
    on it is ``pooled`` and lands whatever becomes of who began it. ``error`` is what the compiler raised.
    """

    __slots__ = ("_turns", "done", "error", "key", "owner", "pooled", "result")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.owner = threading.get_ident()
        self.pooled = False
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.result: Acquired | None = None
        self._turns = [1]

    def claim(self) -> bool:
        """True for the first thread that asks, which is its owner from now on."""
        try:
            self._turns.pop()
        except IndexError:
            return False
        self.owner = threading.get_ident()
        return True

    def wait(self) -> Acquired:
        """What came of a pooled flight. Raises what the compiler raised."""
        self.done.wait()
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class CompileCache:
    """Compiles each key once, whichever threads ask for it. A failed compilation is not remembered.

    ``allow`` False: every request compiles and nothing is kept, in no tier. ``only`` True: what no tier has raises
    RuntimeError instead of being compiled. ``dump`` True: the module of every miss is logged. ``lower`` makes the lower
    tiers when they are first needed, or gives None where there are none. ``threads`` and ``enter`` are the compile pool's.
    """

    def __init__(
        self,
        lower: Callable[[], LowerTiers | None] | None = None,
        threads: int | None = None,
        enter: Callable[[], None] | None = None,
    ) -> None:
        self._entries: dict[Key, CacheEntry] = {}
        self._flights: dict[Key, Flight] = {}
        self._lock = threading.RLock()
        self._lower_lock = threading.RLock()  # as all locks here: a finalizer or a signal handler may come in
        self._make_lower = lower
        self._lower: LowerTiers | None = None
        self._pool = CompilePool(threads, enter)
        self._queued: Counter[Key] = Counter()
        self._closed = False
        self._count = 0  # of announced compilations
        self.hits = 0
        self.misses = 0
        self.loads = 0
        self.seconds = 0.0
        self.allow = True
        self.only = False
        self.dump = False

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> dict[Key, CacheEntry]:
        """A snapshot of what is loaded."""
        with self._lock:
            return dict(self._entries)

    @property
    def lower(self) -> LowerTiers | None:
        """The tiers below, once they were needed."""
        return self._lower

    # ------------------------------------------------------------------------------------------ requests

    def get(
        self,
        key: Key,
        compile_module: Callable[..., Executable],
        options: CompileOptions | None = None,
        build: Callable[[], bytes] | None = None,
    ) -> Executable:
        """The executable of ``key``; see :meth:`request`."""
        return self.request(key, compile_module, options, build).executable

    def request(
        self,
        key: Key,
        compile_module: Callable[..., Executable],
        options: CompileOptions | None = None,
        build: Callable[[], bytes] | None = None,
    ) -> Acquired:
        """The executable of ``key`` and the tier that had it.

        On a miss ``build`` gives the module's bytecode, on the calling thread: an error of a lowering must find the user's
        line on the stack. ``compile_module`` makes the executable of it (of nothing, without ``build``) on the compile
        pool, and must not depend on the thread; the caller waits, and may be interrupted: the compilation goes on, and
        later requests find it. ``options`` are those that an executable is loaded with.

        Raises what either raises, each caller an exception of its own, and RuntimeError for a miss in cache-only mode.
        """
        own = Flight(key)
        try:
            while True:
                with self._lock:
                    entry = self._entries.get(key)
                    if entry is not None:
                        entry.reads += 1
                        entry.last_read = time.time()
                        self.hits += 1
                        break
                    if self._closed:
                        raise RuntimeError("Cannot use CompilationCache after it has been shut down.")
                    flight = self._flights.setdefault(key, own)
                if flight is own:
                    return self._fly(own, compile_module, options, build)
                shared = self._join(flight)
                if shared is not None:
                    return shared
        finally:
            self._abandon(own)
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("Compilation cache STATIC HIT for key: %s", key)
        return Acquired(entry.executable, 1, 0.0)

    @property
    def ahead(self) -> int:
        """How many compilations one caller may :meth:`begin` and not have come back for."""
        return self._pool.ahead

    def begin(
        self, key: Key, compile_module: Callable[..., Executable], build: Callable[[], bytes] | None = None
    ) -> Flight | None:
        """Begin what :meth:`request` does on a miss; ``flight.wait()`` gives its result.

        None where there is nothing to begin: it is loaded or under way, may not be compiled or kept, or a lower tier must
        be asked first. Raises what ``build`` raises.
        """
        if not self.allow or self.only or self._tiers() is not None:
            return None
        own = Flight(key)
        try:
            with self._lock:
                if self._closed or key in self._entries or self._flights.setdefault(key, own) is not own:
                    return None
            self._take_off(own, compile_module, build)
        finally:
            self._abandon(own)
        return own

    def submit(
        self,
        key: Key,
        compile_module: Callable[..., Executable],
        options: CompileOptions | None = None,
        build: Callable[[], bytes] | None = None,
    ) -> Future[Acquired]:
        """:meth:`request` on the compile pool. ``compile_module`` must not depend on the caller's thread."""
        _LOG.info("[TtPerf] Scheduled compilation for key: %s", key)
        with self._lock:
            self._queued[key] += 1

        def job() -> Acquired:
            try:
                return self.request(key, compile_module, options, build)
            finally:
                with self._lock:
                    self._queued -= Counter((key,))

        return self._pool.submit(job)

    def expects(self, key: Key) -> bool:
        """Whether the executable is here, or under way."""
        with self._lock:
            return key in self._entries or key in self._flights or key in self._queued

    # ------------------------------------------------------------------------------------------ misses

    def _join(self, flight: Flight) -> Acquired | None:
        """Wait for another thread's compilation and share it; None where this one must try for itself.

        Raises the compiler's error as an exception of this thread's own.
        """
        if flight.owner == threading.get_ident():
            raise RuntimeError(f"the compilation for key {flight.key} asks for its own result")
        flight.done.wait()
        if not self.allow:
            return None
        if isinstance(flight.error, PjrtError):
            raise copy.copy(flight.error) from flight.error
        if flight.result is None:
            return None
        with self._lock:
            self.hits += 1
        return Acquired(flight.result.executable, 1, 0.0)

    def _fly(
        self,
        flight: Flight,
        compile_module: Callable[..., Executable],
        options: CompileOptions | None,
        build: Callable[[], bytes] | None,
    ) -> Acquired:
        def compiled() -> Executable:
            self._take_off(flight, compile_module, build)
            return flight.wait().executable

        acquired = self._acquire(flight.key, compiled, options)
        if flight.result is None:
            self._land(flight, acquired)
        return flight.result or acquired

    def _take_off(
        self, flight: Flight, compile_module: Callable[..., Executable], build: Callable[[], bytes] | None
    ) -> None:
        """Build the module here, and have the pool compile it and land the flight. Raises what ``build`` raises."""
        started = time.perf_counter()
        work = self._announced(flight.key, compile_module, build)
        built = time.perf_counter() - started

        def job() -> None:
            if not flight.claim():
                return
            started = time.perf_counter()
            try:
                executable = work()
                self._land(flight, Acquired(executable, COMPILED, built + time.perf_counter() - started))
            except BaseException as error:  # noqa: BLE001 (raised by whoever waits)
                flight.error = error
            finally:
                self._close(flight)

        flight.owner = 0
        self._pool.start(job)
        flight.pooled = True

    def _land(self, flight: Flight, acquired: Acquired) -> None:
        with self._lock:
            if acquired.hit:
                self.loads += 1
            else:
                self.misses += 1
                self.seconds += acquired.seconds
            if self.allow:
                self._entries[flight.key] = CacheEntry(
                    acquired.executable, acquired.seconds, acquired.tier, last_read=time.time()
                )
            flight.result = acquired

    def _abandon(self, flight: Flight) -> None:
        """Whoever began a flight leaves it: it ends, unless the pool has it."""
        if not flight.pooled:
            self._close(flight)

    def _close(self, flight: Flight) -> None:
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
        flight.done.set()

    def _announced(
        self, key: Key, compile_module: Callable[..., Executable], build: Callable[[], bytes] | None
    ) -> Callable[[], Executable]:
        """What is left to do of a compilation, after what is said and refused just before one."""
        if self.only:
            raise RuntimeError(
                "The user has asserted that no more compilation should happen; yet compilation is needed for "
                f"key: {key}"
            )
        with self._lock:
            self._count += 1
            number = self._count
        _LOG.info("Compilation cache STATIC MISS #%d for key: %s", number, key)
        _LOG.info("[TtPerf] Compilation cache MISS #%d", number)
        if build is None:
            return compile_module
        module = build()
        if self.dump:
            # The user asked for it, so it must be seen without configuring the logging module.
            _LOG.warning("Dumping StableHLO module due to cache miss for key: %s\n%s", key, _text(module))
        return partial(compile_module, module)

    def _tiers(self) -> LowerTiers | None:
        with self._lower_lock:
            if self._make_lower is not None:
                self._lower, self._make_lower = self._make_lower(), None
            return self._lower

    def _acquire(self, key: Key, compile_module: Callable[[], Executable], options: CompileOptions | None) -> Acquired:
        lower = self._tiers() if self.allow else None
        if lower is not None:
            return lower.acquire(key, compile_module, options)
        started = time.perf_counter()
        executable = compile_module()
        return Acquired(executable, COMPILED, time.perf_counter() - started)

    # ------------------------------------------------------------------------------------------ controls

    def clear(self) -> None:
        """Forget every executable, after the compilations that are in flight now (later ones are not waited for)."""
        with self._lock:
            waiting = [flight for flight in self._flights.values() if flight.owner != threading.get_ident()]
        for flight in waiting:
            flight.done.wait()
        with self._lock:
            self._entries.clear()
        _LOG.info("Compilation cache evicted.")

    def set_allow(self, allow: bool) -> None:
        """False: every request compiles."""
        self.allow = allow
        _LOG.info("CompilationCache allow-cache mode set to: %s", allow)

    def set_only(self, only: bool) -> None:
        """True: a miss raises RuntimeError."""
        self.only = only
        _LOG.info("CompilationCache cache-only mode set to: %s", only)

    def set_dump(self, dump: bool) -> None:
        """True: the module of every miss is logged."""
        self.dump = dump
        _LOG.info("CompilationCache dump-on-miss mode set to: %s", dump)

    def tier_statistics(self) -> tuple[TierStatistics, ...]:
        """Counters of the tiers below, nearest first; empty where there are none."""
        return self._lower.statistics() if self._lower is not None else ()

    def forget_client(self, lower: Callable[[], LowerTiers | None] | None) -> None:
        """Another client is beneath: entries of the old one are of no use, and neither are its directories."""
        self.clear()
        with self._lower_lock:
            self._lower, self._make_lower = None, lower

    def summary(self) -> str:
        """The counters as TorchTPU prints them when the process ends."""
        requests = self.hits + self.loads + self.misses
        share = f"{100 * (self.hits + self.loads) / requests:.2f}%" if requests else "n/a"
        return (
            f"num_cache_reqs: {requests}, num_cache_hits: {self.hits + self.loads} ({share}), "
            f"num_compilations: {self.misses}, peak_compilation_memory_bytes: unknown, "
            f"num_compilation_events: {self.misses}, sum_compilation_time: {self.seconds:.3f}s"
        )

    def shutdown(self, seconds: float = 30.0) -> None:
        """Finish writes under way (at most ``seconds``), say the final counts, and refuse later misses."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._pool.shutdown()
        if self._lower is not None:
            self._lower.flush(seconds)
        _LOG.info("CompilationCache final stats: %s", self.summary())


def _text(bytecode: bytes) -> str:
    from emutpu import _jaxlib

    return _jaxlib.module_text(bytecode)
