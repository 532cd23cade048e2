"""The second opinion: StableHLO's reference interpreter behind the same protocol. Slow, and free of any compiler."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from emutpu import _jaxlib
from emutpu.backend.pjrt import (
    Aval,
    Buffer,
    CompileOptions,
    ErrorBuffer,
    ExecutableMemory,
    FailedPrecondition,
    InvalidArgument,
    MemoryStats,
    ModelledCost,
    ResourceExhausted,
    Topology,
    Unimplemented,
)

from . import _blob
from ._modules import ModuleInfo, inspect, parse
from ._wire import Wire
from .checks import check_arguments, check_options, propagate
from .legalize import VERSION, legalize_precision, own_scatter_operands, widen_bf16_dots
from .rng import legalize_rng

__all__ = ["UNSUPPORTED", "InterpreterClient", "InterpreterExecutable", "NumpyBuffer"]

UNSUPPORTED: dict[str, str] = {
    "stablehlo.batch_norm_grad": "the interpreter has no batch normalisation",
    "stablehlo.batch_norm_inference": "the interpreter has no batch normalisation",
    "stablehlo.batch_norm_training": "the interpreter has no batch normalisation",
    "stablehlo.cholesky": "the interpreter has no matrix decompositions",
    "stablehlo.custom_call": "the interpreter runs no foreign code",
    "stablehlo.fft": "the interpreter aborts the process on real transforms",
    "stablehlo.rng": "the interpreter has no implicit random state",
    "stablehlo.composite": "the interpreter takes no composite operations",
}
"""Operations that it would abort the process on, so they are refused at compilation; with the reason."""

_LEGALISE = "builtin.module(func.func(chlo-legalize-to-stablehlo))"
_LARGEST = 2**34
# The interpreter and its MLIR context are entered by one thread at a time.
_LOCK = threading.RLock()


class NumpyBuffer:
    """An immutable array on the host. Deleting frees it."""

    __slots__ = ("__weakref__", "_array", "aval")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        array.flags.writeable = False
        self._array: np.ndarray[Any, Any] | None = array
        self.aval = Aval(array.shape, array.dtype)

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
        return self._array is None

    def delete(self) -> None:
        self._array = None

    def is_ready(self) -> bool:
        return True

    def block_until_ready(self) -> NumpyBuffer:
        self.value()
        return self

    def value(self) -> np.ndarray[Any, Any]:
        """The array. Raises FailedPrecondition once deleted."""
        if self._array is None:
            raise FailedPrecondition("the buffer has been deleted or donated")
        return self._array


class InterpreterExecutable:
    """A module ready for the interpreter; ``serialize`` is its bytecode."""

    def __init__(self, client: InterpreterClient, module: bytes, info: ModuleInfo) -> None:
        self._client = client
        self._module = module
        self._info = info
        self.name = info.name
        self.arguments = info.arguments
        self.results = info.results
        self.donated = info.donated
        self._wire = client.prepare(module)
        self.launch: Callable[[Sequence[Any]], Sequence[Any]] = self._launch

    def _launch(self, arguments: Sequence[Any]) -> Sequence[Any]:
        self._client.check_open()
        failed = propagate(arguments, self.results, self.donated)
        if failed is not None:
            return failed
        foreign = next((a for a in arguments if not isinstance(a, NumpyBuffer)), None)
        if foreign is not None:
            raise InvalidArgument(f"a {type(foreign).__name__} is no buffer of this client", op=self.name)
        values = [argument.value() for argument in arguments]
        with _LOCK:
            results = self._wire.run(values, self.name)
        for position in self.donated:
            arguments[position].delete()
        return [self._client.track(NumpyBuffer(result)) for result in results]

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        """Check every argument, then run. Raises InvalidArgument or FailedPrecondition."""
        self._client.check_open()
        check_arguments(self.name, self.arguments, arguments)
        return self._launch(arguments)

    def serialize(self) -> bytes:
        """The canonical module under a checksum."""
        self._client.check_open()
        return _blob.pack(self._info, self._client.fingerprint(), self._module)

    def memory(self) -> ExecutableMemory:
        """Bytes of arguments and results; the interpreter's temporaries are unknown and count zero."""
        return ExecutableMemory(
            arguments=sum(aval.nbytes for aval in self.arguments),
            results=sum(aval.nbytes for aval in self.results),
            temporaries=0,
            code=len(self._module),
        )

    def cost(self) -> ModelledCost | None:
        """None: this client has no model of the chip."""
        return None


