"""The one runtime object of a process: the client, the compile cache, counters and switches."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from emutpu.backend.cache import CompileCache
from emutpu.backend.cell import MEMORY
from emutpu.backend.keys import Key, Versions
from emutpu.backend.location import capture, locate, on_behalf_of
from emutpu.backend.metering import DEFAULT_ISSUE, Meter, MeteringClient
from emutpu.backend.options import LOCAL, EagerMode, serve_compiler

if TYPE_CHECKING:
    from emutpu.backend.cache import LowerTiers
    from emutpu.backend.pjrt import Client, CompileOptions, Executable, ModelledCost
    from emutpu.backend.statistics import Statistics, TierStatistics

__all__ = ["Configuration", "Runtime", "runtime"]

FORK_MESSAGE = (
    "cannot access or re-initialize TPU in a forked subprocess. "
    "To use TPU with multiprocessing, you must use the 'spawn' start method"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Configuration:
    """How the face set the backend up: what makes the client, which chip is emulated, what is allowed,
    whose bugs; ``assume_bounded`` whether torch.compile bounds the dimensions that it finds to vary.

    ``versions`` are those of the emulated TorchTPU, in every key; ``compile_threads`` the size of the compile pool, None
    for TorchTPU's own; ``make_tiers`` gives the tiers of the compile cache below the process, for a client.

    ``binary`` gives the binary fingerprint for a client, ``secret`` signs what is native code.
    ``aot_cache`` puts compiled graphs into PyTorch's AOTAutograd cache.

    ``tiled`` gives the bytes of HBM of an array by shape and element size; ``hbm_limit`` is None where memory is
    unlimited; ``host_issue`` is the host's time per launch in picoseconds, None to measure it. ``collective`` gives the
    cost of a StableHLO collective by name, operand bytes per device, devices, and devices of the whole program.
    """

    make_client: Callable[[], Client]
    chip: str
    banner: Callable[[], None]
    allow_fallback: bool = False
    beyond: bool = False
    donate: bool = True
    versions: Versions = dataclasses.field(default_factory=Versions)
    compile_threads: int | None = None
    make_tiers: Callable[[Client], LowerTiers | None] | None = None
    binary: Callable[[Client], str] | None = None
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    aot_cache: bool = False
    repeats: str = "safe"
    quirks: str | None = None
    assume_bounded: bool = False
    tiled: Callable[[tuple[int, ...], int], int] | None = None
    hbm_limit: int | None = None
    host_issue: int | None = DEFAULT_ISSUE
    collective: Callable[[str, float, int, int], ModelledCost | None] | None = None


class Runtime:
    """Process-wide state. The client is made at first use (PjRt starts lazily on the device, too)."""

    def __init__(self) -> None:
        self.configuration: Configuration | None = None
        self.cache = CompileCache()
        self.calls: dict[str, Callable[[], int]] = {}
        self.fallbacks: Counter[tuple[str, str]] = Counter()
        self.recompiles: Counter[tuple[str, str]] = Counter()  # (what changed, of which function) of compiled graphs
        self.allow_fallback = False
        self.donating = True
        self.meter = Meter()
        self.region_launches = 0
        self.around_backward: Callable[[Sequence[object]], AbstractContextManager[object]] | None = None  # by its roots
        self._client: Client | None = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._inherited: list[object] = []

    @property
    def initialized(self) -> bool:
        """True once the client exists."""
        return self._client is not None

    @property
    def in_bad_fork(self) -> bool:
        """True in a child forked after the client was made: XLA's threads did not survive the fork."""
        return self._client is not None and os.getpid() != self._pid

    @property
    def mode(self) -> EagerMode:
        """The eager mode of the calling thread."""
        return LOCAL.state.options.mode

    @property
    def client(self) -> Client:
        """The client, made on first use. Raises RuntimeError in a forked child or before activation."""
        client = self._client
        if client is None:
            client = self._make_client()
        if os.getpid() != self._pid:
            raise RuntimeError(FORK_MESSAGE)
        return client

    def _make_client(self) -> Client:
        with self._lock:
            if self._client is None:
                if self.configuration is None:
                    raise RuntimeError("emutpu is not active in this process; emutpu doctor tells why")
                self.configuration.banner()
                self._pid = os.getpid()
                self._client = MeteringClient(self.configuration.make_client(), self.meter)
                os.register_at_fork(after_in_child=self._after_fork)
            return self._client

    def _after_fork(self) -> None:
        """In a forked child: no launch may happen (XLA's threads are gone, it would hang), so every op must miss and be told.

        What the client owns is kept, never freed: freeing waits for the same threads.
        """
        if self._client is None:
            return
        self._inherited.append(self.cache)
        self.cache = CompileCache()
        kernels = sys.modules.get("emutpu.backend.kernels")
        if kernels is not None:
            self._inherited.append(kernels.abandon_entries())

    def key(self, shapeless: str, dimensions: str, options: str) -> Key:
        """The logical key of a program described by three texts, with the versions of the emulated TorchTPU."""
        versions = self.configuration.versions if self.configuration is not None else Versions()
        return Key.of(shapeless, dimensions, options, versions)

    def configure(self, configuration: Configuration) -> None:
        """Called once by the face, before any tensor is made."""
        self.configuration = configuration
        self.allow_fallback = configuration.allow_fallback
        self.donating = configuration.donate
        if configuration.tiled is not None:
            MEMORY.tiled = configuration.tiled
        MEMORY.limit = configuration.hbm_limit
        self.meter.issue = configuration.host_issue
        self.meter.refresh()
        self.cache = CompileCache(self._make_tiers, configuration.compile_threads, serve_compiler)
        atexit.register(self._shut_down, os.getpid())

    def compiler(self, options: CompileOptions) -> Callable[[bytes], Executable]:
        """Compiles modules on any thread, for the line of the program that is running now."""
        client, place = self.client, capture()

        def compile_module(module: bytes) -> Executable:
            with on_behalf_of(place):
                return client.compile(module, options)

        return compile_module

    def _make_tiers(self) -> LowerTiers | None:
        make = self.configuration.make_tiers if self.configuration is not None else None
        return make(self.client) if make is not None else None

    def binary_fingerprint(self) -> str:
        """What decides native code beside a logical key: the client's versions and flags, and our own sources."""
        make = self.configuration.binary if self.configuration is not None else None
        return make(self.client) if make is not None else self.client.fingerprint()

    @property
    def cache_secret(self) -> bytes | None:
        """What signs native code that leaves the process (``EMUTPU_CACHE_KEY``)."""
        return self.configuration.secret if self.configuration is not None else None

    def _shut_down(self, process: int) -> None:
        if os.getpid() == process:
            self.cache.shutdown()

    def replace_client(self, client: Client) -> Client | None:
        """Put another client beneath (fault injection, adversaries); gives the old one. Executables are forgotten."""
        if self._client is not None:
            self.materialize("synchronize()")
        with self._lock:
            old = self._client
            self._pid = os.getpid()
            self._client = client
            self.forget_executables()
            self.cache.forget_client(self._make_tiers)
            random = sys.modules.get("emutpu.backend.rng")
            if random is not None:
                random.forget_values()
            return old

    def forget_executables(self) -> None:
        """Clear the compile cache and every kernel's table of loaded executables."""
        from emutpu.backend.kernels import forget_entries

        self.cache.clear()
        forget_entries()

    def synchronize(self) -> None:
        """Do everything that is pending, and wait for everything enqueued."""
        self.materialize("synchronize()")
        if self._client is not None:
            from emutpu.backend.errors import read_failure
            from emutpu.backend.pjrt import PjrtError

            try:
                self.client.synchronize()
            except PjrtError as error:
                raise read_failure(error, "synchronize", None) from error

    def materialize(self, reason: str) -> None:
        """Do what was deferred, on every stream. Raises its first failure."""
        queue = sys.modules.get("emutpu.backend.deferred.queue")
        if queue is not None:  # else nothing was ever recorded
            queue.materialize_all(reason)

    @property
    def hbm_bytes(self) -> int:
        """Memory of the emulated device in bytes: the chip's, or the limit that was set instead."""
        if MEMORY.limit is not None:
            return MEMORY.limit
        return self._chip_bytes()

    def _chip_bytes(self) -> int:
        total = self.client.topology.attributes["hbm_bytes_per_device"]
        assert isinstance(total, int)
        return total

    def count_fallback(self, op: str) -> str:
        """Count an op that runs on the CPU, with the user's line, which is returned."""
        location = locate(*capture())
        where = str(location) if location is not None else "unknown"
        self.fallbacks[op, where] += 1
        return where

    def statistics(self, *, modelled: bool = True) -> Statistics:
        """A snapshot of the counters, with what the model says of all that was launched (which takes a look at every executable) or without."""
        from emutpu.backend.deferred.log import LOG
        from emutpu.backend.kernels import launch_count, op_counts
        from emutpu.backend.modelled import memory_statistics, modelled_statistics
        from emutpu.backend.statistics import CompileStatistics, FallbackRecord, Statistics

        ops = op_counts()
        requests = launch_count() + self.region_launches
        cache = self.cache
        return Statistics(
            ops=ops,
            compiles=CompileStatistics(
                requests, requests - cache.misses, cache.misses, cache.seconds, _tiers(cache, requests)
            ),
            fallbacks=tuple(FallbackRecord(op, n, where) for (op, where), n in self.fallbacks.most_common()),
            live_buffers=MEMORY.buffers,
            live_hbm_bytes=MEMORY.live,
            peak_hbm_bytes=MEMORY.peak,
            modelled=modelled_statistics(self.meter) if modelled else None,
            memory=memory_statistics(self.meter, self._chip_bytes()) if modelled else None,
            regions=LOG.statistics(),
        )


def _tiers(cache: CompileCache, requests: int) -> tuple[TierStatistics, ...]:
    """Tier 1 had whatever neither was loaded nor compiled: launches that find their executable never ask the cache."""
    from emutpu.backend.statistics import TierStatistics

    missed = cache.loads + cache.misses
    return (TierStatistics(1, None, requests - missed, missed), *cache.tier_statistics())


_runtime = Runtime()


def runtime() -> Runtime:
    """The runtime of this process."""
    return _runtime
