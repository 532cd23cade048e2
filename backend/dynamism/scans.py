"""``scan`` over a dynamic dimension: a loop of as many steps as the bound, of which those over padding change no carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from emutpu.backend.compile.graph import output_arguments
from emutpu.backend.dynamism.extents import extent_of
from emutpu.backend.dynamism.rules import Unsupported
from emutpu.backend.dynamism.writer import Padded, Writer
from emutpu.backend.storage import DEVICE

__all__ = ["scanned"]

aten = torch.ops.aten


def scanned(
    writer: Writer,
    op: Any,
    combine: fx.GraphModule,
    init: Sequence[Any],
    xs: Sequence[Any],
    additional: Sequence[Any],
) -> list[Any]:
    """What ``scan`` gives: the last carry, then the stacked results of the steps. Raises Unsupported for dynamic steps."""
    rows = [writer.prefixed(x, 0) for x in xs]
    fixed = [*init, *additional, *(Padded(row.node, row.dims[1:]) for row in rows)]
    if any(isinstance(value, Padded) and value.dynamic for value in fixed):
        raise Unsupported("a scan whose step has dynamic dimensions")
    dim = rows[0].dims[0]
    body = _guarded(combine, len(init), len(xs))
    node = writer.graph.call_function(
        op,
        (
            writer.submodule(body),
            tuple(value.node for value in init),
            (*(row.node for row in rows), writer.valid(dim)),
            tuple(value.node if isinstance(value, Padded) else value for value in additional),
        ),
    )
    specs = [_like(value) for value in output_arguments(combine.graph)]
    steps = [None if v is None else ((extent_of(dim), *v[0]), v[1]) for v in specs[len(init) :]]
    carries = [(tuple(value.node.meta["val"].shape), value.dtype) for value in init]
    node.meta["val"] = tuple(None if spec is None else _fake(writer, *spec) for spec in (*carries, *steps))
    if writer.trace is not None:
        node.meta["stack_trace"] = writer.trace
    found: list[Any] = [Padded(writer.item(node, n), value.dims) for n, value in enumerate(init)]
    for number, spec in enumerate(steps, len(init)):
        static = () if spec is None else tuple(writer.bounds.prefix(sympy.Integer(n)) for n in spec[0][1:])
        found.append(None if spec is None else Padded(writer.item(node, number), (dim, *static)))
    return found


def _guarded(combine: fx.GraphModule, carries: int, scanned_: int) -> fx.GraphModule:
    """``combine`` with one more row, behind the others: whether it counts. If not, the carry stays."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    given = list(combine.graph.find_nodes(op="placeholder"))
    for number, node in enumerate(given):
        if number == carries + scanned_:
            counts = graph.placeholder("counts")
        made[node] = graph.node_copy(node)
    if len(given) == carries + scanned_:
        counts = graph.placeholder("counts")
    for node in combine.graph.nodes:
        if node.op not in ("placeholder", "output"):
            made[node] = graph.node_copy(node, lambda n: made[n])
    results: list[Any] = []
    for number, value in enumerate(output_arguments(combine.graph)):
        result = made[value] if isinstance(value, fx.Node) else value
        if number < carries:
            result = graph.call_function(aten.where.self, (counts, result, made[given[number]]))
            result.meta["val"] = given[number].meta["val"]
        results.append(result)
    graph.output(tuple(results))
    return fx.GraphModule(combine, graph)


def _like(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of what a step gives."""
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return (tuple(int(n) for n in tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else None


def _fake(writer: Writer, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = writer.fake(lambda: torch.empty(shape, dtype=dtype, device=DEVICE))
    return made
