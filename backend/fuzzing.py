"""Perturbations of a program's schedule that must not change what it computes, for ``emutpu fuzz``.

A plan is a JSON file with a list of perturbations, each at an op or a launch, counted from 0 in this process:

========== ======== ====================================================================================================
kind       at       effect
========== ======== ====================================================================================================
collect    op       the garbage collector runs before the op is recorded
hold       op       the garbage collector does not run by itself until ``length`` more ops were recorded
read       op       everything that is pending is materialised before the op is recorded
forget     op       the compile cache, all plans and all regions are forgotten
uncached   op       for ``length`` ops nothing is found in a cache and nothing is kept
wait       launch   the host waits until the results are there
late       launch   the launch is held back until ``length`` others have run, or until somebody needs a result
========== ======== ====================================================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from emutpu.backend.pjrt import Aval, ErrorBuffer
from emutpu.backend.wrapped import WrappedClient, WrappedExecutable

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Buffer, Client, Executable

__all__ = ["AT_LAUNCH", "AT_OP", "Disturbance", "Perturbation", "start"]

AT_OP = ("collect", "hold", "read", "forget", "uncached")
AT_LAUNCH = ("wait", "late")

Launch = Callable[[Sequence["Buffer"]], Sequence["Buffer"]]


@dataclasses.dataclass(frozen=True, slots=True)
class Perturbation:
    """One perturbation: its ``kind``, the op or launch it comes ``at``, and a ``length`` where the kind has one."""

    kind: str
    at: int
    length: int = 0

    @property
    def text(self) -> str:
        """In one line, for people."""
        what = "op" if self.kind in AT_OP else "launch"
        return f"{self.kind} at {what} {self.at}" + (f" for {self.length}" if self.length else "")


class Disturbance:
    """Does what the plan in ``path`` says, and writes its counts (and a named result) where the plan asks for them."""

    def __init__(self, path: Path) -> None:
        plan = json.loads(path.read_text(encoding="utf-8"))
        self.report = Path(plan["report"])
        self.result: str | None = plan.get("result")
        self.ops = 0
        self._at_op: dict[int, list[Perturbation]] = defaultdict(list)
        self._until: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self.at_launch: dict[int, list[Perturbation]] = defaultdict(list)
        for entry in plan["perturbations"]:
            perturbation = Perturbation(**entry)
            if perturbation.kind not in (*AT_OP, *AT_LAUNCH):
                raise ValueError(f"unknown perturbation {perturbation.kind!r} in {path}")
            (self._at_op if perturbation.kind in AT_OP else self.at_launch)[perturbation.at].append(perturbation)
        self.client: _DisturbedClient | None = None

    def disturbed(self, client: Client) -> Client:
        """The client, with its launches disturbed."""
        self.client = _DisturbedClient(client, self.at_launch)
        return self.client

    def before_op(self) -> None:
        """Called before every op that is recorded."""
        number = self.ops
        self.ops += 1
        for end in self._until.pop(number, ()):
            end()
        for perturbation in self._at_op.get(number, ()):
            getattr(self, f"_{perturbation.kind}")(perturbation)

    def _collect(self, perturbation: Perturbation) -> None:
        gc.collect()

    def _hold(self, perturbation: Perturbation) -> None:
        if gc.isenabled():
            gc.disable()
            self._until[perturbation.at + 1 + perturbation.length].append(gc.enable)

    def _read(self, perturbation: Perturbation) -> None:
        from emutpu.backend.deferred.queue import current_queue

        current_queue().materialize("synchronize()")

    def _forget(self, perturbation: Perturbation) -> None:
        from emutpu.backend.deferred.queue import forget
        from emutpu.backend.runtime import runtime

        runtime().forget_executables()
        forget()

    def _uncached(self, perturbation: Perturbation) -> None:
        from emutpu.backend.runtime import runtime

        cache = runtime().cache
        if cache.allow:
            cache.allow = False
            self._forget(perturbation)
            self._until[perturbation.at + 1 + perturbation.length].append(lambda: cache.set_allow(True))

    def write(self) -> None:
        """Write the counts, and the program's result if it was asked for. Raises OSError."""
        document: dict[str, Any] = {}
        if self.result is not None:
            main = sys.modules["__main__"].__dict__
            document["result"] = _plain(main[self.result]) if self.result in main else None
            document["found"] = self.result in main
        document |= {"ops": self.ops, "launches": self.client.count if self.client else 0}  # those of the result, too
        self.report.write_text(json.dumps(document), encoding="utf-8")


