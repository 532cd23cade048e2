"""Which tiers of the compile cache there are, and where: from settings to stores. Imports neither torch nor jax."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from emutpu.backend.cache_remote import RemoteStore, is_url
from emutpu.backend.cache_store import DirectoryStore
from emutpu.backend.cache_tiers import Tier, Tiers

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Client

__all__ = ["CACHE_NAME", "DEFAULT", "DEFAULT_CAP", "DISABLED", "FOLDER", "TierSettings", "make_tiers", "secret_of"]

CACHE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
"""What the name of a tier-2 cache may look like: it becomes a directory."""
DISABLED = "disabled"
DEFAULT = "default"
FOLDER = "torch_tpu_cache"
DEFAULT_CAP = 2 << 30
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (TorchTPU's place; what is in it is checked before use)
_SHORTEST_SECRET = 16
_LOG = logging.getLogger("emutpu.cache")


@dataclasses.dataclass(frozen=True, slots=True)
class TierSettings:
    """What decides the tiers.

    ``tier2`` is the name of the shared-memory cache, ``"disabled"``, or None for TorchTPU's rule: ``default`` where
    several processes run or there is a tier 3, else none. ``tier3`` is a directory or URL. ``secret`` signs the entries of
    tier 3 (required for a URL). ``cap`` is in bytes, for each tier. ``fallback`` is where tier 2 lives without shared memory.
    """

    tier2: str | None = None
    tier3: str | None = None
    world_size: int = 1
    backup: bool = True
    read_only: bool = False
    cap: int = DEFAULT_CAP
    secret: bytes | None = dataclasses.field(default=None, repr=False)
    fallback: Path | None = None
    shared_memory: Path = _SHARED_MEMORY

    @property
    def tier2_name(self) -> str | None:
        """The name of the tier-2 cache in use, or None."""
        if self.tier2 is not None:
            return None if self.tier2.lower() == DISABLED else self.tier2
        return DEFAULT if self.world_size > 1 or self.tier3 else None

    def tier2_base(self) -> tuple[Path, bool]:
        """The directory that holds tier 2's, and whether it must be ours (shared memory belongs to everybody)."""
        shared = self.shared_memory
        if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK):
            return shared, False
        return self.fallback or _user_cache(), True

    def tier2_root(self, name: str | None = None) -> Path:
        """Where the tier-2 cache of a name lies, whether or not it is in use."""
        return self.tier2_base()[0] / FOLDER / (name or self.tier2_name or DEFAULT)

    def tier3_path(self) -> Path | None:
        """Tier 3's directory, or None where it is a URL or not in use."""
        if self.tier3 is None or is_url(self.tier3):
            return None
        return Path(self.tier3.removeprefix("file://").removeprefix("local://"))


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "emutpu"


def secret_of(text: str) -> bytes:
    """The secret that a setting names: itself, or after ``@`` the file that holds it, which must be ours alone.

    Raises ValueError when it is too short to protect anything, or the file can be read by others or not at all.
    """
    if text.startswith("@"):
        path = Path(text[1:]).expanduser()
        try:
            status = path.stat()
            if status.st_mode & 0o077 or status.st_uid != os.geteuid():
                raise ValueError(f"{path} can be read by others: chmod 600 {path}")
            secret = path.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"the file of the secret cannot be read: {error}") from error
    else:
        secret = text.encode()
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"a secret of {len(secret)} bytes is too short: use {_SHORTEST_SECRET} or more")
    return secret


def make_tiers(settings: TierSettings, client: Client, binary: Callable[[], str]) -> Tiers | None:
    """The tiers in use below the process, or None. A tier that cannot be used is said, and left out.

    ``binary`` gives the binary fingerprint; it is asked only where there is a tier.
    """
    name = settings.tier2_name
    if name is None and settings.tier2 is None:
        _LOG.info("Tier-2 compilation cache is disabled for world size 1.")
    if name is None and settings.tier3 is None:
        return None
    fingerprint = binary()
    near = _usable(2, lambda: _near(settings, name, fingerprint)) if name is not None else None
    far = _usable(3, lambda: _far(settings, fingerprint)) if settings.tier3 is not None else None
    if near is None and far is None:
        return None
    return Tiers(client, fingerprint, near, far, backup=settings.backup)


def _usable(number: int, make: Callable[[], Tier]) -> Tier | None:
    try:
        return make()
    except Exception as error:  # noqa: BLE001 (a file system of fsspec has errors of its own, and a cache is no need)
        _LOG.warning("emutpu: tier %d of the compile cache is off: %s", number, error)
        return None


def _near(settings: TierSettings, name: str, fingerprint: str) -> Tier:
    if not CACHE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a cache: letters, digits, '.', '_' and '-' only")
    base, check = settings.tier2_base()
    cap = settings.cap
    if not check:
        status = os.statvfs(base)
        cap = min(cap, status.f_blocks * status.f_frsize // 2)
    store = DirectoryStore(
        base, (FOLDER, name, fingerprint), shared_parts=2, cap=cap, check_base=check, read_only=settings.read_only
    )
    return Tier(2, store)


def _far(settings: TierSettings, fingerprint: str) -> Tier:
    assert settings.tier3 is not None
    path = settings.tier3_path()
    if path is not None:
        store = DirectoryStore(path, (fingerprint,), shared_parts=0, cap=settings.cap, read_only=settings.read_only)
        return Tier(3, store, settings.secret)
    if settings.secret is None:
        raise ValueError(
            f"{settings.tier3} is remote, and entries are native code: set EMUTPU_CACHE_KEY, the secret that signs them"
        )
    try:
        return Tier(3, RemoteStore(settings.tier3, fingerprint, read_only=settings.read_only), settings.secret)
    except ImportError as error:
        raise ImportError(f"{error}; pip install 'emutpu[remote-cache]' and the file system's own package") from error
