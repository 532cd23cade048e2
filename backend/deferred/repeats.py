"""Finds programs that repeat themselves without ever reading a value.

The rule, as TorchTPU 0.2.0 was recorded: on the last op of the third consecutive copy of a sequence of S ops, 2 ≤ S ≤ 128,
then again every S ops while the repetition goes on. Views are not counted.

The detector is a finite automaton that is built while it runs: its states are the last 384 ops, so that a program in a loop
walks through the same states again, at one dictionary look-up an op.
"""

from __future__ import annotations

__all__ = ["Detector"]

SHORTEST = 2
LONGEST = 128
_WINDOW = 3 * LONGEST
_LIMIT = 20_000


class _State:
    """``ops`` the last ops, oldest first; ``period`` of the last find; ``wait`` ops still to pass before the next.

    ``found`` where the last op ended a copy, which makes all of the period's ops wait.
    """

    __slots__ = ("found", "next", "ops", "period", "wait")

    def __init__(self, ops: tuple[int, ...], period: int, wait: int) -> None:
        self.ops = ops
        self.period = period
        self.wait = wait
        self.found = 0 < period == wait
        self.next: dict[int, _State] = {}


class Detector:
    """One stream's history of ops."""

    _states: dict[tuple[tuple[int, ...], int, int], _State] = {}  # noqa: RUF012  # shared on purpose: a cache

    def __init__(self) -> None:
        self.state = self._intern((), 0, 0)

    def push(self, op: int) -> bool:
        """Note an op; True when it ends a copy after which the list is to be cut. The recorder has this written out."""
        self.state = self.state.next.get(op) or self.learn(op)
        return self.state.found

    def reset(self) -> None:
        """Forget the history."""
        self.state = self._intern((), 0, 0)

    def learn(self, op: int) -> _State:
        """The state after an op that never came here."""
        before = self.state
        step = before.next[op] = self._step(before, op)
        return step

    def _step(self, before: _State, op: int) -> _State:
        ops = (*before.ops, op)[-_WINDOW:]
        if before.wait > 1:
            return self._intern(ops, before.period, before.wait - 1)
        period = before.period if before.period and _repeats(ops, before.period) else _shortest(ops)
        return self._intern(ops, period, period)

    @classmethod
    def _intern(cls, ops: tuple[int, ...], period: int, wait: int) -> _State:
        if len(cls._states) > _LIMIT:
            cls._states.clear()
        key = (ops, period, wait)
        state = cls._states.get(key)
        return cls._states.setdefault(key, _State(*key)) if state is None else state


def _repeats(ops: tuple[int, ...], period: int) -> bool:
    """Whether the history ends with three copies of its last ``period`` ops."""
    return len(ops) >= 3 * period and ops[-2 * period :] == ops[-3 * period : -period]


def _shortest(ops: tuple[int, ...]) -> int:
    last = ops[-1]
    for period in range(SHORTEST, min(LONGEST, len(ops) // 3) + 1):
        if ops[-1 - period] == last and _repeats(ops, period):
            return period
    return 0
