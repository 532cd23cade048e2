"""Slices: names and legality, ids and hosts as libtpu gives them, and the published figures of whole pods."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emutpu.simulator.chips import CHIPS, chip
from emutpu.simulator.topology import Slice, legal_names, single_chip, slice_named

_LIBTPU = json.loads((Path(__file__).parents[2] / "data" / "libtpu_topologies.json").read_text())
_NAMES = [
    name for spec in ("v4", "v5e", "v5p", "v6e", "v7") for name in legal_names(spec) if slice_named(name).chips <= 64
]


@pytest.mark.parametrize("name", _LIBTPU)
def test_devices_are_libtpus(name: str) -> None:
    """Ids, coordinates, cores, hosts and device kinds are those that libtpu 0.0.42.1 gives for the same slice."""
    recorded = _LIBTPU[name]
    devices = slice_named(name).pjrt_devices()
    assert [[d.id, *d.coords, d.core_on_chip, d.process_index] for d in devices] == recorded["devices"]
    assert {d.kind for d in devices} == {recorded["kind"]}


@pytest.mark.parametrize(
    ("name", "shape", "chips", "devices", "hosts"),
    [
        ("v5e-1", (1, 1, 1), 1, 1, 1),
        ("v5e-8", (2, 4, 1), 8, 8, 1),
        ("v6e-16", (4, 4, 1), 16, 16, 4),
        ("v5p-8", (2, 2, 1), 4, 4, 1),
        ("v5p-128", (4, 4, 4), 64, 64, 16),
        ("v5p-12288", (16, 16, 24), 6144, 6144, 1536),
        ("v7-2", (1, 1, 1), 1, 2, 1),
        ("v7-64", (2, 4, 4), 32, 64, 8),
        ("tpu7x-64", (2, 4, 4), 32, 64, 8),
        ("V5P-4x8x8", (4, 8, 8), 256, 256, 64),
        ("v5litepod-16", (4, 4, 1), 16, 16, 4),
        ("2xv5e-16", (4, 4, 1), 32, 32, 8),
        ("v8i-2", (1, 1, 1), 1, 2, 1),
    ],
)
def test_names(name: str, shape: tuple[int, int, int], chips: int, devices: int, hosts: int) -> None:
    """A size counts TensorCores, as Google's accelerator types do; hosts as in Google's tables of configurations."""
    found = slice_named(name)
    assert (found.shape, found.chips, found.devices, found.hosts) == (shape, chips, devices, hosts)


@pytest.mark.parametrize("spec", CHIPS)
def test_a_slice_is_called_by_its_name(spec: str) -> None:
    """Every legal slice has one name, and the name means that slice."""
    names = legal_names(spec)
    assert len(set(names)) == len(names)
    assert [slice_named(name).name for name in names] == names


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e-3", "'v5e-3' is not a legal slice: v5e-N counts chips; the closest legal N are 1, 4, 8"),
        ("v5e-512", "at most 256"),
        ("v5p-1", "v5p-N counts TensorCores, 2 per chip; the closest legal N are 2, 4, 8"),
        ("v5p-3x3x3", "not a legal slice"),
        ("v5p-8x4x4", "not a legal slice"),
        ("v5e-4x4x4", "the torus of v5e has 2 dimensions"),
        ("v8i-8", "the interconnect of v8i is not published"),
        ("v9-8", "unknown TPU chip 'v9'"),
        ("0xv5e-4", "at least one slice"),
        ("cube", "expected CHIP-SIZE"),
        ("", "expected CHIP-SIZE"),
    ],
)
def test_illegal_names(name: str, message: str) -> None:
    """What is not sold raises ValueError that says why and what is close."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        slice_named(name)


def test_world_sizes_are_torchtpus() -> None:
    """On one host TorchTPU 0.2.0's table of counts; over several hosts one process per device."""
    assert slice_named("v5e-8").legal_world_sizes == [1, 4, 8]
    assert slice_named("v5p-8").legal_world_sizes == [1, 2, 4]
    assert slice_named("v7-8").legal_world_sizes == [2, 4, 8]
    assert slice_named("v5p-128").legal_world_sizes == [64]


@pytest.mark.parametrize(
    ("name", "wrap", "twistable"),
    [
        ("v5e-128", (False, True, False), False),
        ("v5e-256", (True, True, False), False),
        ("v5e-64", (False, False, False), False),
        ("v5p-64", (False, False, False), False),
        ("v5p-128", (True, True, True), False),
        ("v5p-256", (True, True, True), True),
        ("v5p-512", (True, True, True), True),
        ("v5p-4x4x12", (True, True, True), False),
    ],
)
def test_wrap(name: str, wrap: tuple[bool, bool, bool], twistable: bool) -> None:
    """A 2-D dimension closes at 16, a 3-D torus from a full cube on; twisted shapes are those of Google's v5p table."""
    assert slice_named(name).wrap == wrap
    assert slice_named(name).twistable == twistable


