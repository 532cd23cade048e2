"""Tier 3 behind a URL: any file system that fsspec knows, object stores first of all.

Whoever can write there could hand us native code, so every entry is signed (HMAC) and nothing unsigned is read. A store
that hangs or fails must not stop a program: reads run on threads of their own with a deadline, writes in the background,
and after some failures in a row the store is left alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from emutpu.backend.cache_entry import LARGEST
from emutpu.backend.cache_upkeep import QUARANTINE

__all__ = ["RemoteStore", "in_background", "is_url"]

T = TypeVar("T")

_FAILURES = 3


def is_url(root: str) -> bool:
    """True for ``s3://…`` and its like; ``file://`` and paths are local directories."""
    scheme, separator, _ = root.partition("://")
    return bool(separator) and scheme.isidentifier() and scheme not in ("file", "local")


def in_background(job: Callable[[], T]) -> Future[T]:
    """Run ``job`` on a daemon thread: one that hangs does not keep the interpreter from exiting."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(job())
        except BaseException as error:  # noqa: BLE001 (the future hands it over)
            future.set_exception(error)

    threading.Thread(target=run, name="tt_tier3", daemon=True).start()
    return future


class RemoteStore:
    """The entries of one binary fingerprint below a URL. Thread-safe.

    Raises ImportError when fsspec or the file system's own package is missing, ValueError for an unknown protocol.
    """

    def __init__(self, url: str, binary: str, *, read_only: bool = False) -> None:
        import fsspec

        self._files, root = fsspec.core.url_to_fs(url)
        self.path = f"{url.rstrip('/')}/{binary}"
        self._folder = f"{root.rstrip('/')}/{binary}"
        self.read_only = read_only
        self.failures = 0
        self._lock = threading.Lock()
        self._writes: queue.Queue[tuple[str, bytes, Callable[[Exception | None], None]]] = queue.Queue()
        self._writer: threading.Thread | None = None

    @property
    def given_up(self) -> bool:
        """True after :data:`_FAILURES` failures in a row."""
        return self.failures >= _FAILURES

    def read(self, stem: str) -> bytes | None:
        """The bytes of an entry, or None. Raises what the file system raises."""
        path = f"{self._folder}/{stem}.bin"
        try:
            size = self._files.size(path)
            data: bytes | None = self._files.cat_file(path) if size is None or size <= LARGEST else None
        except FileNotFoundError:
            data = None
        self.failures = 0
        return data

    def write(self, stem: str, data: bytes, done: Callable[[Exception | None], None]) -> None:
        """Put an entry in place in the background; ``done`` is told of the failure, or None."""
        if self.read_only or self.given_up:
            return
        with self._lock:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="tt_tier3_writer", daemon=True)
                self._writer.start()
        self._writes.put((stem, data, done))

    def _write_all(self) -> None:
        while True:
            stem, data, done = self._writes.get()
            failure: Exception | None = None
            try:
                if not self.given_up:
                    self._put(stem, data)
            except Exception as error:  # noqa: BLE001 (every file system has errors of its own)
                self.failures += 1
                failure = error
            try:
                done(failure)
            finally:
                self._writes.task_done()

    def _put(self, stem: str, data: bytes) -> None:
        """Object stores put whole objects; elsewhere half an entry is possible, and its checksum tells."""
        path = f"{self._folder}/{stem}.bin"
        try:
            self._files.pipe_file(path, data)
        except FileNotFoundError:
            self._files.makedirs(self._folder, exist_ok=True)
            self._files.pipe_file(path, data)
        self.failures = 0

    def quarantine(self, stem: str) -> None:
        """Move a bad entry aside. Raises what the file system raises."""
        if not self.read_only:
            aside = f"{self._folder}/{QUARANTINE}/{stem}.{time.time_ns()}.bad"
            self._files.mv(f"{self._folder}/{stem}.bin", aside)

    def flush(self, seconds: float) -> bool:
        """Wait for the writes, no longer than ``seconds``; True when all are done."""
        deadline = time.monotonic() + seconds
        while self._writes.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._writes.unfinished_tasks

    def listing(self) -> list[dict[str, Any]]:
        """Every file below the URL with ``name`` and ``size`` in bytes, whatever environment it is for."""
        root = self._folder.rpartition("/")[0]
        try:
            found: dict[str, dict[str, Any]] = self._files.find(root, detail=True)
        except FileNotFoundError:
            return []
        return list(found.values())

    def fetch(self, name: str) -> bytes:
        """The bytes of a file of :meth:`listing`."""
        data: bytes = self._files.cat_file(name)
        return data

    def remove(self, names: list[str]) -> None:
        """Remove files of :meth:`listing`."""
        for name in names:
            self._files.rm_file(name)
