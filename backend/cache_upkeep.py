"""Looking after a directory of cache entries: what is in it, what of it is broken, what can go.

A root holds one directory per binary fingerprint (sixteen digits), and that the entries: ``<key>.bin``, ``<key>.lock``,
unfinished files (``.….tmp``) and a ``quarantine``. Nothing else is touched, so a root may hold other things.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from emutpu.backend.cache_entry import LARGEST, RejectedEntry, read_header
from emutpu.backend.keys import STEM

__all__ = [
    "PRUNE_LOCK",
    "QUARANTINE",
    "CacheFile",
    "Contents",
    "Pruned",
    "broken_entries",
    "clear",
    "contents",
    "folder_bytes",
    "prune",
]

QUARANTINE = "quarantine"
PRUNE_LOCK = ".prune.lock"
_BINARY = re.compile(r"[0-9a-f]{16}")
_TEMPORARY = re.compile(rf"\.{STEM.pattern}\.\d+\.\d+\.tmp")
_ABANDONED_SECONDS = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of the cache. ``kind`` is entry, lock, temporary or quarantined; ``used`` seconds since the epoch."""

    path: Path
    kind: str
    bytes: int
    used: float


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """What a root holds; ``bytes`` counts everything, ``quarantined`` entries that were found bad and set aside."""

    entries: int = 0
    bytes: int = 0
    quarantined: int = 0
    unfinished: int = 0
    environments: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Pruned:
    """What pruning did: ``removed`` entries, ``freed`` bytes, ``left`` bytes. ``busy``: another process was at it."""

    removed: int = 0
    freed: int = 0
    left: int = 0
    busy: bool = False


def _folders(root: Path) -> Iterator[Path]:
    """The directories of ``root`` named by a binary fingerprint; links are not followed."""
    try:
        with os.scandir(root) as found:
            names = sorted(e.name for e in found if _BINARY.fullmatch(e.name) and e.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    yield from (root / name for name in names)


def _kind(name: str) -> str | None:
    stem, dot, suffix = name.rpartition(".")
    if dot and suffix in ("bin", "lock") and STEM.fullmatch(stem):
        return "entry" if suffix == "bin" else "lock"
    return "temporary" if _TEMPORARY.fullmatch(name) else None


def _files(root: Path) -> Iterator[CacheFile]:
    """Every file of the cache below ``root``; files that vanish meanwhile are left out."""
    for folder in _folders(root):
        for place in (folder, folder / QUARANTINE):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as found:
                for item in found:
                    kind = "quarantined" if place is not folder else _kind(item.name)
                    if kind is None:
                        continue
                    with contextlib.suppress(FileNotFoundError):
                        status = item.stat(follow_symlinks=False)
                        if not stat.S_ISDIR(status.st_mode):
                            yield CacheFile(Path(item.path), kind, status.st_size, status.st_mtime)


def folder_bytes(root: Path) -> int:
    """Bytes of all files of the cache below ``root``."""
    return sum(file.bytes for file in _files(root))


def contents(root: Path) -> Contents:
    """Count what is below ``root``. A root that does not exist is empty. Raises OSError."""
    files = list(_files(root))
    kinds = [file.kind for file in files]
    return Contents(
        entries=kinds.count("entry"),
        bytes=sum(file.bytes for file in files),
        quarantined=kinds.count("quarantined"),
        unfinished=kinds.count("temporary"),
        environments=sum(1 for _ in _folders(root)),
    )


def broken_entries(root: Path, secret: bytes | None = None) -> list[tuple[Path, str]]:
    """The entries below ``root`` that would be rejected, with the reason; ``secret`` as for :func:`cache_entry.unpack`."""
    entries = [file.path for file in _files(root) if file.kind == "entry"]
    return [(path, reason) for path in entries if (reason := _defect(path, secret)) is not None]


def _defect(path: Path, secret: bytes | None) -> str | None:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return "a symbolic link or a device"
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            return f"others may have written it (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o})"
        if status.st_size > LARGEST:
            return f"{status.st_size} bytes are too many"
        entry = read_header(path.read_bytes(), secret)
    except FileNotFoundError:
        return None  # evicted meanwhile
    except RejectedEntry as error:
        return str(error)
    if (entry.key, entry.binary) != (path.stem, path.parent.name):
        return f"it is the entry of {entry.binary}/{entry.key}"
    return None


def prune(root: Path, limit: int) -> Pruned:
    """Remove what is broken off or set aside, then the entries that nobody used for the longest, down to ``limit`` bytes.

    Readers are not disturbed: they have the file open, or find none and compile. Raises OSError.
    """
    with _exclusive(root) as held:
        if not held:
            return Pruned(busy=True)
        files = list(_files(root))
        total = sum(file.bytes for file in files)
        removed = freed = 0
        now = time.time()
        for file in sorted(files, key=lambda file: (file.kind == "entry", file.used)):
            abandoned = file.kind == "temporary" and now - file.used > _ABANDONED_SECONDS
            excess = file.kind == "entry" and total - freed > limit
            if (file.kind == "quarantined" or abandoned or excess) and _remove(file.path):
                freed += file.bytes
                removed += file.kind == "entry"
        _remove_idle_locks(files)
        _remove_empty(root)
        return Pruned(removed, freed, total - freed)


def clear(root: Path) -> Pruned:
    """Remove every file of the cache below ``root``, locks in use excepted. Raises OSError."""
    with _exclusive(root) as held:
        if not held:
            return Pruned(busy=True)
        files = list(_files(root))
        removed = freed = 0
        for file in files:
            if file.kind != "lock" and _remove(file.path):
                freed += file.bytes
                removed += file.kind == "entry"
        _remove_idle_locks(files)
        _remove_empty(root)
        return Pruned(removed, freed, sum(file.bytes for file in files) - freed)


@contextlib.contextmanager
def _exclusive(root: Path) -> Iterator[bool]:
    """One clean-up at a time; False when another process is at it."""
    if not root.is_dir():
        yield True
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(root / PRUNE_LOCK, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def _remove_idle_locks(files: list[CacheFile]) -> None:
    """Remove the locks that no entry needs and nobody holds; who waits for one notices that it is gone."""
    for file in files:
        if file.kind != "lock" or file.path.with_suffix(".bin").exists():
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(file.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(file.path)
            finally:
                os.close(descriptor)


def _remove_empty(root: Path) -> None:
    for folder in _folders(root):
        for place in (folder / QUARANTINE, folder):
            with contextlib.suppress(OSError):  # not empty, or not there
                place.rmdir()
