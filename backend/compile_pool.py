"""The threads that compile; XLA releases the GIL meanwhile.

Whoever waits for a compilation does so in Python, where Ctrl-C and a signal's handler find it, and lends its core to the
thread that compiles. What nobody waits for yet has threads of its own, so that it delays nobody.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

__all__ = ["CompilePool", "default_threads"]

P = ParamSpec("P")
T = TypeVar("T")

_SMT = Path("/sys/devices/system/cpu/smt/active")


def _threads_per_core() -> int:
    try:
        return 2 if _SMT.read_text().strip() == "1" else 1
    except OSError:
        return 1


def default_threads(nproc: int | None = None, hardware: int | None = None) -> int:
    """TorchTPU's size of the pool: four hardware threads per unit of ``NPROC``, else all there are; less one core.

    At least 1. ``hardware`` is the number of hardware threads this process may use.
    """
    if hardware is None:
        hardware = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, (4 * nproc if nproc else hardware) - _threads_per_core())


class CompilePool:
    """A pool named ``tt_compile``, started at its first job. ``threads`` None is :func:`default_threads`.

    ``enter`` is called first on each of its threads.
    """

    def __init__(self, threads: int | None = None, enter: Callable[[], None] | None = None) -> None:
        self.threads = threads or default_threads()
        self._on_enter = enter
        self._lock = threading.RLock()  # a finalizer or a signal's handler may come in
        self._own = threading.local()
        self._queue: ThreadPoolExecutor | None = None
        self._waited: ThreadPoolExecutor | None = None

    @property
    def ahead(self) -> int:
        """How many compilations one caller may have under way: the pool's threads, and the one that it lends."""
        return self.threads + 1

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``job``. Raises RuntimeError after :meth:`shutdown` and while the interpreter exits."""
        with self._lock:
            if self._queue is None:
                self._queue = self._executor(self.threads)
            return self._queue.submit(job, *args, **kwargs)

    def start(self, job: Callable[[], object]) -> None:
        """Do ``job`` on a thread that the caller lends: it will wait for what the job signals.

        On a thread of the pool, and where no thread can be had (while the interpreter exits), it is done at once. A job
        must not fail, and do nothing when it is called a second time.
        """
        if not getattr(self._own, "compiles", False):
            try:
                with self._lock:
                    if self._waited is None:
                        self._waited = self._executor(max(self.ahead, default_threads() + 1))
                    self._waited.submit(job)
            except RuntimeError:  # no further threads
                pass
            else:
                return
        job()

    def _executor(self, threads: int) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(threads, thread_name_prefix="tt_compile", initializer=self._enter)

    def _enter(self) -> None:
        self._own.compiles = True
        if self._on_enter is not None:
            self._on_enter()

    def shutdown(self) -> None:
        """Drop what nobody waits for and has not begun, and wait for the rest."""
        with self._lock:
            executors = [self._queue, self._waited]
        for executor in executors:
            if executor is not None:
                executor.shutdown(wait=True, cancel_futures=executor is self._queue)
