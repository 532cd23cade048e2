"""The region compiler: a list of ops becomes one canonical module and one executable. torch.compile uses it too."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from emutpu.backend.cache import Acquired, Flight
from emutpu.backend.dtypes import numpy_dtype
from emutpu.backend.errors import describe
from emutpu.backend.hlo import Builder, Value
from emutpu.backend.keys import Key
from emutpu.backend.location import Origin, locate
from emutpu.backend.options import Options
from emutpu.backend.pjrt import Executable
from emutpu.backend.runtime import runtime

if TYPE_CHECKING:
    from emutpu.backend.deferred.ops import DeferredOp

__all__ = ["Constant", "Node", "Region", "RegionKey", "forget_regions", "region"]

_NAMED_OPS = 6


class Node(NamedTuple):
    """An op of a region. ``operands`` are numbers of values of the region, in order of creation, or ``~n`` for its inputs."""

    op: DeferredOp
    operands: tuple[int, ...]


class Constant(NamedTuple):
    """An input that is part of the module: its number, and what it holds."""

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes


class RegionKey(NamedTuple):
    """What decides a region's module. ``outputs`` are the numbers of the values that it gives.

    torch.compile makes ``constants`` of some inputs, which are then no arguments of the executable, gives others up
    (``donated``, by number), and has a ``name`` for the module.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    constants: tuple[Constant, ...] = ()
    donated: frozenset[int] = frozenset()
    name: str = ""

    @property
    def inputs(self) -> int:
        """How many inputs the region has."""
        return 1 + max((~operand for node in self.nodes for operand in node.operands if operand < 0), default=-1)


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """A region, and its executables by compile options. Use :func:`region`, which gives equal keys the same object."""

    key: RegionKey
    texts: tuple[str, str]
    executables: dict[Options, tuple[Key, Executable]]

    @property
    def name(self) -> str:
        """The module's name: what it was given, else the op's own, or the first few."""
        if self.key.name:
            return self.key.name
        names = [node.op.name for node in self.key.nodes]
        if len(names) == 1:
            return names[0]
        more = f"+{len(names) - _NAMED_OPS} more" if len(names) > _NAMED_OPS else ""
        return f"region[{'+'.join(names[:_NAMED_OPS])}{more}]"

    def logical_key(self, options: Options) -> Key:
        """The three fingerprints under ``options``."""
        shapeless, dimensions = self.texts
        return runtime().key(shapeless, dimensions, _canonical(options))

    def executable(self, options: Options, origins: Sequence[Origin]) -> tuple[Key, Executable, bool]:
        """Key, executable, and whether it had not to be compiled; see :meth:`acquire`."""
        key, acquired = self.acquire(options, origins)
        return key, acquired.executable, acquired.hit

    def acquire(self, options: Options, origins: Sequence[Origin]) -> tuple[Key, Acquired]:
        """Key and executable, and which tier of the cache had it. ``origins`` say who issued the ops.

        Raises what a lowering raises, with the op's line, and PjrtError from the compiler.
        """
        found = self.executables.get(options)
        if found is not None:
            return found[0], Acquired(found[1], 1, 0.0)
        key = self.logical_key(options)
        cache, compile_options = runtime().cache, options.compile_options
        acquired = cache.request(key, runtime().compiler(compile_options), compile_options, lambda: self.build(origins))
        self._keep(options, key, acquired)
        return key, acquired

    def begin(self, options: Options, origins: Sequence[Origin]) -> Flight | None:
        """Begin what :meth:`acquire` would do; :meth:`finish` waits for it. None if there is nothing to begin.

        Raises what a lowering raises, with the op's line.
        """
        key = self.logical_key(options)
        return runtime().cache.begin(key, runtime().compiler(options.compile_options), lambda: self.build(origins))

    def finish(self, options: Options, flight: Flight) -> tuple[Key, Acquired]:
        """What :meth:`begin` began. Raises PjrtError from the compiler."""
        acquired = flight.wait()
        self._keep(options, flight.key, acquired)
        return flight.key, acquired

    def _keep(self, options: Options, key: Key, acquired: Acquired) -> None:
        if runtime().cache.allow:
            self.executables[options] = (key, acquired.executable)

    def submit(self, options: Options, origins: Sequence[Origin]) -> tuple[str, Future[Acquired]] | None:
        """Queue the compilation that :meth:`acquire` would do; gives its key. None if it is done, or queued already.

        Raises what a lowering raises, with the op's line; the future raises PjrtError from the compiler.
        """
        key = self.logical_key(options)
        cache = runtime().cache
        if options in self.executables or cache.expects(key):
            return None
        module, compile_options = self.build(origins), options.compile_options
        compile_module = runtime().compiler(compile_options)
        return str(key), cache.submit(key, compile_module, compile_options, lambda: module)

    def build(self, origins: Sequence[Origin] = ()) -> bytes:
        """The canonical module, with the users' lines as locations where ``origins`` are given."""
        builder = Builder(self.name)
        results = self._emit(builder, origins)
        # The tensors that they are for exist, and count their memory already.
        return builder.finish(results, range(len(results)))

    def text(self, origins: Sequence[Origin] = ()) -> str:
        """The canonical module as text."""
        builder = Builder(self.name)
        builder.finish(self._emit(builder, origins))
        return builder.text()

    def emit(self, builder: Builder, inputs: Sequence[Value], origins: Sequence[Origin]) -> list[Value]:
        """Emit the region into a module that has arguments of its own: ``inputs`` are all the region's inputs."""
        return self._emit(builder, origins, list(inputs))

    def _emit(self, builder: Builder, origins: Sequence[Origin], inputs: list[Value] | None = None) -> list[Value]:
        inputs = [] if inputs is None else inputs
        values: list[Value] = []
        constants = {constant.number: constant for constant in self.key.constants}
        for position, (op, operands) in enumerate(self.key.nodes):
            origin = origins[position] if origins else None
            builder.at(locate(*origin[1:]) if origin is not None else None)
            builder.precision = op.precision
            try:
                taking = _Taking(builder, operands, inputs, values, constants, self.key.donated)
                made = op.emit(builder, taking.take)
            except Exception as error:  # any: it is told of its line and raised again
                if origin is not None:
                    error.add_note(f"  {op.name} issued at {describe(*origin[1:])}")
                raise
            if len(made) != len(op.layouts):
                raise AssertionError(f"{op.name} gives {len(made)} values, {len(op.layouts)} were expected")
            values += made
        builder.at(None)
        return [values[number] for number in self.key.outputs]


