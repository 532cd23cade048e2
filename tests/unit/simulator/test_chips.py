"""The table of chips: complete, sourced, consistent in itself, and equal to what jax knows of the same chips."""

from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from emutpu.simulator.chips import CHIPS, FIGURES, Chip, UnknownFigure, chip

_JAX_NAMES = {"v4": "v4", "v5e": "v5e", "v5p": "v5p", "v6e": "v6e", "v7": "7x", "v8i": "8i"}
_JAX_DTYPES = {
    "f32": "float32", "bf16": "bfloat16", "f8e5m2": "float8_e5m2", "f8e4m3fn": "float8_e4m3fn",
    "f8e4m3b11fnuz": "float8_e4m3b11fnuz", "s8": "int8", "u8": "uint8", "s4": "int4", "u4": "uint4",
}  # fmt: skip


@pytest.mark.parametrize("name", CHIPS)
def test_every_figure_has_a_source(name: str) -> None:
    """Every figure names where it comes from, a missing one says so, and a conflicting one names a real field."""
    spec = chip(name)
    sources = dict(spec.sources)
    assert sorted(sources) == sorted(FIGURES)
    assert len(sources) == len(spec.sources)
    assert all(sources.values())
    for field in FIGURES:
        missing = getattr(spec, field) in (None, ())
        assert not (missing and "computed" in sources[field])
    for conflict in spec.conflicts:
        assert conflict.field in FIGURES
        assert conflict.source
        assert conflict.source != sources[conflict.field]
        assert conflict.value != getattr(spec, conflict.field)


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "v7", "v8i"])
def test_figures_agree_with_jax(name: str) -> None:
    """The table in jax agrees: units and memories exactly, capacities and peaks within 3 %, bandwidth within 12 %."""
    info = _jax_info(name)
    spec = chip(name)
    scale = info.num_cores if spec.megacore else 1  # jax's figures are per core, ours per device
    cores = spec.figure("cores")
    assert cores == info.chip_version.num_physical_tensor_cores_per_chip
    assert spec.megacore == info.chip_version.supports_megacore
    assert spec.mxu_side == info.mxu_column_size
    if jax.__version_info__ >= (0, 10):  # older tables do not count the MXUs
        assert spec.mxus == info.num_mxus
    assert (spec.sublanes, spec.lanes) == (info.num_sublanes, info.num_lanes)
    assert (spec.vmem_bytes, spec.smem_bytes) == (info.vmem_capacity_bytes, info.smem_capacity_bytes)
    assert spec.hbm_bytes == pytest.approx(info.hbm_capacity_bytes * scale, rel=0.03)
    assert info.mem_bw_bytes_per_second * scale == pytest.approx(spec.hbm_bandwidth / spec.devices, rel=0.12)
    assert spec.bf16_flops / cores == pytest.approx(info.bf16_ops_per_second, rel=0.03)
    assert spec.generation == info.generation


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "v7", "v8i"])
def test_matmul_dtypes_are_jaxs(name: str) -> None:
    """The dtypes that the MXU takes without a conversion are those that jax's Pallas may pass to it."""
    import jax.numpy as jnp

    info = _jax_info(name)
    supported = {
        ours
        for ours, theirs in _JAX_DTYPES.items()
        if info.is_matmul_supported(*(jnp.dtype(getattr(jnp, theirs)),) * 2)
        or info.is_matmul_supported(jnp.dtype(jnp.float32), jnp.dtype(getattr(jnp, theirs)))
    }
    assert set(chip(name).matmul_dtypes) == supported


@pytest.mark.parametrize("spec", CHIPS.values(), ids=list(CHIPS))
def test_figures_agree_with_each_other(spec: Chip) -> None:
    """Links, both ways, make the chip's bandwidth; two cores are one device exactly in megacore; a host tiles the torus."""
    if spec.ici_links and spec.ici_link_bandwidth:
        assert spec.ici_bandwidth == pytest.approx(2 * spec.ici_links * spec.ici_link_bandwidth)
    if spec.torus_rank:
        assert spec.ici_links == 2 * spec.torus_rank
    if spec.cores is not None:
        assert spec.devices == (1 if spec.megacore else spec.cores)
    if spec.host_bounds is not None:
        assert spec.chips_per_host == math.prod(spec.host_bounds)
    assert spec.status == ("published" if spec.generation < 8 else "unverified")


def test_a_hole_in_the_table_is_an_error() -> None:
    """A figure that is not published raises and names what could be used instead; it is never zero."""
    with pytest.raises(UnknownFigure, match=r"v8t has no published bf16 peak; peaks are known for: fp4"):
        _ = chip("v8t").bf16_flops
    with pytest.raises(UnknownFigure, match=r"v5e has no published fp8 peak"):
        chip("v5e").peak("fp8")
    with pytest.raises(UnknownFigure, match=r"v8i: host_bounds is not published .*choose one of v4, v5e"):
        _ = chip("v8i").chips_per_host
    assert chip("v7").figure("vmem_bytes") == 64 * 2**20


@pytest.mark.parametrize(("alias", "name"), [("TPU7x", "v7"), ("v5litepod", "v5e"), ("V6E", "v6e"), ("Ironwood", "v7")])
def test_aliases(alias: str, name: str) -> None:
    """The names that Google's tools use mean the same rows."""
    assert chip(alias).name == name


def test_rows_are_frozen() -> None:
    """Nobody can change the table."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip("v5e").cores = 2  # type: ignore[misc]  # frozen: what is tested


def _jax_info(name: str):
    tpu_info = pytest.importorskip("jax._src.pallas.mosaic.tpu_info", reason="this release of jax has no such table")
    if not hasattr(tpu_info, "get_tpu_info_for_chip"):
        pytest.skip("this release of jax has no table of chips without a device")
    try:
        version = tpu_info.ChipVersion(_JAX_NAMES[name])
    except ValueError:
        pytest.skip(f"this release of jax does not know {name}")
    return tpu_info.get_tpu_info_for_chip(version, 2 if chip(name).megacore else 1)
