"""Elementwise ops against CPU, over PyTorch's own sample inputs."""

from __future__ import annotations

import pytest
import torch
from harness import check_backward, check_forward, check_inplace, opinfo

UNARY = """abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj conj_physical cos cosh deg2rad digamma erf
erfinv exp exp2 expm1 floor frac isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not
logit nan_to_num neg positive rad2deg reciprocal round round.decimals_0 round.decimals_3 round.decimals_neg_3 rsqrt sgn
sigmoid sign signbit sin sinh sqrt square tan tanh trunc""".split()

BINARY = """add sub rsub mul div.no_rounding_mode div.floor_rounding div.trunc_rounding floor_divide remainder fmod
true_divide pow float_power eq ne lt le gt ge maximum minimum fmax fmin max.binary min.binary atan2 xlogy logical_and
logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __radd__ __rmul__
__rsub__ __rdiv__ __rpow__ __rmod__ __rand__ __ror__ __rxor__ isclose ldexp complex polar""".split()

OTHER = "clamp clamp_min clamp_max where lerp addcmul addcdiv masked_fill real imag fill zero_ to float clone".split()

NAMES = [*UNARY, *BINARY, *OTHER]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
_CASES = [(n, d) for n in NAMES if n not in ("zero_",) for d in DTYPES if d in opinfo(n).dtypes]


@pytest.mark.parametrize(("name", "dtype"), _CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU, for every dtype the CPU kernel takes."""
    check_forward(name, dtype, limit=3)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "zero_" and opinfo(n).supports_autograd])
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name, limit=2)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "zero_" and opinfo(n).inplace_variant is not None])
def test_inplace(name: str) -> None:
    """In-place variants write through views and leave neighbours alone."""
    dtype = torch.float32 if torch.float32 in opinfo(name).dtypes else torch.int64
    check_inplace(name, dtype, limit=2)
