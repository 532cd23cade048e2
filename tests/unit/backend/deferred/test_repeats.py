"""The repeated-op rule: against the recorded figures, and against a plain restatement of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emutpu.backend.deferred.repeats import Detector


def found(ops: list[int]) -> list[int]:
    """After which ops, counted from 1, the list is cut."""
    detector = Detector()
    return [n for n, op in enumerate(ops, 1) if detector.push(op)]


@pytest.mark.parametrize(("period", "first"), [(1, 6), (2, 6), (3, 9), (28, 84), (128, 384)])
def test_first_and_following_cuts(period: int, first: int) -> None:
    """On the last op of the third copy, then every S; period 1 counts as 2."""
    ops = list(range(period)) * (first // period + 5)
    step = max(2, period)
    assert found(ops) == list(range(first, len(ops) + 1, step))


def test_longer_than_128_never() -> None:
    """130 ops are too many."""
    assert found(list(range(130)) * 5) == []


def test_reset() -> None:
    """A materialising read forgets the history."""
    detector = Detector()
    assert not any(detector.push(op) for op in (1, 2, 1, 2, 1))
    detector.reset()
    assert [detector.push(op) for op in (2, 1, 2, 1, 2, 1)] == [False] * 5 + [True]


@given(st.lists(st.integers(0, 2), max_size=60))
def test_equals_the_plain_rule(ops: list[int]) -> None:
    """The automaton against the rule written down without any cleverness."""
    expected = []
    wait = period = 0
    for n in range(1, len(ops) + 1):
        if wait > 1:
            wait -= 1
            continue
        candidates = [period] if period else []
        candidates += range(2, 129)
        period = next((s for s in candidates if 3 * s <= n and ops[n - 3 * s : n - s] == ops[n - 2 * s : n]), 0)
        wait = period
        if period:
            expected.append(n)
    assert found(ops) == expected
