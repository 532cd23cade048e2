"""What ``emutpu cache`` does to a tier, and what it found."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emutpu.backend import cache_upkeep
from emutpu.backend.cache_entry import RejectedEntry, read_header
from emutpu.backend.cache_store import open_folder

if TYPE_CHECKING:
    from emutpu.backend.cache_remote import RemoteStore
    from emutpu.backend.cache_setup import TierSettings

__all__ = ["Row", "act"]

_NO_EVICTION = "a remote root is not pruned from here: give its bucket an expiry rule"


@dataclasses.dataclass(slots=True)
class Row:
    """One tier after the action. ``removed`` entries; ``findings`` the bad ones; None where ``notes`` says why."""

    name: str
    path: str
    entries: int | None = 0
    bytes: int | None = 0
    corrupt: int | None = 0
    unfinished: int | None = 0
    removed: int | None = 0
    findings: list[dict[str, str]] = dataclasses.field(default_factory=list)
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


def act(action: str, settings: TierSettings) -> list[Row]:
    """Do ``stats``, ``verify``, ``prune`` or ``clear`` to each tier. Raises OSError for a directory that is not ours."""
    root = settings.tier2_root()
    rows = [_local("tier2", root, action, settings.cap, None)]
    path = settings.tier3_path()
    if path is not None:
        rows.append(_local("tier3", path, action, settings.cap, settings.secret))
    elif settings.tier3 is not None:
        rows.append(_remote(settings, action))
    return rows


def _local(name: str, root: Path, action: str, cap: int, secret: bytes | None) -> Row:
    row = Row(name, str(root))
    if not root.is_symlink() and not root.exists():
        row.notes["path"] = "the directory does not exist: nothing has been cached there"
        return row
    # Who removes files in a directory of somebody else's, or through a link of theirs, may remove what they point at.
    os.close(open_folder(root, (), create=False, check_base=True))
    if action in ("prune", "clear"):
        done = cache_upkeep.prune(root, cap) if action == "prune" else cache_upkeep.clear(root)
        row.removed = None if done.busy else done.removed
        if done.busy:
            row.notes["removed"] = "another process is pruning this directory"
    found = cache_upkeep.contents(root)
    bad = cache_upkeep.broken_entries(root, secret)
    row.entries, row.bytes, row.unfinished = found.entries, found.bytes, found.unfinished
    row.corrupt = found.quarantined + len(bad)
    row.findings = [{"entry": str(path.relative_to(root)), "reason": reason} for path, reason in bad]
    return row


def _remote(settings: TierSettings, action: str) -> Row:
    from emutpu.backend.cache_remote import RemoteStore

    assert settings.tier3 is not None
    row = Row("tier3", settings.tier3, unfinished=None)
    row.notes["unfinished"] = "a remote store keeps unfinished files to itself"
    try:
        _act_remotely(RemoteStore(settings.tier3, "any"), row, action, settings.secret)
    except (OSError, ImportError, ValueError):
        raise
    except Exception as error:  # (every file system of fsspec has errors of its own)
        raise OSError(f"{settings.tier3}: {type(error).__name__}: {error}") from error
    return row


def _act_remotely(store: RemoteStore, row: Row, action: str, secret: bytes | None) -> None:
    files = [file for file in store.listing() if file["name"].endswith((".bin", ".bad"))]
    if action == "clear":
        store.remove([file["name"] for file in files])
        row.removed = sum(file["name"].endswith(".bin") for file in files)
        files = []
    elif action == "prune":
        row.removed = None
        row.notes["removed"] = _NO_EVICTION
    entries = [file["name"] for file in files if file["name"].endswith(".bin")]
    row.entries, row.bytes = len(entries), sum(file["size"] or 0 for file in files)
    row.corrupt = len(files) - len(entries)
    if action != "verify":
        row.notes["corrupt"] = "entries set aside only: `verify` reads them all"
        return
    row.findings = [{"entry": name, "reason": reason} for name, reason in _bad(store.fetch, entries, secret)]
    row.corrupt += len(row.findings)


def _bad(fetch: Callable[[str], bytes], names: list[str], secret: bytes | None) -> list[tuple[str, str]]:
    return [(name, reason) for name in names if (reason := _defect(fetch(name), name, secret)) is not None]


def _defect(data: bytes, name: str, secret: bytes | None) -> str | None:
    folder, _, file = name.rpartition("/")
    try:
        entry = read_header(data, secret)
    except RejectedEntry as error:
        return str(error)
    if f"{entry.key}.bin" != file or entry.binary != folder.rpartition("/")[2]:
        return f"it is the entry of {entry.binary}/{entry.key}"
    return None
