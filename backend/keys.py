"""Cache keys: three fingerprints, as TorchTPU has them, and a fourth for the machine.

``shapeless`` sees ops, parameters, dtypes and edges; ``dimensions`` all extents, strides and offsets; ``options`` the
compile options and the versions of the emulated TorchTPU. Sixteen hexadecimal digits each; portable between machines.
What a machine adds (jaxlib, flags, CPU, our own code) is the binary fingerprint: it names the directory of the entries.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from pathlib import Path

__all__ = ["STEM", "Key", "Versions", "binary_fingerprint", "fingerprint", "source_fingerprint"]

_DIGITS = 16
STEM = re.compile(r"[0-9a-f]{16}_[0-9a-f]{16}_[0-9a-f]{16}")
"""What ``str`` of a :class:`Key` matches."""


def fingerprint(text: str) -> str:
    """Sixteen hexadecimal digits that stand for ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


@dataclasses.dataclass(frozen=True, slots=True)
class Versions:
    """The versions in the third part of a key: a cache of one TorchTPU release is of no use to another.

    ``binary`` is TorchTPU's own counter (5 in its sources of 2026), ``pjrt`` the plugin's version; both are settable, so
    that keys can be compared with those of a given installation's structure.
    """

    binary: int = 5
    pjrt: str = "0.0.52"

    def canonical(self) -> str:
        """One line of text, equal exactly for equal versions."""
        return f"binary={self.binary} pjrt={self.pjrt}"


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A logical key; ``str`` gives the cache file's stem."""

    shapeless: str
    dimensions: str
    options: str

    def __str__(self) -> str:
        return f"{self.shapeless}_{self.dimensions}_{self.options}"

    @classmethod
    def of(cls, shapeless: str, dimensions: str, options: str, versions: Versions) -> Key:
        """The key of a program described by three texts, under the emulated ``versions``."""
        third = f"{options};{versions.canonical()}"
        return cls(fingerprint(shapeless), fingerprint(dimensions), fingerprint(third))


def binary_fingerprint(client: str, versions: Versions, torch: str, sources: str) -> str:
    """Sixteen digits for all that decides native code beside a logical key.

    ``client`` is :meth:`Client.fingerprint` (jaxlib, XLA flags, CPU), ``torch`` the version whose meta kernels decided
    the shapes of results, ``sources`` our own (:func:`source_fingerprint`): an entry made by another lowering must not
    be found.
    """
    return fingerprint("\n".join((client, versions.canonical(), f"torch {torch}", sources)))


@functools.cache
def source_fingerprint(*folders: Path) -> str:
    """Sixteen digits for the Python sources below ``folders``, which turn a key into code (10 ms, once per process)."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:_DIGITS]
