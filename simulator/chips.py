"""The chips that can be emulated: one frozen table, each figure with its source, and both values where sources conflict.

Units: bytes, bytes per second, FLOP/s (a multiply-add counts two), hertz. Figures are per chip unless their name or the
field's description says core, device, link or host. A figure that nobody has published is None, never zero:
:meth:`Chip.figure` and :meth:`Chip.peak` raise for it, so that nothing is computed from a hole in the table.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

__all__ = ["ALIASES", "CHIPS", "Chip", "Conflict", "UnknownFigure", "chip"]

KIB, MIB, GIB = 2**10, 2**20, 2**30

_GOOGLE = "docs.cloud.google.com/tpu/docs/"
_JAX = "jax 0.10.2, jax/_src/pallas/mosaic/tpu_info.py"
_BOOK = "jax-ml/scaling-book, tpus.md"
_INFO = "tpu-info 0.14.2, tpu_info/device.py"
_WHEEL = "torch_tpu 0.2.0 wheel, _internal/utils/hardware.py"
_XPK = "AI-Hypercomputer/xpk, core/system_characteristics.py"
_PRESS = "press: sipoch.com/en/article/300330021435853"
_DEEP_DIVE = "press: summary of Google's TPU 8t and 8i deep dive, app.daily.dev"
_NONE = "not published"


class UnknownFigure(ValueError):
    """A figure that has not been published was asked for. Names the chip, the figure and what is known instead."""


@dataclasses.dataclass(frozen=True, slots=True)
class Conflict:
    """A second value of a figure, from a source that disagrees with the one the table follows."""

    field: str
    value: float | str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One TPU generation.

    ``status`` is ``published`` or ``unverified`` (press-grade figures, no first-party page). ``kind`` is PjRt's
    device_kind. ``cores`` are TensorCores per chip, ``devices`` what software sees per chip: two cores in ``megacore``
    are one device. ``mxus`` per core, ``mxu_side`` square. A vector register holds ``sublanes`` x ``lanes`` 32-bit
    values and ``valus`` vector ALUs work on it per cycle. ``vmem_bytes`` and ``smem_bytes`` per core, ``cmem_bytes`` per
    chip, ``hbm_bytes`` per device. ``peaks`` maps a dtype to operations per second of the chip; ``matmul_dtypes`` are
    those the MXU takes without a conversion. ``large_16_bit_tiles``: XLA tiles 16-bit arrays (16, 128), not (8, 128).
    ``ici_link_bandwidth`` is one link, one way; ``ici_bandwidth`` all links, both ways. ``torus_rank`` is the number of
    torus dimensions (None: no torus); ``wrap_multiple`` says when a dimension closes into a ring: 16 for "only at its
    full 16", 4 for "when every dimension is a multiple of 4". ``host_bounds`` are the chips of one host.
    ``pci_device`` belongs to vendor 0x1ae0; ``dev_node`` is the kind of node in /dev, ``vfio`` or ``accel``.
    """

    name: str
    status: str
    kind: str
    generation: int
    cores: int | None
    devices: int
    megacore: bool
    mxus: int | None
    mxu_side: int | None
    clock_hz: float | None
    sublanes: int | None
    lanes: int | None
    valus: int | None
    vmem_bytes: int | None
    smem_bytes: int | None
    cmem_bytes: int
    hbm_bytes: int
    hbm_bandwidth: float
    peaks: tuple[tuple[str, float], ...]
    matmul_dtypes: tuple[str, ...]
    large_16_bit_tiles: bool | None
    sparse_cores: int | None
    ici_links: int | None
    ici_link_bandwidth: float | None
    ici_bandwidth: float | None
    ici_hop_seconds: float | None
    torus_rank: int | None
    wrap_multiple: int | None
    max_chips: int | None
    host_bounds: tuple[int, int, int] | None
    host_memory_bytes: float | None
    dcn_bandwidth: float | None
    pcie_bandwidth: float | None
    pci_device: int | None
    dev_node: str
    sources: tuple[tuple[str, str], ...]
    conflicts: tuple[Conflict, ...] = ()

    @property
    def bf16_flops(self) -> float:
        """Peak of one chip in bf16 FLOP/s. Raises UnknownFigure where none is published."""
        return self.peak("bf16")

    @property
    def chips_per_host(self) -> int:
        """Chips of one host. Raises UnknownFigure where the host is not published."""
        x, y, z = self.figure("host_bounds")
        return int(x * y * z)

    def peak(self, dtype: str) -> float:
        """Peak operations per second of one chip in ``dtype`` (``bf16``, ``int8``, ``fp8``, ``int4``, ``fp4``).

        Divide by ``devices`` for one device. Raises UnknownFigure listing the dtypes that have a peak.
        """
        found = dict(self.peaks).get(dtype)
        if found is None:
            known = ", ".join(name for name, _ in self.peaks) or "none"
            raise UnknownFigure(f"TPU {self.name} has no published {dtype} peak; peaks are known for: {known}")
        return found

    # Fields differ in type; the caller names the field and so knows it.
    def figure(self, field: str) -> Any:
        """The value of ``field``, which must be known. Raises UnknownFigure when it has not been published."""
        value = getattr(self, field)
        if value is None:
            raise UnknownFigure(
                f"TPU {self.name}: {field} is not published ({dict(self.sources)[field]}); "
                f"choose one of {', '.join(row.name for row in _ROWS if getattr(row, field) is not None)}"
            )
        return value


