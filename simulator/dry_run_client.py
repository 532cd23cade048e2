"""The client that computes nothing: it knows shapes, so a program runs at the cost of its host side alone."""

from __future__ import annotations

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
    Topology,
    Unimplemented,
)

from . import _blob
from ._modules import ModuleInfo, inspect, parse
from .checks import check_arguments, check_options, propagate

__all__ = ["DryRunClient", "DryRunExecutable", "ShapeBuffer"]


Launch = Callable[[Sequence[Any]], Sequence[Any]]


class ShapeBuffer:
    """A buffer without a value."""

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

    def block_until_ready(self) -> ShapeBuffer:
        if self._deleted:
            raise FailedPrecondition("the buffer has been deleted or donated")
        return self


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


class DryRunExecutable:
    """The interface of a module. ``launch`` makes its results' shapes: 0.2 us for one."""

    def __init__(self, client: DryRunClient, info: ModuleInfo) -> None:
        self._client = client
        self._info = info
        self.name = info.name
        self.arguments = info.arguments
        self.results = info.results
        self.donated = info.donated
        self.launch: Callable[[Sequence[Any]], Sequence[Any]] = self._launcher()

    def _launcher(self) -> Launch:
        results, donated, client = self.results, self.donated, self._client

        def slow(arguments: Sequence[Any]) -> Sequence[Any]:
            client.check_open()
            failed = propagate(arguments, results, donated)
            if failed is not None:
                return failed
            foreign = next((a for a in arguments if not isinstance(a, ShapeBuffer)), None)
            if foreign is not None:
                raise InvalidArgument(f"a {type(foreign).__name__} is no buffer of this client", op=self.name)
            for position in donated:
                if arguments[position].is_deleted():
                    raise FailedPrecondition(f"argument {position} of {self.name} has been donated", op=self.name)
                arguments[position].delete()
            return [ShapeBuffer(aval) for aval in results]

        return _consuming(results, donated, slow) if donated else _fresh(results, slow)

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        """Check every argument, then launch. Raises InvalidArgument or FailedPrecondition."""
        self._client.check_open()
        check_arguments(self.name, self.arguments, arguments)
        return self.launch(arguments)

    def serialize(self) -> bytes:
        """The interface alone."""
        self._client.check_open()
        return _blob.pack(self._info, self._client.fingerprint(), b"")

    def memory(self) -> ExecutableMemory:
        """Bytes of arguments and results; temporaries are unknown here and count zero."""
        return ExecutableMemory(
            arguments=sum(aval.nbytes for aval in self.arguments),
            results=sum(aval.nbytes for aval in self.results),
            temporaries=0,
            code=0,
        )

    def cost(self) -> ModelledCost | None:
        """None: there is no model of the chip yet."""
        return None


class DryRunClient:
    """Accepts every well-formed module and gives results without values."""

    name = "dry_run"
    computes = False

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._closed = False

    def check_open(self) -> None:
        """Raise FailedPrecondition after :meth:`close`."""
        if self._closed:
            raise FailedPrecondition("the client is closed")

    def fingerprint(self) -> str:
        """Only the module decides anything here."""
        return f"dry_run jaxlib {_jaxlib.versions()[1]}"

    def compile(self, module: bytes, options: CompileOptions) -> DryRunExecutable:
        """Read the interface of a module. Raises InvalidArgument for a malformed one."""
        self.check_open()
        check_options(self.topology, options)
        return DryRunExecutable(self, inspect(parse(module)))

    def deserialize(self, blob: bytes, options: CompileOptions) -> DryRunExecutable:
        """Load :meth:`DryRunExecutable.serialize`'s blob. Raises InvalidArgument for a corrupt one."""
        self.check_open()
        check_options(self.topology, options)
        return DryRunExecutable(self, _blob.unpack(blob, self.fingerprint())[0])

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> ShapeBuffer:
        """The shape and dtype of ``array``; its values are not read."""
        self.check_open()
        return ShapeBuffer(Aval(array.shape, array.dtype))

    def to_host(self, buffer: Any) -> np.ndarray[Any, Any]:
        """Raises Unimplemented: there is no value (or the error of the launch that failed)."""
        self.check_open()
        if isinstance(buffer, ErrorBuffer):
            raise buffer.error
        if buffer.is_deleted():
            raise FailedPrecondition("the buffer has been deleted or donated")
        raise Unimplemented(
            f"the dry-run client has no values, so {buffer.aval} cannot be read: run without --dry-run, or keep "
            "values on the device"
        )

    def synchronize(self) -> None:
        """Nothing is ever pending."""
        self.check_open()

    def memory_stats(self) -> MemoryStats:
        """Zeros: nothing is allocated."""
        self.check_open()
        return MemoryStats()

    def close(self) -> None:
        """Refuse every later use with FailedPrecondition."""
        self._closed = True
