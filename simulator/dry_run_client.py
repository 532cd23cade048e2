"""The client that computes nothing: it knows shapes, so a program runs at the cost of its host side alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emutpu import _jaxlib
from emutpu.backend.pjrt import Aval, CompileOptions, MemoryStats, PlainBuffer, Topology, Unimplemented

from ._base import EmulatedClient, EmulatedExecutable, Launch, emulated_launch, readable
from ._modules import ModuleInfo, inspect, parse

__all__ = ["DryRunClient", "DryRunExecutable", "ShapeBuffer"]


class ShapeBuffer(PlainBuffer):
    """A buffer without a value."""

    __slots__ = ()


def _fresh(results: tuple[Aval, ...], slow: Launch) -> Launch:
    """The launch of an executable that donates nothing; anything unusual goes to ``slow``."""

    def fresh(arguments: Sequence[Any]) -> Sequence[Any]:
        for argument in arguments:
            if argument.__class__ is not ShapeBuffer:
                return slow(arguments)
        return [ShapeBuffer(aval) for aval in results]

    return fresh


def _consuming(results: tuple[Aval, ...], donated: frozenset[int], slow: Launch) -> Launch:
    """The launch of an executable that consumes arguments."""

    def consuming(arguments: Sequence[Any]) -> Sequence[Any]:
        for argument in arguments:
            if argument.__class__ is not ShapeBuffer or argument.is_deleted():
                return slow(arguments)
        for position in donated:
            arguments[position].delete()
        return [ShapeBuffer(aval) for aval in results]

    return consuming


class DryRunExecutable(EmulatedExecutable):
    """The interface of a module. ``launch`` makes its results' shapes: 0.2 us for one."""

    __slots__ = ()

    def __init__(self, client: DryRunClient, info: ModuleInfo, module: bytes, options: CompileOptions) -> None:
        results, donated = info.results, info.donated

        def shapes(arguments: Sequence[Any]) -> Sequence[Any]:
            return [ShapeBuffer(aval) for aval in results]

        slow = emulated_launch(client, info, ShapeBuffer, shapes)
        launch = _consuming(results, donated, slow) if donated else _fresh(results, slow)
        super().__init__(client, info, module, options, launch)


class DryRunClient(EmulatedClient):
    """Accepts every well-formed module and gives results without values.

    ``seed`` makes reads give values drawn from it, each read others; without it they raise.
    """

    name = "dry_run"
    computes = False

    def __init__(self, topology: Topology, seed: int | None = None) -> None:
        super().__init__(topology)
        self._values = None if seed is None else np.random.default_rng(seed)

    def fingerprint(self) -> str:
        """Only the module decides anything here."""
        return f"dry_run jaxlib {_jaxlib.versions()[1]}"

    def compile(self, module: bytes, options: CompileOptions) -> DryRunExecutable:
        """Read the interface of a module. Raises InvalidArgument for a malformed one."""
        self.check_compile(options)
        return DryRunExecutable(self, inspect(parse(module)), module, options)

    def deserialize(self, blob: bytes, options: CompileOptions) -> DryRunExecutable:
        """Load :meth:`DryRunExecutable.serialize`'s blob. Raises InvalidArgument for a corrupt one."""
        contents = self.unpack(blob, options)
        return DryRunExecutable(self, contents.info, contents.module, options).knowing(contents.modelled)

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> ShapeBuffer:
        """The shape and dtype of ``array``; its values are not read."""
        self.check_open()
        return ShapeBuffer(Aval(array.shape, array.dtype))

    def to_host(self, buffer: Any) -> np.ndarray[Any, Any]:
        """Drawn values with a seed, else Unimplemented: there is no value. Raises the error of the launch that failed."""
        self.check_open()
        readable(buffer, ShapeBuffer)
        if self._values is None:
            raise Unimplemented(
                f"a dry run computes no values, so {buffer.aval} cannot be read: keep values on the device, run with "
                "--dry-values for made-up ones (EMUTPU_DRY_VALUES=<seed>), or without --dry-run"
            )
        return _drawn(self._values, buffer.aval)

    def synchronize(self) -> None:
        """Nothing is ever pending."""
        self.check_open()

    def memory_stats(self) -> MemoryStats:
        """Zeros: nothing is allocated."""
        self.check_open()
        return MemoryStats()


def _drawn(generator: np.random.Generator, aval: Aval) -> np.ndarray[Any, Any]:
    """Values for a read: integers 0 or 1, booleans true or false, anything else in [0.5, 1.5)."""
    whole = aval.dtype.kind in "biu"
    uniform = generator.random(aval.shape)
    drawn = np.asarray(uniform < 0.5 if whole else uniform + 0.5, aval.dtype)  # of a scalar, numpy makes no array
    drawn.flags.writeable = False
    return drawn
