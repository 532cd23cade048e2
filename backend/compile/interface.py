"""The device as Dynamo asks for it."""

# ruff: noqa: ARG003, ARG004, C901  # a class of small answers, each with the arguments of PyTorch's own
from __future__ import annotations

from typing import Any

import torch

from emutpu.backend import streams
from emutpu.backend.dtypes import DTYPES
from emutpu.backend.runtime import runtime

__all__ = ["interface"]


def interface(base: Any) -> Any:
    """A device interface over PyTorch's own for the name ``tpu``, which would look for another package."""

    class TpuInterface(base):  # type: ignore[misc]  # the base is imported with Dynamo only
        Event = streams.TpuEvent
        Stream = streams.TpuStream

        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def device_count() -> int:
            return 1

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def set_device(device: Any) -> None:
            """There is one device."""

        @staticmethod
        def exchange_device(device: int) -> int:
            return 0

        @staticmethod
        def maybe_exchange_device(device: int) -> int:
            return 0

        @staticmethod
        def current_stream() -> torch.Stream:
            return streams.current_stream()

        @staticmethod
        def set_stream(stream: torch.Stream) -> None:
            streams.set_stream(stream)

        @staticmethod
        def stream(stream: Any) -> Any:
            return streams.StreamContext(stream)

        @staticmethod
        def synchronize(device: Any = None) -> None:
            runtime().synchronize()

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

        @classmethod
        def is_dtype_supported(cls, dtype: torch.dtype, including_emulation: bool = False) -> bool:
            return dtype in DTYPES

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return False

    return TpuInterface
