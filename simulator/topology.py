"""Slices that a client can emulate. So far: one chip."""

from __future__ import annotations

from emutpu.backend.pjrt import Device, Topology

from .chips import chip

__all__ = ["single_chip"]


def single_chip(name: str = "v5e") -> Topology:
    """The topology of one chip: ``v5e-1``; a v7 chip shows two devices. Raises ValueError for an unknown chip."""
    spec = chip(name)
    devices = tuple(Device(id=core, kind=spec.kind, core_on_chip=core) for core in range(spec.devices))
    return Topology(
        name=f"{spec.name}-{spec.devices}",
        chip=spec.name,
        devices=devices,
        attributes={"hbm_bytes_per_device": spec.hbm_bytes},
    )
