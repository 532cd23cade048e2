"""``torch.accelerator``'s view of the device: memory by live cells, synchronisation, the one device index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from emutpu.backend.cell import MEMORY
from emutpu.backend.runtime import runtime

__all__ = ["ACCELERATOR", "check_index"]


def check_index(index: int) -> int:
    """The index of the process's device. Raises ValueError for any other (negative ones mean the current device)."""
    if index > 0:
        raise ValueError(
            f"Cannot set TPU device to index {index}, current process is bound to device index 0. "
            "Changing the active TPU device within a process is not supported."
        )
    return 0


def _synchronize(index: int) -> None:
    check_index(index)
    runtime().synchronize()


def _memory_stats(index: int) -> dict[str, Any]:
    """Nested as the allocators of other devices give it: bytes of HBM of live storages, tiles filled up."""
    check_index(index)
    used = {"all": {"current": MEMORY.live, "peak": MEMORY.peak}}
    return {"active_bytes": used, "allocated_bytes": used, "reserved_bytes": used}


def _reset_peak(index: int) -> None:
    check_index(index)
    MEMORY.peak = MEMORY.live
    runtime().meter.refresh()


def _reset_accumulated(index: int) -> None:
    raise RuntimeError("torch.accelerator.memory.reset_accumulated_memory_stats is not implemented for TPU.")


def _memory_info(index: int) -> tuple[int, int]:
    """(free, total) bytes of the emulated device."""
    check_index(index)
    total = runtime().hbm_bytes
    return max(0, total - MEMORY.live), total


def _capability(index: int) -> dict[str, Any]:
    check_index(index)
    raise NotImplementedError("torch.accelerator.get_device_capability is not implemented for TPU.")


# torch._C's functions behind torch.accelerator: they want a C++ allocator or C++ hooks, and look at no Python hook.
ACCELERATOR: dict[str, Callable[..., Any]] = {
    "_accelerator_emptyCache": lambda: None,
    "_accelerator_emptyHostCache": lambda: None,
    "_accelerator_exchangeDevice": check_index,
    "_accelerator_getDeviceCapability": _capability,
    "_accelerator_getDeviceStats": _memory_stats,
    "_accelerator_getMemoryInfo": _memory_info,
    "_accelerator_isAllocatorInitialized": lambda: True,
    "_accelerator_maybeExchangeDevice": check_index,
    "_accelerator_resetAccumulatedStats": _reset_accumulated,
    "_accelerator_resetPeakStats": _reset_peak,
    "_accelerator_setDeviceIndex": check_index,
    "_accelerator_synchronizeDevice": _synchronize,
}
