"""Pending work, looked at: under the names of TorchTPU's ``torch_tpu._internal.sync``.

Of a tensor in DeferAndFuse it says whether it is computed, and shows the graph that would compute it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = [
    "computation_graphviz",
    "computation_mlir",
    "computation_text",
    "dump_computation_graphviz",
    "dump_computation_mlir",
    "is_materialized",
    "is_materializing",
]


def _flat(tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> Iterator[torch.Tensor]:
    for one in tensors:
        if isinstance(one, list | tuple):
            yield from one
        else:
            yield one  # type: ignore[misc]  # a tensor is no sequence


def is_materialized(tensor: torch.Tensor) -> bool:
    """Whether the tensor's value is computed, or being computed by the device. Raises RuntimeError for a foreign tensor."""
    from emutpu.backend.deferred.values import Pending
    from emutpu.backend.storage import cell_of

    cell = cell_of(tensor)
    if cell is None:
        raise RuntimeError("is_materialized(): tensor is not on the PrivateUse1 device")
    return not isinstance(cell.value, Pending) or cell.value.buffer is not None


def is_materializing(tensor: torch.Tensor) -> bool:
    """Whether the tensor's value is launched and not there yet. Raises RuntimeError for a foreign tensor."""
    from emutpu.backend.storage import cell_of

    if not is_materialized(tensor):
        return False
    cell = cell_of(tensor)
    return cell is not None and cell.value is not None and not cell.value.is_ready()


def computation_text(*tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """The graphs that compute pending tensors, as the device prints them. Raises ValueError for a computed tensor."""
    from emutpu.backend.deferred.text import pending_text

    return "\n".join(pending_text(tensor) for tensor in _flat(tensors))


def computation_graphviz(*tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """The same as graphviz digraphs, one after the other."""
    from emutpu.backend.deferred.text import pending_dot

    return "\n".join(pending_dot(tensor) for tensor in _flat(tensors))


def computation_mlir(*tensors: torch.Tensor | Sequence[torch.Tensor]) -> str:
    """The same as StableHLO modules, one after the other."""
    from emutpu.backend.deferred.text import pending_mlir

    return "\n".join(pending_mlir(tensor) for tensor in _flat(tensors))


def dump_computation_graphviz(tensors: Sequence[torch.Tensor], file_name: str) -> None:
    """Write :func:`computation_graphviz` to a file. Raises OSError."""
    Path(file_name).write_text(computation_graphviz(tensors), encoding="utf-8")


def dump_computation_mlir(tensors: Sequence[torch.Tensor], file_name: str) -> None:
    """Write :func:`computation_mlir` to a file. Raises OSError."""
    Path(file_name).write_text(computation_mlir(tensors), encoding="utf-8")