class _Taking:
    """Hands an op its operands one after the other; inputs of the region are declared when first taken."""

    def __init__(
        self,
        builder: Builder,
        operands: Sequence[int],
        inputs: list[Value],
        values: Sequence[Value],
        constants: Mapping[int, Constant],
        donated: frozenset[int],
    ) -> None:
        self.builder = builder
        self.constants = constants
        self.donated = donated
        self.operands: Iterator[int] = iter(operands)
        self.inputs = inputs
        self.values = values

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, *, donated: bool = False) -> Value:
        number = next(self.operands)
        if number < 0 and ~number == len(self.inputs):
            self.inputs.append(self._input(~number, shape, dtype, donated))
        value = self.inputs[~number] if number < 0 else self.values[number]
        if value.shape != tuple(shape) or value.dtype != dtype:
            raise AssertionError(f"an operand is {value}, {dtype} {list(shape)} was recorded")
        return value

    def _input(self, number: int, shape: tuple[int, ...], dtype: torch.dtype, donated: bool) -> Value:
        constant = self.constants.get(number)
        if constant is None:
            return self.builder.argument(shape, dtype, donated=donated or number in self.donated)
        array = np.frombuffer(constant.data, numpy_dtype(constant.dtype)).reshape(constant.shape)
        if constant.dtype is torch.bool and not constant.shape:
            return self.builder.full(bool(array), (), torch.bool)
        return self.builder.constant(array, constant.dtype)


def _canonical(options: Options) -> str:
    """What of the options decides a region's code beside the ops: each op's precision is in the shapeless key."""
    return f"{options.compile_options.canonical()} checks={options.bounds_checks:d}"


_regions: dict[RegionKey, Region] = {}
_lock = threading.RLock()  # a finalizer or a signal handler may come in


def region(key: RegionKey) -> Region:
    """The one Region with this key."""
    found = _regions.get(key)
    if found is None:
        with _lock:
            found = _regions.setdefault(key, Region(key, _texts(key), {}))
    return found


def forget_regions() -> None:
    """Drop every region and its executables; who holds one keeps it."""
    with _lock:
        _regions.clear()


def _given(key: RegionKey) -> str:
    """What torch.compile decides of the inputs."""
    if not key.constants and not key.donated:
        return ""
    constants = [(c.number, str(c.dtype), c.shape, c.data.hex()) for c in key.constants]
    return f";constants={constants};donated={sorted(key.donated)}"


def _texts(key: RegionKey) -> tuple[str, str]:
    shapeless = [f"{node.op.shapeless}({node.operands})" for node in key.nodes]
    return (
        "region;" + ";".join(shapeless) + f"->{key.outputs}" + _given(key),
        ";".join(node.op.dimensions for node in key.nodes),
    )
