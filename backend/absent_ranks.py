"""Collectives with ranks that are not there: PyTorch's fake process group moves nothing, its time is modelled.

A dry run of one rank of many uses that group. Its collectives reach the dispatcher as operators of ``c10d``; the kernels
here charge the modelled device with what they would take, and hand over. Where ops are recorded, so are collectives: they
are done in order with the rest of the list, whether or not somebody holds their results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from emutpu.backend.options import LOCAL
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE, cell_of

if TYPE_CHECKING:
    from emutpu.backend.cell import Cell
    from emutpu.backend.pjrt import ModelledCost

__all__ = ["COLLECTIVES", "Charge", "kernels"]

_KEY = "PrivateUse1"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)

COLLECTIVES: dict[str, tuple[str, int, int]] = {
    "_allgather_base_": ("all_gather", 1, 2),
    "allgather_": ("all_gather", 1, 2),
    "allgather_coalesced_": ("all_gather", 1, 2),
    "allgather_into_tensor_coalesced_": ("all_gather", 1, 2),
    "gather_": ("all_gather", 1, 2),
    "scatter_": ("all_gather", 0, 2),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 2),
    "reduce_scatter_": ("reduce_scatter", 1, 2),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 2),
    "allreduce_": ("all_reduce", 0, 1),
    "allreduce_coalesced_": ("all_reduce", 0, 1),
    "alltoall_": ("all_to_all", 1, 2),
    "alltoall_base_": ("all_to_all", 1, 2),
    "broadcast_": ("collective_broadcast", 0, 1),
    "reduce_": ("collective_broadcast", 0, 1),
    "send": ("collective_permute", 0, 1),
    "recv_": ("collective_permute", 0, 1),
}
"""Operator of ``c10d``: the StableHLO collective that takes as long, and the positions of its operand and its group.

A reduction to one rank is a broadcast backwards, a scatter from one rank a gather backwards.
"""

_ONE_WAY = frozenset({"send"})  # they write nothing; all others write their first argument


def kernels() -> dict[str, Callable[..., Any]]:
    """The kernels by operator of ``c10d``; none where PyTorch was built without distributed."""
    if not hasattr(torch._C, "_c10d_init"):
        return {}
    return {name: _kernel(name, *row) for name, row in COLLECTIVES.items()}


def _kernel(name: str, op: str, operand: int, group: int) -> Callable[..., Any]:
    original = torch.library.get_kernel(f"c10d::{name}", _KEY)

    def collective(*arguments: Any) -> Any:
        charge = _charge(name, op, arguments[operand], arguments[group])
        if charge is not None and not _recorded(name, arguments[operand], arguments[0], charge):
            charge()
        return original.call_boxed(_KEYS, *arguments)

    return collective


def _charge(name: str, op: str, operand: Any, group: Any) -> Charge | None:
    """What charges the modelled device with a collective of the group, if its other ranks are not there."""
    from torch.distributed import ProcessGroup, get_world_size

    ranks = ProcessGroup.unbox(group)
    configuration = runtime().configuration
    if configuration is None or configuration.collective is None or ranks._get_backend(DEVICE).name() != "fake":
        return None
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(operand))
    runtime().client  # noqa: B018  # the clock starts with the device
    cost = configuration.collective(op, float(nbytes), ranks.size(), get_world_size())
    return Charge(f"c10d.{name}", cost)


@dataclasses.dataclass(frozen=True, slots=True)
class Charge:
    """Charges the modelled device with a collective, by name."""

    name: str
    cost: ModelledCost | None

    def __call__(self) -> None:
        runtime().meter.charge(self.name, self.cost)


def _recorded(name: str, operand: Any, written: Any, charge: Charge) -> bool:
    """Record the collective where ops are recorded: True. It gives new values of what it writes, here the old ones."""
    if not LOCAL.state.defers:
        return False
    if LOCAL.state.options.flushes:  # the mode was left: what is pending comes first
        runtime().materialize("debug_mode")
        return False
    from emutpu.backend.deferred.collectives import record  # brings jax, which is not imported with torch

    targets = [] if name in _ONE_WAY else list(_cells(written))
    record(charge, targets, [cell for cell in _cells(operand) if cell not in targets])
    return True


def _cells(value: Any) -> Iterable[Cell]:
    """The written cells of tensors on the device, each once: nothing was computed for the others."""
    found: dict[int, Cell] = {}
    for tensor in _tensors(value):
        cell = cell_of(tensor)
        if cell is not None and cell.value is not None:
            found[id(cell)] = cell
    return found.values()


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for each in value:
            yield from _tensors(each)
