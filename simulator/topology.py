"""Slices of TPU chips: names, legal shapes, the torus and where it wraps, hosts, coordinates, distances, bisection.

A name is ``CHIP-SIZE``: the size counts TensorCores, as Google's accelerator types do (``v5e-8`` is 8 chips, ``v5p-128``
and ``v7-64`` are 64 and 32), or is a shape in chips (``v5p-4x4x8``). ``2xv5e-16`` is two slices joined by the data
centre network.

Rules and where they come from: shapes of v5e and v6e, cubes of v4, v5p and v7, and twisted shapes from
docs.cloud.google.com/tpu/docs; a 2-D dimension closes into a ring at its full 16, a 3-D one when all are multiples of 4
(jax-ml/scaling-book); one-chip and two-chip shapes and world sizes from torch_tpu 0.2.0's hardware table; device ids,
coordinates and hosts of 2x2x1 chips in slices of several hosts as libtpu 0.0.42.1 gives them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

from emutpu.backend.pjrt import Device, Topology

from .chips import Chip, chip

__all__ = ["Coordinates", "Slice", "legal_names", "single_chip", "slice_named"]

Coordinates = tuple[int, int, int]

_NAME = re.compile(r"(?:(?P<count>\d+)x)?(?P<chip>[a-z][a-z0-9]*)-(?P<size>\d+(?:x\d+){0,2})")
_FLAT = ((1, 1, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1), (4, 8, 1), (8, 8, 1), (8, 16, 1), (16, 16, 1))
_BELOW_A_CUBE = ((1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_CUBE = 4
_HOST_OF_MANY: Coordinates = (2, 2, 1)
_LISTED = 12
_IDS_OF_A_SLICE = 100_000


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """``slices`` slices of ``shape`` chips (x, y, z) each. Made by :func:`slice_named`; every instance is legal."""

    chip: Chip
    shape: Coordinates
    slices: int = 1

    @property
    def name(self) -> str:
        """The shortest name that means this slice: by size where the shape is the default for it."""
        size = str(self._cores) if _default_shape(self.chip, self._cores) == self.shape else self.shape_text
        return f"{self.slices}x{self.chip.name}-{size}" if self.slices > 1 else f"{self.chip.name}-{size}"

    @property
    def shape_text(self) -> str:
        """The shape in chips, in as many dimensions as the torus has: ``4x4`` or ``4x4x8``."""
        return "x".join(map(str, self.shape[: self.chip.figure("torus_rank") if self.chip.torus_rank else 3]))

    @property
    def _cores(self) -> int:
        return math.prod(self.shape) * (self.chip.cores or 1)

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Devices that software sees, of all slices."""
        return self.chips * self.chip.devices

    @property
    def host_shape(self) -> Coordinates:
        """Chips of one host (x, y, z): all of a slice that fits one machine, else 2x2x1."""
        bounds = self.chip.host_bounds or (1, 1, 1)
        one_host = math.prod(self.shape) <= math.prod(bounds)
        return self.shape if one_host else _HOST_OF_MANY

    @property
    def hosts(self) -> int:
        """Hosts (virtual machines) of all slices."""
        return self.chips // math.prod(self.host_shape)

    @property
    def wrap(self) -> tuple[bool, bool, bool]:
        """Whether each dimension closes into a ring."""
        multiple = self.chip.wrap_multiple
        if multiple is None:
            return (False, False, False)
        if self.chip.torus_rank == 2:
            x, y, _ = (extent == multiple for extent in self.shape)
            return (x, y, False)
        closed = all(extent % multiple == 0 for extent in self.shape)
        return (closed, closed, closed)

    @property
    def twistable(self) -> bool:
        """Whether the optical switches can also join this shape as a twisted torus (n x n x 2n or n x 2n x 2n)."""
        low, middle, high = sorted(self.shape)
        return all(self.wrap) and high == 2 * low and middle in (low, high)

    def coordinates(self) -> list[Coordinates]:
        """The chips of one slice in the order of their ids: x runs fastest."""
        x, y, z = self.shape
        return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]

    def host_of(self, at: Coordinates) -> int:
        """The host (process index within one slice) of a chip; hosts are counted along x first."""
        grid = [extent // size for extent, size in zip(self.shape, self.host_shape, strict=True)]
        x, y, z = (c // size for c, size in zip(at, self.host_shape, strict=True))
        return x + grid[0] * (y + grid[1] * z)

    def hops(self, one: Coordinates, other: Coordinates) -> int:
        """Links on the shortest way between two chips of a slice. Raises ValueError for a chip outside it."""
        for at in (one, other):
            if any(not 0 <= c < extent for c, extent in zip(at, self.shape, strict=True)):
                raise ValueError(f"{self.name} has no chip at {at}: its shape is {self.shape_text}")
        steps = (abs(a - b) for a, b in zip(one, other, strict=True))
        return sum(
            min(step, extent - step) if ring else step
            for step, extent, ring in zip(steps, self.shape, self.wrap, strict=True)
        )

    @property
    def diameter(self) -> int:
        """The longest of all shortest ways, in links."""
        return sum(extent // 2 if ring else extent - 1 for extent, ring in zip(self.shape, self.wrap, strict=True))

    def links(self) -> Iterator[tuple[Coordinates, Coordinates]]:
        """Every link of one slice once, the closing links of rings last in each row."""
        for at in self.coordinates():
            for axis, (extent, ring) in enumerate(zip(self.shape, self.wrap, strict=True)):
                if at[axis] + 1 < extent or (ring and extent > 2):
                    to = list(at)
                    to[axis] = (at[axis] + 1) % extent
                    yield at, (to[0], to[1], to[2])

    @property
    def bisection_links(self) -> int:
        """Links that a cut of one slice into equal halves crosses: the smallest over the dimensions that can be halved."""
        chips = math.prod(self.shape)
        cuts = (
            chips // extent * (2 if ring and extent > 2 else 1)
            for extent, ring in zip(self.shape, self.wrap, strict=True)
            if extent % 2 == 0
        )
        return min(cuts, default=0)

    @property
    def bisection_bandwidth(self) -> float | None:
        """Bytes per second through the smallest halving cut, one way; None where the links are not published."""
        if self.chip.ici_link_bandwidth is None:
            return None
        return self.bisection_links * self.chip.ici_link_bandwidth

    @property
    def legal_world_sizes(self) -> list[int]:
        """Numbers of processes that TorchTPU starts here: on one host the counts of its table, else one per device."""
        if self.hosts > 1:
            return [self.devices]
        counts = (math.prod(shape) * self.chip.devices for shape in _single_host_shapes(self.chip))
        return sorted({count for count in counts if count <= self.devices})

    def pjrt_devices(self) -> tuple[Device, ...]:
        """What PjRt shows of every device of every slice, ordered by id; ids of joined slices start at 100,000 each."""
        per_slice = self.hosts // self.slices
        places = itertools.product(range(self.slices), self.coordinates(), range(self.chip.devices))
        return tuple(
            Device(
                id=number
                if self.slices == 1
                else (index + 1) * _IDS_OF_A_SLICE + number % (self.devices // self.slices),
                kind=self.chip.kind,
                process_index=index * per_slice + self.host_of(at),
                coords=at,
                core_on_chip=core,
                slice_index=index,
            )
            for number, (index, at, core) in enumerate(places)
        )

    def topology(self, devices: tuple[Device, ...] | None = None) -> Topology:
        """The PjRt topology of this slice; ``devices`` are those that the process sees, all of the slice by default."""
        return Topology(
            name=self.name,
            chip=self.chip.name,
            devices=self.pjrt_devices() if devices is None else devices,
            attributes={
                "hbm_bytes_per_device": self.chip.hbm_bytes,
                "bf16_flops_per_device": dict(self.chip.peaks).get("bf16", 0.0) / self.chip.devices,
                "hbm_bytes_per_second_per_device": self.chip.hbm_bandwidth / self.chip.devices,
                "host_bytes_per_second_per_device": (self.chip.pcie_bandwidth or 0.0) / self.chip.devices,
                "shape": self.shape,
                "wrap": self.wrap,
                "hosts": self.hosts,
                "slices": self.slices,
            },
        )


def single_chip(name: str = "v5e") -> Topology:
    """The topology of one chip: ``v5e-1``; a v7 chip shows two devices. Raises ValueError for an unknown chip."""
    return Slice(chip(name), (1, 1, 1)).topology()


def slice_named(name: str) -> Slice:
    """The slice of that name, in any case.

    Raises ValueError for a malformed name, an unknown chip, or a size or shape that is not sold, with the closest legal.
    """
    match = _NAME.fullmatch(name.lower())
    if match is None:
        raise ValueError(f"{name!r} is not the name of a slice: expected CHIP-SIZE, such as v5e-8 or v5p-4x4x8")
    spec = chip(match["chip"])
    count = int(match["count"] or 1)
    if count < 1:
        raise ValueError(f"{name!r}: there must be at least one slice")
    if spec.torus_rank is None or spec.host_bounds is None:
        if match["size"] in (str(spec.cores or 1), "1x1x1", "1x1") and count == 1:
            return Slice(spec, (1, 1, 1))
        raise ValueError(
            f"{name!r}: the interconnect of {spec.name} is not published, so only {spec.name}-{spec.cores or 1} is known"
        )
    shape = _shape(spec, match["size"], name)
    return Slice(spec, shape, count)


def _shape(spec: Chip, size: str, name: str) -> Coordinates:
    if "x" not in size:
        found = _default_shape(spec, int(size))
        if found is None:
            raise ValueError(f"{name!r} is not a legal slice: {_nearest(spec, int(size))}")
        return found
    extents = [int(part) for part in size.split("x")]
    if len(extents) != spec.torus_rank:
        raise ValueError(f"{name!r}: the torus of {spec.name} has {spec.torus_rank} dimensions")
    padded = (*extents, 1)[:3]
    shape = (padded[0], padded[1], padded[2])
    if shape not in _legal(spec):
        cores = math.prod(extents) * (spec.cores or 1)
        raise ValueError(f"{name!r} is not a legal slice: {_nearest(spec, cores)}")
    return shape


def _nearest(spec: Chip, size: int) -> str:
    unit = "chips" if spec.cores in (None, 1) else f"TensorCores, {spec.cores} per chip"
    sizes = sorted({math.prod(shape) * (spec.cores or 1) for shape in _legal(spec)})
    near = sorted(sorted(sizes, key=lambda legal: abs(legal - size))[:_LISTED])
    return f"{spec.name}-N counts {unit}; the closest legal N are {', '.join(map(str, near))} (at most {sizes[-1]})"


def legal_names(name: str) -> list[str]:
    """Every slice of one chip, smallest first: the default shape of each size, then other shapes of that size."""
    spec = chip(name)
    if spec.torus_rank is None or spec.host_bounds is None:
        return [Slice(spec, (1, 1, 1)).name]
    shapes = sorted(_legal(spec), key=lambda shape: (math.prod(shape), sum(shape)))
    return [Slice(spec, shape).name for shape in shapes]


def _legal(spec: Chip) -> tuple[Coordinates, ...]:
    if spec.torus_rank == 2:
        return _FLAT
    limit = int(spec.figure("max_chips"))
    return _BELOW_A_CUBE + tuple(_cubes(limit))


def _cubes(limit: int) -> Iterator[Coordinates]:
    for x in range(_CUBE, round(limit ** (1 / 3)) + 1, _CUBE):
        for y in range(x, math.isqrt(limit // x) + 1, _CUBE):
            for z in range(y, limit // (x * y) + 1, _CUBE):
                yield (x, y, z)


def _default_shape(spec: Chip, cores: int) -> Coordinates | None:
    """The most compact legal shape of that many TensorCores."""
    if spec.torus_rank is None or spec.host_bounds is None:
        return (1, 1, 1) if cores == (spec.cores or 1) else None
    wanted = [shape for shape in _legal(spec) if math.prod(shape) * (spec.cores or 1) == cores]
    return min(wanted, key=sum, default=None)


def _single_host_shapes(spec: Chip) -> tuple[Coordinates, ...]:
    """Shapes of torch_tpu 0.2.0's table, which knows eight devices of a 3-D chip as one host too."""
    flat = ((1, 1, 1), (2, 2, 1), (2, 4, 1))
    deep = ((1, 1, 1), (1, 2, 1), (2, 2, 1))
    return flat if spec.torus_rank == 2 else deep
