"""Device functions of ``torch.tpu``. A process owns one device, with index 0, and cannot change it."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import torch

from emutpu.backend.memory import check_index
from emutpu.backend.runtime import runtime

__all__ = [
    "DeviceContext",
    "DeviceProperties",
    "device_of",
    "exchange_device",
    "get_device_name",
    "get_device_properties",
    "local_device_attributes",
    "set_device",
    "synchronize",
]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceProperties:
    """``total_memory`` in bytes; ``multi_processor_count`` is 1 on every TPU."""

    name: str
    total_memory: int
    multi_processor_count: int = 1


def _index(device: Any) -> int:
    """The index of a TPU device given as an index, string, device or None. Raises ValueError for another type of device."""
    if device is None:
        return 0
    if isinstance(device, int):
        return check_index(device)
    parsed = torch.device(device)
    if parsed.type != "tpu":
        raise ValueError(f"Expected a tpu device, but got: {device}")
    return check_index(parsed.index or 0)


def set_device(device: Any) -> None:
    """Check that ``device`` is the process's own. Raises ValueError for any other, TypeError for what is no device."""
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(f"Invalid device string {device}") from None
    if isinstance(device, torch.device):
        if device.type != "tpu":
            raise ValueError(f"Invalid device type {device.type}")
        device = device.index or 0
    if not isinstance(device, int):
        raise TypeError(f"Got unrecognized device type, {type(device).__name__}")
    check_index(device)


def exchange_device(device: int) -> int:
    """Check the index and give the current one, which is the same; negative indices mean the current device."""
    return check_index(device)


class DeviceContext:
    """``with torch.tpu.device(d)``: checks that ``d`` is the process's own device."""

    def __init__(self, device: Any) -> None:
        self.idx = _index(device)

    def __enter__(self) -> None:
        """Nothing to switch."""

    def __exit__(self, kind: object, error: object, trace: types.TracebackType | None) -> None:
        """Nothing to switch back."""


def device_of(obj: Any) -> DeviceContext:
    """The device of a tensor or storage as a context; nothing happens for anything else."""
    on_device = isinstance(obj, torch.Tensor | torch.UntypedStorage) and obj.device.type == "tpu"
    context = DeviceContext(None)
    context.idx = 0 if on_device else -1
    return context


def get_device_name(device: Any = None) -> str:
    """The product name, such as ``TPU v5e``."""
    _index(device)
    configuration = runtime().configuration
    return "TPU" if configuration is None else f"TPU {configuration.chip}"


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Name and memory of the emulated chip's device."""
    name = get_device_name(device)
    configuration = runtime().configuration
    if configuration is None:
        raise RuntimeError(f"unrecognized TPU '{name}'; cannot determine device memory")
    from emutpu.simulator.chips import chip

    return DeviceProperties(name, chip(configuration.chip).hbm_bytes)


def local_device_attributes() -> dict[str, Any]:
    """What PjRt shows of the process's device."""
    device = runtime().client.topology.devices[0]
    return {
        "id": device.id,
        "coords": device.coords,
        "core_on_chip": device.core_on_chip,
        "device_kind": device.kind,
        "process_index": device.process_index,
    }


def synchronize(device: Any = None) -> None:
    """Wait for everything enqueued; raises the failure of asynchronous work."""
    _index(device)
    runtime().synchronize()
