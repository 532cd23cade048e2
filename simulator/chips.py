"""The chips that can be emulated: one frozen table, each figure with its source."""

from __future__ import annotations

import dataclasses
import difflib

__all__ = ["CHIPS", "Chip", "chip"]

GIB = 2**30


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """One TPU generation.

    ``kind`` is PjRt's device_kind; ``hbm_bytes`` is per device; ``devices`` is how many devices software sees per chip
    (two cores in megacore count once); ``bf16_flops`` is the peak of one chip in FLOP/s; ``pci_device`` belongs to
    vendor 0x1ae0. ``sources`` names where each figure comes from.
    """

    name: str
    kind: str
    hbm_bytes: int
    devices: int
    bf16_flops: float
    pci_device: int
    sources: tuple[tuple[str, str], ...]


_WHEEL = "torch_tpu 0.2.0 wheel, _internal/utils/hardware.py"
_KINDS = "jax 0.10.2, jax/_src/pallas/mosaic/tpu_info.py"


def _sources(flops: str) -> tuple[tuple[str, str], ...]:
    return (
        ("kind", _KINDS),
        ("hbm_bytes", _WHEEL),
        ("devices", _WHEEL),
        ("bf16_flops", flops),
        ("pci_device", _WHEEL),
    )


_ROWS = (
    Chip("v4", "TPU v4", 32 * GIB, 1, 275e12, 0x005E, _sources(_WHEEL)),
    Chip("v5e", "TPU v5 lite", 16 * GIB, 1, 197e12, 0x0063, _sources("docs.cloud.google.com/tpu/docs/v5e")),
    Chip("v5p", "TPU v5", 95 * GIB, 1, 459e12, 0x0062, _sources("docs.cloud.google.com/tpu/docs/v5p")),
    Chip("v6e", "TPU v6 lite", 32 * GIB, 1, 918e12, 0x006F, _sources("docs.cloud.google.com/tpu/docs/v6e")),
    Chip("v7", "TPU7x", 96 * GIB, 2, 2307e12, 0x0076, _sources("docs.cloud.google.com/tpu/docs/tpu7x")),
)
CHIPS: dict[str, Chip] = {row.name: row for row in _ROWS}


def chip(name: str) -> Chip:
    """The chip of that name. Raises ValueError listing the known ones."""
    found = CHIPS.get(name)
    if found is None:
        close = difflib.get_close_matches(name, CHIPS, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown TPU chip {name!r}: known are {', '.join(CHIPS)}{hint}")
    return found
