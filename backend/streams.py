"""Streams and events. The device runs one program at a time in the order of launches, so both exist for the interface only."""

from __future__ import annotations

import enum
import itertools
import threading
import types
import warnings
from typing import Any, Self

import torch

from emutpu.backend.memory import check_index
from emutpu.backend.options import LOCAL
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE

__all__ = [
    "CorePinningMode",
    "StreamContext",
    "TpuEvent",
    "TpuStream",
    "current_stream",
    "default_stream",
    "set_stream",
]

_UNFINISHED = (
    "Streams and Events are not fully implemented in TorchTPU. Please file a feature request describing your use case."
)


class CorePinningMode(enum.IntEnum):
    """Which cores of the chip a stream wants."""

    UNPINNED = 0
    TENSOR_CORE = 1
    SPARSE_CORE = 2


_PINNING = {
    CorePinningMode.UNPINNED: ("none", "unpinned"),
    CorePinningMode.TENSOR_CORE: ("tensorcore", "tensor_core", "tc", "tensor", "dense"),
    CorePinningMode.SPARSE_CORE: ("sparse", "sparse_core", "sparsecore", "sc", "sparseoffload"),
}
_stream_ids = itertools.count(1)


def _pinning(mode: CorePinningMode | str) -> CorePinningMode:
    if isinstance(mode, CorePinningMode):
        return mode
    for found, words in _PINNING.items():
        if str(mode).lower() in words:
            return found
    raise ValueError(f"Unknown device pinning mode: {mode}")


def _index(device: Any) -> int:
    if device is None or isinstance(device, int):
        return check_index(device or 0)
    return check_index(torch.device(device).index or 0)


class TpuStream(torch.Stream):
    """A stream of the device. ``pinned`` names the cores it wants; the emulator keeps the order of launches anyway."""

    pinned: CorePinningMode

    def __new__(
        cls,
        device: Any = None,
        priority: int = 0,  # noqa: ARG004  # TorchTPU takes it, and has no priorities
        *,
        pinned: CorePinningMode | str = "none",
        **kwargs: Any,
    ) -> Self:
        _index(device)
        identity = kwargs.pop("stream_id", None)
        made: Self = super().__new__(
            cls,
            stream_id=next(_stream_ids) if identity is None else identity,
            device_index=0,
            device_type=torch._C._autograd.DeviceType.PrivateUse1.value,
        )
        made.pinned = _pinning(pinned)
        return made

    @property
    def is_sparse(self) -> bool:
        return self.pinned is CorePinningMode.SPARSE_CORE

    @property
    def is_dense(self) -> bool:
        return self.pinned is CorePinningMode.TENSOR_CORE

    def query(self) -> bool:
        raise NotImplementedError(_UNFINISHED)

    def synchronize(self) -> None:
        runtime().synchronize()

    def wait_event(self, event: torch.Event) -> None:
        _warn_of_waiting()

    def wait_stream(self, stream: torch.Stream) -> None:
        _warn_of_waiting()

    def record_event(self, event: TpuEvent | None = None) -> TpuEvent:  # type: ignore[override]  # ours
        return (TpuEvent() if event is None else event).record(self)

    @staticmethod
    def priority_range() -> tuple[int, int]:
        raise NotImplementedError(_UNFINISHED)

    def __enter__(self) -> Self:
        runtime().materialize("synchronize()")
        _entered().append(current_stream())
        set_stream(self)
        return self

    def __exit__(self, kind: object, error: object, trace: types.TracebackType | None) -> None:
        try:
            runtime().materialize("synchronize()")
        finally:
            set_stream(_entered().pop())

    def __repr__(self) -> str:
        return "<torch.tpu.TpuStream>"


class TpuEvent(torch.Event):
    """A fence over the work enqueued before ``record``; times are the modelled device's, never this host's."""

    def __new__(
        cls,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,  # noqa: ARG004  # TorchTPU takes it, and does nothing with it
        device: Any = None,
    ) -> Self:
        _index(device)
        if interprocess:
            raise NotImplementedError(_UNFINISHED)
        made: Self = super().__new__(cls, DEVICE, enable_timing=enable_timing, blocking=blocking)
        made._timed = enable_timing
        made._recorded = None
        return made

    _timed: bool
    _recorded: int | None

    def record(self, stream: torch.Stream | None = None) -> TpuEvent:  # type: ignore[override]  # returns itself
        """Note when all work enqueued so far will be done on the modelled device. Waits for nothing; returns the event."""
        if stream is not None and not isinstance(stream, torch.Stream):
            raise TypeError(f"expected torch.Stream, but got {type(stream).__name__}")
        runtime().materialize("synchronize()")
        self._recorded = runtime().meter.now()
        return self

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Nothing to wait for: launches keep their order."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if self._recorded is not None:
            runtime().synchronize()

    def elapsed_time(self, end_event: TpuEvent) -> float:  # type: ignore[override]  # events of this device
        """Milliseconds of modelled time between the two records. Raises ValueError for events without timing."""
        if not (self._timed and end_event._timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded is None or end_event._recorded is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded - self._recorded) / 1e9

    def ipc_handle(self) -> bytes:
        raise NotImplementedError(_UNFINISHED)

    @classmethod
    def from_ipc_handle(cls, device: Any, ipc_handle: bytes) -> TpuEvent:
        raise NotImplementedError(_UNFINISHED)

    def __repr__(self) -> str:
        return "<torch.tpu.TpuEvent>"


class _Waiting:
    warned = False


def _warn_of_waiting() -> None:
    if not _Waiting.warned:
        _Waiting.warned = True
        warnings.warn("<TorchTpu/> Asynchronous stream waiting is not yet implemented.", stacklevel=3)


class _Streams(threading.local):
    def __init__(self) -> None:
        self.current: TpuStream | None = None
        self.entered: list[TpuStream] = []


_streams = _Streams()
_default: list[TpuStream] = []


def _entered() -> list[TpuStream]:
    return _streams.entered


def default_stream(device: Any = None) -> TpuStream:
    """The stream with id 0, always the same object."""
    _index(device)
    if not _default:
        _default.append(TpuStream(stream_id=0))
    return _default[0]


def current_stream(device: Any = None) -> TpuStream:
    """The calling thread's stream."""
    _index(device)
    return _streams.current or default_stream()


def set_stream(stream: torch.Stream) -> None:
    """Make ``stream`` the calling thread's. Raises TypeError for a stream of another device."""
    if not isinstance(stream, TpuStream):
        raise TypeError(f"expected a TpuStream, got {type(stream).__name__}: make it with torch.tpu.Stream()")
    _streams.current = stream
    LOCAL.state.queue = None  # found again by the next op that is recorded


class StreamContext:
    """``with torch.tpu.stream(s)``: nothing happens for None."""

    def __init__(self, stream: TpuStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()

    def __exit__(self, kind: object, error: object, trace: types.TracebackType | None) -> None:
        if self.stream is not None:
            self.stream.__exit__(kind, error, trace)