def _sources(default: str, **groups: str) -> tuple[tuple[str, str], ...]:
    """One source per figure: ``default`` unless a group, ``a__b=source`` for the fields a and b, says otherwise."""
    by_field = {field: source for names, source in groups.items() for field in names.split("__")}
    return tuple((field, by_field.pop(field, default)) for field in FIGURES) + tuple(by_field.items())


FIGURES = tuple(
    field.name for field in dataclasses.fields(Chip) if field.name not in ("name", "status", "sources", "conflicts")
)
_FLOATS = ("f32", "bf16", "f8e5m2", "f8e4m3b11fnuz")
_INTEGERS = ("s8", "u8", "s4", "u4")
_FP7 = ("f32", "bf16", "f8e5m2", "f8e4m3fn")

_V4 = Chip(
    name="v4",
    status="published",
    kind="TPU v4",
    generation=4,
    cores=2,
    devices=1,
    megacore=True,
    mxus=4,
    mxu_side=128,
    clock_hz=1.05e9,
    sublanes=8,
    lanes=128,
    valus=None,
    vmem_bytes=16 * MIB,
    smem_bytes=1 * MIB,
    cmem_bytes=128 * MIB,
    hbm_bytes=32 * GIB,
    hbm_bandwidth=1200e9,
    peaks=(("bf16", 275e12), ("int8", 275e12)),
    matmul_dtypes=("f32", "bf16"),
    large_16_bit_tiles=False,
    sparse_cores=None,
    ici_links=6,
    ici_link_bandwidth=45e9,
    ici_bandwidth=540e9,
    ici_hop_seconds=1e-6,
    torus_rank=3,
    wrap_multiple=4,
    max_chips=4096,
    host_bounds=(2, 2, 1),
    host_memory_bytes=None,
    dcn_bandwidth=6.25e9,
    pcie_bandwidth=15e9,
    pci_device=0x005E,
    dev_node="accel",
    sources=_sources(
        _JAX,
        cores__mxus__peaks__hbm_bandwidth__max_chips__wrap_multiple__torus_rank=_GOOGLE + "v4",
        hbm_bytes__devices__pci_device=_WHEEL,
        clock_hz="computed: 275e12 / (2 cores x 4 MXUs x 2 x 128^2)",
        valus__sparse_cores__host_memory_bytes=_NONE,
        ici_links__ici_link_bandwidth__ici_hop_seconds__host_bounds__pcie_bandwidth=_BOOK,
        ici_bandwidth="computed: 6 links x 45 GB/s x 2 ways",
        dcn_bandwidth=_BOOK + ": about 25 GB/s per host of 4 chips",
        dev_node=_INFO,
    ),
    conflicts=(
        Conflict("hbm_bandwidth", 1.23e12, _JAX),
        Conflict("cmem_bytes", 134e6, _JAX + " (decimal)"),
        Conflict("hbm_bytes", 34.4e9, _JAX),
        Conflict("peaks", "int8: none", _JAX),
    ),
)

