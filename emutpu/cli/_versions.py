"""Release numbers and bounds, as our own metadata and jax's write them.

``packaging`` knows all of PEP 440 and is no dependency of the core; what is needed here is comparison of releases.
"""

from __future__ import annotations

import dataclasses
import operator
import re
from collections.abc import Callable

__all__ = ["Bounds", "Requirement", "release"]

_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*([^;]*)(;.*)?")
_BOUND = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9][0-9.]*)")


def release(version: str) -> tuple[int, ...]:
    """``(2, 13, 0)`` for ``2.13.0+cpu``; trailing zeros do not count in comparisons. Raises ValueError without a number."""
    found = re.match(r"\d+(\.\d+)*", version)
    if found is None:
        raise ValueError(f"not a version: {version!r}")
    return tuple(int(part) for part in found[0].split("."))


def _significant(parts: tuple[int, ...]) -> tuple[int, ...]:
    while parts and parts[-1] == 0:
        parts = parts[:-1]
    return parts


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """A comma-separated list of bounds such as ``>=2.13.0,<2.14``. Raises ValueError for any other form."""

    text: str

    def __post_init__(self) -> None:
        for part in self.parts:
            if _BOUND.fullmatch(part) is None:
                raise ValueError(f"not a version bound: {part!r}")

    @property
    def parts(self) -> list[str]:
        """The single bounds, lower ones first."""
        return sorted((part.strip() for part in self.text.split(",") if part.strip()), reverse=True)

    def __str__(self) -> str:
        return ",".join(self.parts)

    def contains(self, version: str) -> bool:
        """Whether a release is within every bound; local and pre-release labels do not count."""
        return all(self._holds(part, version) for part in self.parts)

    def too_old(self, version: str) -> bool:
        """Whether a lower bound is what the release misses."""
        return any(part.startswith(">") and not self._holds(part, version) for part in self.parts)

    @staticmethod
    def _holds(part: str, version: str) -> bool:
        found = _BOUND.fullmatch(part)
        assert found is not None
        return _OPERATORS[found[1]](_significant(release(version)), _significant(release(found[2])))


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """A line of ``Requires-Dist``; ``conditional`` when it holds for an extra or an environment only."""

    name: str
    bounds: Bounds
    conditional: bool

    @staticmethod
    def parse(line: str) -> Requirement:
        """Raises ValueError for a line that is not a name with bounds."""
        found = _REQUIREMENT.fullmatch(line.strip())
        if found is None:
            raise ValueError(f"not a requirement: {line!r}")
        conditional = found[3] is not None
        return Requirement(found[1], Bounds("" if conditional else found[2].strip().strip("()")), conditional)
