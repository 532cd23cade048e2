"""Tier 1 of the compile cache: logical key → loaded executable in this process, each compiled once.

Below it are the tiers that outlive a process (:mod:`emutpu.backend.cache_tiers`). Imports neither torch nor jax.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from emutpu.backend.compile_pool import CompilePool
from emutpu.backend.keys import Key

if TYPE_CHECKING:
    from emutpu.backend.pjrt import CompileOptions, Executable
    from emutpu.backend.statistics import TierStatistics

__all__ = ["COMPILED", "Acquired", "CacheEntry", "CompileCache", "LowerTiers"]

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


class _Flight:
    """A compilation in flight: those who ask for the same key wait for ``done`` and share ``result``."""

    __slots__ = ("done", "owner", "result")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.owner = threading.get_ident()
        self.result: Acquired | None = None


class CompileCache:
    """Compiles each key once, whichever threads ask for it. A failed compilation is not remembered.

    ``allow`` False: every request compiles and nothing is kept, in no tier. ``only`` True: what no tier has raises
    RuntimeError instead of being compiled. ``dump`` True: the module of every miss is logged. ``lower`` makes the lower
    tiers when they are first needed, or gives None where there are none.
    """

    def __init__(self, lower: Callable[[], LowerTiers | None] | None = None, threads: int | None = None) -> None:
        self._entries: dict[Key, CacheEntry] = {}
        self._flights: dict[Key, _Flight] = {}
        self._lock = threading.RLock()
        self._lower_lock = threading.RLock()  # as all locks here: a finalizer or a signal handler may come in
        self._make_lower = lower
        self._lower: LowerTiers | None = None
        self._pool = CompilePool(threads)
        self._queued: Counter[Key] = Counter()
        self._closed = False
        self._announced = 0
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
        compile_module: Callable[[], Executable],
        options: CompileOptions | None = None,
        build: Callable[[], bytes] | None = None,
    ) -> Executable:
        """The executable of ``key``; see :meth:`request`."""
        return self.request(key, compile_module, options, build).executable

    def request(
        self,
        key: Key,
        compile_module: Callable[[], Executable],
        options: CompileOptions | None = None,
        build: Callable[[], bytes] | None = None,
    ) -> Acquired:
        """The executable of ``key`` and the tier that had it.

        ``compile_module`` makes it on a miss, on the calling thread (an error of a lowering must find the user's line on
        the stack; XLA releases the GIL). ``options`` are those it is loaded with, ``build`` gives the module's bytecode
        for the dump. Raises what ``compile_module`` raises, and RuntimeError for a miss in cache-only mode.
        """
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
                flight = self._flights.get(key)
                if flight is None:
                    own = self._flights[key] = _Flight()
            if flight is None:
                return self._fly(own, key, compile_module, options, build)
            shared = self._join(flight, key)
            if shared is not None:
                return shared
        if _LOG.isEnabledFor(logging.DEBUG):
            _LOG.debug("Compilation cache STATIC HIT for key: %s", key)
        return Acquired(entry.executable, 1, 0.0)

    def submit(
        self,
        key: Key,
        compile_module: Callable[[], Executable],
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

    def _join(self, flight: _Flight, key: Key) -> Acquired | None:
        """Wait for another thread's compilation and share it; None when it failed or nothing may be shared."""
        if flight.owner == threading.get_ident():
            raise RuntimeError(f"the compilation for key {key} asks for its own result")
        flight.done.wait()
        if flight.result is None or not self.allow:
            return None
        with self._lock:
            self.hits += 1
        return Acquired(flight.result.executable, 1, 0.0)

    def _fly(
        self,
        flight: _Flight,
        key: Key,
        compile_module: Callable[[], Executable],
        options: CompileOptions | None,
        build: Callable[[], bytes] | None,
    ) -> Acquired:
        try:
            acquired = self._acquire(key, self._compilation(key, compile_module, build), options)
            with self._lock:
                if acquired.hit:
                    self.loads += 1
                else:
                    self.misses += 1
                    self.seconds += acquired.seconds
                if self.allow:
                    self._entries[key] = CacheEntry(
                        acquired.executable, acquired.seconds, acquired.tier, last_read=time.time()
                    )
            flight.result = acquired
            return acquired
        finally:
            with self._lock:
                del self._flights[key]
            flight.done.set()

    def _compilation(
        self, key: Key, compile_module: Callable[[], Executable], build: Callable[[], bytes] | None
    ) -> Callable[[], Executable]:
        """``compile_module`` with what is said and refused just before a compilation."""

        def checked() -> Executable:
            if self.only:
                raise RuntimeError(
                    "The user has asserted that no more compilation should happen; yet compilation is needed for "
                    f"key: {key}"
                )
            with self._lock:
                self._announced += 1
                number = self._announced
            _LOG.info("Compilation cache STATIC MISS #%d for key: %s", number, key)
            _LOG.info("[TtPerf] Compilation cache MISS #%d", number)
            if self.dump and build is not None:
                # The user asked for it, so it must be seen without configuring the logging module.
                _LOG.warning("Dumping StableHLO module due to cache miss for key: %s\n%s", key, _text(build()))
            return compile_module()

        return checked

    def _acquire(self, key: Key, compile_module: Callable[[], Executable], options: CompileOptions | None) -> Acquired:
        if self.allow:
            with self._lower_lock:
                if self._make_lower is not None:
                    self._lower, self._make_lower = self._make_lower(), None
                lower = self._lower
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
