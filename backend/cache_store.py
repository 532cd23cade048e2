"""A directory of cache entries that several processes share: whole files only, and nobody else's.

An entry is native code, so a directory is used only where no one but this user can have put a file in it: it is ours, not
writable by others, and no symbolic link. Every file is opened relative to the checked directory's descriptor. A file is
read into memory, never mapped: a mapping would let whoever truncates the file kill this process with SIGBUS.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from emutpu.backend.cache_entry import LARGEST, RejectedEntry
from emutpu.backend.cache_upkeep import QUARANTINE, folder_bytes, prune

__all__ = ["LOCK_SECONDS", "DirectoryStore", "UnsafeFolder", "open_folder", "read_file"]

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK opening a planted FIFO would wait for ever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_KEPT_IN_QUARANTINE = 16
_FILL = 0.9
LOCK_SECONDS = 600.0
"""How long another process may compile a key before this one no longer waits for it."""


class UnsafeFolder(OSError):
    """A directory that may hold somebody else's native code; the message says what to do."""


def _check_folder(descriptor: int, path: Path, forbidden: int) -> None:
    status = os.fstat(descriptor)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        raise UnsafeFolder(
            f"{path} belongs to user {status.st_uid}, not to {os.geteuid()}: use a directory of your own"
        )
    if mode & forbidden:
        raise UnsafeFolder(f"{path} is open to others (mode {mode:04o}): chmod 700 {path}")


def _open_no_link(name: str | Path, path: Path, parent: int | None) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsafeFolder(f"{path} is a symbolic link or no directory: name the directory itself") from error
        raise


def open_folder(base: Path, parts: Sequence[str], *, create: bool, check_base: bool) -> int:
    """A descriptor of ``base/parts…``, each part made with mode 0700 if it may be, and checked.

    ``base`` itself must be ours and closed to other writers, unless it is a system directory (``check_base`` False). Raises
    UnsafeFolder, FileNotFoundError or another OSError.
    """
    if create and check_base:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = _open_no_link(base, base, None) if check_base else os.open(base, os.O_RDONLY | os.O_DIRECTORY)
    path = base
    try:
        if check_base:
            _check_folder(descriptor, base, 0o022)
        for part in parts:
            path /= part
            if create:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=descriptor)
            child = _open_no_link(part, path, descriptor)
            os.close(descriptor)
            descriptor = child
            _check_folder(descriptor, path, 0o077)
    except BaseException:  # any: the descriptor is closed, and it goes on
        os.close(descriptor)
        raise
    return descriptor


