"""The ``torch.tpu`` namespace."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch

from emutpu.backend import options
from emutpu.backend.dtypes import DTYPES
from emutpu.backend.rng import DEFAULT_GENERATOR
from emutpu.backend.runtime import runtime

__all__ = ["make"]


def make() -> types.ModuleType:
    """The module that PyTorch installs as ``torch.tpu``."""
    module = types.ModuleType("torch.tpu", __doc__)
    module.__dict__.update(_NAMES)
    return module


def _synchronize(device: Any = None) -> None:
    runtime().synchronize()


def _manual_seed(seed: int) -> None:
    DEFAULT_GENERATOR.manual_seed(int(seed))


def _get_rng_state(device: Any = "tpu") -> torch.Tensor:
    return DEFAULT_GENERATOR.get_state()


def _set_rng_state(state: torch.Tensor, device: Any = "tpu") -> None:
    DEFAULT_GENERATOR.set_state(state)


@contextlib.contextmanager
def _device(device: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _precision(mode: options.Precision) -> Iterator[None]:
    if not isinstance(mode, options.Precision):
        raise ValueError(
            "expected to be one of 'PrecisionConfig.DEFAULT', 'PrecisionConfig.HIGH', or "
            f"'PrecisionConfig.HIGHEST', got '{mode}'"
        )
    with options.override(precision=mode):
        yield


_NAMES: dict[str, Any] = {
    "EagerMode": options.EagerMode,
    "Precision": options.Precision,
    "_exchange_device": lambda device: 0,
    "_is_in_bad_fork": lambda: runtime().in_bad_fork,
    "_lazy_init": lambda: None,
    "_maybe_exchange_device": lambda device: 0,
    "current_device": lambda: 0,
    "default_generators": (DEFAULT_GENERATOR,),
    "device": _device,
    "device_count": lambda: 1,
    "get_amp_supported_dtype": lambda: list(DTYPES),
    "get_rng_state": _get_rng_state,
    "initial_seed": DEFAULT_GENERATOR.initial_seed,
    "is_available": lambda: True,
    "is_initialized": lambda: runtime().initialized,
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "precision": _precision,
    "set_device": lambda device: None,
    "set_rng_state": _set_rng_state,
    "synchronize": _synchronize,
}
