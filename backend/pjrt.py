"""The PjRt protocol: the only seam between the PyTorch side and whatever runs the executables.

What crosses the seam is a canonical StableHLO module (MLIR bytecode), buffers and plain values. The PyTorch side
(``emutpu.backend``) holds a :class:`Client` and knows nothing of what is behind it; a client knows nothing of PyTorch.
Every client passes the same contract suite, ``tests/pjrt_contract``.

This module and the storage-cell API (``emutpu.backend.cell``) are frozen: a change needs a record in ``docs/decisions``.

Conventions of a canonical module
    * one public function ``main``; its symbol name is the executable's ``name`` (``aten.add.Tensor``, ``region_12`` …);
    * static ranked tensors only; 64-bit types are real; ``i1`` is the boolean;
    * ``dot_general`` and ``convolution`` on f32 carry ``precision_config``: the client owes 1, 3 or 6 bf16 passes for
      ``DEFAULT``, ``HIGH``, ``HIGHEST``;
    * an argument with the attribute ``jax.buffer_donor = true`` is donated: unusable after the launch, on every client;
    * the module's attribute ``emutpu.reused`` (``array<i64: …>``) lists the results that the emulated device would put
      in the memory of the tensor they replace: fewer than are donated, and they count no memory of their own;
    * collectives are StableHLO collectives over ``replica_groups``; a client that is not the whole slice needs a
      :class:`Transport` to run them.
"""

from __future__ import annotations

import dataclasses
import enum
import fnmatch
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

__all__ = [
    "Aval",
    "Buffer",
    "Client",
    "CompileOptions",
    "Device",
    "DeviceUnavailable",
    "Effort",
    "ErrorBuffer",
    "Executable",
    "ExecutableMemory",
    "FailedPrecondition",
    "Fault",
    "FaultInjectingClient",
    "FaultSite",
    "InternalError",
    "InvalidArgument",
    "MemoryStats",
    "ModelledCost",
    "OutOfRange",
    "PjrtError",
    "PlainBuffer",
    "ResourceExhausted",
    "Topology",
    "Transport",
    "Unimplemented",
]


# --------------------------------------------------------------------------------------------------- errors


class PjrtError(RuntimeError):
    """A failure reported by a client. ``code`` is the absl status code's name; ``op`` the executable that failed.

    ``origin`` is filled by the PyTorch side with the user's line that issued the failing launch.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, op: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.op = op
        self.origin: object | None = None


class InvalidArgument(PjrtError, ValueError):
    """Wrong count, shape, dtype or device of an argument, or a malformed module."""

    code = "INVALID_ARGUMENT"


class FailedPrecondition(PjrtError):
    """A deleted or donated buffer was used, or the client was closed."""

    code = "FAILED_PRECONDITION"


class OutOfRange(PjrtError, IndexError):
    """An index outside its dimension."""

    code = "OUT_OF_RANGE"


class Unimplemented(PjrtError, NotImplementedError):
    """The client cannot run this operation or cannot give this answer."""

    code = "UNIMPLEMENTED"


class ResourceExhausted(PjrtError, MemoryError):
    """Out of device (or host) memory."""

    code = "RESOURCE_EXHAUSTED"


class DeviceUnavailable(PjrtError):
    """The device is held by another process or has gone away."""

    code = "UNAVAILABLE"


class InternalError(PjrtError):
    """A defect of the client or of the compiler below it."""

    code = "INTERNAL"


# --------------------------------------------------------------------------------------------------- values


@dataclasses.dataclass(frozen=True, slots=True)
class Aval:
    """Shape (elements per dimension, major first) and numpy dtype (``ml_dtypes`` for bf16 and fp8) of a buffer."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Dense size in bytes, without TPU tiling."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype.name}[{','.join(map(str, self.shape))}]"


@runtime_checkable
class Buffer(Protocol):
    """An array on a device. Immutable; may still be computing. ``jax.Array`` satisfies it as it is."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def is_deleted(self) -> bool: ...
    def delete(self) -> None: ...
    def is_ready(self) -> bool:
        """True when a read would not wait (also when it would raise)."""
        ...

    def block_until_ready(self) -> Buffer:
        """Wait for the value. Raises the :class:`PjrtError` of the launch that failed to produce it."""
        ...


class PlainBuffer:
    """A buffer that is not a framework's array: shape and dtype, ready at once. Subclasses hold a value, or an error."""

    __slots__ = ("_deleted", "aval")

    def __init__(self, aval: Aval) -> None:
        self.aval = aval
        self._deleted = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.aval.dtype

    @property
    def nbytes(self) -> int:
        return self.aval.nbytes

    def is_deleted(self) -> bool:
        return self._deleted

    def delete(self) -> None:
        self._deleted = True

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> Self:
        """Raises FailedPrecondition for a deleted buffer."""
        if self._deleted:
            raise FailedPrecondition("the buffer has been deleted or donated")
        return self


class ErrorBuffer(PlainBuffer):
    """The result of a launch that failed asynchronously: every read raises ``error``, every launch on it propagates it."""

    __slots__ = ("error",)

    def __init__(self, aval: Aval, error: PjrtError) -> None:
        super().__init__(aval)
        self.error = error

    def block_until_ready(self) -> Self:
        raise self.error


