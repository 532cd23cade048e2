"""A fake PCI tree of the TPUs of one host, and the rules by which discovery code reads such trees, real or fake.

What readers look at (tpu-info 0.14.2, jax 0.10.2 and torch_tpu 0.2.0 were read): ``vendor``, ``device`` and
``subsystem_device`` under ``/sys/bus/pci/devices``, ``iommu_group``, which must be a symbolic link, and
``/dev/vfio/<group>``; tpu-info takes functions ``.0`` and ``.1`` of one address for the cores of one chip; v4 has
``/dev/accelN``. A fake function also has a file ``emutpu``, which no real sysfs can have: by it emutpu tells its own chips
from real ones. The subsystem's id is nowhere published and repeats the device's.
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Collection
from pathlib import Path

from .chips import CHIPS
from .topology import Slice

__all__ = ["DEVICES", "MARKER", "VENDOR", "Function", "attached", "functions", "plan", "write_tree"]

VENDOR = 0x1AE0
MARKER = "emutpu"
DEVICES = Path("sys/bus/pci/devices")
_ACCELERATOR_CLASS = 0x120000
_FIRST_SLOT = 4
_SLOTS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """One PCI function: one device as software counts them. ``group`` is its IOMMU group, None where it has no link.

    ``emulated`` is the marker's text, ``SLICE HOST``, and None for a function that is not ours.
    """

    address: str
    chip: str
    group: str | None
    emulated: str | None


def plan(where: Slice, host: int = 0, taken: Collection[str] = ()) -> list[Function]:
    """The functions of one host of a slice, at addresses that are not ``taken``.

    Raises ValueError for a host outside the slice, UnknownFigure for a chip without a PCI id.
    """
    where.chip.figure("pci_device")
    if not 0 <= host < where.hosts:
        raise ValueError(f"{where.name} has {where.hosts} host(s), 0 to {where.hosts - 1}: there is no host {host}")
    cores = where.chip.devices
    used = {address.rpartition(".")[0] for address in taken}
    places = (f"0000:{slot // _SLOTS:02x}:{slot % _SLOTS:02x}" for slot in itertools.count(_FIRST_SLOT))
    free = itertools.islice((place for place in places if place not in used), where.chips // where.hosts)
    return [
        Function(f"{place}.{core}", where.chip.name, str(number * cores + core), f"{where.name} {host}")
        for number, place in enumerate(free)
        for core in range(cores)
    ]


def write_tree(where: Slice, folder: Path, host: int = 0, taken: Collection[str] = ()) -> list[Function]:
    """Write ``sys/`` and ``dev/`` of one host below ``folder``, which is new, empty or an older tree (then replaced).

    Raises ValueError as :func:`plan`, FileExistsError for a folder with anything else in it, OSError.
    """
    found = plan(where, host, taken)
    folder.mkdir(parents=True, exist_ok=True)
    present = {entry.name for entry in folder.iterdir()}
    if present and MARKER not in present:
        raise FileExistsError(f"{folder} is not empty and is no tree of emutpu's: give a new directory")
    for name in ("sys", "dev"):
        if name in present:
            shutil.rmtree(folder / name)
    (folder / MARKER).write_text(f"{where.name} {host}\n")
    vfio = folder / "dev/vfio"
    vfio.mkdir(parents=True)
    (vfio / "vfio").touch()
    for number, function in enumerate(found):
        _write_function(folder, function)
        (vfio / str(function.group)).touch()
        if where.chip.dev_node == "accel":
            (folder / f"dev/accel{number}").touch()
    return found


def _write_function(folder: Path, function: Function) -> None:
    entry = folder / DEVICES / function.address
    entry.mkdir(parents=True)
    device = CHIPS[function.chip].figure("pci_device")
    files = {
        "vendor": f"0x{VENDOR:04x}",
        "device": f"0x{device:04x}",
        "subsystem_vendor": f"0x{VENDOR:04x}",
        "subsystem_device": f"0x{device:04x}",
        "class": f"0x{_ACCELERATOR_CLASS:06x}",
        "revision": "0x00",
        "numa_node": "0",
        MARKER: str(function.emulated),
    }
    for name, text in files.items():
        (entry / name).write_text(text + "\n")
    members = folder / "sys/kernel/iommu_groups" / str(function.group) / "devices"
    members.mkdir(parents=True)
    (entry / "iommu_group").symlink_to(f"../../../../kernel/iommu_groups/{function.group}")
    (members / function.address).symlink_to(f"../../../../bus/pci/devices/{function.address}")


def functions(root: Path) -> list[Function]:
    """The TPU functions below ``root`` (``/``, or a tree), by address: Google's vendor id and a known device id."""
    by_id = {spec.pci_device: spec.name for spec in CHIPS.values() if spec.pci_device is not None}
    found = []
    for entry in sorted((root / DEVICES).glob("*")):
        vendor, device = (_number(entry / name) for name in ("vendor", "device"))
        if vendor == VENDOR and device in by_id:
            link = entry / "iommu_group"
            group = link.readlink().name if link.is_symlink() else None
            found.append(Function(entry.name, by_id[device], group, _text(entry / MARKER)))
    return found


def attached(root: Path) -> list[Function]:
    """Those of :func:`functions` that a driver has taken, as torch_tpu counts them: with a node in ``/dev/vfio``."""
    return [
        function
        for function in functions(root)
        if function.group is not None and (root / "dev/vfio" / function.group).exists()
    ]


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _number(path: Path) -> int | None:
    text = _text(path)
    try:
        return int(text, 16) if text else None
    except ValueError:
        return None