class InterpreterClient:
    """StableHLO's reference interpreter, with numpy buffers."""

    name = "interpreter"
    computes = True

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._closed = False
        self._live: weakref.WeakSet[NumpyBuffer] = weakref.WeakSet()
        self._peak = 0

    def check_open(self) -> None:
        """Raise FailedPrecondition after :meth:`close`."""
        if self._closed:
            raise FailedPrecondition("the client is closed")

    def track(self, buffer: NumpyBuffer) -> NumpyBuffer:
        """Count ``buffer`` in :meth:`memory_stats`."""
        with _LOCK:
            self._live.add(buffer)
        return buffer

    def fingerprint(self) -> str:
        """The interpreter comes with jaxlib, so its version and that of our legalisation are all."""
        return f"interpreter jaxlib {_jaxlib.versions()[1]} legalisation {VERSION}"

    def prepare(self, module: bytes) -> Wire:
        """Legalise CHLO, precision and random bits. Raises Unimplemented for what would abort the interpreter."""
        with _LOCK:
            parsed = parse(module)
            _jaxlib.run_passes(parsed, _LEGALISE)
            info = inspect(parsed)
            for op in sorted(info.ops):
                if op in UNSUPPORTED:
                    raise Unimplemented(f"{op}: {UNSUPPORTED[op]}", op=info.name)
                if not op.startswith(("stablehlo.", "func.")):
                    raise Unimplemented(f"{op} is no StableHLO operation", op=info.name)
            if info.largest > _LARGEST:
                raise ResourceExhausted("a tensor is too large for the interpreter, which aborts when memory ends")
            legalize_rng(parsed, info)
            own_scatter_operands(parsed, info)
            widen_bf16_dots(parsed, info)
            legalize_precision(parsed, info)
            return Wire(parsed, info)

    def compile(self, module: bytes, options: CompileOptions) -> InterpreterExecutable:
        """Take a canonical module. Raises InvalidArgument for a malformed one, Unimplemented for an unknown op."""
        self.check_open()
        check_options(self.topology, options)
        with _LOCK:
            return InterpreterExecutable(self, module, inspect(parse(module)))

    def deserialize(self, blob: bytes, options: CompileOptions) -> InterpreterExecutable:
        """Load :meth:`InterpreterExecutable.serialize`'s blob. Raises InvalidArgument for a corrupt one."""
        self.check_open()
        check_options(self.topology, options)
        info, module, _ = _blob.unpack(blob, self.fingerprint())
        return InterpreterExecutable(self, module, info)

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> NumpyBuffer:
        """Copy ``array`` once; with ``zero_copy`` keep a view of its memory."""
        self.check_open()
        return self.track(NumpyBuffer(array.view() if zero_copy else np.array(array, order="C")))

    def to_host(self, buffer: Any) -> np.ndarray[Any, Any]:
        """The value, read-only, without a copy. Raises the error of the launch that failed."""
        self.check_open()
        if isinstance(buffer, ErrorBuffer):
            raise buffer.error
        if not isinstance(buffer, NumpyBuffer):
            raise InvalidArgument(f"a {type(buffer).__name__} is no buffer of this client")
        return buffer.value()

    def synchronize(self) -> None:
        """Nothing is ever pending: launches run on the caller's thread to their end."""
        self.check_open()

    def memory_stats(self) -> MemoryStats:
        """Bytes of the buffers alive; the peak is the largest value that a call has seen."""
        self.check_open()
        with _LOCK:
            sizes = [buffer.nbytes for buffer in self._live if not buffer.is_deleted()]
            self._peak = max(self._peak, sum(sizes))
        return MemoryStats(sum(sizes), self._peak, None, len(sizes), max(sizes, default=0))

    def close(self) -> None:
        """Refuse every later use with FailedPrecondition."""
        self._closed = True
