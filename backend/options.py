"""The options every launch is keyed with: eager mode, matmul precision, compiler options. Per thread, over a process default."""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emutpu.backend.pjrt import CompileOptions

__all__ = [
    "LOCAL",
    "EagerMode",
    "Options",
    "Precision",
    "ThreadOptions",
    "carried_to_engine_threads",
    "override",
    "process_options",
    "serve_compiler",
    "set_process",
]


class EagerMode(enum.IntEnum):
    """TorchTPU's eager modes, by its names and numbers."""

    DEFER_AND_FUSE = 0
    DEFER_NEVER = 1
    DEFER_NEVER_AND_LAUNCH_BLOCKING = 2
    _INTERNAL_COMPILE_FX_GRAPH = 4


_DEFERRING = frozenset({EagerMode.DEFER_AND_FUSE, EagerMode._INTERNAL_COMPILE_FX_GRAPH})


class Precision(enum.IntEnum):
    """Passes of an f32 matmul: 1, 3 or 6 bf16 passes."""

    DEFAULT = 0
    HIGH = 1
    HIGHEST = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Interned (see :func:`_intern`), so that keys compare them by identity first.

    ``precision`` is None in the options of ops that emit neither dots nor convolutions. ``flushes`` is set for the first
    op after DEFER_AND_FUSE was left with work pending: it joins that work, and all of it is launched.
    """

    mode: EagerMode = EagerMode.DEFER_NEVER
    precision: Precision | None = Precision.DEFAULT
    excess_precision: bool = False
    overrides: tuple[tuple[str, str], ...] = ()
    bounds_checks: bool = False
    flushes: bool = False

    @property
    def defers(self) -> bool:
        """True when ops are recorded rather than launched."""
        return self.flushes or self.mode in _DEFERRING

    @property
    def compile_options(self) -> CompileOptions:
        from emutpu.backend.pjrt import CompileOptions, Effort

        given = dict(self.overrides)
        effort = Effort[given.pop("xla_optimization_level", "O2" if self.defers else "O1")]
        given.pop(
            "xla_memory_fitting_level", None
        )  # how hard the TPU compiler tries to fit a program: nothing here can
        return CompileOptions(effort, self.excess_precision, overrides=tuple(given.items()))

    def canonical(self) -> str:
        """What of the options decides generated code; the mode does not."""
        return f"{self.compile_options.canonical()} precision={self.precision.name if self.precision is not None else None} checks={self.bounds_checks:d}"


_interned: dict[Options, Options] = {}


def _intern(options: Options) -> Options:
    return _interned.setdefault(options, options)


class ThreadOptions:
    """One thread's options: the process default with this thread's overrides on top, innermost last."""

    __slots__ = ("__weakref__", "compiles", "defers", "drawer", "options", "plain", "queue", "stack")

    def __init__(self, stack: tuple[dict[str, object], ...] = ()) -> None:
        self.stack = list(stack)
        self.compiles = False  # a thread of the compile pool: what else it does is a finalizer's
        self.queue: Any = None  # of its stream (:mod:`emutpu.backend.deferred.queue`), once it has recorded an op
        self.drawer: Any = None  # the generator whose state the op that is being recorded takes
        self.refresh()
        _threads.add(self)

    def refresh(self) -> None:
        merged: dict[str, object] = {}
        for changes in self.stack:
            merged.update(changes)
        options = dataclasses.replace(_process.options, **merged)  # type: ignore[arg-type]  # field names
        if not options.defers and self.queue is not None and self.queue.pending:
            options = dataclasses.replace(options, flushes=True)
        self.options = _intern(options)
        self.defers = options.defers
        # What ops without a matmul are keyed with: a change of precision must not recompile them.
        self.plain = _intern(dataclasses.replace(self.options, precision=None))


class _Process:
    def __init__(self) -> None:
        self.options = _intern(Options())


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = ThreadOptions()
        if isinstance(threading.current_thread(), threading._DummyThread):  # started by C++, not by the program
            _engine_threads.add(self.state)
            if _callers:
                _take_over(self.state, _callers[-1])


_process = _Process()
_threads: weakref.WeakSet[ThreadOptions] = weakref.WeakSet()
_engine_threads: weakref.WeakSet[ThreadOptions] = weakref.WeakSet()
_callers: list[ThreadOptions] = []  # threads inside a backward pass, innermost last
LOCAL = _Local()


def serve_compiler() -> None:
    """The calling thread compiles for others, who may hold locks while they wait for it."""
    LOCAL.state.compiles = True


def process_options() -> Options:
    """The process-wide options, without this thread's overrides."""
    return _process.options


def set_process(**changes: object) -> None:
    """Change process-wide options; threads keep what they override."""
    _process.options = _intern(dataclasses.replace(_process.options, **changes))  # type: ignore[arg-type]  # field names
    for state in list(_threads):
        state.refresh()


@contextmanager
def override(**changes: object) -> Iterator[None]:
    """Override options in this thread; nests."""
    state = LOCAL.state
    state.stack.append(changes)
    state.refresh()
    try:
        yield
    finally:
        state.stack.remove(changes)
        state.refresh()


def _take_over(state: ThreadOptions, parent: ThreadOptions) -> None:
    if state is not parent:
        state.stack = list(parent.stack)
        state.queue = parent.queue
        state.refresh()


@contextmanager
def carried_to_engine_threads() -> Iterator[None]:
    """While the calling thread runs backward, threads that PyTorch's engine starts for it have its options."""
    caller = LOCAL.state
    _callers.append(caller)
    for state in list(_engine_threads):
        _take_over(state, caller)
    try:
        yield
    finally:
        _callers.remove(caller)
