"""TPU_VISIBLE_DEVICES and libtpu's bounds: what one process sees of a slice."""

from __future__ import annotations

import pytest

from emutpu.simulator.topology import slice_named
from emutpu.simulator.visible import Placement, visible_devices


@pytest.mark.parametrize(
    ("name", "placement", "ids"),
    [
        ("v5e-4", {}, [0, 1, 2, 3]),
        ("v5e-4", {"devices": (2,)}, [2]),
        ("v5e-4", {"devices": (3, 0)}, [3, 0]),
        ("v5e-4", {"devices": (1,), "chips": (2,)}, [1]),
        ("v7-8", {"devices": (1,)}, [1]),
        ("v7-8", {"chips": (1,)}, [2, 3]),
        ("v5e-16", {}, [0, 1, 4, 5]),
        ("v5e-16", {"task": 3}, [10, 11, 14, 15]),
        ("v5e-16", {"task": 3, "devices": (1,)}, [11]),
        ("v5e-4", {"attached": (0, 2)}, [0, 2]),
        ("v5e-4", {"attached": (0, 2), "devices": (1,)}, [2]),
        ("v5e-4", {"devices": (2,), "chips_per_process": (1, 1, 1), "processes": (2, 2, 1), "task": 2}, [2]),
        ("v5e-8", {"devices": (0, 1, 2, 3), "chips_per_process": (2, 2, 1), "processes": (1, 1, 1)}, [0, 1, 2, 3]),
    ],
)
def test_devices(name: str, placement: dict[str, object], ids: list[int]) -> None:
    """The devices, by id and in the order asked for; the first is the process's own."""
    found = visible_devices(slice_named(name), Placement(**placement))  # type: ignore[arg-type]  # a table of mixed types
    assert [device.id for device in found] == ids


def test_process_index_is_the_task() -> None:
    """In a grid of processes on one host, the process index is the task's number, not the host's."""
    placement = Placement(devices=(2,), processes=(2, 2, 1), task=2, addresses=4)
    (device,) = visible_devices(slice_named("v5e-4"), placement)
    assert device.process_index == 2
    assert device.coords == (0, 1, 0)


@pytest.mark.parametrize(
    ("name", "placement", "message"),
    [
        (
            "v5e-1",
            {"devices": (1,)},
            "TPU_VISIBLE_DEVICES=1 names a device that does not exist: .* v5e-1, only device 0",
        ),
        ("v5e-4", {"devices": (0, 4)}, "TPU_VISIBLE_DEVICES=0,4 .* devices 0 to 3 exist"),
        ("v7-8", {"chips": (4,)}, "TPU_VISIBLE_CHIPS=4 names a chip .* chips 0 to 3 exist"),
        ("v5e-4", {"devices": (0,), "chips_per_process": (2, 2, 1)}, "TPU_CHIPS_PER_PROCESS_BOUNDS=2,2,1 is 4 chip"),
        ("v5e-4", {"devices": (0,), "processes": (4, 2, 1)}, "TPU_PROCESS_BOUNDS=4,2,1 needs 8 chips, but v5e-4 has 4"),
        ("v5e-4", {"processes": (2, 2, 1), "task": 4}, "CLOUD_TPU_TASK_ID=4 is outside"),
        ("v5e-16", {"task": 4}, "v5e-16 has 4 process"),
        ("v5e-4", {"devices": (0,), "processes": (2, 2, 1), "addresses": 3}, "TPU_PROCESS_ADDRESSES lists 3"),
        ("v5e-4", {"attached": ()}, "has a node in /dev/vfio"),
    ],
)
def test_what_cannot_be_obeyed(name: str, placement: dict[str, object], message: str) -> None:
    """Each contradiction is a ValueError that names the variable and what exists."""
    with pytest.raises(ValueError, match=message):
        visible_devices(slice_named(name), Placement(**placement))  # type: ignore[arg-type]  # a table of mixed types
