"""Which devices of a slice one process sees: ``TPU_VISIBLE_DEVICES`` and the bounds variables of libtpu.

``TPU_VISIBLE_DEVICES`` numbers the devices of the process's host in the order of their PCI addresses (on v7, where a chip
shows two, TorchTPU starts one process per device); ``TPU_VISIBLE_CHIPS`` numbers its chips, and gives way to the former.
``TPU_CHIPS_PER_PROCESS_BOUNDS`` (``TPU_CHIPS_PER_HOST_BOUNDS``) is the box of chips of one process,
``TPU_PROCESS_BOUNDS`` (``TPU_HOST_BOUNDS``) the grid of processes, ``CLOUD_TPU_TASK_ID`` this process's place in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from emutpu.backend.pjrt import Device

from .topology import Slice

__all__ = ["Placement", "visible_devices"]

Bounds = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The variables above, parsed; None where unset. ``addresses`` is the length of ``TPU_PROCESS_ADDRESSES``.

    ``attached`` are the devices of the host that have a node in an emulated ``/dev``; None means all.
    """

    devices: tuple[int, ...] | None = None
    chips: tuple[int, ...] | None = None
    chips_per_process: Bounds | None = None
    processes: Bounds | None = None
    addresses: int | None = None
    task: int | None = None
    attached: tuple[int, ...] | None = None


def visible_devices(where: Slice, placement: Placement) -> tuple[Device, ...]:
    """The devices of one process, first its own. Raises ValueError that names the variable which cannot be obeyed."""
    task = _task(where, placement)
    host = min(task, where.hosts - 1) if placement.processes is None else task * where.hosts // _grid(placement)
    here = [device for device in where.pjrt_devices() if device.process_index == host]
    if placement.attached is not None:
        here = [device for number, device in enumerate(here) if number in placement.attached]
    if not here:
        raise ValueError(
            f"no device of the emulated {where.name} has a node in /dev/vfio: pass the nodes to this process"
        )
    found = _chosen(where, here, placement)
    _check_bounds(where, found, placement)
    if placement.processes is None:
        return tuple(found)
    return tuple(dataclasses.replace(device, process_index=task) for device in found)


def _grid(placement: Placement) -> int:
    return math.prod(placement.processes or (1,))


def _task(where: Slice, placement: Placement) -> int:
    task = placement.task or 0
    count = where.hosts if placement.processes is None else _grid(placement)
    if task >= count:
        source = "TPU_PROCESS_BOUNDS makes" if placement.processes else f"{where.name} has"
        raise ValueError(f"CLOUD_TPU_TASK_ID={task} is outside: {source} {count} process(es), 0 to {count - 1}")
    if placement.addresses is not None and placement.addresses != count:
        raise ValueError(f"TPU_PROCESS_ADDRESSES lists {placement.addresses} process(es), but there are {count}")
    return task


def _chosen(where: Slice, here: Sequence[Device], placement: Placement) -> list[Device]:
    if placement.devices is not None:
        _check_range("TPU_VISIBLE_DEVICES", placement.devices, len(here), "device", where)
        return [here[number] for number in placement.devices]
    if placement.chips is not None:
        cores = where.chip.devices
        _check_range("TPU_VISIBLE_CHIPS", placement.chips, len(here) // cores, "chip", where)
        return [device for number in placement.chips for device in here[number * cores : (number + 1) * cores]]
    return list(here)


def _check_range(variable: str, numbers: tuple[int, ...], count: int, unit: str, where: Slice) -> None:
    if max(numbers) >= count:
        text = ",".join(map(str, numbers))
        existing = f"only {unit} 0 exists" if count == 1 else f"{unit}s 0 to {count - 1} exist"
        raise ValueError(
            f"{variable}={text} names a {unit} that does not exist: on a host of the emulated {where.name}, {existing}"
        )


def _check_bounds(where: Slice, found: Sequence[Device], placement: Placement) -> None:
    chips = len({device.coords for device in found})
    bounds = placement.chips_per_process
    if bounds is not None and math.prod(bounds) != chips:
        raise ValueError(
            f"TPU_CHIPS_PER_PROCESS_BOUNDS={','.join(map(str, bounds))} is {math.prod(bounds)} chip(s), but this process "
            f"sees {chips}: set TPU_VISIBLE_DEVICES to as many"
        )
    if placement.processes is not None and _grid(placement) * chips > where.chips:
        raise ValueError(
            f"TPU_PROCESS_BOUNDS={','.join(map(str, placement.processes))} needs {_grid(placement) * chips} chips, but "
            f"{where.name} has {where.chips}"
        )
