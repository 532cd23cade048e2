"""The threads that compile what nobody waits for yet; XLA releases the GIL while it compiles."""

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
    """A pool named ``tt_compile``, started at its first job. ``threads`` None is :func:`default_threads`."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads or default_threads()
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, job: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``job``. Raises RuntimeError after :meth:`shutdown` and while the interpreter exits."""
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="tt_compile")
            return self._executor.submit(job, *args, **kwargs)

    def shutdown(self) -> None:
        """Drop what has not begun and wait for what has."""
        with self._lock:
            executor = self._executor
        if executor is not None:
            executor.shutdown(wait=True, cancel_futures=True)
