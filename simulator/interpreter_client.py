"""The second opinion: StableHLO's reference interpreter behind the same protocol. Slow, and free of any compiler."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from emutpu import _jaxlib
from emutpu.backend.pjrt import (
    Aval,
    CompileOptions,
    MemoryStats,
    PlainBuffer,
    ResourceExhausted,
    Topology,
    Unimplemented,
)

from ._base import EmulatedClient, EmulatedExecutable, emulated_launch, readable
from ._modules import ModuleInfo, inspect, parse
from ._wire import Wire
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


class NumpyBuffer(PlainBuffer):
    """An immutable array on the host. Deleting frees it."""

    __slots__ = ("__weakref__", "_array")

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        array.flags.writeable = False
        super().__init__(Aval(array.shape, array.dtype))
        self._array: np.ndarray[Any, Any] | None = array

    def delete(self) -> None:
        super().delete()
        self._array = None

    def value(self) -> np.ndarray[Any, Any]:
        """The array. Raises FailedPrecondition once deleted."""
        self.block_until_ready()
        assert self._array is not None
        return self._array


class InterpreterExecutable(EmulatedExecutable):
    """A module ready for the interpreter."""

    __slots__ = ()

    def __init__(self, client: InterpreterClient, info: ModuleInfo, module: bytes, options: CompileOptions) -> None:
        wire = client.prepare(module)

        def run(arguments: Sequence[Any]) -> Sequence[Any]:
            values = [argument.value() for argument in arguments]
            with _LOCK:
                results = wire.run(values, info.name)
            return [client.track(NumpyBuffer(result)) for result in results]

        super().__init__(client, info, module, options, emulated_launch(client, info, NumpyBuffer, run))


class InterpreterClient(EmulatedClient):
    """StableHLO's reference interpreter, with numpy buffers."""

    name = "interpreter"
    computes = True

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self._live: weakref.WeakSet[NumpyBuffer] = weakref.WeakSet()
        self._peak = 0

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
        self.check_compile(options)
        with _LOCK:
            return InterpreterExecutable(self, inspect(parse(module)), module, options)

    def deserialize(self, blob: bytes, options: CompileOptions) -> InterpreterExecutable:
        """Load :meth:`InterpreterExecutable.serialize`'s blob. Raises InvalidArgument for a corrupt one."""
        contents = self.unpack(blob, options)
        return InterpreterExecutable(self, contents.info, contents.module, options).knowing(contents.modelled)

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> NumpyBuffer:
        """Copy ``array`` once; with ``zero_copy`` keep a view of its memory."""
        self.check_open()
        return self.track(NumpyBuffer(array.view() if zero_copy else np.array(array, order="C")))

    def to_host(self, buffer: Any) -> np.ndarray[Any, Any]:
        """The value, read-only, without a copy. Raises the error of the launch that failed."""
        self.check_open()
        readable(buffer, NumpyBuffer)
        value: np.ndarray[Any, Any] = buffer.value()
        return value

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