@pytest.mark.parametrize(("name", "published"), [("v5e-256", 1.6e12), ("v6e-256", 3.2e12), ("v4-8192", 24e12)])
def test_bisection_of_a_pod(name: str, published: float) -> None:
    """The bandwidth through the smallest cut is what Google publishes for the whole pod (v4: within 5 %)."""
    assert slice_named(name).bisection_bandwidth == pytest.approx(published, rel=0.05)


@pytest.mark.parametrize(("name", "published"), [("v5e-256", 51.2e12), ("v6e-256", 102.4e12)])
def test_links_of_a_pod(name: str, published: float) -> None:
    """All links of the pod together carry, both ways, what Google publishes as its all-reduce bandwidth."""
    pod = slice_named(name)
    assert len(list(pod.links())) * pod.chip.figure("ici_link_bandwidth") * 2 == pytest.approx(published)


@pytest.mark.parametrize("name", _NAMES)
def test_hops_are_shortest_ways(name: str) -> None:
    """Distances, diameter and bisection equal a search over the links themselves."""
    found = slice_named(name)
    neighbours: dict[object, list[object]] = {at: [] for at in found.coordinates()}
    for one, other in found.links():
        neighbours[one].append(other)
        neighbours[other].append(one)
    start = found.coordinates()[0]
    distance = {start: 0}
    queue = [start]
    for at in queue:
        for to in neighbours[at]:
            if to not in distance:
                distance[to] = distance[at] + 1
                queue.append(to)
    assert {at: found.hops(start, at) for at in neighbours} == distance
    far = max(found.hops(a, b) for a, b in itertools.product(found.coordinates(), repeat=2))
    assert far == found.diameter
    assert found.bisection_links == _smallest_cut(found)


def _smallest_cut(found: Slice) -> int:
    """Links that a halving plane crosses, counted one by one."""
    cuts = []
    for axis, extent in enumerate(found.shape):
        if extent % 2 == 0:
            cuts.append(sum((a[axis] < extent // 2) != (b[axis] < extent // 2) for a, b in found.links()))
    return min(cuts, default=0)


@given(st.sampled_from(_NAMES), st.data())
def test_hops_are_a_metric(name: str, data: st.DataObject) -> None:
    """Zero only from a chip to itself, symmetric, and never longer than by way of a third chip."""
    found = slice_named(name)
    a, b, c = (data.draw(st.sampled_from(found.coordinates())) for _ in range(3))
    assert (found.hops(a, b) == 0) == (a == b)
    assert found.hops(a, b) == found.hops(b, a)
    assert found.hops(a, c) <= found.hops(a, b) + found.hops(b, c)


@pytest.mark.parametrize("name", [*_NAMES, "v5p-256", "2xv5e-16"])
def test_hosts_partition_the_chips(name: str) -> None:
    """Every host has the same number of chips, which form its box."""
    found = slice_named(name)
    by_host: dict[int, list[tuple[int, int, int]]] = {}
    for at in found.coordinates():
        by_host.setdefault(found.host_of(at), []).append(at)
    assert sorted(by_host) == list(range(found.hosts // found.slices))
    for chips in by_host.values():
        assert len(chips) == math.prod(found.host_shape)
        extents = tuple(max(axis) - min(axis) + 1 for axis in zip(*chips, strict=True))
        assert extents == found.host_shape


def test_slices_over_the_network() -> None:
    """Devices of a second slice have their own slice index, hosts and ids (as libtpu's), and the same coordinates."""
    devices = slice_named("2xv5e-16").pjrt_devices()
    assert [d.id for d in devices] == [*range(100_000, 100_016), *range(200_000, 200_016)]
    assert [d.slice_index for d in devices] == [0] * 16 + [1] * 16
    assert {d.process_index for d in devices[16:]} == {4, 5, 6, 7}
    assert [d.coords for d in devices[:16]] == [d.coords for d in devices[16:]]


def test_a_chip_outside_the_slice() -> None:
    """A distance to nowhere is an error."""
    with pytest.raises(ValueError, match=r"v5e-4 has no chip at \(0, 2, 0\): its shape is 2x2"):
        slice_named("v5e-4").hops((0, 0, 0), (0, 2, 0))


def test_single_chip_is_a_slice() -> None:
    """One chip is the smallest slice, under its accelerator type's name."""
    assert single_chip("v5p").name == "v5p-2"
    assert single_chip("v7").name == "v7-2"
    assert single_chip().devices == slice_named("v5e-1").pjrt_devices()
    assert single_chip("v5e").attributes["hbm_bytes_per_device"] == chip("v5e").hbm_bytes
