"""Convolutions against CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, check_backward, check_forward, highest, opinfo, samples, to_device

NAMES = [f"nn.functional.conv{kind}{rank}d" for kind in ("", "_transpose") for rank in (1, 2, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str) -> None:
    """Equals CPU: strides, paddings, dilations, groups, unbatched inputs."""
    check_forward(name, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_rounds_once(name: str) -> None:
    """The float32 result rounded once; CPU's own transposed convolutions add up in bfloat16."""
    op = opinfo(name)
    for sample in samples(op, torch.bfloat16, requires_grad=False, limit=3):
        arguments = (sample.input, *sample.args)
        wide = [a.float() if isinstance(a, torch.Tensor) else a for a in arguments]
        expected = op(*wide, **sample.kwargs).bfloat16()
        actual = op(*to_device(arguments), **sample.kwargs)
        assert_same(actual, expected, what=f"{name} bfloat16", tolerance=(8e-3, 1e-3))


@pytest.mark.parametrize("name", NAMES)
def test_backward(name: str) -> None:
    """Gradients of input, weight and bias equal CPU."""
    check_backward(name)


def _both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.clone().requires_grad_(), x.to("tpu").requires_grad_()


@pytest.mark.parametrize("mask", list(itertools.product([True, False], repeat=3)))
@pytest.mark.parametrize("transposed", [False, True])
def test_every_output_mask(transposed: bool, mask: tuple[bool, bool, bool]) -> None:
    """Gradients that are not asked for are undefined, the others right."""
    x = torch.randn(2, 4, 6, 7)
    w = torch.randn(4, 3, 3, 2) if transposed else torch.randn(6, 2, 3, 2)
    extra = [1, 0] if transposed else [0, 0]
    geometry = ([2, 1], [1, 0], [1, 2], transposed, extra, 2)
    y = torch.randn_like(torch.ops.aten.convolution(x, w, None, *geometry))
    bias = [y.shape[1]]
    expected = torch.ops.aten.convolution_backward(y, x, w, bias, *geometry, list(mask))
    with highest():
        device = [t.to("tpu") for t in (y, x, w)]
        actual = torch.ops.aten.convolution_backward(*device, bias, *geometry, list(mask))
    for wanted, a, e in zip(mask, actual, expected, strict=True):
        assert (a is not None) == wanted
        if wanted:
            assert_same(a, e, what=f"convolution_backward {mask}")


def test_channels_last_propagates() -> None:
    """A channels_last input gives a channels_last output and input gradient."""
    x = torch.randn(2, 4, 5, 6).to(memory_format=torch.channels_last).requires_grad_()
    w, device_w = _both(torch.randn(3, 4, 3, 3))
    device_x = x.detach().to("tpu").requires_grad_()
    with highest():
        expected, actual = F.conv2d(x, w, padding=1), F.conv2d(device_x, device_w, padding=1)
        assert actual.stride() == expected.stride()
        expected.backward(expected.detach())
        actual.backward(actual.detach())
    assert device_x.grad is not None
    assert x.grad is not None
    assert device_x.grad.stride() == x.grad.stride()
    assert_same(
        [device_x.grad, device_w.grad], [x.grad, w.grad], what="channels_last gradients", tolerance=(1e-4, 1e-4)
    )


def test_empty_batch() -> None:
    """No images: an empty output, an empty input gradient, a zero weight gradient."""
    x, device_x = _both(torch.randn(0, 4, 5, 6))
    w, device_w = _both(torch.randn(3, 4, 3, 3))
    expected, actual = F.conv2d(x, w), F.conv2d(device_x, device_w)
    assert_same(actual, expected, what="empty batch")
    gradients = torch.autograd.grad(actual, (device_x, device_w), torch.zeros_like(actual))
    assert_same(list(gradients), [torch.zeros_like(x), torch.zeros_like(w)], what="gradients of an empty batch")


def test_double_backward() -> None:
    """The gradient of a gradient, through PyTorch's own formula."""
    results = []
    for place in ("cpu", "tpu"):
        torch.manual_seed(0)
        x, w = (torch.randn(s).to(place).requires_grad_() for s in ((1, 2, 5, 5), (3, 2, 3, 3)))
        cotangents = [torch.randn(s).to(place) for s in ((1, 3, 2, 2), (1, 2, 5, 5), (3, 2, 3, 3))]
        with highest():
            first = torch.autograd.grad(F.conv2d(x, w, stride=2), (x, w), cotangents[0], create_graph=True)
            results.append(torch.autograd.grad(first, (x, w), cotangents[1:]))
    assert_same(list(results[1]), list(results[0]), what="double backward")


def test_refusals() -> None:
    """Integers in the device's words; wrong channels and mixed dtypes in PyTorch's."""
    x, w = torch.ones(1, 2, 4, 4).to("tpu"), torch.ones(3, 2, 3, 3).to("tpu")
    with pytest.raises(RuntimeError, match="neither long nor"):
        F.conv2d(x.long(), w.long())
    with pytest.raises(RuntimeError, match=r"expected input\[1, 2, 4, 4\] to have 3 channels, but got 2 channels"):
        F.conv2d(x, torch.ones(3, 3, 3, 3).to("tpu"))
    with pytest.raises(RuntimeError, match=r"Input type \(float\) and bias type \(c10::BFloat16\) should be the same"):
        F.conv2d(x, w, torch.ones(3, dtype=torch.bfloat16).to("tpu"))
