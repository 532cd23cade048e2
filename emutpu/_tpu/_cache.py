"""Controls and counters of the compile cache: private names that programs and tests use."""

from __future__ import annotations

import dataclasses

from emutpu.backend.runtime import runtime

__all__ = [
    "EntryStats",
    "PerfStats",
    "cache_hits",
    "cache_misses",
    "cache_requests",
    "cache_stats",
    "clear_cache",
    "dump_on_cache_miss",
    "hbm_usage_summary",
    "set_allow_cache",
    "set_cache_only",
    "set_dump_on_cache_miss",
]


@dataclasses.dataclass(frozen=True, slots=True)
class EntryStats:
    """One executable: seconds its compilation (or load) took, when it was last read (since the epoch), and how often."""

    compilation_duration: float
    last_read: float
    read_count: int


@dataclasses.dataclass(frozen=True, slots=True)
class PerfStats:
    """A snapshot. ``peak_compilation_host_memory_bytes`` is None: nobody measures it."""

    num_cache_reqs: int
    num_cache_hits: int
    num_compilations: int
    per_entry_stats: dict[str, EntryStats]
    peak_compilation_host_memory_bytes: int | None = None


def cache_requests() -> int:
    """Launches so far: each asks the cache."""
    return runtime().statistics().compiles.requests


def cache_hits() -> int:
    """Launches that compiled nothing."""
    return runtime().statistics().compiles.hits


def cache_misses() -> int:
    """Compilations so far."""
    return runtime().statistics().compiles.misses


def cache_stats() -> PerfStats:
    """Counters, and one entry per executable, named by its key."""
    compiles = runtime().statistics().compiles
    entries = {
        str(key): EntryStats(entry.compile_seconds, entry.last_read, entry.reads)
        for key, entry in runtime().cache.entries().items()
    }
    return PerfStats(compiles.requests, compiles.hits, compiles.misses, entries)


def clear_cache() -> None:
    """Forget every executable, once the compilations in flight are done."""
    runtime().forget_executables()


def set_allow_cache(allow: bool) -> None:
    """False: every launch compiles."""
    runtime().cache.set_allow(bool(allow))
    runtime().forget_executables()


def set_cache_only(cache_only: bool) -> None:
    """True: a launch that would have to compile raises RuntimeError."""
    runtime().cache.set_only(bool(cache_only))


def set_dump_on_cache_miss(enable: bool) -> None:
    """True: the StableHLO of whatever has to be compiled is logged."""
    runtime().cache.set_dump(bool(enable))


def dump_on_cache_miss() -> bool:
    """Whether misses are dumped."""
    return runtime().cache.dump


def hbm_usage_summary() -> str:
    """One line on the device memory that loaded executables take: their code, by the client's own count."""
    entries = runtime().cache.entries().values()
    total = sum(entry.executable.memory().code for entry in entries)
    return f"CompilationCache HBM usage: {total}B for {len(entries)} executables."
