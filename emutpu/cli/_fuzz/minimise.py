"""Delta debugging: the few of many perturbations that a failure needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["minimise"]

T = TypeVar("T")


def minimise(items: Sequence[T], fails: Callable[[Sequence[T]], bool], attempts: int = 100) -> tuple[list[T], bool]:
    """A subset that still fails and of which no element can be left out (ddmin of Zeller and Hildebrandt, 2002).

    ``fails`` is asked at most ``attempts`` times and never twice for the same subset. Also gives whether the search came to
    its end; if not, the subset fails but may have elements to spare. ``items`` must fail.
    """
    search = _Search(list(items), fails, attempts)
    size = 2
    while len(search.current) > 1:
        if search.attempts <= 0:
            return search.current, False
        chunk = -(-len(search.current) // size)
        parts = [search.current[at : at + chunk] for at in range(0, len(search.current), chunk)]
        if any(search.take(part) for part in parts):
            size = 2
        elif len(parts) > 2 and any(search.take(search.without(part)) for part in parts):
            size = max(size - 1, 2)
        elif size >= len(search.current):
            break
        else:
            size = min(len(search.current), 2 * size)
    return search.current, search.attempts > 0


class _Search(Generic[T]):
    def __init__(self, items: list[T], fails: Callable[[Sequence[T]], bool], attempts: int) -> None:
        self.current: list[T] = items
        self.attempts = attempts
        self._fails = fails
        self._known: dict[tuple[int, ...], bool] = {}

    def without(self, part: Sequence[T]) -> list[T]:
        """What is left when a part goes."""
        gone = {id(item) for item in part}
        return [item for item in self.current if id(item) not in gone]

    def take(self, part: list[T]) -> bool:
        """Go on with a part if it fails."""
        key = tuple(map(id, part))
        if key not in self._known:
            if self.attempts <= 0:
                return False
            self.attempts -= 1
            self._known[key] = self._fails(part)
        if self._known[key]:
            self.current = part
        return self._known[key]
