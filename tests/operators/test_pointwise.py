"""Elementwise ops against CPU, over PyTorch's own sample inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, check_backward, check_forward, check_inplace, opinfo

from emutpu.backend.kernels import op_counts
from emutpu.backend.runtime import runtime

UNARY = """abs acos acosh angle asin asinh atan atanh bitwise_not ceil conj conj_physical cos cosh deg2rad digamma erf
erfinv exp exp2 expm1 floor frac isfinite isinf isnan isneginf isposinf isreal lgamma log log10 log1p log2 logical_not
logit nan_to_num neg positive rad2deg reciprocal round round.decimals_0 round.decimals_3 round.decimals_neg_3 rsqrt sgn
sigmoid sign signbit sin sinh sqrt square tan tanh trunc"""

BINARY = """add sub rsub mul div.no_rounding_mode div.floor_rounding div.trunc_rounding floor_divide remainder fmod
true_divide pow float_power eq ne lt le gt ge maximum minimum fmax fmin max.binary min.binary atan2 xlogy logical_and
logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift __radd__ __rmul__
__rsub__ __rdiv__ __rpow__ __rmod__ __rand__ __ror__ __rxor__ isclose ldexp complex polar"""

OTHER = "clamp clamp_min clamp_max where lerp addcmul addcdiv real imag fill float clone"

SPECIAL_UNARY = "sign sgn signbit floor ceil round trunc frac isnan isinf isfinite abs relu nan_to_num"
SPECIAL_BINARY = "maximum minimum fmax fmin remainder fmod floor_divide atan2 pow lt eq xlogy"
NAMES = [*UNARY.split(), *BINARY.split(), *OTHER.split()]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
# complex128 results, which the device has not.
_DOUBLE = ("float_power", torch.complex64)
_CASES = [(n, d) for n in NAMES for d in DTYPES if d in opinfo(n).dtypes and (n, d) != _DOUBLE]


@pytest.mark.parametrize(("name", "dtype"), _CASES, ids=lambda v: str(v).removeprefix("torch."))
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU, for every dtype the CPU kernel takes."""
    check_forward(name, dtype, limit=3)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "imag" and opinfo(n).supports_autograd])
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name, limit=2)


@pytest.mark.parametrize("name", [n for n in NAMES if opinfo(n).inplace_variant is not None])
def test_inplace(name: str) -> None:
    """In-place variants write through views and leave neighbours alone."""
    dtype = torch.float32 if torch.float32 in opinfo(name).dtypes else torch.int64
    if name == "float_power":  # its result is double precision, which PyTorch does not write into anything narrower
        dtype = torch.float64
    check_inplace(name, dtype, limit=2)


def _both(function: Callable[..., Any], *tensors: torch.Tensor) -> None:
    """The function gives the same on the device as on the CPU."""
    assert_same(function(*(t.to("tpu") for t in tensors)), function(*tensors), what="hand-written case")


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 2.5, -2.5, 3.5, 0.1, 1e30, -7.0])


@pytest.mark.parametrize("name", SPECIAL_UNARY.split())
def test_special_values(name: str) -> None:
    """NaN, infinities, signed zeros and ties, zero-size and 0-d inputs."""
    _both(getattr(torch, name), SPECIAL)
    _both(getattr(torch, name), SPECIAL[:0])
    _both(getattr(torch, name), SPECIAL[7])


@pytest.mark.parametrize("name", SPECIAL_BINARY.split())
def test_special_pairs(name: str) -> None:
    """Every pair of special values."""
    pair = (SPECIAL[:, None].clone(), SPECIAL[None, :].clone())
    if name in ("remainder", "fmod", "floor_divide"):
        # The last bit of a quotient of 1e30 decides its remainder.
        pair = tuple(t[t.abs() != 1e30].reshape(s) for t, s in zip(pair, [(-1, 1), (1, -1)], strict=True))
    _both(getattr(torch, name), *pair)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_integer_division(dtype: torch.dtype) -> None:
    """Floor, truncation and both remainders by the signs of the operands."""
    x = torch.tensor([7, -7, 7, -7, 0, 5], dtype=dtype)
    y = torch.tensor([2, 2, -2, -2, 3, 5], dtype=dtype)
    for function in (
        torch.floor_divide,
        torch.remainder,
        torch.fmod,
        lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        lambda a, b: a % 3,
        lambda a, b: a // 2.5,
    ):
        _both(function, x, y)


