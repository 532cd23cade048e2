"""Interpolation, edge padding and patches against CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, check_backward, check_forward, highest

from emutpu.backend.deferred.text import pending_mlir

NAMES = [
    "nn.functional.interpolate.nearest",
    "nn.functional.interpolate.nearest-exact",
    "nn.functional.interpolate.bilinear",
    "nn.functional.interpolate.bicubic",
    "nn.functional.pad.reflect",
    "nn.functional.pad.replicate",
    "nn.functional.pad.replicate_negative",
    "nn.functional.unfold",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU."""
    check_forward(name, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name, limit=2)


@pytest.mark.parametrize("size", [(14, 10), (3, 4), (9, 13)])
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "nearest"},
        {"mode": "nearest-exact"},
        {"mode": "bilinear"},
        {"mode": "bilinear", "align_corners": True},
        {"mode": "bicubic"},
        {"mode": "bicubic", "align_corners": True},
    ],
)
def test_both_ways(options: dict[str, Any], size: tuple[int, int]) -> None:
    """Growing by a whole factor, shrinking and odd sizes, with gradients, under the default precision."""
    x = torch.randn(2, 3, 7, 5).requires_grad_()
    device_x = x.detach().to("tpu").requires_grad_()
    expected = F.interpolate(x, size, **options)
    actual = F.interpolate(device_x, size, **options)
    assert_same(actual, expected, what=f"{options} {size}")
    expected.backward(expected.detach())
    actual.backward(actual.detach())
    assert_same(device_x.grad, x.grad, what=f"gradient of {options} {size}", tolerance=(5e-5, 5e-5))


def test_infinities_stay_where_they_are() -> None:
    """A masked pixel does not spread beyond the taps that read it."""
    x = torch.randn(1, 1, 6, 6)
    x[0, 0, 2, 2] = -torch.inf
    for mode in ("nearest", "bilinear", "bicubic"):
        expected = F.interpolate(x, (12, 12), mode=mode)
        assert_same(F.interpolate(x.to("tpu"), (12, 12), mode=mode), expected, what=mode)


def test_scale_factor_is_used() -> None:
    """``scale_factor`` without recomputation keeps the user's ratio."""
    x = torch.randn(1, 2, 5, 6)
    options = {"scale_factor": 1.7, "mode": "bilinear", "recompute_scale_factor": False}
    assert_same(F.interpolate(x.to("tpu"), **options), F.interpolate(x, **options), what="scale_factor")


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [True, False])
def test_grid_sample(interpolation: str, padding: str, align: bool) -> None:
    """Samples and both gradients equal CPU, also outside the image."""
    _grid_sample((2, 3, 5, 6), (2, 4, 3, 2), mode=interpolation, padding_mode=padding, align_corners=align)


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_3d(interpolation: str, padding: str) -> None:
    """Volumes too."""
    _grid_sample((2, 3, 4, 5, 6), (2, 3, 2, 4, 3), mode=interpolation, padding_mode=padding, align_corners=False)


def _grid_sample(image: tuple[int, ...], grid: tuple[int, ...], **options: Any) -> None:
    torch.manual_seed(3)
    leaves = [torch.randn(image).requires_grad_(), (torch.rand(grid) * 3 - 1.5).requires_grad_()]
    device_leaves = [t.detach().to("tpu").requires_grad_() for t in leaves]
    with highest():
        expected, actual = F.grid_sample(*leaves, **options), F.grid_sample(*device_leaves, **options)
        assert_same(actual, expected, what=f"grid_sample {options}")
        cotangent = torch.randn_like(expected)
        e = torch.autograd.grad(expected, leaves, cotangent)
        a = torch.autograd.grad(actual, device_leaves, cotangent.to("tpu"))
    assert_same(list(a), list(e), what=f"gradients of grid_sample {options}", tolerance=(1e-4, 1e-4))


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((5, 6), {"kernel_size": (2, 3), "dilation": (2, 1), "padding": (1, 0), "stride": (2, 2)}),
        # A kernel that is no multiple of the stride, edges; gaps between patches; places further apart than the patches.
        ((23, 9), {"kernel_size": (7, 3), "dilation": (1, 2), "padding": (3, 1), "stride": (5, 1)}),
        ((11, 30), {"kernel_size": (1, 12), "stride": (4, 5)}),
        ((9, 9), {"kernel_size": 2, "dilation": 3, "padding": 1, "stride": 4}),
    ],
)
def test_patches(size: tuple[int, int], options: dict[str, Any]) -> None:
    """Taken apart, and added up again: each is the gradient of the other."""
    x = torch.randn(2, 3, *size)
    patches = F.unfold(x, **options)
    assert_same(F.unfold(x.to("tpu"), **options), patches, what="unfold")
    assert_same(F.fold(patches.to("tpu"), size, **options), F.fold(patches, size, **options), what="fold")


def test_a_window_over_time() -> None:
    """A spectrum's 1,920 places, 480 apart, are four blocks: as many slices as places took XLA minutes and gigabytes."""
    options = {"kernel_size": (1, 1920), "stride": (1, 480)}
    x = torch.randn(2, 1, 1, 6240)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        patches = F.unfold(x.to("tpu"), **options)
        merged = F.fold(patches, (1, 6240), **options)
        modules = pending_mlir(patches), pending_mlir(merged)
    assert max(module.count("stablehlo.pad") for module in modules) <= 16
    expected = F.unfold(x, **options)
    assert_same(patches, expected, what="unfold")
    assert_same(merged, F.fold(expected, (1, 6240), **options), what="fold")


@pytest.mark.parametrize("padding", [0, 5])
def test_patches_as_large_as_those_of_depth_networks(padding: int) -> None:
    """16 x 16 places that overlap: two blocks of rows and of columns (a module of 4,096 slices took XLA a minute), same values."""
    options = {"kernel_size": 16, "stride": 12, "padding": padding}
    x = torch.randn(2, 3, 40, 52)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        patches = F.unfold(x.to("tpu"), **options)
        merged = F.fold(patches, (40, 52), **options)
        modules = pending_mlir(patches), pending_mlir(merged)
    assert max(module.count("stablehlo.slice") for module in modules) <= 2 * (2 + 2)
    expected = F.unfold(x, **options)
    assert_same(patches, expected, what="unfold")
    assert_same(merged, F.fold(expected, (40, 52), **options), what="fold")
