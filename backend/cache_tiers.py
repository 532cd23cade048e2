"""Tiers 2 and 3: executables that outlive the process, in shared memory and in a persistent root.

Nothing here can fail a program: whatever a store does wrong is counted, said once, and compiled again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

from emutpu.backend.cache import COMPILED, Acquired
from emutpu.backend.cache_entry import Entry, RejectedEntry, pack, unpack
from emutpu.backend.cache_remote import RemoteStore, in_background
from emutpu.backend.cache_store import DirectoryStore
from emutpu.backend.pjrt import CompileOptions, InvalidArgument, PjrtError
from emutpu.backend.statistics import TierStatistics

if TYPE_CHECKING:
    from emutpu.backend.keys import Key
    from emutpu.backend.pjrt import Client, Executable

__all__ = ["Tier", "Tiers"]

_LOG = logging.getLogger("emutpu.cache")

HEAD_START = 0.25
"""Seconds that a remote root has before the local backup compilation begins."""
PATIENCE = 60.0
"""Seconds after which a remote root is no longer waited for, where there is no backup compilation."""


@dataclasses.dataclass(slots=True)
class Tier:
    """A store and what became of the requests to it. ``secret`` signs its entries, and no others are read."""

    number: int
    store: DirectoryStore | RemoteStore
    secret: bytes | None = None
    hits: int = 0
    misses: int = 0
    writes: int = 0
    rejected: int = 0
    failed: int = 0
    seconds: float = 0.0
    said: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def count(self, **changes: float) -> None:
        """Add to counters."""
        with self.lock:
            for name, value in changes.items():
                setattr(self, name, getattr(self, name) + value)

    def complain(self, what: str, error: BaseException) -> None:
        """Count a failure of the store, and say the first one."""
        self.count(failed=1)
        if not self.said:
            self.said = True
            _LOG.warning(
                "emutpu: tier %d of the compile cache (%s) %s: %s: %s; executables are compiled instead (said once)",
                self.number,
                self.store.path,
                what,
                type(error).__name__,
                error,
            )

    def statistics(self) -> TierStatistics:
        """The counters now."""
        evicted = self.store.evicted if isinstance(self.store, DirectoryStore) else 0
        return TierStatistics(
            self.number,
            str(self.store.path),
            self.hits,
            self.misses,
            self.writes,
            self.rejected,
            self.failed,
            evicted,
            self.seconds,
        )


class Tiers:
    """The tiers below the process, for one client and one binary fingerprint.

    ``near`` is shared by the processes of this host, which compile each key once between them; ``far`` is persistent.
    With ``backup`` a slow remote root races a local compilation.
    """

    def __init__(
        self, client: Client, binary: str, near: Tier | None, far: Tier | None, *, backup: bool = True
    ) -> None:
        self._client = client
        self.binary = binary
        self._near = near
        self._far = far
        self._backup = backup

    def acquire(self, key: Key, compile_module: Callable[[], Executable], options: CompileOptions | None) -> Acquired:
        """Load ``key`` or compile it, and keep what was compiled. Raises what ``compile_module`` raises."""
        options = options or CompileOptions()
        stem = str(key)
        near = self._near
        if near is None:
            return self._from_far(stem, compile_module, options)
        found = self._load_near(near, stem, options, final=near.store.read_only)
        if found is not None:
            return found
        with self._locked(near, stem) as held:
            # Whoever had the lock before may have compiled it.
            found = self._load_near(near, stem, options, final=True) if held else None
            if not held and not near.store.read_only:
                near.count(misses=1)
            return found or self._from_far(stem, compile_module, options)

    @contextlib.contextmanager
    def _locked(self, tier: Tier, stem: str) -> Iterator[bool]:
        assert isinstance(tier.store, DirectoryStore)
        with contextlib.ExitStack() as stack:
            try:
                held = stack.enter_context(tier.store.lock(stem))
            except (OSError, RejectedEntry) as error:
                tier.complain("cannot be locked", error)
                held = False
            yield held

    # ------------------------------------------------------------------------------------------ loading

    def _load_near(self, tier: Tier, stem: str, options: CompileOptions, *, final: bool) -> Acquired | None:
        """Look without the lock first: then a bad or missing entry is not yet a verdict (``final``)."""
        started = time.perf_counter()
        try:
            data = tier.store.read(stem)
        except OSError as error:
            if final:
                tier.complain("cannot be read", error)
            return None
        except RejectedEntry as error:
            if final:
                self._reject(tier, stem, error)
            return None
        if data is None:
            if final:
                tier.count(misses=1)
                _LOG.debug("Tier-2 cache MISS for key: %s", stem)
            return None
        return self._loaded(tier, stem, data, options, started, final=final)

    def _loaded(
        self, tier: Tier, stem: str, data: bytes, options: CompileOptions, started: float, *, final: bool = True
    ) -> Acquired | None:
        try:
            entry, executable = self._verified(tier, stem, data, options)
        except RejectedEntry as error:
            if final:
                self._reject(tier, stem, error)
            return None
        seconds = time.perf_counter() - started
        tier.count(hits=1, seconds=seconds)
        _LOG.debug("Tier-%d cache HIT for key: %s", tier.number, stem)
        if tier is self._far and self._near is not None:
            self._keep(self._near, stem, entry.payload, entry.seconds)
        return Acquired(executable, tier.number, seconds)

    def _verified(self, tier: Tier, stem: str, data: bytes, options: CompileOptions) -> tuple[Entry, Executable]:
        entry = unpack(data, stem, self.binary, tier.secret)
        try:
            return entry, self._client.deserialize(entry.payload, options)
        except InvalidArgument as error:
            raise RejectedEntry(f"the client refuses it: {error}") from error
        except PjrtError as error:
            raise RejectedEntry(f"the client cannot load it: {error}") from error

    def _reject(self, tier: Tier, stem: str, error: RejectedEntry) -> None:
        tier.count(rejected=1, misses=1)
        _LOG.warning("Tier-%d cache entry for key %s rejected: %s", tier.number, stem, error)
        try:
            tier.store.quarantine(stem)
        except Exception as failure:  # noqa: BLE001 (a remote file system has errors of its own)
            tier.complain("cannot set a bad entry aside", failure)

    # ------------------------------------------------------------------------------------------ the far tier

    def _from_far(self, stem: str, compile_module: Callable[[], Executable], options: CompileOptions) -> Acquired:
        far = self._far
        if far is not None:
            started = time.perf_counter()
            data = self._fetch(far, stem)
            if data is not None:
                found = self._loaded(far, stem, data, options, started)
                if found is not None:
                    return found
        return self._compiled(stem, compile_module)

    def _fetch(self, far: Tier, stem: str) -> bytes | None:
        """The bytes of the far entry; None where there is none, or it takes longer than compiling would be put off."""
        try:
            if isinstance(far.store, DirectoryStore):
                data = far.store.read(stem)
            elif far.store.given_up:
                return None
            else:
                store = far.store
                fetching: Future[bytes | None] = in_background(lambda: store.read(stem))
                data = fetching.result(HEAD_START if self._backup else PATIENCE)
        except RejectedEntry as error:
            self._reject(far, stem, error)
            return None
        except FutureTimeout as error:
            far.count(misses=1)
            if not self._backup:
                far.complain("does not answer", error)
            return None
        except Exception as error:  # noqa: BLE001 (a remote file system has errors of its own)
            if isinstance(far.store, RemoteStore):
                far.store.failures += 1
            far.complain("cannot be read", error)
            return None
        if data is None:
            far.count(misses=1)
            _LOG.debug("Tier-3 cache MISS for key %s", stem)
        return data

    # ------------------------------------------------------------------------------------------ keeping

    def _compiled(self, stem: str, compile_module: Callable[[], Executable]) -> Acquired:
        started = time.perf_counter()
        executable = compile_module()
        seconds = time.perf_counter() - started
        writable = [tier for tier in (self._near, self._far) if tier is not None and not tier.store.read_only]
        if writable:
            try:
                payload = executable.serialize()
            except PjrtError as error:
                writable[0].complain("has nothing to keep", error)
            else:
                for tier in writable:
                    self._keep(tier, stem, payload, seconds)
        return Acquired(executable, COMPILED, seconds)

    def _keep(self, tier: Tier, stem: str, payload: bytes, seconds: float) -> None:
        data = pack(stem, self.binary, payload, seconds, tier.secret)
        if isinstance(tier.store, RemoteStore):
            tier.store.write(stem, data, lambda error: self._written(tier, stem, error))
            return
        if tier.store.read_only:
            return
        try:
            tier.store.write(stem, data)
        except OSError as error:
            self._written(tier, stem, error)
        else:
            self._written(tier, stem, None)

    def _written(self, tier: Tier, stem: str, error: Exception | None) -> None:
        if error is not None:
            tier.complain("cannot be written", error)
            return
        tier.count(writes=1)
        _LOG.debug("Tier-%d cache WRITE for key: %s", tier.number, stem)

    def statistics(self) -> tuple[TierStatistics, ...]:
        """The counters of the tiers in use, nearest first."""
        return tuple(tier.statistics() for tier in (self._near, self._far) if tier is not None)

    def flush(self, seconds: float) -> None:
        """Wait for writes to a remote root, no longer than ``seconds``."""
        far = self._far
        if far is not None and isinstance(far.store, RemoteStore) and not far.store.flush(seconds):
            far.complain("was not written before the process ended", TimeoutError(f"{seconds:g} s"))