_V5E = Chip(
    name="v5e",
    status="published",
    kind="TPU v5 lite",
    generation=5,
    cores=1,
    devices=1,
    megacore=False,
    mxus=4,
    mxu_side=128,
    clock_hz=1.5e9,
    sublanes=8,
    lanes=128,
    valus=4,
    vmem_bytes=128 * MIB,
    smem_bytes=1 * MIB,
    cmem_bytes=0,
    hbm_bytes=16 * GIB,
    hbm_bandwidth=819e9,
    peaks=(("bf16", 197e12), ("int8", 393e12), ("int4", 788e12)),
    matmul_dtypes=_FLOATS + _INTEGERS,
    large_16_bit_tiles=False,
    sparse_cores=0,
    ici_links=4,
    ici_link_bandwidth=50e9,
    ici_bandwidth=400e9,
    ici_hop_seconds=1e-6,
    torus_rank=2,
    wrap_multiple=16,
    max_chips=256,
    host_bounds=(2, 4, 1),
    host_memory_bytes=512 * GIB,
    dcn_bandwidth=3.125e9,
    pcie_bandwidth=15e9,
    pci_device=0x0063,
    dev_node="vfio",
    sources=_sources(
        _JAX,
        cores__mxus__hbm_bandwidth__ici_links__ici_bandwidth__max_chips__torus_rank__host_memory_bytes=_GOOGLE + "v5e",
        peaks=_GOOGLE + "v5e; int4: " + _JAX,
        clock_hz__valus__ici_hop_seconds__wrap_multiple__pcie_bandwidth=_BOOK,
        hbm_bytes__devices__pci_device__host_bounds=_WHEEL,
        ici_link_bandwidth="computed: 400 GB/s / 4 links / 2 ways",
        dcn_bandwidth=_GOOGLE + "v5e: 2 x 100 Gb/s per host of 8 chips",
        dev_node=_INFO,
    ),
    conflicts=(
        Conflict("hbm_bandwidth", 800 * GIB, _GOOGLE + "v5e (the current page)"),
        Conflict("hbm_bandwidth", 820e9, _JAX),
        Conflict("hbm_bytes", 16e9, _GOOGLE + "v5e"),
        Conflict("hbm_bytes", 17.2e9, _JAX),
        Conflict("peaks", "int8: 394e12", _JAX),
        Conflict("ici_link_bandwidth", 45e9, _BOOK + " (text; its table has 50e9)"),
        Conflict("ici_hop_seconds", 0.5e-6, _BOOK + " (worked problem)"),
        Conflict("clock_hz", 1.503e9, "computed: 197e12 / (4 MXUs x 2 x 128^2)"),
        Conflict("host_bounds", "2x2x1 in slices of several hosts", _XPK),
    ),
)