class DirectoryStore:
    """The entries of one binary fingerprint, in ``base/parts…`` (see :func:`open_folder`). Thread-safe.

    ``shared_parts`` of the parts lead to the directory that the size cap (``cap`` bytes) is for. ``read_only`` writes
    nothing at all: no entry, no lock, no time of last use.
    """

    def __init__(
        self,
        base: Path,
        parts: Sequence[str],
        *,
        shared_parts: int,
        cap: int,
        check_base: bool = True,
        read_only: bool = False,
        lock_seconds: float = LOCK_SECONDS,
    ) -> None:
        self.path = base.joinpath(*parts)
        self.root = base.joinpath(*parts[:shared_parts])
        self.read_only = read_only
        self.cap = cap
        self.evicted = 0
        self._base, self._parts, self._check_base = base, tuple(parts), check_base
        self._lock_seconds = lock_seconds
        self._descriptor = self._open()
        self._stale: list[int] = []
        self._numbers = itertools.count()
        self._total: int | None = None

    def __del__(self) -> None:
        for descriptor in (*getattr(self, "_stale", ()), getattr(self, "_descriptor", None)):
            if descriptor is not None:
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _open(self) -> int:
        return open_folder(self._base, self._parts, create=not self.read_only, check_base=self._check_base)

    def _create(self, name: str, flags: int) -> int:
        """Open a new file, in a new directory if somebody removed ours (another thread may still use its descriptor)."""
        try:
            return os.open(name, flags, 0o600, dir_fd=self._descriptor)
        except FileNotFoundError:
            fresh = self._open()
            self._stale.append(self._descriptor)
            self._descriptor = fresh
            return os.open(name, flags, 0o600, dir_fd=fresh)

    # ------------------------------------------------------------------------------------------ entries

    def read(self, stem: str) -> bytes | None:
        """The bytes of an entry, or None. Raises RejectedEntry for what is no plain file of ours, OSError otherwise."""
        try:
            descriptor = os.open(f"{stem}.bin", _READ, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise RejectedEntry("a symbolic link or a device") from None
            raise
        try:
            size = _check_file(descriptor)
            data = _read_all(descriptor, size)
            if not self.read_only:
                os.utime(descriptor)
        finally:
            os.close(descriptor)
        return data

    def write(self, stem: str, data: bytes) -> None:
        """Put an entry in place, whole or not at all. Raises OSError; nothing happens where the store is read-only."""
        if self.read_only or len(data) > self.cap:
            return
        temporary = f".{stem}.{os.getpid()}.{next(self._numbers)}.tmp"
        descriptor = self._create(temporary, _CREATE)
        try:
            try:
                _write_all(descriptor, data)
            finally:
                os.close(descriptor)
            os.rename(temporary, f"{stem}.bin", src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:  # any: nothing half written is left, and it goes on
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._descriptor)
            raise
        self._account(len(data))

    def quarantine(self, stem: str) -> None:
        """Move a bad entry aside, where it can be looked at and is never loaded. The oldest of many are removed."""
        if self.read_only:
            return
        with contextlib.suppress(FileExistsError):
            os.mkdir(QUARANTINE, 0o700, dir_fd=self._descriptor)
        folder = os.open(QUARANTINE, _FOLDER, dir_fd=self._descriptor)
        try:
            aside = f"{stem}.{time.time_ns()}.bad"
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                os.rename(f"{stem}.bin", aside, src_dir_fd=self._descriptor, dst_dir_fd=folder)
            kept = sorted(os.listdir(folder), key=lambda name: name.rpartition(".bad")[0].rpartition(".")[2])
            for name in kept[:-_KEPT_IN_QUARANTINE]:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def _account(self, size: int) -> None:
        if self._total is None:
            self._total = folder_bytes(self.root)
        else:
            self._total += size
        if self._total > self.cap:
            pruned = prune(self.root, int(self.cap * _FILL))
            self.evicted += pruned.removed
            self._total = None if pruned.busy else pruned.left

    # ------------------------------------------------------------------------------------------ locks

    @contextlib.contextmanager
    def lock(self, stem: str) -> Iterator[bool]:
        """Hold the lock of a key against other processes and threads; False where it could not be had.

        The kernel drops the lock of a process that dies. Whoever holds it longer than ``lock_seconds`` is not waited for.
        """
        if self.read_only:
            yield False
            return
        descriptor = self._acquire(f"{stem}.lock")
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None:
                # A forked child may hold a copy of the descriptor, so closing ours would not unlock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _acquire(self, name: str) -> int | None:
        deadline = time.monotonic() + self._lock_seconds
        pause = 0.001
        while True:
            descriptor = self._create(name, _LOCK)
            try:
                _check_file(descriptor)
                while not _try_lock(descriptor):
                    if time.monotonic() > deadline:
                        os.close(descriptor)
                        return None
                    time.sleep(pause)
                    pause = min(2 * pause, 0.05)
                if self._still_there(name, descriptor):
                    return descriptor
            except BaseException:  # any: the descriptor is closed, and it goes on
                os.close(descriptor)
                raise
            os.close(descriptor)  # a clean-up removed the file that we waited for

    def _still_there(self, name: str, descriptor: int) -> bool:
        try:
            there = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return there.st_ino == os.fstat(descriptor).st_ino


def read_file(path: str | Path) -> bytes:
    """A file of ours, by the rules of an entry's. Raises RejectedEntry for anything else, and OSError."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise RejectedEntry(f"{path}: a symbolic link or a device") from None
        raise
    try:
        return _read_all(descriptor, _check_file(descriptor))
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_file(descriptor: int) -> int:
    """The size of an open file. Raises RejectedEntry unless it is a plain one that only we can have written."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise RejectedEntry("not a plain file")
    if status.st_uid != os.geteuid():
        raise RejectedEntry(f"the file belongs to user {status.st_uid}")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise RejectedEntry("others may write the file")
    if status.st_size > LARGEST:
        raise RejectedEntry(f"{status.st_size} bytes are too many")
    return status.st_size


def _read_all(descriptor: int, size: int) -> bytes:
    """Up to ``size`` bytes: a file that shrinks meanwhile is short, and its checksum tells."""
    chunks = []
    while size > 0 and (chunk := os.read(descriptor, min(size, 1 << 24))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