def _plain(value: Any) -> Any:
    """A result as JSON: tensors as nested lists, anything unknown by its repr."""
    if isinstance(value, torch.Tensor):
        host = value.detach().cpu()
        return {"shape": list(host.shape), "values": (host.float() if host.is_floating_point() else host).tolist()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    return value if isinstance(value, int | float | str | type(None)) else repr(value)


class _Job:
    """A launch that is held back. ``force`` does it, once; its failure is kept for every result."""

    def __init__(self, launch: Launch, arguments: Sequence[Buffer], wait: int) -> None:
        self._launch = launch
        self._arguments: Sequence[Buffer] = arguments
        self._lock = threading.RLock()
        self.wait = wait
        self.done: Sequence[Buffer] | None = None
        self._failure: Exception | None = None

    def force(self) -> Sequence[Buffer]:
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self.done is None:
                try:
                    self.done = self._launch([settled(argument) for argument in self._arguments])
                except Exception as error:  # any: kept for those who ask later, and raised again
                    self._failure = error
                    raise
                finally:
                    self._arguments = ()
            return self.done


class _Late:
    """A result of a job."""

    def __init__(self, job: _Job, position: int, aval: Aval) -> None:
        self.job = job
        self.position = position
        self._aval = aval

    def settled(self) -> Buffer:
        return self.job.force()[self.position]

    @property
    def shape(self) -> tuple[int, ...]:
        return self._aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._aval.dtype

    @property
    def nbytes(self) -> int:
        return self._aval.nbytes

    def is_deleted(self) -> bool:
        return self.job.done is not None and self.settled().is_deleted()

    def delete(self) -> None:
        self.settled().delete()

    def is_ready(self) -> bool:
        return self.job.done is not None and self.settled().is_ready()

    def block_until_ready(self) -> Buffer:
        return self.settled().block_until_ready()


def settled(buffer: Buffer) -> Buffer:
    """The buffer itself, after its launch if that was held back."""
    return buffer.settled() if isinstance(buffer, _Late) else buffer


class _DisturbedClient(WrappedClient):
    """Counts launches, waits for some and holds others back."""

    def __init__(self, inner: Client, at_launch: dict[int, list[Perturbation]]) -> None:
        super().__init__(inner)
        self.count = 0
        self._at_launch = at_launch
        self._held: list[_Job] = []
        self._lock = threading.RLock()

    def wrap(self, executable: Executable) -> Executable:
        return _Disturbed(executable, self)

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        return self.inner.to_host(settled(buffer))

    def synchronize(self) -> None:
        self._release()
        self.inner.synchronize()

    def run(self, executable: Executable, arguments: Sequence[Buffer], launch: Launch) -> Sequence[Buffer]:
        with self._lock:
            number = self.count
            self.count += 1
            perturbations = self._at_launch.get(number, ())
            if executable.donated:
                self._release()  # a held launch may still read what this one consumes
            late = next((p for p in perturbations if p.kind == "late"), None)
            if late is not None and not executable.donated:
                job = _Job(launch, arguments, late.length)
                self._held.append(job)
                return [_Late(job, n, aval) for n, aval in enumerate(executable.results)]
        results = launch([settled(argument) for argument in arguments])
        if any(p.kind == "wait" for p in perturbations):
            for result in results:
                if not isinstance(result, ErrorBuffer):
                    result.block_until_ready()
        self._passed()
        return results

    def _passed(self) -> None:
        with self._lock:
            for job in self._held:
                job.wait -= 1
            due = [job for job in self._held if job.wait <= 0 and job.done is None]
            self._held = [job for job in self._held if job.wait > 0 and job.done is None]
        _do(due)

    def _release(self) -> None:
        with self._lock:
            held, self._held = self._held, []
        _do(held)


def _do(jobs: Sequence[_Job]) -> None:
    """The youngest first: the other order is what happens anyway."""
    for job in reversed(jobs):
        with contextlib.suppress(Exception):  # kept by the job: every read of its results raises it
            job.force()


class _Disturbed(WrappedExecutable):
    def __init__(self, inner: Executable, client: _DisturbedClient) -> None:
        super().__init__(inner)
        self._client = client

    def run(self, arguments: Sequence[Buffer], launch: Launch) -> Sequence[Buffer]:
        return self._client.run(self.inner, arguments, launch)


def start(path: Path) -> Disturbance:
    """Disturb this process from now on. Raises OSError and ValueError for an unusable plan."""
    from emutpu.backend.deferred.ops import HOOKS

    disturbance = Disturbance(path)
    HOOKS.before = disturbance.before_op
    return disturbance
