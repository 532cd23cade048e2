"""Everything that differs between jaxlib releases, and the process's one MLIR context. Nothing else imports jaxlib.

A leaf: both the backend (which builds modules) and the simulator (which runs them) use it. It never changes the
user's JAX configuration: no ``jax.config.update``, no lasting edit of ``XLA_FLAGS`` (and none at all unless a baseline CPU
is asked for, :func:`limit_cpu`); 64-bit types are enabled in a thread-local scope around the one call that needs it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import io
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

__all__ = [
    "JaxNotFound",
    "chlo",
    "code_features",
    "compile_module",
    "compile_options",
    "context",
    "cpu_backend",
    "deserialize",
    "device_list",
    "dies_of_avx512",
    "entries",
    "from_portable_artifact",
    "func",
    "host_features",
    "ir",
    "known_flags",
    "light_emitters",
    "limit_cpu",
    "matrix_library",
    "module_text",
    "portable_artifact",
    "put",
    "read_module",
    "result_handler",
    "run_passes",
    "select_stream",
    "selected_stream",
    "serialize",
    "serialize_xspace",
    "shaped",
    "single_device_sharding",
    "stablehlo",
    "to_numpy",
    "versions",
    "wide_types",
    "xla_error_types",
]


class JaxNotFound(ImportError):
    """jax or jaxlib is missing, broken, or lacks something every supported release has."""


try:
    import jax
    import jaxlib.version
    from jax.extend import backend as jax_backend
    from jaxlib import _jax, xla_client
    from jaxlib.mlir import ir, passmanager
    from jaxlib.mlir.dialects import chlo, func, sdy, stablehlo
except ImportError as error:
    raise JaxNotFound(
        f"emutpu runs its programs with JAX, which cannot be imported here ({error}). "
        "Install a supported pair: pip install 'jax>=0.8.3,<0.11' 'jaxlib>=0.8.3,<0.11'"
    ) from error


# --------------------------------------------------------------------------------------------------- MLIR


@functools.cache
def context() -> Any:
    """The MLIR context of this process (making one costs up to 2 ms), with StableHLO, CHLO, Shardy and func loaded."""
    return _new_context()


def _new_context() -> Any:
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)
    made = ir.Context()
    made.append_dialect_registry(registry)
    made.load_all_available_dialects()
    stablehlo.register_dialect(made)
    chlo.register_dialect(made)
    sdy.register_dialect(made)
    return made


@functools.cache
def _register_passes() -> None:
    stablehlo.register_stablehlo_passes()


def read_module(module: bytes | str) -> Any:
    """The ``ir.Module`` of bytecode or MLIR text. Raises MLIRError, or ValueError.

    In jaxlib 0.9 a ``true`` splat of booleans comes out of bytecode as the byte 0xFF, which XLA copies as it is: the
    constant prints as ``true`` and converts to 255. Such constants are made anew from their text.
    """
    parsed = ir.Module.parse(module, context=context())
    if _garbles_booleans():
        _renew_booleans(parsed.operation)
    return parsed


_TRUE = "module { stablehlo.constant dense<true> : tensor<i1> }"


@functools.cache
def _garbles_booleans() -> bool:
    module = ir.Module.parse(_TRUE, context=context())
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    again = ir.Module.parse(bytecode.getvalue(), context=context())
    return len({m.body.operations[0].operation.attributes["value"] for m in (module, again)}) > 1


def _renew_booleans(operation: Any) -> None:
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                inner = inner.operation
                if inner.name == "stablehlo.constant" and str(inner.results[0].type.element_type) == "i1":
                    inner.attributes["value"] = ir.Attribute.parse(str(inner.attributes["value"]), operation.context)
                _renew_booleans(inner)


def entries(array: Any) -> list[Any]:
    """The entries of an MLIR array attribute, by position: an iterator of jaxlib's ends with a C++ exception, for which the
    unwinder looks through every executable that is loaded (a seventh of a process's time beside some thousands).
    """
    return [array[position] for position in range(len(array))]


def module_text(bytecode: bytes) -> str:
    """MLIR text of a module's bytecode. Raises MLIRError."""
    return str(read_module(bytecode))


def portable_artifact(bytecode: bytes, version: str | None = None) -> bytes:
    """A module as StableHLO's portable artifact for consumers of ``version`` (the oldest supported one if None).

    What only this release understands (CHLO) is rewritten first.
    """
    module = read_module(bytecode)
    run_passes(module, "builtin.module(func.func(chlo-legalize-to-stablehlo))")
    target = version or stablehlo.get_minimum_version()
    artifact: bytes = stablehlo.serialize_portable_artifact_str(str(module), target)
    return artifact


def from_portable_artifact(artifact: bytes) -> str:
    """The text of a portable artifact's module. Raises ValueError for something else."""
    return str(read_module(stablehlo.deserialize_portable_artifact_str(artifact)))


def run_passes(module: Any, pipeline: str) -> None:
    """Run a textual pass pipeline on an ``ir.Module`` in place. Raises MLIRError."""
    _register_passes()
    with context():
        passmanager.PassManager.parse(pipeline).run(module.operation)


# --------------------------------------------------------------------------------------------------- runtime


def versions() -> tuple[str, str]:
    """The versions of jax and jaxlib."""
    return jax.__version__, jaxlib.version.__version__


def matrix_library() -> bool:
    """Whether XLA:CPU's matrix library may be given conversions and arithmetic: before 0.10 it aborts the process."""
    return _release() >= (0, 10)


def light_emitters() -> bool:
    """Whether optimisation level 1 does without the fusion emitters: before 0.9 concatenating four rows of three elements
    aborts the process so.
    """
    return _release() >= (0, 9)


def _release() -> tuple[int, int]:
    major, minor = versions()[1].split(".")[:2]
    return int(major), int(minor)


def cpu_backend() -> Any:
    """JAX's CPU backend. Raises RuntimeError where the user's configuration excludes it (``JAX_PLATFORMS``)."""
    _keep_freed_memory()
    try:
        with _yielding_threads():
            return jax_backend.get_backend("cpu")
    except AssertionError as error:  # what jax raises where none of JAX_PLATFORMS exists
        raise RuntimeError("no platform of JAX_PLATFORMS exists here") from error


_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt(3)
_KEPT = {_TRIM_THRESHOLD: 512 << 20, _TOP_PAD: 64 << 20, _MMAP_THRESHOLD: 32 << 20}


@functools.cache
def _keep_freed_memory() -> None:
    """What a step frees, up to 512 MiB, the next one gets without asking the system (glibc's malloc).

    XLA allocates results and temporaries with malloc, on any of its threads. By default what is free at the end of a thread's
    heap goes back to the system: a training step of six residual blocks met 6,900 fresh pages, 110 so, and took 131 ms of
    processor time instead of 124. The padding is a heap's size: a heap that is empty is given up whatever the threshold.
    (One heap for all threads meets as few pages, but two threads that compile then wait for each other: 1.2 s for 0.7.)
    Whoever has set malloc up in the environment keeps that.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None and not chosen:
        for option, value in _KEPT.items():
            set_option(option, value)


@contextmanager
def _yielding_threads() -> Iterator[None]:
    """Threads that are made inside do not preempt the one that feeds them when they wake up (Linux's ``SCHED_BATCH``).

    XLA has a thread per core, so with the program's own there is one too many: on two cores it was interrupted 3.5 times
    in a training step of eleven launches, which took 1.05 ms, and 0.05 times so (0.87 ms). Their share of a busy machine
    stays the same. Where that is not allowed, or another policy was chosen, everything stays as it is.
    """
    try:
        policy, parameter = os.sched_getscheduler(0), os.sched_getparam(0)
        ours = policy == os.SCHED_OTHER
        if ours:
            os.sched_setscheduler(0, os.SCHED_BATCH, parameter)
    except (AttributeError, PermissionError):  # not Linux; a sandbox
        ours = False
    try:
        yield
    finally:
        if ours:
            os.sched_setscheduler(0, policy, parameter)


def device_list(devices: Sequence[Any]) -> Any:
    """The devices of an executable, as ``compile_and_load`` wants them."""
    return _jax.DeviceList(tuple(devices))


def single_device_sharding(device: Any) -> Any:
    """The sharding of an array that lives on one device."""
    return jax.sharding.SingleDeviceSharding(device)


def shaped(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """JAX's own aval of an array."""
    with wide_types():
        return jax.core.ShapedArray(shape, dtype)


def wide_types() -> AbstractContextManager[Any]:
    """A scope in which this thread may make 64-bit arrays; the user's own setting is untouched."""
    scope: AbstractContextManager[Any] = _enable_x64(True)
    return scope


def _find_enable_x64() -> Any:
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64
    return importlib.import_module("jax.experimental").enable_x64


_enable_x64 = _find_enable_x64()
put = _jax.batched_device_put
COPY = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
ZERO_COPY = xla_client.HostBufferSemantics.ZERO_COPY


def to_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Wait for a ``jax.Array`` and view it read-only.

    Unlike ``np.asarray`` this does not cache the view on the array: a view that is alive makes a later donation copy.
    """
    view: np.ndarray[Any, Any] = array._single_device_array_to_np_array_did_copy()[0]
    return view


def result_handler(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any) -> Any:
    """What turns one result of ``execute_sharded`` into a ``jax.Array`` without asking Python anything."""
    return _jax.array_result_handler(shaped(shape, dtype), sharding, True, True)


def _no_stream(stream: int) -> None:
    """Without streams every launch waits for the one before it."""


selected_stream: Callable[[], int] = getattr(_jax, "get_execution_stream_id", lambda: 0)
"""The stream of the calling thread's launches, 0 unless somebody selected another."""
select_stream: Callable[[int], None] = getattr(_jax, "set_execution_stream_id", _no_stream)
"""Put the calling thread's launches on a stream: those of one stream are done one after another, others beside them. What a
launch reads it waits for, whichever stream that comes from. Releases without streams take no notice.
"""


def xla_error_types() -> tuple[type[Exception], ...]:
    """What XLA, jaxlib's argument checks and the MLIR parser raise."""
    return (jax.errors.JaxRuntimeError, ValueError, TypeError, RuntimeError, ir.MLIRError)


# --------------------------------------------------------------------------------------------------- compilation


def compile_options(device_ids: Sequence[int], flags: Iterable[tuple[str, str]] = ()) -> Any:
    """Options for one replica on each of ``device_ids``; ``flags`` are XLA's debug options by name."""
    options = xla_client.CompileOptions()
    options.num_replicas = len(device_ids)
    options.num_partitions = 1
    options.executable_build_options.num_replicas = len(device_ids)
    # A device list alone leaves the executable on device 0.
    assignment = np.asarray(device_ids, np.int64).reshape(len(device_ids), 1)
    options.device_assignment = xla_client.DeviceAssignment.create(assignment)
    options.env_option_overrides = [(name, _flag_value(value)) for name, value in flags]
    return options


def _flag_value(value: str) -> str | int | bool | float:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


_TRIVIAL = "module { func.func public @main(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> } }"


@functools.cache
def _accepted(flags: tuple[tuple[str, str], ...]) -> bool:
    backend = cpu_backend()
    device = backend.local_devices()[0]
    try:
        backend.compile_and_load(_TRIVIAL, device_list([device]), compile_options([device.id], flags))
    except xla_error_types():
        return False
    return True


@functools.cache
def known_flags(flags: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Those of ``flags`` that this jaxlib knows: one trivial compilation per process where it knows them all, else
    one for each.
    """
    return flags if _accepted(flags) else tuple(flag for flag in flags if _accepted((flag,)))


class _Compiling(threading.local):
    """An MLIR context for each thread that compiles."""

    def __init__(self) -> None:
        self.context = _new_context()


@functools.cache
def _contexts() -> _Compiling:
    return _Compiling()


def _taken_out(module: Any) -> Any:
    """A copy of ``module`` in the calling thread's own context.

    XLA changes the context of what it compiles, and without the GIL: two compilations in one context crash the process.
    """
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    copied = ir.Module.parse(bytecode.getvalue(), context=_contexts().context)
    if _garbles_booleans():
        _renew_booleans(copied.operation)
    return copied


def compile_module(backend: Any, module: Any, devices: Any, options: Any) -> Any:
    """Compile an ``ir.Module`` or MLIR text for ``devices``, on any number of threads at once. Releases the GIL."""
    taken = module if isinstance(module, str) else _taken_out(module)
    return backend.compile_and_load(taken, devices, options)


def serialize(backend: Any, executable: Any) -> bytes:
    """The native code of a loaded executable."""
    return bytes(backend.serialize_executable(executable))


def deserialize(backend: Any, blob: bytes, devices: Any, options: Any) -> Any:
    """Load native code. The caller has verified it: a corrupt blob crashes the process."""
    return backend.deserialize_executable(blob, devices, options)


def xla_flags() -> str:
    """The XLA flags this process was started with."""
    return os.environ.get("XLA_FLAGS", "")


@functools.cache
def _processor() -> str:
    """Model and feature flags of the CPU: XLA generates code for exactly these."""
    wanted = ("model name", "flags", "Features", "CPU part")
    found: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in wanted:
                    found.setdefault(name.strip(), value.strip())
    except OSError:
        found["machine"] = f"{platform.machine()} {platform.processor()}"
    text = " ".join(f"{name}={value}" for name, value in sorted(found.items()))
    return f"{found.get('model name', platform.machine())}/{hashlib.sha256(text.encode()).hexdigest()[:16]}"


@functools.cache
def fingerprint(cpu_target: str | None = None) -> str:
    """The jax and jaxlib versions, XLA flags, CPU and its feature flags (or the baseline), as one line."""
    cpu = f"baseline {cpu_target}" if cpu_target is not None else _processor()
    return f"jax {versions()[0]} jaxlib {versions()[1]} cpu {cpu} xla_flags {xla_flags()!r}"


_FEATURES = re.compile(rb"[+-][a-z0-9][a-z0-9.-]*(?:,[+-][a-z0-9][a-z0-9.-]*){15,}")


def code_features(code: bytes) -> frozenset[str]:
    """LLVM's names of the CPU features that serialised code was compiled for; empty where a release does not record them."""
    return frozenset().union(*map(_features_of, _FEATURES.findall(code)))


@functools.lru_cache(64)  # all code of one compiler has the same text
def _features_of(text: bytes) -> frozenset[str]:
    """LLVM takes the names in turn, and one turned off turns off what implies it: AVX10.1 is all of AVX-512 but VP2INTERSECT.

    XLA's limit to AVX2 turns off what begins with ``avx512`` and leaves ``+avx10.1`` before it.
    """
    on: set[str] = set()
    for name in text.decode().split(","):
        (on.add if name.startswith("+") else on.discard)(name[1:])
        if name.startswith("-avx512") and name != "-avx512vp2intersect":
            on = {other for other in on if not other.startswith("avx10.")}
    return frozenset(on)


@functools.cache
def host_features() -> frozenset[str]:
    """What this process compiles for (one trivial compilation)."""
    return code_features(_probe())


def _probe() -> bytes:
    backend = cpu_backend()
    device = backend.local_devices()[0]
    loaded = backend.compile_and_load(_TRIVIAL, device_list([device]), compile_options([device.id]))
    return serialize(backend, loaded)


def limit_cpu(isa: str) -> frozenset[str]:
    """Make XLA:CPU compile for no more than ``isa`` in this whole process, and give the features it compiles for now.

    XLA reads ``XLA_FLAGS`` once, at its first use; the variable is restored at once. Whether that came in time can be
    seen from the features only.
    """
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} --xla_cpu_max_isa={isa}".strip()
    try:
        with _yielding_threads():
            return code_features(_probe())
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


def dies_of_avx512() -> bool:
    """Whether LLVM in this jaxlib can end the process where it compiles for AVX-512: 0.8.3's does, of a padded f64[1, 3]."""
    return platform.machine() == "x86_64" and tuple(map(int, versions()[1].split(".")[:2])) < (0, 9)


def serialize_xspace(text: str) -> bytes:
    """The bytes of an XSpace (what XProf reads) from its text form; jaxlib has the protocol buffer built in."""
    from jax.profiler import ProfileData

    data: bytes = ProfileData.text_proto_to_serialized_xspace(text)
    return data