def test_integer_powers() -> None:
    """Negative exponents of integers: zero in general, refused for a Python number on every call."""
    x = torch.tensor([1, -1, 2, -2, 3])
    _both(torch.pow, x[:, None].clone(), torch.arange(-3, 4)[None])
    device = x.to("tpu")
    assert (device**2).tolist() == [1, 1, 4, 4, 9]
    with pytest.raises(RuntimeError, match="Integers to negative integer powers are not allowed"):
        device**-1


def test_scalars_do_not_recompile() -> None:
    """A changing Python number is an input: one module for all its values."""
    x = torch.ones(3, device="tpu")
    y = (x + 2) * 2.5 - x.clamp(min=0.25, max=0.75) + x**3.5
    misses = runtime().cache.misses
    y = (x + 3) * 1.5 - x.clamp(min=0.5, max=0.625) + x**2.5
    assert runtime().cache.misses == misses
    assert y.tolist() == [6.375] * 3


def test_comparison_rounds_the_scalar() -> None:
    """A number is compared in the tensor's own dtype, as on the CPU."""
    _both(lambda x: torch.stack([x == 0.1, x < 0.1, x.ge(0.1)]), torch.tensor([0.1, 0.2], dtype=torch.bfloat16))


def test_division_by_a_root() -> None:
    """bf16 / math.sqrt(128) equals the float32 quotient rounded once, for every bf16 value (subnormals flush to zero)."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() > 1e-36)]
    actual = (x.to("tpu") / math.sqrt(128)).cpu()
    assert torch.equal(actual, (x.float() / math.sqrt(128)).bfloat16())


def test_conversion_is_one_launch() -> None:
    """``to(dtype)`` on the device launches once, keeps strides, and wraps and truncates as the CPU does."""
    x = torch.tensor([[1.9, -1.9, 300.0], [0.0, -0.5, 255.0]])
    device = x.to("tpu")
    for dtype in (torch.bfloat16, torch.int32, torch.int8, torch.bool, torch.complex64):
        before = sum(op_counts().values())
        converted = device.t().to(dtype)
        assert sum(op_counts().values()) == before + 1
        assert converted.stride() == x.t().to(dtype).stride()
        assert_same(converted, x.t().to(dtype), what=str(dtype))
    image = torch.randn(2, 3, 4, 5).to("tpu")
    assert image.to(torch.bfloat16, memory_format=torch.channels_last).is_contiguous(memory_format=torch.channels_last)
    assert image.clone(memory_format=torch.channels_last).stride() == (60, 1, 15, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.5, -2.25, math.nan, math.inf]),
        torch.arange(2000.0).reshape(40, 50),
        torch.arange(6).reshape(2, 3),
        torch.tensor([True, False]),
        torch.tensor([1.5, 1e-8], dtype=torch.bfloat16),
        torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64),
        torch.tensor([1 + 2j], dtype=torch.complex64).conj(),
        torch.tensor(3.25),
        torch.empty(0, 3),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}",
)
def test_printing(tensor: torch.Tensor) -> None:
    """``print`` shows what CPU shows and the device."""
    plain, shown = repr(tensor), repr(tensor.to("tpu"))
    assert shown.replace(", device='tpu:0'", "").replace("device='tpu:0', ", "") == plain
    assert "device='tpu:0'" in shown
    assert tensor.to("tpu").tolist() == tensor.tolist() or bool(tensor.isnan().any())


def test_printing_of_parameters() -> None:
    """The suffix of a tensor that requires gradients."""
    x = torch.ones(2, device="tpu", requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='tpu:0', requires_grad=True)"
    assert "grad_fn=<MulBackward0>" in repr(x * 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    "function",
    [
        lambda t: torch.add(0.3333, t, alpha=2),
        lambda t: torch.sub(2, t),
        lambda t: torch.mul(True, t),
        lambda t: torch.div(1.5, t),
        lambda t: torch.floor_divide(7, t),
        lambda t: torch.true_divide(2, t),
        lambda t: torch.add(1j, t),
    ],
    ids=["add", "sub", "mul", "div", "floor_divide", "true_divide", "complex"],
)
def test_a_number_comes_first(function: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> None:
    """What PyTorch takes as ``torch.add(2, x)``: values and dtype are the CPU's."""
    x = torch.tensor([1, -2, 3], dtype=dtype)
    expected, actual = function(x), function(x.to("tpu")).cpu()
    torch.testing.assert_close(actual, expected)
