"""The fake PCI tree, read by other people's discovery code and by ours."""

from __future__ import annotations

import glob
from pathlib import Path
from types import SimpleNamespace

import pytest

from emutpu._activation import attached_tpus, emulated_tree
from emutpu.simulator import pci
from emutpu.simulator.chips import UnknownFigure, chip
from emutpu.simulator.topology import slice_named

# torch_tpu 0.2.0's detection rule and table of topologies, as recorded from its wheel.
_WHEEL_TOPOLOGY = {
    "v5e-1": "1,1,1", "v5e-4": "2,2,1", "v5e-8": "2,4,1", "v5p-8": "2,2,1", "v7-2": "1,1,1,2", "v7-8": "2,2,1,2",
}  # fmt: skip
_SLICES = ["v5e-1", "v5e-4", "v5e-8", "v6e-8", "v5p-8", "v4-8", "v7-2", "v7-8", "v5e-16"]
_JAX_NAMES = {"v7": "tpu7x"}
_TPU_INFO_NAMES = {"v7": "7x"}


def _rooted(tree: Path) -> SimpleNamespace:
    """The module ``glob`` for code that looks at /sys, which then looks below ``tree``."""
    return SimpleNamespace(glob=lambda pattern: glob.glob(f"{tree}{pattern}"))


@pytest.mark.parametrize("name", _SLICES)
def test_jax_finds_the_chips(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code in jax counts the host's functions and names the generation."""
    from jax._src import hardware_utils

    where = slice_named(name)
    pci.write_tree(where, tmp_path)
    monkeypatch.setattr(hardware_utils, "glob", _rooted(tmp_path))
    count, version = hardware_utils.num_available_tpu_chips_and_device_id()
    assert count == where.devices // where.hosts
    assert version.name == _JAX_NAMES.get(where.chip.name, where.chip.name)


@pytest.mark.parametrize("name", _SLICES)
def test_tpu_info_finds_the_chips(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The code in tpu-info finds the chips, their cores and their nodes, which exist."""
    device = pytest.importorskip("tpu_info.device", reason="tpu-info is not installed")
    where = slice_named(name)
    pci.write_tree(where, tmp_path)
    monkeypatch.setattr(device, "glob", _rooted(tmp_path))
    kind, count = device.get_local_chips()
    assert kind.value.name == _TPU_INFO_NAMES.get(where.chip.name, where.chip.name)
    assert count == where.devices // where.hosts
    chips = device.get_chips()
    assert len(chips) == where.chips // where.hosts
    assert all(len(found.cores) == where.chip.devices for found in chips)
    nodes = [core.vfio_path for found in chips for _, core in sorted(found.cores.items())]
    assert nodes == [f"/dev/vfio/{number}" for number in range(count)]
    assert all((tmp_path / node[1:]).exists() for node in nodes)
    assert all((tmp_path / device.chip_path(kind, number)[1:]).exists() for number in range(count))


@pytest.mark.parametrize("name", _SLICES)
def test_torch_tpu_finds_the_chips(name: str, tmp_path: Path) -> None:
    """By torch_tpu's rule (vendor, known id, an iommu_group link whose node exists) every device counts once."""
    where = slice_named(name)
    pci.write_tree(where, tmp_path)
    found = 0
    for entry in (tmp_path / "sys/bus/pci/devices").iterdir():
        ours = (entry / "vendor").read_text().strip() == "0x1ae0"
        known = int((entry / "device").read_text(), 16) == where.chip.pci_device
        found += ours and known and (tmp_path / "dev/vfio" / (entry / "iommu_group").readlink().name).exists()
    assert found == where.devices // where.hosts
    if name in _WHEEL_TOPOLOGY:
        cores = (where.chip.devices,) if where.chip.devices > 1 else ()
        assert ",".join(map(str, (*where.shape, *cores))) == _WHEEL_TOPOLOGY[name]


@pytest.mark.parametrize("name", _SLICES)
def test_our_own_discovery(name: str, tmp_path: Path) -> None:
    """We read back what we wrote, as emulated, and never take it for a real TPU."""
    where = slice_named(name)
    written = pci.write_tree(where, tmp_path)
    assert pci.functions(tmp_path) == written
    assert pci.attached(tmp_path) == written
    assert {found.emulated for found in written} == {f"{name} 0"}
    assert attached_tpus(tmp_path / pci.DEVICES) == []
    assert emulated_tree(tmp_path / pci.DEVICES) == (name, 0)


def test_a_real_chip_beside_emulated_ones(tmp_path: Path) -> None:
    """A function without our marker is a real TPU, whatever stands beside it."""
    (first, *_) = pci.write_tree(slice_named("v5e-4"), tmp_path)
    (tmp_path / pci.DEVICES / first.address / pci.MARKER).unlink()
    assert attached_tpus(tmp_path / pci.DEVICES) == [first.address]


def test_only_functions_with_a_node_are_attached(tmp_path: Path) -> None:
    """A container that was given some nodes of /dev/vfio has those devices."""
    pci.write_tree(slice_named("v5e-4"), tmp_path)
    (tmp_path / "dev/vfio/2").unlink()
    assert [found.group for found in pci.attached(tmp_path)] == ["0", "1", "3"]
    assert len(pci.functions(tmp_path)) == 4


def test_other_hosts_of_a_slice(tmp_path: Path) -> None:
    """Each host has a tree of its own chips; there is none beyond the last host."""
    pci.write_tree(slice_named("v5e-16"), tmp_path, host=3)
    assert emulated_tree(tmp_path / pci.DEVICES) == ("v5e-16", 3)
    with pytest.raises(ValueError, match="there is no host 4"):
        pci.plan(slice_named("v5e-16"), 4)


def test_taken_addresses_are_left_alone() -> None:
    """Beside a machine's own PCI devices the chips take the free slots."""
    addresses = [found.address for found in pci.plan(slice_named("v7-4"), taken=["0000:00:04.0", "0000:00:06.3"])]
    assert addresses == ["0000:00:05.0", "0000:00:05.1", "0000:00:07.0", "0000:00:07.1"]


def test_links_lead_somewhere(tmp_path: Path) -> None:
    """The link to the IOMMU group leads to a group that lists the function."""
    (found,) = pci.write_tree(slice_named("v5e-1"), tmp_path)
    group = (tmp_path / pci.DEVICES / found.address / "iommu_group").resolve(strict=True)
    (member,) = (group / "devices").iterdir()
    assert member.resolve(strict=True) == (tmp_path / pci.DEVICES / found.address).resolve()


def test_a_tree_is_replaced_but_nothing_else(tmp_path: Path) -> None:
    """Writing again replaces an older tree whole; a directory with other contents is refused."""
    pci.write_tree(slice_named("v5e-8"), tmp_path / "tree")
    pci.write_tree(slice_named("v6e-4"), tmp_path / "tree")
    assert {found.chip for found in pci.functions(tmp_path / "tree")} == {"v6e"}
    assert len(pci.functions(tmp_path / "tree")) == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "other/precious").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        pci.write_tree(slice_named("v5e-1"), tmp_path / "other")


def test_chips_without_an_id(tmp_path: Path) -> None:
    """No id is invented for a chip whose id nobody has published."""
    assert chip("v8i").pci_device is None
    with pytest.raises(UnknownFigure, match="pci_device is not published"):
        pci.write_tree(slice_named("v8i-2"), tmp_path)
