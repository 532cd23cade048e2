"""The tasks of a run on a Ray cluster: the same processes with the same limits, one on each processor that is asked for.

Ray knows the cluster by itself (``RAY_ADDRESS``, or one that it starts here). Its nodes need this package; what they compile they
share if the tier-3 cache is a place that all of them reach. A node that is lost is no finding: its task is given to another.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from emutpu._workers import paths
from emutpu.conformance.pool import Answer, Finished, Limits, Seat, Task, failure

__all__ = ["NoRay", "check", "work_off"]

_LOSSES = 3  # seats that a task may lose before that is its outcome


class NoRay(ImportError):
    """Ray is not installed."""


class _Place:
    """What Ray keeps on a node: a seat. It lives in the actor's process, which imports neither torch nor jax."""

    def __init__(self, environment: Mapping[str, str], limits: Limits, command: list[str]) -> None:
        from emutpu.conformance import pool

        pool.COMMAND = [sys.executable, *command]
        self._seat = Seat(environment, limits)

    def answer(self, task: Task) -> Answer:
        return self._seat.answer(task)


def work_off(
    tasks: Iterable[Task], *, jobs: int, environment: Mapping[str, str], limits: Limits, finished: Finished
) -> None:
    """As :func:`emutpu.conformance.pool.work_off`, with ``jobs`` processors of the cluster. Raises NoRay without Ray."""
    ray = _ray()
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False)
    try:
        _Farm(ray, jobs, environment, limits).work_off(collections.deque(tasks), finished)
    finally:
        if started:
            ray.shutdown()


def check() -> None:
    """Raise NoRay unless Ray can be imported."""
    _ray()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing here reports to anybody
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise NoRay(f"--executor ray needs Ray ({error}): pip install 'emutpu[ray]'") from error


@dataclasses.dataclass(slots=True)
class _Asked:
    """A task under way: where, and how many seats it lost before."""

    task: Task
    place: Any
    losses: int


class _Farm:
    """The driver's side: which place has which task."""

    def __init__(self, ray: Any, jobs: int, environment: Mapping[str, str], limits: Limits) -> None:
        self._ray = ray
        self._jobs = max(1, min(jobs, int(ray.cluster_resources().get("CPU", 1))))
        self._kind = ray.remote(num_cpus=1, max_restarts=0, scheduling_strategy="SPREAD")(_Place).options(
            runtime_env={"env_vars": {"PYTHONPATH": paths(), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}
        )
        self._environment, self._limits = dict(environment), limits
        self._under_way: dict[Any, _Asked] = {}

    def work_off(self, waiting: collections.deque[Task], finished: Finished) -> None:
        try:
            while waiting and len(self._under_way) < self._jobs:
                self._ask(waiting.popleft(), self._place(), 0)
            while self._under_way:
                ready, _ = self._ray.wait(list(self._under_way), num_returns=1)
                self._take(ready[0], waiting, finished)
        finally:
            for asked in self._under_way.values():
                self._ray.kill(asked.place)

    def _place(self) -> Any:
        from emutpu.conformance import pool

        return self._kind.remote(self._environment, self._limits, pool.COMMAND[1:])

    def _ask(self, task: Task, place: Any, losses: int) -> None:
        self._under_way[place.answer.remote(task)] = _Asked(task, place, losses)

    def _take(self, reference: Any, waiting: collections.deque[Task], finished: Finished) -> None:
        asked = self._under_way.pop(reference)
        place = asked.place
        try:
            answer: Answer = self._ray.get(reference)
        except self._ray.exceptions.RayActorError as error:
            if asked.losses + 1 < _LOSSES:
                self._ask(asked.task, self._place(), asked.losses + 1)
                return
            text = f"Ray lost the node {_LOSSES} times: {error}"
            answer, place = failure(asked.task, "crash", text[:2000], 0.0), None
        if not waiting:
            if place is not None:
                self._ray.kill(place)
        else:
            self._ask(waiting.popleft(), place or self._place(), 0)
        finished(answer)