_V5P = Chip(
    name="v5p",
    status="published",
    kind="TPU v5",
    generation=5,
    cores=2,
    devices=1,
    megacore=True,
    mxus=4,
    mxu_side=128,
    clock_hz=1.75e9,
    sublanes=8,
    lanes=128,
    valus=4,
    vmem_bytes=64 * MIB,
    smem_bytes=1 * MIB,
    cmem_bytes=0,
    hbm_bytes=95 * GIB,
    hbm_bandwidth=2765e9,
    peaks=(("bf16", 459e12), ("int8", 918e12), ("fp8", 459e12), ("int4", 1840e12)),
    matmul_dtypes=_FLOATS + _INTEGERS,
    large_16_bit_tiles=False,
    sparse_cores=4,
    ici_links=6,
    ici_link_bandwidth=100e9,
    ici_bandwidth=1200e9,
    ici_hop_seconds=1e-6,
    torus_rank=3,
    wrap_multiple=4,
    max_chips=6144,
    host_bounds=(2, 2, 1),
    host_memory_bytes=448e9,
    dcn_bandwidth=6.25e9,
    pcie_bandwidth=15e9,
    pci_device=0x0062,
    dev_node="vfio",
    sources=_sources(
        _JAX,
        cores__mxus__hbm_bandwidth__sparse_cores__ici_bandwidth__max_chips__host_bounds__torus_rank=_GOOGLE + "v5p",
        host_memory_bytes__dcn_bandwidth__wrap_multiple=_GOOGLE + "v5p",
        peaks=_GOOGLE + "v5p; int8 and int4: " + _JAX,
        clock_hz="computed: 459e12 / (2 cores x 4 MXUs x 2 x 128^2)",
        valus__ici_links__ici_hop_seconds__pcie_bandwidth=_BOOK,
        hbm_bytes__devices__pci_device=_WHEEL,
        ici_link_bandwidth="computed: 1200 GB/s / 6 links / 2 ways",
        dev_node=_INFO,
    ),
    conflicts=(
        Conflict("hbm_bandwidth", 2460e9, _JAX),
        Conflict("hbm_bandwidth", 2800e9, _BOOK),
        Conflict("hbm_bytes", 96 * GIB, _GOOGLE + "v5p (physical; 1 GiB is reserved)"),
        Conflict("hbm_bytes", 103e9, _JAX),
        Conflict("peaks", "fp8: none", _JAX),
        Conflict("ici_link_bandwidth", 90e9, _BOOK + " (text; its table has 100e9)"),
        Conflict("max_chips", 8960, _GOOGLE + "v5p (the pod; the largest job is 6144)"),
    ),
)

_V6E = Chip(
    name="v6e",
    status="published",
    kind="TPU v6 lite",
    generation=6,
    cores=1,
    devices=1,
    megacore=False,
    mxus=2,
    mxu_side=256,
    clock_hz=1.75e9,
    sublanes=8,
    lanes=128,
    valus=None,
    vmem_bytes=128 * MIB,
    smem_bytes=1 * MIB,
    cmem_bytes=0,
    hbm_bytes=32 * GIB,
    hbm_bandwidth=1638e9,
    peaks=(("bf16", 918e12), ("int8", 1836e12), ("fp8", 918e12), ("int4", 3680e12)),
    matmul_dtypes=_FLOATS + _INTEGERS,
    large_16_bit_tiles=False,
    sparse_cores=2,
    ici_links=4,
    ici_link_bandwidth=100e9,
    ici_bandwidth=800e9,
    ici_hop_seconds=1e-6,
    torus_rank=2,
    wrap_multiple=16,
    max_chips=256,
    host_bounds=(2, 4, 1),
    host_memory_bytes=1536 * GIB,
    dcn_bandwidth=12.5e9,
    pcie_bandwidth=32e9,
    pci_device=0x006F,
    dev_node="vfio",
    sources=_sources(
        _JAX,
        cores__mxus__hbm_bandwidth__ici_links__ici_bandwidth__max_chips__torus_rank__host_memory_bytes=_GOOGLE + "v6e",
        peaks=_GOOGLE + "v6e; fp8: " + _GOOGLE + "tpu7x; int4: " + _JAX,
        sparse_cores__dcn_bandwidth=_GOOGLE + "tpu7x",
        clock_hz="computed: 918e12 / (4 array-equivalents x 2 x 256^2)",
        valus=_NONE,
        ici_hop_seconds__wrap_multiple__pcie_bandwidth=_BOOK,
        hbm_bytes__devices__pci_device__host_bounds=_WHEEL,
        ici_link_bandwidth="computed: 800 GB/s / 4 links / 2 ways",
        dev_node=_INFO,
    ),
    conflicts=(
        Conflict("clock_hz", 3.5e9, "computed from the published 2 MXUs; not a plausible clock"),
        Conflict("hbm_bandwidth", 1640e9, _JAX),
        Conflict("hbm_bytes", 32e9, _GOOGLE + "v6e"),
        Conflict("hbm_bytes", 34.4e9, _JAX),
        Conflict("peaks", "bf16: 920e12, int8: 1840e12, fp8: 920e12", _JAX),
        Conflict("ici_link_bandwidth", 90e9, _BOOK + " (text; its table has 100e9)"),
        Conflict("host_memory_bytes", 1440e9, _GOOGLE + "tpu7x (720 GB per 4-chip VM)"),
        Conflict("host_bounds", "2x2x1 in slices of several hosts", _XPK),
    ),
)

