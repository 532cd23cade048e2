"""Collectives with ranks that are not there: PyTorch's fake process group moves nothing, its time is modelled.

A dry run of one rank of many uses that group. Its collectives reach the dispatcher as operators of ``c10d``; the kernels
here charge the modelled device with what they would take, and hand over. Where ops are recorded, so are collectives: they
are done in order with the rest of the list, whether or not somebody holds their results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from emutpu.backend.deferred.ops import DeferredOp, repeat_number
from emutpu.backend.deferred.values import operand as operand_of
from emutpu.backend.location import capture
from emutpu.backend.options import LOCAL
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE, cell_of

if TYPE_CHECKING:
    from emutpu.backend.cell import Cell, Layout
    from emutpu.backend.hlo import Builder, Value
    from emutpu.backend.pjrt import Buffer, ModelledCost
    from emutpu.backend.strict import Take

__all__ = ["COLLECTIVES", "kernels"]

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


def _charge(name: str, op: str, operand: Any, group: Any) -> _Charge | None:
    """What charges the modelled device with a collective of the group, if its other ranks are not there."""
    from torch.distributed import ProcessGroup, get_world_size

    ranks = ProcessGroup.unbox(group)
    configuration = runtime().configuration
    if configuration is None or configuration.collective is None or ranks._get_backend(DEVICE).name() != "fake":
        return None
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(operand))
    runtime().client  # noqa: B018  # the clock starts with the device
    cost = configuration.collective(op, float(nbytes), ranks.size(), get_world_size())
    return _Charge(f"c10d.{name}", cost)


@dataclasses.dataclass(frozen=True, slots=True)
class _Charge:
    name: str
    cost: ModelledCost | None

    def __call__(self) -> None:
        runtime().meter.charge(self.name, self.cost)


def _recorded(name: str, operand: Any, written: Any, charge: _Charge) -> bool:
    """Record the collective where ops are recorded: True. It gives new values of what it writes, here the old ones."""
    if not LOCAL.state.defers:
        return False
    if LOCAL.state.options.flushes:  # the mode was left: what is pending comes first
        runtime().materialize("debug_mode")
        return False
    targets = [] if name in _ONE_WAY else list(_cells(written))
    sources = [cell for cell in _cells(operand) if cell not in targets]
    values = [operand_of(cell) for cell in (*targets, *sources)]
    origin = (charge.name, *capture())
    made = _op(charge, tuple(cell.layout for cell in targets), tuple(cell.layout for cell in sources))
    for cell, value in zip(targets, made.record(values, origin), strict=True):
        cell.write(value, cell.layout, origin)
    return True


def _op(charge: _Charge, targets: tuple[Layout, ...], sources: tuple[Layout, ...]) -> DeferredOp:
    key = charge, targets, sources
    made = _ops.get(key)
    if made is None:
        layouts = (*targets, *sources)

        def done(values: Sequence[Buffer]) -> Sequence[Buffer]:
            charge()
            return values[: len(targets)]

        def emit(builder: Builder, take: Take) -> list[Value]:
            return [take(layout.dims, layout.dtype) for layout in layouts][: len(targets)]

        text = f"{charge};{len(targets)};{[str(layout.dtype) for layout in layouts]}"
        dims = str([layout.dims for layout in layouts])
        made = _ops[key] = DeferredOp(
            charge.name,
            emit,
            targets,
            (text, dims),
            results=[(layout.dims, layout.dtype) for layout in targets],
            parts=[charge.name],
            repeat=repeat_number(f"{text}|{dims}"),
            collective=done,
        )
    return made


_ops: dict[tuple[_Charge, tuple[Layout, ...], tuple[Layout, ...]], DeferredOp] = {}


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