# --------------------------------------------------------------------------------------------------- devices


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes of device memory, as PjRt's allocator statistics name them. ``bytes_limit`` is None where unlimited."""

    bytes_in_use: int = 0
    peak_bytes_in_use: int = 0
    bytes_limit: int | None = None
    num_allocs: int = 0
    largest_alloc_size: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """One addressable device: what PjRt's device attributes show (``coords`` in chips, x first)."""

    id: int
    kind: str
    process_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    slice_index: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Topology:
    """The slice a client emulates. ``attributes`` are the client's own (torus, wrap, hosts …), plain values only."""

    name: str
    chip: str
    devices: tuple[Device, ...]
    attributes: Mapping[str, object] = dataclasses.field(default_factory=dict)


# --------------------------------------------------------------------------------------------------- compilation


class Effort(enum.Enum):
    """XLA's compile effort. Strict uses O1, fused regions and torch.compile O2, as TorchTPU does."""

    O0 = "O0"
    O1 = "O1"
    O2 = "O2"
    O3 = "O3"


@dataclasses.dataclass(frozen=True, slots=True)
class CompileOptions:
    """Everything beside the module that decides what is compiled; part of the cache key through :meth:`canonical`.

    ``overrides`` are XLA options (name, value), sorted by name; ``replicas`` is the size of the SPMD program.
    ``transport`` carries the bytes of collectives and is no part of the key.
    """

    effort: Effort = Effort.O1
    excess_precision: bool = False
    replicas: int = 1
    device: int = 0
    overrides: tuple[tuple[str, str], ...] = ()
    transport: Transport | None = dataclasses.field(default=None, compare=False)

    def canonical(self) -> str:
        """The options as one line of text, equal exactly when compilation is."""
        pairs = " ".join(f"{name}={value}" for name, value in self.overrides)
        return f"{self.effort.value} excess={self.excess_precision:d} replicas={self.replicas} device={self.device} {pairs}"


@dataclasses.dataclass(frozen=True, slots=True)
class ExecutableMemory:
    """Bytes an executable needs: arguments, results, temporaries, generated code, and what results alias."""

    arguments: int
    results: int
    temporaries: int
    code: int
    aliased: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class ModelledCost:
    """What the emulated chip would spend on one launch. Modelled, never measured.

    ``error_bar`` is relative: the truth is expected between ``seconds / (1 + error_bar)`` and ``seconds * (1 + error_bar)``.
    ``bound`` names the unit that takes longest, ``units`` the seconds of each (they overlap), ``assumptions`` what was
    assumed where the model knows no better. ``masked_flops`` are those of ``flops`` that masks of attention discard
    (NaN where a mask comes from elsewhere), ``ici_bytes`` what one device receives over the links between chips.
    """

    seconds: float
    flops: float
    hbm_bytes: float
    error_bar: float
    bound: str = ""
    units: tuple[tuple[str, float], ...] = ()
    assumptions: tuple[str, ...] = ()
    masked_flops: float = 0.0
    ici_bytes: float = 0.0


class Executable(Protocol):
    """A compiled module on one device."""

    @property
    def name(self) -> str: ...
    @property
    def arguments(self) -> tuple[Aval, ...]: ...
    @property
    def results(self) -> tuple[Aval, ...]: ...
    @property
    def donated(self) -> frozenset[int]:
        """Positions of the arguments that a launch consumes."""
        ...

    @property
    def launch(self) -> Callable[[Sequence[Buffer]], Sequence[Buffer]]:
        """Enqueue on the caller's thread without checking: for callers whose keys guarantee the avals (the hot path)."""
        ...

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        """Check count, shape, dtype, device and liveness of every argument, then :attr:`launch`.

        Raises InvalidArgument or FailedPrecondition at once; failures of the computation itself surface at the read.
        """
        ...

    def serialize(self) -> bytes:
        """Native code for :meth:`Client.deserialize`. The caller checksums it: a corrupt blob may crash the process."""
        ...

    def memory(self) -> ExecutableMemory: ...

    def cost(self) -> ModelledCost | None:
        """Modelled cost, or None while the client has no model of the chip."""
        ...


