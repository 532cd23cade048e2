"""Random state of ``torch.tpu``: 16 bytes, seed and offset."""

from __future__ import annotations

from typing import Any

import torch

from emutpu.backend.rng import DEFAULT_GENERATOR, TpuGenerator

__all__ = ["generator_of", "get_rng_state", "initial_seed", "manual_seed", "set_rng_state"]


def _check(device: Any) -> None:
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "tpu":
            raise ValueError(f"expected device type 'tpu' for RNG state access, got '{device.type}'")
        device = device.index or 0
    if not isinstance(device, int):
        raise TypeError(f"got unrecognized device type: {type(device).__name__}")
    if device != 0:
        raise ValueError(
            f"expected local device index 0, got {device}: accessing RNG state of a non-current TPU device is not supported"
        )


def manual_seed(seed: int) -> None:
    """Seed the default generator and set its offset to 0."""
    DEFAULT_GENERATOR.manual_seed(int(seed))


def initial_seed() -> int:
    """The default generator's seed."""
    return DEFAULT_GENERATOR.initial_seed()


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """The default generator's state: uint8[16] on the CPU."""
    _check(device)
    return DEFAULT_GENERATOR.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    """Restore what :func:`get_rng_state` gave."""
    _check(device)
    DEFAULT_GENERATOR.set_state(new_state)


def generator_of(device: Any = 0) -> TpuGenerator:
    """The default generator of the process's device."""
    _check(device)
    return DEFAULT_GENERATOR
