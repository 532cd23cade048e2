"""A compiled graph with symbolic extents: pads its inputs, launches, and gives outputs of their true size.

Padding and cutting are copies in the host's memory: they compile nothing, whatever the size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from emutpu.backend.compile.assembly import CompiledGraph, compile_graph
from emutpu.backend.compile.settings import CompileSettings
from emutpu.backend.dynamism.buckets import choose, sizes_of
from emutpu.backend.dynamism.rules import Symbolic
from emutpu.backend.dynamism.symbols import Symbols, has_symbols
from emutpu.backend.dynamism.transfer import At, cut, kept, padded, read, scalar, strided, write
from emutpu.backend.dynamism.translate import Given, Translated, translate
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE, tensor_over

__all__ = ["BoundedGraph", "bounded_graph", "has_symbols"]


Bucket = tuple[tuple[sympy.Symbol, int], ...]


@dataclasses.dataclass(slots=True)
class _Program:
    """One bucket's executable."""

    translated: Translated
    compiled: CompiledGraph


class BoundedGraph:
    """Call it with a list of inputs, which it empties; gives the list of outputs.

    ``visible`` outputs are the caller's, those after them go to another bounded graph; None: all are the caller's.
    ``grows`` adds a bucket where a size exceeds them all, instead of raising RuntimeError.
    ``note`` is called with each bucket's compiled graph.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        name: str,
        *,
        buckets: int = 1,
        bucket_size: int = 128,
        visible: int | None = None,
        grows: bool = False,
        note: Callable[[CompiledGraph], None] | None = None,
    ) -> None:
        self._boxed_call = True  # on the object: wrappers copy what they find there
        self.module = module
        self.name = name
        self.visible = visible
        self.grows = grows
        self.note = note
        self.bucket_size = bucket_size
        self.programs: dict[Bucket, _Program] = {}
        self._placeholders = list(module.graph.find_nodes(op="placeholder"))
        self.symbols = Symbols(module)
        self.symbols.check_guards()
        self.sizes = {s.symbol: sizes_of(s, buckets, bucket_size) for s in self.symbols.all if not s.number}
        self._numbers: dict[tuple[int, ...], dict[sympy.Expr, int | float]] = {}
        self._tensors: dict[tuple[int, float, torch.dtype], torch.Tensor] = {}
        self._program(choose(self.symbols.hints(), self.sizes))

    # A call ----------------------------------------------------------------------------------------------

    def __call__(self, inputs: list[Any]) -> list[Any]:
        values = self.symbols.values_of(inputs)
        program = self._program(self._bucket(values))
        at = self._evaluator(values)
        translated = program.translated
        given: list[Any] = [
            padded(inputs[position], extents) if extents is not None else inputs[position]
            for position, extents in zip(translated.positions, translated.extents, strict=True)
        ]
        sizes = [self._size(at(expr), expr) for expr in translated.sizes]
        arguments = [given[place] if place >= 0 else sizes[~place] for place in translated.order]
        del given
        results = program.compiled(arguments)
        for wrote in translated.writes:
            write(inputs[wrote.position], cut(read(results[wrote.number]), wrote.dims, at))
        outputs = [
            self._output(output, results, inputs, at, self.visible is not None and n >= self.visible)
            for n, output in enumerate(translated.outputs)
        ]
        inputs.clear()
        return outputs

    def _bucket(self, values: dict[sympy.Symbol, int]) -> Bucket:
        for symbol in self.symbols.all:
            if values[symbol.symbol] < symbol.lower:
                raise RuntimeError(
                    f"Dynamic shape lower/upper bound check failed: {symbol.symbol} is {values[symbol.symbol]}, "
                    f"expected {symbol.lower} to {symbol.upper}"
                )
            if self.grows and not symbol.number and values[symbol.symbol] > self.sizes[symbol.symbol][-1]:
                larger = dataclasses.replace(symbol, upper=2 * values[symbol.symbol])
                self.sizes[symbol.symbol] += sizes_of(larger, 1, self.bucket_size)
        return choose(values, self.sizes)

    def _program(self, bucket: Bucket) -> _Program:
        program = self.programs.get(bucket)
        if program is None:
            translated = translate(self.module, self.symbols.bounds(dict(bucket)), self.visible)
            compiled = compile_graph(translated.module, self.name)
            if self.note is not None:
                self.note(compiled)
            program = self.programs[bucket] = _Program(translated, compiled)
        return program

    def _evaluator(self, values: dict[sympy.Symbol, int]) -> At:
        """Gives an expression's value at the sizes of this call."""
        found = self._numbers.setdefault(tuple(values.values()), {})

        def number(expr: sympy.Expr) -> Any:
            value = found.get(expr)
            if value is None:
                exact = expr.xreplace({symbol: sympy.Integer(size) for symbol, size in values.items()})
                value = found[expr] = int(exact) if expr.is_integer else float(exact)
            return value

        return number

    def _size(self, value: float, expr: sympy.Expr) -> torch.Tensor:
        """A size as 0-d tensor of the device; made once for each value."""
        dtype = torch.int64 if expr.is_integer else torch.float32
        key = (id(runtime().client), value, dtype)
        tensor = self._tensors.get(key)
        if tensor is None:
            tensor = self._tensors[key] = scalar(value, dtype)
        return tensor

    def _output(self, output: Given, results: Sequence[Any], inputs: Sequence[Any], at: At, saved: bool) -> Any:
        view, value = output.view, output.value
        if output.number is None and view is None:
            if isinstance(value, Symbolic):
                return at(value.expr)
            return inputs[self._placeholders.index(value)] if isinstance(value, fx.Node) else value
        if view is None:
            assert output.number is not None
            return results[output.number]
        size, stride = tuple(map(at, view.size)), tuple(map(at, view.stride))
        if output.number is None:
            base = inputs[value]
            offset = int(base.storage_offset()) + at(view.offset)
            return tensor_over(base.untyped_storage(), base.dtype, offset, size, stride)
        result = results[output.number]
        if result.device.type != DEVICE.type:
            return torch.from_numpy(cut(result.numpy(), output.dims, at).copy())
        if saved:
            return kept(result, size)
        return strided(cut(read(result), output.dims, at), result.dtype, size, stride, at(view.offset))


def bounded_graph(
    settings: CompileSettings,
    name: str,
    module: fx.GraphModule,
    *,
    training: bool,
    note: Callable[[CompiledGraph], None],
) -> BoundedGraph:
    """A graph of AOTAutograd's with symbols. Of a ``training`` forward the outputs that are saved stay padded."""
    visible = None
    if training:
        context = torch._guards.TracingContext.try_get()
        metadata = None if context is None else context.fw_metadata
        visible = None if metadata is None else metadata.num_forward
    configuration = runtime().configuration
    return BoundedGraph(
        module,
        name,
        buckets=settings.buckets,
        bucket_size=settings.bucket_size,
        visible=visible,
        grows=configuration is not None and configuration.assume_bounded,
        note=note,
    )
