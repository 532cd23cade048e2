"""Random numbers: Philox bits of (seed, offset), and only exact steps from integers to uniform floats.

Every client thus draws the same uniform numbers. A uniform float takes as many bits as its mantissa holds, so that it is
never rounded up to 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend.dtypes import dtype_name, opmath
from emutpu.backend.errors import user_line
from emutpu.backend.hlo import Number, Value
from emutpu.backend.lowering._registry import Context, OutputSpec, lowering
from emutpu.backend.lowering.sorting import scan

__all__: list[str] = []

Specs = tuple[OutputSpec | None, ...]
_MANTISSA = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24, torch.float64: 53}


def _numel(specs: Specs) -> int:
    spec = specs[0]
    return math.prod(spec.size) if spec is not None else 0


def _one_each(specs: Specs, arguments: dict[str, Any]) -> int:
    """One number an element; two for 64-bit results."""
    spec = specs[0]
    return _numel(specs) * (2 if spec is not None and spec.dtype.itemsize == 8 else 1)


def _two_each(specs: Specs, arguments: dict[str, Any]) -> int:
    return 2 * _numel(specs)


def _bits(cx: Context, shape: tuple[int, ...], count: int) -> Value:
    """``count`` random bits as unsigned integers."""
    dtype = torch.uint64 if count > 32 else torch.uint32
    width = dtype.itemsize * 8
    bits = cx.random_bits(shape, dtype)
    return bits if count == width else bits >> (width - count)


def _require_float(dtype: torch.dtype) -> None:
    if dtype not in _MANTISSA:
        raise NotImplementedError(
            f"random numbers of a continuous distribution: not implemented for {dtype_name(dtype)}"
        )


def _uniform(cx: Context, shape: tuple[int, ...], dtype: torch.dtype, *, above_zero: bool = False) -> Value:
    """Uniform in [0, 1), or (0, 1], on the grid that ``dtype`` holds; computed in its opmath dtype."""
    _require_float(dtype)
    digits = _MANTISSA[dtype]
    compute = opmath(dtype)
    drawn = _bits(cx, shape, digits).convert(compute)
    return (drawn + 1 if above_zero else drawn) * 2.0**-digits


def _symmetric(cx: Context, shape: tuple[int, ...], compute: torch.dtype) -> Value:
    """Uniform in (-1, 1) at odd multiples of half a step: neither end, nor 0."""
    _require_float(compute)
    digits = _MANTISSA[compute] - 1
    return _bits(cx, shape, digits).convert(compute) * 2.0 ** (1 - digits) + (2.0**-digits - 1)


def standard_normal(cx: Context, shape: tuple[int, ...], dtype: torch.dtype) -> Value:
    """Normal numbers in the opmath dtype of ``dtype``."""
    compute = opmath(dtype)
    return _symmetric(cx, shape, compute).unary("chlo.erf_inv") * math.sqrt(2)


def _chance(cx: Context, shape: tuple[int, ...], p: Value | float) -> Value:
    """A mask that is true with probability ``p`` (a float32 value or a number)."""
    drawn = _uniform(cx, shape, torch.float32)
    return drawn < p


def _requires(allowed: Callable[..., bool], message: str) -> Callable[[Any], Callable[..., Any]]:
    """For ``around``: PyTorch's own check of numbers that are not in the key, so that every call is checked."""

    def around(made: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = made.function
        defaults = tuple(a.default_value for a in made.op._schema.arguments[1:] if not a.kwarg_only)

        def kernel(self: torch.Tensor, *numbers: float, generator: torch.Generator | None = None) -> Any:
            if numbers and not allowed(*numbers, *defaults[len(numbers) :]):
                raise RuntimeError(message.format(*numbers, *defaults[len(numbers) :]) + f"\n  issued at {user_line()}")
            return function(self, *numbers, generator=generator)

        return kernel

    return around


# ------------------------------------------------------------------------------------------------- continuous


@lowering(
    "uniform_(Tensor(a!) self, float from=0., float to=1., *, Generator? generator=None) -> Tensor(a!)",
    reads=False,
    draws=_one_each,
    dynamic="from to",
    around=_requires(
        lambda low, high: low <= high, "uniform_ expects to return a [from, to) range, but found from={} > to={}"
    ),
)
def _uniform_(cx: Context, x: None, low: Value | float, high: Value | float, generator: None) -> Value:
    size, dtype = cx.output.size, cx.output.dtype
    if dtype.is_complex:
        # Each part is uniform.
        pair = _stretched(cx, (2, *size), dtype.to_real(), low, high)
        return cx.builder.complex(*[pair.slice_dim(0, part, part + 1).reshape(size) for part in range(2)])
    return _stretched(cx, size, dtype, low, high)


def _stretched(
    cx: Context, shape: tuple[int, ...], dtype: torch.dtype, low: Value | float, high: Value | float
) -> Value:
    drawn = _uniform(cx, shape, dtype)
    if not isinstance(low, Value) and not isinstance(high, Value):
        return drawn.convert(dtype)
    bottom, top = cx.scalar(low, drawn.dtype), cx.scalar(high, drawn.dtype)
    value = (drawn * (top - bottom) + bottom).convert(dtype)
    # Rounding may reach the open end.
    return cx.builder.select(value.eq(top.convert(dtype)), bottom.convert(dtype), value)


@lowering(
    "normal_(Tensor(a!) self, float mean=0., float std=1., *, Generator? generator=None) -> Tensor(a!)",
    reads=False,
    draws=_one_each,
    dynamic="mean std",
    around=_requires(lambda mean, std: std >= 0, "normal expects std >= 0.0, but found std {1}"),
)
def _normal_(cx: Context, x: None, mean: Value | float, std: Value | float, generator: None) -> Value:
    dtype = cx.output.dtype
    if not dtype.is_complex:
        return _normal(cx, mean, std, generator)
    real = dtype.to_real()
    # The variance is shared between the two parts.
    spread = std.convert(real) if isinstance(std, Value) else std
    pair = _scaled(standard_normal(cx, (2, *cx.output.size), real) * math.sqrt(0.5), 0.0, spread)
    parts = [pair.slice_dim(0, part, part + 1).reshape(cx.output.size) for part in range(2)]
    return cx.builder.complex(_scaled(parts[0], cx.scalar(mean, real), 1.0), parts[1])


def _scaled(value: Value, mean: Value | Number, std: Value | Number) -> Value:
    if isinstance(std, Value) or std != 1:
        value = value * std
    return value + mean if isinstance(mean, Value) or mean != 0 else value


def _normal(cx: Context, mean: Value | float, std: Value | float, generator: None) -> Value:
    compute = opmath(cx.output.dtype)
    given = [v.convert(compute) if isinstance(v, Value) else v for v in (mean, std)]
    return _scaled(standard_normal(cx, cx.output.size, compute), *given).convert(cx.output.dtype)


for _name, _types in (
    ("Tensor_Tensor", "Tensor mean, Tensor std"),
    ("Tensor_float", "Tensor mean, float std=1."),
    ("float_Tensor", "float mean, Tensor std"),
):
    lowering(f"normal.{_name}({_types}, *, Generator? generator=None) -> Tensor", draws=_one_each)(_normal)


@lowering(
    "exponential_(Tensor(a!) self, float lambd=1., *, Generator? generator=None) -> Tensor(a!)",
    reads=False,
    draws=_one_each,
)
def _exponential_(cx: Context, x: None, rate: float, generator: None) -> Value:
    dtype = cx.output.dtype
    compute = opmath(dtype)
    drawn = -_uniform(cx, cx.output.size, compute, above_zero=True).log()
    return (drawn if rate == 1.0 else drawn * (1 / rate)).convert(dtype)


# ---------------------------------------------------------------------------------------------------- chances


@lowering(
    "bernoulli_.float(Tensor(a!) self, float p=0.5, *, Generator? generator=None) -> Tensor(a!)",
    reads=False,
    draws=_one_each,
    dynamic="p",
    around=_requires(lambda p: 0 <= p <= 1, "bernoulli_ expects p to be in [0, 1], but got p={}"),
)
def _bernoulli_number(cx: Context, x: None, p: Value | float, generator: None) -> Value:
    return _chance(cx, cx.output.size, cx.scalar(p, torch.float32)).convert(cx.output.dtype)


@lowering(
    "bernoulli_.Tensor(Tensor(a!) self, Tensor p, *, Generator? generator=None) -> Tensor(a!)",
    reads=False,
    draws=_one_each,
)
def _bernoulli_tensor(cx: Context, x: None, p: Value, generator: None) -> Value:
    chance = p.convert(torch.float32).broadcast(cx.output.size)
    return _chance(cx, cx.output.size, chance).convert(cx.output.dtype)


@lowering("native_dropout(Tensor input, float p, bool? train) -> (Tensor, Tensor)", draws=_two_each)
def _native_dropout(cx: Context, x: Value, p: float, train: bool | None) -> tuple[Value, Value]:
    if train is False:
        return x, cx.builder.full(True, x.shape, torch.bool)
    kept = _chance(cx, x.shape, 1.0 - p)
    scale = 0.0 if p == 1 else 1.0 / (1.0 - p)
    wide = x.convert(opmath(x.dtype))
    return (wide * kept.convert(wide.dtype) * scale).convert(x.dtype), kept


@lowering("_fused_dropout(Tensor self, float p, Generator? generator=None) -> (Tensor, Tensor)", draws=_two_each)
def _fused_dropout(cx: Context, x: Value, p: float, generator: None) -> tuple[Value, Value]:
    """``p`` is the chance to stay; the mask is of bytes."""
    kept = _chance(cx, x.shape, p)
    wide = x.convert(opmath(x.dtype))
    return (wide * kept.convert(wide.dtype) * (1.0 / p if p else 0.0)).convert(x.dtype), kept.convert(torch.uint8)


@lowering("native_dropout_backward(Tensor grad_output, Tensor mask, float scale) -> Tensor")
def _native_dropout_backward(cx: Context, grad: Value, mask: Value, scale: float) -> Value:
    wide = grad.convert(opmath(cx.output.dtype))
    return (wide * (mask.convert(wide.dtype) * scale)).convert(cx.output.dtype)


# --------------------------------------------------------------------------------------------------- integers


def _between(cx: Context, low: int, count: int) -> Value:
    """Integers of ``[low, low + count)``; ``count`` up to 2**64."""
    dtype, size = cx.output.dtype, cx.output.size
    wide = count > 2**32 or dtype in (torch.int64, torch.uint64)
    bits = _bits(cx, size, 64 if wide else 32)
    if count & (count - 1) == 0:
        drawn = bits & (count - 1) if count < 2 ** (bits.dtype.itemsize * 8) else bits
    else:
        drawn = cx.builder.binary("stablehlo.remainder", bits, count)
    if dtype.is_floating_point or dtype == torch.bool:
        exact = drawn.convert(torch.int64)
        return (exact + low if low else exact).convert(opmath(dtype)).convert(dtype)
    # Two's complement: sums wrap to the right value in any width.
    whole = drawn.convert(torch.int64)
    return (whole + low if low else whole).convert(dtype)


@lowering("random_(Tensor(a!) self, *, Generator? generator=None) -> Tensor(a!)", reads=False, draws=_two_each)
def _random_(cx: Context, x: None, generator: None) -> Value:
    dtype = cx.output.dtype
    if dtype.is_floating_point:
        return _between(cx, 0, 2 ** _MANTISSA[dtype] + 1)
    return _between(cx, 0, 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1)


@lowering(
    "random_.to(Tensor(a!) self, int to, *, Generator? generator=None) -> Tensor(a!)", reads=False, draws=_two_each
)
def _random_to(cx: Context, x: None, to: int, generator: None) -> Value:
    return _between(cx, 0, to)


@lowering(
    "random_.from(Tensor(a!) self, int from, int? to, *, Generator? generator=None) -> Tensor(a!)",
    reads=False,
    draws=_two_each,
)
def _random_from(cx: Context, x: None, low: int, to: int | None, generator: None) -> Value:
    if to is not None:
        return _between(cx, low, to - low)
    dtype = cx.output.dtype
    top = 2 ** _MANTISSA[dtype] if dtype.is_floating_point else torch.iinfo(dtype).max
    return _between(cx, low, top - low + 1)


@lowering(
    "randperm.generator_out(SymInt n, *, Generator? generator, Tensor(a!) out) -> Tensor(a!)",
    reads=False,
    draws=_two_each,
    dispatched=False,
)
def _randperm(cx: Context, n: int, generator: None, out: None) -> Value:
    """Positions sorted by 64-bit keys, which practically never tie."""
    keys = cx.random_bits((n,), torch.uint64)
    positions = cx.builder.iota((n,), 0, torch.int32)
    return cx.builder.sort([keys, positions], 0, lambda a, b, i, j: a < b)[1].convert(cx.output.dtype)


# ------------------------------------------------------------------------------------------------ multinomial


def _multinomial_draws(specs: Specs, arguments: dict[str, Any]) -> int:
    """One number for each draw with replacement, one for each weight without."""
    drawn = _numel(specs) if arguments["replacement"] else 0
    return drawn or int(arguments["self"].numel())


@lowering(
    "multinomial(Tensor self, SymInt num_samples, bool replacement=False, *, Generator? generator=None) -> Tensor",
    draws=_multinomial_draws,
    dispatched=False,
)
def _multinomial(cx: Context, weights: Value, count: int, replacement: bool, generator: None) -> Value:
    work = weights.convert(torch.float32).reshape((weights.numel // weights.shape[-1], weights.shape[-1]))
    drawn = _with_replacement(cx, work, count) if replacement else _without_replacement(cx, work, count)
    return drawn.convert(torch.int64).reshape(cx.output.size)


def _without_replacement(cx: Context, weights: Value, count: int) -> Value:
    """The first arrivals of exponential clocks that run at the weights."""
    clocks = -_uniform(cx, weights.shape, torch.float32, above_zero=True).log()
    positions = cx.builder.iota(weights.shape, 1, torch.int32)
    # A clock may stand at 0; a weight of 0 never comes first.
    speed = cx.builder.select(weights.eq(0), -1.0, weights / clocks)
    order = cx.builder.sort([speed, positions], 1, lambda a, b, i, j: a > b)[1]
    return order.slice_dim(1, 0, count)


def _with_replacement(cx: Context, weights: Value, count: int) -> Value:
    """How many cumulated weights lie at or below a uniform part of the total."""
    rows, extent = weights.shape
    reached = scan([weights], [0.0], Value.__add__, 1)[0]
    total = reached.slice_dim(1, extent - 1, extent)
    mark = _uniform(cx, (rows, count), torch.float32) * total.broadcast((rows, count))
    below = reached.reshape((rows, 1, extent)).broadcast((rows, count, extent)) <= mark.reshape((rows, count, 1))
    found = below.convert(torch.int32).sum([2])
    positions = cx.builder.iota(weights.shape, 1, torch.int32)
    # Rounding may carry the mark up to the total.
    last = cx.builder.select(weights > 0, positions, 0).max([1], keepdim=True)
    return found.minimum(last.broadcast((rows, count)))
