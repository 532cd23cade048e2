"""Recorded facts that come with the package, as lists of names: which overloads the device has, and which models use.

``facts/torchtpu_overloads.txt`` are the 673 ATen overloads that TorchTPU 0.2.0 registers a kernel for, and
``facts/torchtpu_missing_overloads.txt`` those that programs of PyTorch's op database met no kernel for; both were read off
the wheel at work on torch 2.13. ``facts/model_op_histogram_*.json`` count how many of 2,646 traced models use an overload.
"""

from __future__ import annotations

import json
from importlib.resources import files

__all__ = ["histogram", "read"]


def read(name: str) -> list[str]:
    """The lines of a list, without comments."""
    text = files("emutpu").joinpath("facts", name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def histogram(name: str) -> dict[str, int]:
    """Overloads and how many models use them."""
    found: dict[str, int] = json.loads(files("emutpu").joinpath("facts", name).read_text(encoding="utf-8"))
    return found
