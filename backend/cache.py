"""The in-process compile cache: logical key → loaded executable, and its statistics."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from emutpu.backend.keys import Key

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Executable

__all__ = ["CacheEntry", "CompileCache"]


@dataclasses.dataclass(slots=True)
class CacheEntry:
    """A loaded executable and what it took: ``compile_seconds`` of wall time."""

    executable: Executable
    compile_seconds: float
    reads: int = 0


class CompileCache:
    """Compiles each key once, whichever threads ask for it.

    ``allow`` False: nothing is kept. ``only`` True: what is not there raises RuntimeError instead of being compiled.
    """

    def __init__(self) -> None:
        self._entries: dict[Key, CacheEntry] = {}
        self._in_flight: dict[Key, threading.Event] = {}
        self._lock = threading.Lock()
        self.misses = 0
        self.seconds = 0.0
        self.allow = True
        self.only = False

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> dict[Key, CacheEntry]:
        """A snapshot of what is loaded."""
        return dict(self._entries)

    def get(self, key: Key, compile_module: Callable[[], Executable]) -> Executable:
        """The executable of ``key``; ``compile_module`` makes it on a miss. A failed compile is not remembered."""
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    entry.reads += 1
                    return entry.executable
                if self.only:
                    raise RuntimeError(
                        "The user has asserted that no more compilation should happen; yet compilation is needed for "
                        f"key: {key}"
                    )
                event = self._in_flight.get(key)
                if event is None:
                    self._in_flight[key] = threading.Event()
                    break
            event.wait()
        return self._compile(key, compile_module)

    def _compile(self, key: Key, compile_module: Callable[[], Executable]) -> Executable:
        started = time.perf_counter()
        try:
            executable = compile_module()
            elapsed = time.perf_counter() - started
            with self._lock:
                self.misses += 1
                self.seconds += elapsed
                if self.allow:
                    self._entries[key] = CacheEntry(executable, elapsed)
            return executable
        finally:
            with self._lock:
                self._in_flight.pop(key).set()

    def clear(self) -> None:
        """Forget every executable, after the compilations in flight."""
        while True:
            with self._lock:
                waiting = list(self._in_flight.values())
                if not waiting:
                    self._entries.clear()
                    return
            for event in waiting:
                event.wait()