class Transport(Protocol):
    """Bytes in, bytes out, between the processes of a slice. The PyTorch side injects it (torch's gloo).

    Every call names the ranks of its group in order and blocks until this rank's part is done; a rank that fails makes
    the others raise DeviceUnavailable rather than hang.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def all_gather(self, payload: bytes, group: Sequence[int]) -> list[bytes]: ...
    def all_to_all(self, payloads: Sequence[bytes], group: Sequence[int]) -> list[bytes]: ...
    def send(self, payload: bytes, destination: int) -> None: ...
    def receive(self, source: int) -> bytes: ...


class Client(Protocol):
    """What the PyTorch side needs of a runtime. Thread-safe; ``compile`` releases the GIL where it can."""

    @property
    def name(self) -> str: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def computes(self) -> bool:
        """False for clients that know shapes and costs only: reads of values raise Unimplemented."""
        ...

    def fingerprint(self) -> str:
        """Identifies everything outside module and options that decides the generated code (versions, flags, CPU)."""
        ...

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        """Compile MLIR bytecode. Raises InvalidArgument for a malformed module, Unimplemented for an unknown op."""
        ...

    def deserialize(self, blob: bytes, options: CompileOptions) -> Executable:
        """Load what :meth:`Executable.serialize` gave on a client with the same fingerprint."""
        ...

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> Buffer:
        """Copy a C-contiguous array to the device, once. ``zero_copy`` is a permission, for memory nobody else reaches."""
        ...

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        """Wait, and give a read-only view of the value (no copy where the memory is shared). Raises the launch's error."""
        ...

    def synchronize(self) -> None:
        """Wait for everything enqueued by this process; raises the first error that nobody has read."""
        ...

    def memory_stats(self) -> MemoryStats: ...

    def close(self) -> None:
        """Release the device. Later use raises FailedPrecondition."""
        ...


# --------------------------------------------------------------------------------------------------- fault injection


class FaultSite(enum.Enum):
    """Where an injected failure happens."""

    COMPILE = "compile"
    EXECUTE = "execute"
    FROM_HOST = "from_host"
    TO_HOST = "to_host"


@dataclasses.dataclass(slots=True)
class Fault:
    """Fail the ``nth`` matching call (1 = first) at ``site``; ``nth=0`` fails all. ``op`` is a glob on executable names.

    A fault at EXECUTE is asynchronous, as on a device: the launch succeeds and every read of its results raises.
    """

    site: FaultSite
    error: PjrtError
    op: str = "*"
    nth: int = 1
    calls: int = 0

    def strikes(self, site: FaultSite, op: str) -> bool:
        """Count a call; True when this one must fail."""
        if site is not self.site or not fnmatch.fnmatchcase(op, self.op):
            return False
        self.calls += 1
        return self.nth in (0, self.calls)


class FaultInjectingClient:
    """Any client with faults on top. Faults may be added and removed while it runs (``faults`` is a plain list)."""

    def __init__(self, inner: Client, faults: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.faults = list(faults)
        self._unread: PjrtError | None = None
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def topology(self) -> Topology:
        return self.inner.topology

    @property
    def computes(self) -> bool:
        return self.inner.computes

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        executable = self.inner.compile(module, options)
        self._raise_at(FaultSite.COMPILE, executable.name)
        return _FaultyExecutable(executable, self)

    def deserialize(self, blob: bytes, options: CompileOptions) -> Executable:
        return _FaultyExecutable(self.inner.deserialize(blob, options), self)

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> Buffer:
        self._raise_at(FaultSite.FROM_HOST, "from_host")
        return self.inner.from_host(array, zero_copy=zero_copy)

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        if isinstance(buffer, ErrorBuffer):
            self._unread = None
            raise buffer.error
        self._raise_at(FaultSite.TO_HOST, "to_host")
        return self.inner.to_host(buffer)

    def synchronize(self) -> None:
        self.inner.synchronize()
        error, self._unread = self._unread, None
        if error is not None:
            raise error

    def memory_stats(self) -> MemoryStats:
        return self.inner.memory_stats()

    def close(self) -> None:
        self.inner.close()

    def strike(self, site: FaultSite, op: str) -> PjrtError | None:
        """The error of the first fault that strikes this call, named after the op, or None."""
        with self._lock:
            for fault in self.faults:
                if fault.strikes(site, op):
                    error = type(fault.error)(fault.error.message, op=op)
                    if site is FaultSite.EXECUTE and self._unread is None:
                        self._unread = error
                    return error
        return None

    def _raise_at(self, site: FaultSite, op: str) -> None:
        error = self.strike(site, op)
        if error is not None:
            raise error


class _FaultyExecutable:
    def __init__(self, inner: Executable, client: FaultInjectingClient) -> None:
        self._inner = inner
        self._client = client

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def arguments(self) -> tuple[Aval, ...]:
        return self._inner.arguments

    @property
    def results(self) -> tuple[Aval, ...]:
        return self._inner.results

    @property
    def donated(self) -> frozenset[int]:
        return self._inner.donated

    @property
    def launch(self) -> Callable[[Sequence[Buffer]], Sequence[Buffer]]:
        return self._launch

    def _launch(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        return self._run(arguments, self._inner.launch)

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        return self._run(arguments, self._inner.execute)

    def _run(
        self, arguments: Sequence[Buffer], run: Callable[[Sequence[Buffer]], Sequence[Buffer]]
    ) -> Sequence[Buffer]:
        error = next((a.error for a in arguments if isinstance(a, ErrorBuffer)), None)
        error = error or self._client.strike(FaultSite.EXECUTE, self.name)
        if error is None:
            return run(arguments)
        for position in self.donated:
            arguments[position].delete()
        return [ErrorBuffer(aval, error) for aval in self.results]

    def serialize(self) -> bytes:
        return self._inner.serialize()

    def memory(self) -> ExecutableMemory:
        return self._inner.memory()

    def cost(self) -> ModelledCost | None:
        return self._inner.cost()
