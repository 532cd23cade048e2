"""What a case is, and how a subject is measured beside its baseline."""

from __future__ import annotations

import dataclasses
import enum
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

__all__ = ["Bounded", "Case", "Measurement", "Plan", "alternate", "repeated_add", "seconds_of", "steady"]


class Bounded(enum.Enum):
    """Which figure of a measurement the bound is for."""

    RATIO = "ratio"
    VALUE = "value"


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How long to measure: ``rounds`` pairs; a quick run only shows that a case works and about where it stands."""

    quick: bool = False

    def rounds(self, usual: int) -> int:
        """``usual`` rounds, or a sixth of them (at least three)."""
        return max(3, usual // 6) if self.quick else usual


@dataclasses.dataclass(frozen=True, slots=True)
class Measurement:
    """``pairs`` are (subject, baseline) in the case's unit, one per round; ``extra`` are further figures by name."""

    pairs: tuple[tuple[float, float], ...]
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def value(self) -> float:
        """Median of the subject."""
        return statistics.median(value for value, _ in self.pairs)

    @property
    def baseline(self) -> float:
        """Median of the baseline."""
        return statistics.median(baseline for _, baseline in self.pairs)

    @property
    def ratios(self) -> list[float]:
        """Subject over baseline, round by round."""
        return [value / baseline for value, baseline in self.pairs]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return statistics.median(self.ratios)

    @property
    def best(self) -> float:
        """Fastest round of the subject over fastest round of the baseline: what an idle machine would show."""
        return min(value for value, _ in self.pairs) / min(baseline for _, baseline in self.pairs)


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One row of the table.

    ``bound`` is the largest allowed ratio, or value in ``unit`` where ``bounded`` says so. ``run`` measures; ``profile``
    gives the subject alone, to be called ``n`` times under a profiler. ``environment`` is set before the process starts.
    """

    name: str
    what: str
    against: str
    unit: str
    bound: float
    run: Callable[[Plan], Measurement]
    subject: Callable[[], Callable[[], Any]]
    bounded: Bounded = Bounded.RATIO
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    calls: int = 2000

    def holds(self, measurement: Measurement) -> bool:
        """Whether the bound holds for the median."""
        figure = measurement.ratio if self.bounded is Bounded.RATIO else measurement.value
        return figure <= self.bound


Subject = Callable[[], float]


def alternate(subject: Subject, baseline: Subject, rounds: int, scale: float = 1.0) -> tuple[tuple[float, float], ...]:
    """Pairs of seconds × ``scale``, after one round that is thrown away. Who goes first changes with each round."""
    pairs = []
    with steady():
        for turn in range(rounds + 1):
            if turn % 2:
                second = baseline()
                first = subject()
            else:
                first = subject()
                second = baseline()
            pairs.append((first * scale, second * scale))
    return tuple(pairs[1:])


def seconds_of(function: Callable[[], Any], calls: int) -> float:
    """Seconds per call of ``function``, over ``calls`` calls in a row."""
    turns: Sequence[int] = range(calls)
    started = time.perf_counter()
    for _ in turns:
        function()
    return (time.perf_counter() - started) / calls


def repeated_add(operand: Any, calls: int) -> float:
    """Seconds per add. The loop is written out, so that nothing but the add is in it."""
    turns = range(calls)
    started = time.perf_counter()
    for _ in turns:
        operand + operand  # the launch is what is measured
    return (time.perf_counter() - started) / calls


@contextmanager
def steady() -> Iterator[None]:
    """Keep what is alive now out of the garbage collector's way; it stays on, as in a user's program."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
