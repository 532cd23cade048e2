"""A region, or the pending graph of a tensor, as the device prints it, as graphviz and as MLIR."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from emutpu.backend.deferred.log import OpRecord, RegionRecord, ValueRecord, input_records, op_record
from emutpu.backend.deferred.plan import recorded_region
from emutpu.backend.deferred.values import Batch, Pending
from emutpu.backend.storage import cell_of

__all__ = ["pending_dot", "pending_mlir", "pending_text", "region_text"]

_DTYPES = {
    "bool": "pred",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "complex64": "c64",
}


def _type(value: ValueRecord) -> str:
    name = value.dtype
    short = _DTYPES.get(name) or name.replace("int", "i")
    return f"{short}[{', '.join(map(str, value.shape))}]"


def _lines(ops: Sequence[OpRecord], inputs: Sequence[ValueRecord], outputs: Sequence[int], reason: str) -> list[str]:
    count = len(inputs)
    lines = [f"# Graph: {len(ops)} ops, {count} inputs, reason: {reason}"]
    lines += [f"%{number}: {_type(value)} = input" for number, value in enumerate(inputs)]
    first = count
    for op in ops:
        names = ", ".join(f"%{first + n}" for n in range(len(op.results)))
        types = ", ".join(_type(value) for value in op.results)
        operands = ", ".join(f"%{~o if o < 0 else count + o}" for o in op.operands)
        where = f"    # {op.location.file}:{op.location.line} in {op.location.function}" if op.location else ""
        lines.append(f"{names}: {types} = {'+'.join(op.parts) or op.name}({operands}){where}")
        first += len(op.results)
    lines.append("return " + ", ".join(f"%{count + number}" for number in outputs))
    return lines


def region_text(region: RegionRecord) -> str:
    """One line an input and an op, with the user's lines; an op and the views that it reads and writes are one line."""
    return "\n".join(_lines(region.ops, region.inputs, region.output_numbers, region.reason)) + "\n"


def _pending(tensors: Sequence[torch.Tensor]) -> tuple[Batch, list[int]]:
    """The list that all of them are pending in, and their numbers there."""
    found: list[Pending] = []
    for tensor in tensors:
        cell = cell_of(tensor)
        value = cell.value if cell is not None else None
        if not isinstance(value, Pending) or value.buffer is not None or value.failure is not None:
            raise ValueError("the tensor's value is not pending: it has no graph")
        found.append(value)
    if len({id(value.batch) for value in found}) != 1:
        raise ValueError("give one tensor or more that are pending on one stream")
    return found[0].batch, [value.slot for value in found]


def _graph(tensors: Sequence[torch.Tensor]) -> tuple[list[OpRecord], list[ValueRecord], list[int]]:
    batch, slots = _pending(tensors)
    region, nodes, _, given = recorded_region(batch.state, slots)
    ops = [op_record(node, batch.origins[k]) for node, k in zip(region.key.nodes, nodes, strict=True)]
    return ops, list(input_records(region.key.nodes)), [region.key.outputs[given[slot]] for slot in slots]


def pending_text(*tensors: torch.Tensor) -> str:
    """The graph that computes pending tensors. Raises ValueError for a tensor whose value is there."""
    return "\n".join(_lines(*_graph(tensors), "pending")) + "\n"


def pending_dot(*tensors: torch.Tensor) -> str:
    """The same as a graphviz digraph."""
    ops, inputs, outputs = _graph(tensors)
    lines = ["digraph pending {"]
    lines += [f'  i{number} [shape=box, label="{_type(value)}"];' for number, value in enumerate(inputs)]
    owner: list[int] = []
    for position, op in enumerate(ops):
        types = ", ".join(_type(value) for value in op.results)
        lines.append(f'  n{position} [label="{"+".join(op.parts) or op.name}\\n{types}"];')
        lines += [f"  {f'i{~o}' if o < 0 else f'n{owner[o]}'} -> n{position};" for o in op.operands]
        owner += [position] * len(op.results)
    lines += [f"  n{owner[number]} [peripheries=2];" for number in outputs]
    return "\n".join([*lines, "}"]) + "\n"


def pending_mlir(*tensors: torch.Tensor) -> str:
    """The canonical StableHLO module that computes them."""
    batch, slots = _pending(tensors)
    region, nodes, _, _ = recorded_region(batch.state, slots)
    return region.text([batch.origins[k] for k in nodes])