_V7 = Chip(
    name="v7",
    status="published",
    kind="TPU7x",
    generation=7,
    cores=2,
    devices=2,
    megacore=False,
    mxus=2,
    mxu_side=256,
    clock_hz=2.2e9,
    sublanes=8,
    lanes=128,
    valus=None,
    vmem_bytes=64 * MIB,
    smem_bytes=1 * MIB,
    cmem_bytes=0,
    hbm_bytes=96 * GIB,
    hbm_bandwidth=7380e9,
    peaks=(("bf16", 2307e12), ("fp8", 4614e12)),
    matmul_dtypes=_FP7,
    large_16_bit_tiles=True,
    sparse_cores=4,
    ici_links=6,
    ici_link_bandwidth=100e9,
    ici_bandwidth=1200e9,
    ici_hop_seconds=1e-6,
    torus_rank=3,
    wrap_multiple=4,
    max_chips=9216,
    host_bounds=(2, 2, 1),
    host_memory_bytes=960e9,
    dcn_bandwidth=12.5e9,
    pcie_bandwidth=None,
    pci_device=0x0076,
    dev_node="vfio",
    sources=_sources(
        _JAX,
        cores__hbm_bandwidth__peaks__sparse_cores__ici_bandwidth__max_chips__dcn_bandwidth=_GOOGLE + "tpu7x",
        host_bounds__host_memory_bytes=_GOOGLE + "tpu7x",
        wrap_multiple=_GOOGLE + "tpu7x: many similarities with v5p",
        clock_hz="computed: 2307e12 / (2 cores x 4 array-equivalents x 2 x 256^2)",
        valus__pcie_bandwidth=_NONE,
        ici_hop_seconds=_BOOK + " (an earlier generation)",
        hbm_bytes__devices__pci_device__torus_rank=_WHEEL,
        ici_links="computed from three torus dimensions in " + _WHEEL,
        ici_link_bandwidth="computed: 1200 GB/s / 6 links / 2 ways",
        dev_node=_INFO,
    ),
    conflicts=(
        Conflict("clock_hz", 4.4e9, "computed from the published 2 MXUs per core; not a plausible clock"),
        Conflict("hbm_bandwidth", 7400e9, _JAX),
        Conflict("hbm_bytes", 103e9, _JAX),
        Conflict("peaks", "bf16: 2310e12, fp8: 4600e12", _JAX),
    ),
)

