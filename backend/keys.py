"""Cache keys: three fingerprints, as TorchTPU has them.

``shapeless`` sees ops, parameters, dtypes and edges; ``dimensions`` all extents, strides and offsets; ``options`` the
compile options and versions. Sixteen hexadecimal digits each; portable between machines.
"""

from __future__ import annotations

import dataclasses
import hashlib

__all__ = ["Key", "fingerprint"]


def fingerprint(text: str) -> str:
    """Sixteen hexadecimal digits that stand for ``text``."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A logical key; ``str`` gives the cache file's stem."""

    shapeless: str
    dimensions: str
    options: str

    def __str__(self) -> str:
        return f"{self.shapeless}_{self.dimensions}_{self.options}"
