"""Fourier transforms against CPU: norms, lengths, many dimensions, gradients, and the short-time transform."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import assert_same, check_backward, check_forward

NAMES = """fft.fft fft.fft2 fft.fftn fft.ifft fft.ifft2 fft.ifftn fft.rfft fft.rfft2 fft.rfftn fft.irfft fft.irfft2 fft.irfftn
fft.hfft fft.hfft2 fft.hfftn fft.ihfft fft.ihfft2 fft.ihfftn"""
REAL = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
COMPLEX = torch.complex(REAL, REAL.flip(0))


@pytest.mark.parametrize("name", NAMES.split())
def test_database(name: str) -> None:
    """Values and gradients over PyTorch's samples, from real and, where they are taken, complex tensors."""
    check_forward(name, torch.float32, limit=3)
    if name.startswith(("fft.ih", "fft.rf")):
        check_forward(name, torch.int64, limit=1)
    else:
        check_forward(name, torch.complex64, limit=3)
    check_backward(name, limit=2)


@pytest.mark.parametrize("norm", ["forward", "backward", "ortho"])
def test_norms(norm: str) -> None:
    """Each normalisation, in both directions, over one and over five dimensions."""
    for function, x in (
        (torch.fft.fft, COMPLEX),
        (torch.fft.ifft, REAL),
        (torch.fft.fftn, COMPLEX),
        (torch.fft.ifftn, COMPLEX),
        (torch.fft.rfftn, REAL),
        (torch.fft.irfftn, COMPLEX),
        (torch.fft.hfft, COMPLEX),
        (torch.fft.ihfft, REAL),
    ):
        assert_same(function(x.to("tpu"), norm=norm), function(x, norm=norm), what=f"{function.__name__} {norm}")


@pytest.mark.parametrize("length", [1, 3, 7, 8, 20])
def test_lengths(length: int) -> None:
    """Odd, even, shorter and longer than the input, back from half a spectrum too."""
    for function, x in ((torch.fft.fft, COMPLEX), (torch.fft.rfft, REAL), (torch.fft.irfft, COMPLEX)):
        assert_same(function(x.to("tpu"), n=length, dim=2), function(x, n=length, dim=2), what=f"{length}")


def test_no_batch() -> None:
    """A batch of nothing keeps its shape."""
    none = REAL[:0].to("tpu")
    assert torch.fft.fft(none).shape == (0, 3, 4, 5, 6)
    assert torch.fft.rfft(none).shape == (0, 3, 4, 5, 4)
    assert torch.fft.irfft(none).shape == (0, 3, 4, 5, 10)


def _spectrogram(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(64, device=x.device)
    return torch.stft(x, 64, 16, window=window, return_complex=True)


def _there_and_back(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(64, device=x.device)
    return torch.istft(_spectrogram(x) * 2, 64, 16, window=window, length=x.shape[-1])


@pytest.mark.parametrize("function", [_spectrogram, _there_and_back])
def test_short_time(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """``stft`` and ``istft`` of a signal, and their gradient."""
    signal = torch.randn(2, 400, generator=torch.Generator().manual_seed(0))
    assert_same(function(signal.to("tpu")), function(signal), what="signal", tolerance=(1e-4, 1e-4))

    def gradient(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().clone().requires_grad_()
        function(leaf).abs().square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    assert_same(gradient(signal.to("tpu")), gradient(signal), what="gradient", tolerance=(1e-4, 1e-3))


def test_half_precision_is_refused() -> None:
    """As on the CPU: PyTorch transforms 16-bit floats on CUDA alone."""
    with pytest.raises(RuntimeError, match="Unsupported dtype"):
        torch.fft.fft(torch.ones(4, dtype=torch.bfloat16, device="tpu"))