_V8I = Chip(
    name="v8i",
    status="unverified",
    kind="TPU8i",
    generation=8,
    cores=2,
    devices=2,
    megacore=False,
    mxus=2,
    mxu_side=256,
    clock_hz=2.1e9,
    sublanes=8,
    lanes=128,
    valus=None,
    vmem_bytes=192 * MIB,
    smem_bytes=1 * MIB,
    cmem_bytes=0,
    hbm_bytes=144 * GIB,
    hbm_bandwidth=8601e9,
    peaks=(("bf16", 1101e12), ("fp8", 8808e12), ("fp4", 10.1e15)),
    matmul_dtypes=_FP7,
    large_16_bit_tiles=None,
    sparse_cores=2,
    ici_links=None,
    ici_link_bandwidth=None,
    ici_bandwidth=2400e9,
    ici_hop_seconds=None,
    torus_rank=None,
    wrap_multiple=None,
    max_chips=None,
    host_bounds=None,
    host_memory_bytes=None,
    dcn_bandwidth=None,
    pcie_bandwidth=None,
    pci_device=None,
    dev_node="vfio",
    sources=_sources(
        _JAX,
        clock_hz="computed: 1101e12 / (2 cores x 2 MXUs x 2 x 256^2)",
        hbm_bytes__hbm_bandwidth=_PRESS,
        peaks=_JAX + " (its fp8 is 8 x bf16, as on no other chip); fp4: press, tutorial.emka.web.id/?p=2150",
        ici_bandwidth="press: zubnet.ai, 19.2 Tb/s",
        torus_rank__ici_links=_DEEP_DIVE + ": Boardfly, which is no torus",
        valus__ici_link_bandwidth__ici_hop_seconds__wrap_multiple__max_chips__host_bounds__host_memory_bytes=_NONE,
        dcn_bandwidth__pcie_bandwidth__pci_device__large_16_bit_tiles=_NONE,
        dev_node="assumed: as the two generations before it",
    ),
    conflicts=(
        Conflict("hbm_bandwidth", 8600e9, _JAX),
        Conflict("hbm_bytes", 154.5e9, _JAX + " (309e9 per chip)"),
        Conflict("vmem_bytes", 192e6, _PRESS + " (384 MB per chip)"),
    ),
)

_V8T = Chip(
    name="v8t",
    status="unverified",
    kind="TPU8t",
    generation=8,
    cores=None,
    devices=1,
    megacore=False,
    mxus=None,
    mxu_side=None,
    clock_hz=None,
    sublanes=None,
    lanes=None,
    valus=None,
    vmem_bytes=None,
    smem_bytes=None,
    cmem_bytes=0,
    hbm_bytes=216 * 10**9,
    hbm_bandwidth=6528e9,
    peaks=(("fp4", 12.6e15),),
    matmul_dtypes=(),
    large_16_bit_tiles=None,
    sparse_cores=None,
    ici_links=6,
    ici_link_bandwidth=None,
    ici_bandwidth=None,
    ici_hop_seconds=None,
    torus_rank=3,
    wrap_multiple=None,
    max_chips=9600,
    host_bounds=None,
    host_memory_bytes=None,
    dcn_bandwidth=None,
    pcie_bandwidth=None,
    pci_device=None,
    dev_node="vfio",
    sources=_sources(
        _NONE,
        kind="assumed: named as TPU8i is",
        devices__megacore__cmem_bytes="assumed: one device per chip, no cache beside VMEM",
        generation="its name",
        hbm_bytes__hbm_bandwidth=_PRESS,
        vmem_bytes=_PRESS + ": 128 MB per chip; the number of cores is not published",
        peaks__max_chips="press: tutorial.emka.web.id/?p=2150",
        ici_links__torus_rank=_DEEP_DIVE + ": 3-D torus",
        dev_node="assumed: as the two generations before it",
    ),
)

_ROWS = (_V4, _V5E, _V5P, _V6E, _V7, _V8I, _V8T)
CHIPS: dict[str, Chip] = {row.name: row for row in _ROWS}
ALIASES = {"v5litepod": "v5e", "tpu7x": "v7", "v7x": "v7", "7x": "v7", "trillium": "v6e", "ironwood": "v7"}


def chip(name: str) -> Chip:
    """The chip of that name or alias, in any case. Raises ValueError listing the known ones."""
    word = name.lower()
    found = CHIPS.get(ALIASES.get(word, word))
    if found is None:
        close = difflib.get_close_matches(word, CHIPS, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown TPU chip {name!r}: known are {', '.join(CHIPS)}{hint}")
    return found
