"""What DEFER_AND_FUSE has pending: its graph, and doing it.

The functions of TorchTPU's ``torch_tpu._internal.sync``, by their names: a program that imports them from there imports
them from ``emutpu.sync`` here. Nothing but ``synchronize`` makes a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from emutpu.backend.deferred import text
from emutpu.backend.deferred.values import Pending, ready
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of

__all__ = [
    "computation_graphviz",
    "computation_mlir",
    "computation_text",
    "dump_computation_graphviz",
    "dump_computation_mlir",
    "is_materialized",
    "is_materializing",
    "synchronize",
]

Tensors = torch.Tensor | Sequence[torch.Tensor]


def _flat(tensors: Sequence[Tensors]) -> list[torch.Tensor]:
    return [t for given in tensors for t in ([given] if isinstance(given, torch.Tensor) else given)]


def computation_graphviz(*tensors: Tensors) -> str:
    """The pending graph of tensors (or lists of them) as graphviz text. Raises ValueError for what is not pending."""
    return text.pending_dot(*_flat(tensors))


def computation_mlir(*tensors: Tensors) -> str:
    """The pending graph as a StableHLO module. Raises ValueError for what is not pending."""
    return text.pending_mlir(*_flat(tensors))


def computation_text(*tensors: Tensors) -> str:
    """The pending graph as TorchTPU logs it: one line an input and an op. Raises ValueError for what is not pending."""
    return text.pending_text(*_flat(tensors))


def dump_computation_graphviz(tensors: Sequence[torch.Tensor], file_name: str) -> None:
    """Write :func:`computation_graphviz` to a file. Raises OSError."""
    Path(file_name).write_text(computation_graphviz(tensors), encoding="utf-8")


def dump_computation_mlir(tensors: Sequence[torch.Tensor], file_name: str) -> None:
    """Write :func:`computation_mlir` to a file. Raises OSError."""
    Path(file_name).write_text(computation_mlir(tensors), encoding="utf-8")


def is_materialized(tensor: torch.Tensor) -> bool:
    """Whether the tensor's value is computed, or being computed by the device. Raises RuntimeError for a foreign tensor."""
    cell = cell_of(tensor)
    if cell is None:
        raise RuntimeError("is_materialized(): tensor is not on the PrivateUse1 device")
    return not isinstance(cell.value, Pending) or cell.value.buffer is not None


def is_materializing(tensor: torch.Tensor) -> bool:
    """Whether the tensor's value is launched and not there yet. Raises RuntimeError for a foreign tensor."""
    cell = cell_of(tensor)
    return is_materialized(tensor) and cell is not None and cell.value is not None and not cell.value.is_ready()


def synchronize(tensors: Tensors | None = None, wait: bool = False) -> None:
    """Do what tensors need (everything pending for None), and with ``wait`` wait until it is done."""
    if tensors is None:
        runtime().materialize("synchronize()")
    else:
        for tensor in _flat([tensors]):
            cell = cell_of(tensor)
            if cell is not None:
                made = ready(cell, "synchronize()")
                if wait:
                    made.block_until_ready()
    if wait and tensors is None:
        runtime().synchronize()
