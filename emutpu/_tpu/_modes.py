"""How ops run: eager mode, matmul precision, compiler options, and whether missing ops may run on the CPU."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from emutpu.backend import options
from emutpu.backend.options import LOCAL, EagerMode, Precision
from emutpu.backend.runtime import runtime

__all__ = [
    "FallbackMode",
    "custom_compiler_options",
    "fallback_mode",
    "get_eager_mode",
    "get_excess_precision",
    "precision",
    "set_eager_mode",
    "set_excess_precision",
    "set_process_eager_mode",
]

_EFFORTS = ("O0", "O1", "O2", "O3")
_EFFORT_OPTIONS = ("xla_optimization_level", "xla_memory_fitting_level")


class FallbackMode(enum.Enum):
    """Whether an op that the device lacks raises NotImplementedError or runs on the CPU."""

    FORBID_FALLBACK = 0
    ALLOW_FALLBACK = 1


@contextmanager
def fallback_mode(mode: FallbackMode) -> Iterator[None]:
    """Allow or forbid CPU fallbacks inside, for the whole process. Raises TypeError for what is no FallbackMode."""
    if not isinstance(mode, FallbackMode):
        raise TypeError(f"expected an emutpu.FallbackMode, got {mode!r}")
    state = runtime()
    before, state.allow_fallback = state.allow_fallback, mode is FallbackMode.ALLOW_FALLBACK
    try:
        yield
    finally:
        state.allow_fallback = before


def _refuse_tracing(function: Any) -> None:
    if torch.compiler.is_compiling():
        raise AssertionError(f"Attempt to trace forbidden callable {function}")


def _checked(mode: Any) -> EagerMode:
    if not isinstance(mode, EagerMode):
        raise TypeError(
            f"_set_eager_mode(): incompatible function arguments: expected a torch.tpu.EagerMode, got {mode!r}"
        )
    if mode is EagerMode._INTERNAL_COMPILE_FX_GRAPH:
        raise NotImplementedError(f"EagerMode.{mode.name} is the compiler's own: use torch.compile(backend='tpu')")
    return mode


def get_eager_mode() -> EagerMode:
    """The calling thread's eager mode."""
    return LOCAL.state.options.mode


def set_process_eager_mode(mode: EagerMode) -> None:
    """Change the process-wide eager mode. Raises TypeError for what is no EagerMode."""
    options.set_process(mode=_checked(mode))


@contextmanager
def set_eager_mode(mode: EagerMode) -> Iterator[None]:
    """Another eager mode inside, in this thread; nests. Raises TypeError for what is no EagerMode."""
    _refuse_tracing(set_eager_mode)
    with options.override(mode=_checked(mode)):
        yield


@contextmanager
def precision(mode: Precision) -> Iterator[None]:
    """Another precision of f32 matmuls inside, in this thread; nests. Raises ValueError for what is no Precision."""
    if not isinstance(mode, Precision):
        raise ValueError(
            "expected to be one of 'PrecisionConfig.DEFAULT', 'PrecisionConfig.HIGH', or "
            f"'PrecisionConfig.HIGHEST', got '{mode}'"
        )
    with options.override(precision=mode):
        yield


def get_excess_precision() -> bool:
    """Whether XLA may keep more precision than asked for."""
    return options.process_options().excess_precision


def set_excess_precision(allow: bool) -> None:
    """Set it for what is compiled from now on, in the whole process. Raises TypeError for anything but a bool."""
    if not isinstance(allow, bool):
        raise TypeError(f"allow_excess_precision: expected a bool, got {type(allow).__name__}")
    options.set_process(excess_precision=allow)


@contextmanager
def custom_compiler_options(compiler_options: Mapping[str, str]) -> Iterator[None]:
    """XLA options (string to string) for what is compiled inside; dicts merge when nested, the inner wins.

    Raises ValueError for an empty name or an unknown effort level.
    """
    _refuse_tracing(custom_compiler_options)
    for name, value in compiler_options.items():
        if not name:
            raise ValueError("XLA compiler option name must not be empty")
        if name in _EFFORT_OPTIONS and value not in _EFFORTS:
            raise ValueError(f"unknown XLA compiler effort level: {value}")
    merged = {**dict(LOCAL.state.options.overrides), **compiler_options}
    with options.override(overrides=tuple(sorted(merged.items()))):
        yield
