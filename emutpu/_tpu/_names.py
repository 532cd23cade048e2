"""The table of ``torch.tpu``: public names with their stages, and the private names that frameworks use."""

from __future__ import annotations

from typing import Any

import torch

from emutpu._tpu import _cache, _device, _modes, _random
from emutpu._tpu._stages import Api, Kind, Stage
from emutpu.backend import streams
from emutpu.backend.options import EagerMode, Precision
from emutpu.backend.rng import DEFAULT_GENERATOR
from emutpu.backend.runtime import runtime

__all__ = ["COMPILER", "LATER", "PRIVATE", "PUBLIC"]

_SUPPORTED_UNDER_AUTOCAST = (
    "bfloat16 bool complex128 complex64 float16 float32 float64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 "
    "float8_e5m2fnuz float8_e8m0fnu int16 int32 int64 int8 uint16 uint32 uint64 uint8"
)


def _internal(name: str, target: Any, prefer: str, shown: str | None = None) -> Api:
    advice = f"torch.accelerator.{prefer}"
    return Api(name, target, Stage.INTERNAL, f"Use {advice} instead.", prefer=advice, shown=shown)


def _experimental(name: str, target: Any, reason: str) -> Api:
    return Api(name, target, Stage.EXPERIMENTAL, reason)


def _unstable(name: str, target: Any, verb: str = "subject to change", what: str = "()") -> Api:
    return _experimental(name, target, f"{name}{what} is experimental and {verb} without notice.")


def _attribute(name: str, target: Any, reason: str | None = None) -> Api:
    return Api(name, target, Stage.EXPERIMENTAL, reason, Kind.ATTRIBUTE)


def _property(name: str, getter: Any, setter: Any, reason: str | None = None) -> Api:
    return Api(name, getter, Stage.EXPERIMENTAL, reason, Kind.PROPERTY, setter=setter)


def _autocast_dtypes() -> list[torch.dtype]:
    return [getattr(torch, name) for name in _SUPPORTED_UNDER_AUTOCAST.split()]


_MAY_CHANGE = "may change or be removed"

_ROWS = (
    _attribute("EagerMode", EagerMode, "TPU eager execution mode configuration."),
    _unstable("Event", streams.TpuEvent, _MAY_CHANGE),
    _attribute("Precision", Precision, "StableHLO precision configuration."),
    _unstable("Stream", streams.TpuStream, _MAY_CHANGE),
    _property("allow_excess_precision", _modes.get_excess_precision, _modes.set_excess_precision),
    _internal("current_device", lambda: 0, "current_device_index"),
    _internal("current_stream", streams.current_stream, "current_stream"),
    _attribute("default_generators", (DEFAULT_GENERATOR,)),
    _unstable("default_stream", streams.default_stream),
    _internal("device", _device.DeviceContext, "device_index", "_DeviceContext"),
    _internal("device_count", lambda: 1, "device_count"),
    _unstable("device_of", _device.device_of, what="() context manager"),
    _property(
        "eager_mode",
        _modes.get_eager_mode,
        _modes.set_process_eager_mode,
        "TPU eager execution mode configuration.",
    ),
    _unstable("get_amp_supported_dtype", _autocast_dtypes, _MAY_CHANGE),
    _unstable("get_device_name", _device.get_device_name),
    _unstable("get_device_properties", _device.get_device_properties),
    _internal("get_rng_state", _random.get_rng_state, "random.get_rng_state"),
    _internal("initial_seed", _random.initial_seed, "random.initial_seed"),
    _internal("is_available", lambda: True, "is_available"),
    _unstable("is_initialized", lambda: runtime().initialized),
    _unstable("manual_seed", _random.manual_seed, _MAY_CHANGE),
    _unstable("manual_seed_all", _random.manual_seed, _MAY_CHANGE),
    _experimental("precision", _modes.precision, "Op precision context manager."),
    _internal("set_device", _device.set_device, "set_device_index"),
    _experimental("set_eager_mode", _modes.set_eager_mode, "Context manager for setting the eager mode."),
    _unstable("set_rng_state", _random.set_rng_state),
    _internal("set_stream", streams.set_stream, "set_stream"),
    _unstable("stream", streams.StreamContext),
    _internal("synchronize", _device.synchronize, "synchronize"),
)
PUBLIC: dict[str, Api] = {row.name: row for row in _ROWS}

# torch.tpu.compiler
COMPILER: dict[str, Api] = {
    "custom_compiler_options": Api(
        "torch.tpu.compiler.custom_compiler_options",
        _modes.custom_compiler_options,
        Stage.EXPERIMENTAL,
        "torch.tpu.compiler.custom_compiler_options is experimental and subject to change.",
    )
}

# What TorchTPU has and this version of emutpu has not.
LATER = frozenset({"distributed", "ops", "optimizers", "pallas", "profiler", "topology_aware_mesh"})

PRIVATE: dict[str, Any] = {
    "_clear_cache": _cache.clear_cache,
    "_exchange_device": _device.exchange_device,
    "_get_cache_hits": _cache.cache_hits,
    "_get_cache_misses": _cache.cache_misses,
    "_get_cache_requests": _cache.cache_requests,
    "_get_cache_stats": _cache.cache_stats,
    "_get_dump_on_cache_miss": _cache.dump_on_cache_miss,
    "_get_generator": _random.generator_of,
    "_get_local_device_attributes": _device.local_device_attributes,
    "_hbm_usage_summary": _cache.hbm_usage_summary,
    "_is_in_bad_fork": lambda: runtime().in_bad_fork,
    "_lazy_init": lambda: None,
    "_maybe_exchange_device": _device.exchange_device,
    "_set_allow_cache": _cache.set_allow_cache,
    "_set_cache_only": _cache.set_cache_only,
    "_set_dump_on_cache_miss": _cache.set_dump_on_cache_miss,
}
