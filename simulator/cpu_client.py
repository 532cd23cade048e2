"""The client that computes: XLA's CPU compiler, through JAX's CPU device. Its buffers are ``jax.Array`` themselves."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from emutpu import _jaxlib
from emutpu.backend.pjrt import (
    Aval,
    Buffer,
    CompileOptions,
    DeviceUnavailable,
    Effort,
    ErrorBuffer,
    FailedPrecondition,
    InvalidArgument,
    MemoryStats,
    Topology,
)

from . import _cpu_features
from ._base import EmulatedClient, EmulatedExecutable, Launch
from ._modules import ModuleInfo, inspect, parse
from ._xla_flags import prepare
from .checks import check_arguments, propagate
from .errors import translate
from .legalize import VERSION

__all__ = ["CpuClient", "CpuExecutable"]

_ERRORS = _jaxlib.xla_error_types()


def _launcher(loaded: Any, info: ModuleInfo, sharding: Any) -> Launch:
    """A closure that enqueues ``loaded``: the hot path, so nothing but two calls into jaxlib on success.

    Measured with one result / eight: ``execute`` 5.7 / 25.9 us, ``execute_sharded`` and
    ``disassemble_into_single_device_arrays`` 5.4 / 24.9, ``jax.jit``'s own fast path 4.3 / 13.2, with jaxlib's result
    handlers 3.6 / 10.6 (of which enqueueing is 3.1 / 8.9).
    """
    run = loaded.execute_sharded
    handlers = [_jaxlib.result_handler(aval.shape, aval.dtype, sharding) for aval in info.results]
    name, results, donated = info.name, info.results, info.donated

    def failed(error: Exception, arguments: Sequence[Any]) -> Sequence[Any]:
        propagated = propagate(arguments, results, donated)
        if propagated is None:
            raise translate(error, name) from error
        return propagated

    def launch(arguments: Sequence[Any]) -> Sequence[Any]:
        try:
            return run(arguments).consume_with_handlers(handlers)  # type: ignore[no-any-return]  # untyped jaxlib
        except _ERRORS as error:
            return failed(error, arguments)

    return launch


_STREAMS = 5
_FUSED = frozenset({Effort.O2, Effort.O3})


def _beside(launch: Launch, turn: Callable[[], int]) -> Launch:
    """``launch`` with streams taking turns, so that fused modules which do not read each other's results run side by side.

    XLA's threads wait for each other around every product: 24 of [128, 512] x [512, 512] and 24 of [512, 128] x [128, 512]
    take 28 to 30 ms in one stream and 21 in two. A training step of a recurrent network
    in DeferAndFuse (165 regions) takes 77 ms without streams and, with 2, 3, 4, 5, 7 and 8 of them, 79, 68, 65, 63, 65
    and 66; steps of few large regions are the same within the noise. Selecting costs 0.2 us a launch.
    """
    select, selected = _jaxlib.select_stream, _jaxlib.selected_stream

    def launch_beside(arguments: Sequence[Any]) -> Sequence[Any]:
        before = selected()
        select(turn())
        try:
            return launch(arguments)
        finally:
            select(before)

    return launch_beside


class CpuExecutable(EmulatedExecutable):
    """A module compiled for one CPU device. ``launch`` is a plain attribute, replaced when the client closes."""

    __slots__ = ("_device", "_loaded")
    _device: CpuClient

    def __init__(
        self, client: CpuClient, loaded: Any, info: ModuleInfo, module: bytes, options: CompileOptions
    ) -> None:
        launch = _launcher(loaded, info, client.sharding)
        if options.effort in _FUSED:
            launch = _beside(launch, client.turn)
        super().__init__(client, info, module, options, launch)
        self._device = client
        self._loaded = loaded

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        """Check every argument, then launch. Raises InvalidArgument or FailedPrecondition."""
        self._device.check_open()
        check_arguments(self.name, self.arguments, arguments)
        for position, buffer in enumerate(arguments):
            if not isinstance(buffer, ErrorBuffer):
                self._device.check_device(self.name, position, buffer)
        return self.launch(arguments)

    def _code(self) -> bytes:
        try:
            return _jaxlib.serialize(self._device.backend, self._loaded)
        except _ERRORS as error:
            raise translate(error, self.name) from error

    def _features(self, code: bytes) -> frozenset[str]:
        return _jaxlib.code_features(code) or _cpu_features.of_kernel()


def _limit(target: str) -> None:
    """Compile for a baseline. Raises DeviceUnavailable where XLA has been in use before, or does not tell."""
    features = _jaxlib.limit_cpu(_cpu_features.LEVELS[target])
    above = _cpu_features.beyond_level(features, target)
    if above or not features:
        why = f"it uses {', '.join(sorted(above)[:4])}" if above else "this jaxlib does not say what it compiles for"
        raise DeviceUnavailable(
            f"XLA does not compile for the baseline {target} ({why}): it reads its flags at its first use, so use the "
            f"device before jax, or set XLA_FLAGS=--xla_cpu_max_isa={_cpu_features.LEVELS[target]} for the whole process"
        )


class CpuClient(EmulatedClient):
    """One emulated device on JAX's CPU device. Thread-safe; compilation and execution release the GIL.

    ``cpu_target`` is a baseline of :data:`_cpu_features.LEVELS` (or ``native``) that code is compiled for; ``quick`` trades
    the speed of the code for that of the compiler (:mod:`simulator._xla_flags` has the figures), ``native_highest`` the
    chip's way to compute HIGHEST for a sixth of its time (:mod:`simulator.legalize`).
    """

    name = "cpu"
    computes = True

    def __init__(
        self, topology: Topology, *, cpu_target: str | None = None, quick: bool = False, native_highest: bool = False
    ) -> None:
        super().__init__(topology)
        self._cpu_target = None if cpu_target == "native" else cpu_target
        self._quick = quick
        self._native_highest = native_highest
        try:
            if self._cpu_target is not None:
                _limit(self._cpu_target)
            elif cpu_target is None and _jaxlib.dies_of_avx512():
                _jaxlib.limit_cpu("AVX2")
            self.backend = _jaxlib.cpu_backend()
        except RuntimeError as error:
            raise DeviceUnavailable(
                f"JAX gives no CPU device ({error}); add 'cpu' to JAX_PLATFORMS or unset it"
            ) from error
        self.device = self.backend.local_devices()[0]
        self._devices = _jaxlib.device_list([self.device])
        self._loading = _jaxlib.compile_options([self.device.id])
        self.sharding = _jaxlib.single_device_sharding(self.device)
        self._avals: dict[tuple[tuple[int, ...], np.dtype[Any]], Any] = {}
        self._live: weakref.WeakSet[CpuExecutable] = weakref.WeakSet()
        self._peak = 0
        self.turn: Callable[[], int] = itertools.cycle(range(1, 1 + _STREAMS)).__next__

    # ------------------------------------------------------------------------------------------ state

    def check_device(self, op: str, position: int, buffer: Any) -> None:
        """Raise InvalidArgument unless ``buffer`` is an array on this client's device."""
        devices = getattr(buffer, "devices", None)
        if devices is None:
            raise InvalidArgument(f"argument {position} of {op} is a {type(buffer).__name__} of another client", op=op)
        where = devices()
        if where != {self.device}:
            raise InvalidArgument(f"argument {position} of {op} is on {where}, expected {self.device}", op=op)

    def fingerprint(self) -> str:
        """Versions, flags, CPU features and our own legalisation: whatever decides the code besides module and options."""
        kinds = [name for name, chosen in (("quick", self._quick), ("native HIGHEST", self._native_highest)) if chosen]
        return " ".join([_jaxlib.fingerprint(self._cpu_target), f"legalisation {VERSION}", *kinds])

    def close(self) -> None:
        """Refuse every later use with FailedPrecondition."""
        super().close()
        for executable in list(self._live):
            executable.launch = self._refuse

    def _refuse(self, arguments: Sequence[Any]) -> Sequence[Any]:
        raise FailedPrecondition("the client is closed")

    # ------------------------------------------------------------------------------------------ compilation

    def compile(self, module: bytes, options: CompileOptions) -> CpuExecutable:
        """Compile a canonical module. Raises InvalidArgument, Unimplemented, ResourceExhausted or InternalError."""
        self.check_compile(options)
        parsed = parse(module)
        info = inspect(parsed)
        flags = prepare(parsed, info, options, quick=self._quick, native_highest=self._native_highest)
        settings = _jaxlib.compile_options([self.device.id], flags)
        try:
            loaded = _jaxlib.compile_module(self.backend, parsed, self._devices, settings)
        except _ERRORS as error:
            raise translate(error, info.name) from error
        return self._executable(loaded, info, module, options)

    def deserialize(self, blob: bytes, options: CompileOptions) -> CpuExecutable:
        """Load :meth:`CpuExecutable.serialize`'s blob. Raises InvalidArgument for a corrupt or foreign one, and for one
        that needs instructions which this CPU lacks.
        """
        info, module, code, features, modelled = self.unpack(blob, options)
        lacking = _cpu_features.lacking(features | _jaxlib.code_features(code), code, _jaxlib.host_features)
        if lacking:
            raise InvalidArgument(
                f"the serialised executable needs CPU features that this host lacks: {', '.join(sorted(lacking))}",
                op=info.name,
            )
        try:
            loaded = _jaxlib.deserialize(self.backend, code, self._devices, self._loading)
        except _ERRORS as error:
            raise translate(error, info.name) from error
        return self._executable(loaded, info, module, options).knowing(modelled)

    def _executable(self, loaded: Any, info: ModuleInfo, module: bytes, options: CompileOptions) -> CpuExecutable:
        executable = CpuExecutable(self, loaded, info, module, options)
        self._live.add(executable)
        return executable

    # ------------------------------------------------------------------------------------------ transfers

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> Any:
        """Copy ``array`` (C-contiguous) once; with ``zero_copy`` XLA may keep its memory where it is aligned to 64."""
        if self._closed:
            raise FailedPrecondition("the client is closed")
        semantics = _jaxlib.ZERO_COPY if zero_copy else _jaxlib.COPY
        key = (array.shape, array.dtype)
        aval = self._avals.get(key)
        if aval is None:
            aval = self._avals.setdefault(key, _jaxlib.shaped(Aval(*key).shape, array.dtype))
        try:
            if array.dtype.itemsize < 8:
                return _jaxlib.put(aval, self.sharding, [array], [self.device], True, False, semantics)
            with _jaxlib.wide_types():
                return _jaxlib.put(aval, self.sharding, [array], [self.device], True, False, semantics)
        except _ERRORS as error:
            raise translate(error) from error

    def to_host(self, buffer: Any) -> np.ndarray[Any, Any]:
        """Wait, and view the value read-only, without a copy. Raises the error of the launch that failed."""
        if self._closed:
            raise FailedPrecondition("the client is closed")
        if isinstance(buffer, ErrorBuffer):
            raise buffer.error
        try:
            return _jaxlib.to_numpy(buffer)
        except _ERRORS as error:
            raise translate(error) from error

    def synchronize(self) -> None:
        """Wait for every array alive on the device; raises the first failure."""
        self.check_open()
        for array in self.backend.live_arrays():
            if not array.is_deleted():
                try:
                    array.block_until_ready()
                except _ERRORS as error:
                    raise translate(error) from error

    def memory_stats(self) -> MemoryStats:
        """Bytes of the arrays alive on JAX's CPU device; the peak is the largest value that a call has seen."""
        self.check_open()
        sizes = [array.nbytes for array in self.backend.live_arrays() if not array.is_deleted()]
        total = sum(sizes)
        self._peak = max(self._peak, total)
        return MemoryStats(total, self._peak, None, len(sizes), max(sizes, default=0))
