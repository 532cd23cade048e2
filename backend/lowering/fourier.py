"""Fourier transforms: StableHLO's own over up to three dimensions at a time, scaled as PyTorch asks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering
from emutpu.backend.value import int_array

__all__: list[str] = []

_TOGETHER = 3  # StableHLO transforms at most three dimensions in one op
_NONE, _ROOT, _LENGTH = 0, 1, 2  # at::native::fft_norm_mode


def _transform(x: Value, kind: str, dims: Sequence[int], lengths: Sequence[int], extents: Sequence[int]) -> Value:
    """One ``stablehlo.fft`` over ``dims``, whose extents become ``extents``; the last of them is the halved one."""
    order = [d for d in range(x.ndim) if d not in dims] + list(dims)
    moved = x.transpose(order)
    shape = (*moved.shape[: x.ndim - len(dims)], *extents)
    dtype = x.dtype.to_real() if kind == "IRFFT" else x.dtype.to_complex()
    made = x.builder.emit(
        "stablehlo.fft",
        [moved],
        shape,
        dtype,
        fft_type=f"#stablehlo<fft_type {kind}>",
        fft_length=int_array(lengths),
    )
    return made.transpose([order.index(d) for d in range(x.ndim)])


def _whole(x: Value, dims: Sequence[int], forward: bool) -> Value:
    """Complex to complex over any number of dimensions, without a factor in either direction."""
    for at in range(0, len(dims), _TOGETHER):
        group = dims[at : at + _TOGETHER]
        lengths = [x.shape[d] for d in group]
        x = _transform(x, "FFT" if forward else "IFFT", group, lengths, lengths)
        if not forward:  # StableHLO's inverse divides by the length
            x = x * float(math.prod(lengths))
    return x


def _scaled(x: Value, normalization: int, count: int) -> Value:
    if normalization == _NONE or not count:
        return x
    return x * (1 / math.sqrt(count) if normalization == _ROOT else 1 / count)


def _positive(x: Value, dims: Sequence[int]) -> list[int]:
    return [d % x.ndim for d in dims]


@lowering("_fft_c2c(Tensor self, SymInt[] dim, int normalization, bool forward) -> Tensor")
def _c2c(cx: Context, x: Value, dim: Sequence[int], normalization: int, forward: bool) -> Value:
    if not x.numel:
        return x
    dims = _positive(x, dim)
    return _scaled(_whole(x, dims, forward), normalization, math.prod(x.shape[d] for d in dims))


@lowering("_fft_r2c(Tensor self, int[] dim, int normalization, bool onesided) -> Tensor")
def _r2c(cx: Context, x: Value, dim: Sequence[int], normalization: int, onesided: bool) -> Value:
    spec = cx.output
    if 0 in spec.size or not x.numel:
        return cx.builder.full(0, spec.size, spec.dtype)
    dims = _positive(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    if not onesided:
        return _scaled(_whole(x.convert(spec.dtype), dims, True), normalization, count)
    *others, last = dims
    half = _transform(x, "RFFT", [last], [x.shape[last]], [x.shape[last] // 2 + 1])
    return _scaled(_whole(half, others, True), normalization, count)


@lowering("_fft_c2r(Tensor self, int[] dim, int normalization, SymInt last_dim_size) -> Tensor")
def _c2r(cx: Context, x: Value, dim: Sequence[int], normalization: int, last_dim_size: int) -> Value:
    spec = cx.output
    if 0 in spec.size or not x.numel:
        return cx.builder.full(0, spec.size, spec.dtype)
    *others, last = _positive(x, dim)
    x = _whole(x, others, False)
    count = math.prod(x.shape[d] for d in others) * last_dim_size
    low, high = [0] * x.ndim, [0] * x.ndim
    high[last] = last_dim_size // 2 + 1 - x.shape[last]  # what is missing is zero, what is beyond is not read
    x = x.pad(low, high) if high[last] else x
    real = _transform(x, "IRFFT", [last], [last_dim_size], [last_dim_size])
    return _scaled(real * float(last_dim_size), normalization, count)
