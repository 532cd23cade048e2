"""Runs a recorded program in this process, as a process of its own would: nothing compiled, nothing pending, no draws."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from emutpu.backend import kernels
from emutpu.backend.deferred.log import LOG
from emutpu.backend.deferred.queue import Repeats, current_queue
from emutpu.backend.options import EagerMode, Options, Precision, override
from emutpu.backend.pjrt import CompileOptions, Executable
from emutpu.backend.rng import DEFAULT_GENERATOR
from emutpu.backend.runtime import runtime
from emutpu.backend.strict import Entry, OpModule, Signature, miss

__all__ = ["Launch", "Ran", "run"]


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A launch of a region or, in Strict, of an op. ``outputs`` is None where Strict does not tell."""

    reason: str
    cache_hit: bool
    ops: tuple[str, ...]
    outputs: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What a program did and printed; ``counters`` are the compile cache's."""

    launches: tuple[Launch, ...]
    counters: dict[str, int]
    printed: str


def _counters() -> dict[str, int]:
    compiles = runtime().statistics().compiles
    return {name: getattr(compiles, name) for name in ("requests", "hits", "misses")}


@contextlib.contextmanager
def _fresh(repeats: Repeats) -> Iterator[None]:
    """What a process that has just begun has; afterwards, what was there before."""
    queue = current_queue()
    generator = DEFAULT_GENERATOR
    state = generator.get_state()
    before = queue.repeats
    runtime().materialize("synchronize()")
    runtime().forget_executables()
    queue.detector.reset()
    queue.repeats = repeats
    generator._updates, generator._value = 0, None
    try:
        yield
    finally:
        gc.collect()
        runtime().materialize("synchronize()")
        queue.repeats = before
        queue.detector.reset()
        generator._updates, generator._value = 0, None
        generator.set_state(state)


@contextlib.contextmanager
def _strict_launches() -> Iterator[list[Launch]]:
    """Notes every launch of an op while inside."""
    noted: list[Launch] = []

    def noting(signature: Signature, options: Options, values: tuple[Any, ...], donate: bool) -> Entry:
        compiled = runtime().cache.misses
        entry = miss(signature, options, values, donate)
        by_name = dict(zip((a.name for a in signature.schema.arguments), values, strict=True))
        parts = tuple(OpModule(signature, options, by_name, donate=False).parts())
        fresh = [runtime().cache.misses > compiled]
        launch = entry.launch

        def noted_launch(arguments: Any) -> Any:
            noted.append(Launch("debug_mode", not fresh[0], parts, None))
            fresh[0] = False
            return launch(arguments)

        entry.launch = noted_launch
        return entry

    with mock.patch.object(kernels, "miss", noting):
        yield noted


_compiled: dict[tuple[bytes, CompileOptions], Executable] = {}


@contextlib.contextmanager
def _compiling_once() -> Iterator[None]:
    """Equal modules of several runs are compiled once, beneath the compile cache, which counts as ever."""
    client = runtime().client
    compile_module = client.compile

    def compiled(module: bytes, options: CompileOptions) -> Executable:
        key = (module, options)
        if key not in _compiled:
            _compiled[key] = compile_module(module, options)
        return _compiled[key]

    with mock.patch.object(client, "compile", compiled):
        yield


def run(program: Path, setting: str) -> Ran:
    """``setting``: safe, aggressive or off for DEFER_AND_FUSE, or strict."""
    strict = setting == "strict"
    mode = EagerMode.DEFER_NEVER if strict else EagerMode.DEFER_AND_FUSE
    printed = io.StringIO()
    # The recordings computed matmuls in float32.
    with (
        override(mode=mode, precision=Precision.HIGHEST),
        _fresh(Repeats.SAFE if strict else Repeats(setting)),
        _strict_launches() as noted,
        _compiling_once(),
        contextlib.redirect_stdout(printed),
        mock.patch.object(sys, "argv", [str(program)]),
        warnings.catch_warnings(action="ignore"),
    ):
        before, seen = _counters(), LOG.launched
        runpy.run_path(str(program), run_name="__main__")
        launches = tuple(noted) if strict else _regions(seen)
        counters = {name: value - before[name] for name, value in _counters().items()}
    return Ran(launches, counters, printed.getvalue())


def _regions(since: int) -> tuple[Launch, ...]:
    return tuple(
        Launch(
            region.reason,
            region.hit,
            tuple(part for op in region.ops for part in op.parts),
            len(region.outputs) + region.undefined,
        )
        for region in LOG.records(since)
    )
