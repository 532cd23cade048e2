"""Convolutions in 1, 2 and 3 dimensions, their gradients, and their transposes, as StableHLO convolutions.

Three functions carry everything: :func:`_correlate` (the convolution itself), :func:`_spread` (its transpose, which is
also the gradient of its input) and :func:`_kernel_gradient`. Transposed convolution swaps the roles of the first two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from emutpu.backend.dtypes import dtype_name, opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

_SIGNATURE = (
    "(Tensor input, Tensor weight, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "bool transposed, SymInt[] output_padding, SymInt groups) -> Tensor"
)
_BACKWARD = (
    "(Tensor grad_output, Tensor input, Tensor weight, {}SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "bool transposed, SymInt[] output_padding, SymInt groups, bool[3] output_mask) -> {}"
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """Geometry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(rank: int, stride: Any, padding: Any, dilation: Any, groups: int) -> _Window:
        def full(value: Sequence[int]) -> tuple[int, ...]:
            return tuple(value) if len(value) == rank else (value[0],) * rank

        return _Window(full(stride), full(padding), full(dilation), groups)


def _numbers(x: str, kernel: str, result: str, rank: int) -> str:
    """``bf``, ``oi``, ``bf`` for rank 2 → ``[b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1]``."""
    spatial = [str(d) for d in range(rank)]
    x, kernel, result = (f"[{', '.join([*part, *spatial])}]" for part in (x, kernel, result))
    return f"{x}x{kernel}->{result}"


def _reach(size: int, dilation: int) -> int:
    return (size - 1) * dilation + 1 if size else 0


def _zeros(x: Value, shape: Sequence[int]) -> Value:
    return x.builder.full(0, shape, opmath(x.dtype))


def _correlate(x: Value, weight: Value, window: _Window, spatial: Sequence[int]) -> Value:
    """X [N, I, …], weight [O, I/groups, …] → [N, O, *spatial] in the accumulation dtype."""
    shape = (x.shape[0], weight.shape[0], *spatial)
    if 0 in shape or not x.numel or not weight.numel:
        return _zeros(x, shape)
    return x.builder.convolution(
        x,
        weight,
        dimension_numbers=_numbers("bf", "oi", "bf", len(spatial)),
        shape=shape,
        strides=window.stride,
        padding=_padding(x, weight, window, spatial),
        rhs_dilation=window.dilation,
        feature_groups=window.groups,
        accumulate=opmath(x.dtype),
    )


def _padding(x: Value, weight: Value, window: _Window, spatial: Sequence[int]) -> list[tuple[int, int]]:
    """The op's own padding; the far side gives way where ``output_padding`` made an input longer than windows need."""
    padding = []
    for n, m, size, step, pad, dilation in zip(
        x.shape[2:], spatial, weight.shape[2:], window.stride, window.padding, window.dilation, strict=True
    ):
        reach = _reach(size, dilation)
        fits = (n + 2 * pad - reach) // step + 1 == m
        padding.append((pad, pad if fits else (m - 1) * step + reach - n - pad))
    return padding


def _spread(y: Value, weight: Value, window: _Window, spatial: Sequence[int]) -> Value:
    """The transpose of :func:`_correlate`: y [N, O, …], weight [O, I/groups, …] → [N, I, *spatial]."""
    groups = window.groups
    out, per_group = weight.shape[:2]
    shape = (y.shape[0], per_group * groups, *spatial)
    if 0 in shape or not y.numel or not weight.numel:
        return _zeros(y, shape)
    kernel = weight.reverse(range(2, weight.ndim))
    if groups > 1:
        # [groups · O', I', …] → [O', groups · I', …]
        kernel = kernel.reshape((groups, out // groups, *weight.shape[1:]))
        kernel = kernel.transpose((1, 0, *range(2, kernel.ndim)))
        kernel = kernel.reshape((out // groups, groups * per_group, *weight.shape[2:]))
    padding = []
    for n, m, size, step, pad, dilation in zip(
        spatial, y.shape[2:], weight.shape[2:], window.stride, window.padding, window.dilation, strict=True
    ):
        low = _reach(size, dilation) - 1 - pad
        padding.append((low, n + _reach(size, dilation) - 1 - _reach(m, step) - low))
    return y.builder.convolution(
        y,
        kernel,
        dimension_numbers=_numbers("bf", "io", "bf", len(spatial)),
        shape=shape,
        strides=[1] * len(spatial),
        padding=padding,
        lhs_dilation=window.stride,
        rhs_dilation=window.dilation,
        feature_groups=groups,
        accumulate=opmath(y.dtype),
    )


def _kernel_gradient(x: Value, y: Value, window: _Window, shape: Sequence[int]) -> Value:
    """The gradient of :func:`_correlate` in its weight, for input x [N, I, …] and cotangent y [N, O, …]."""
    if 0 in shape or not x.numel or not y.numel:
        return _zeros(x, shape)
    padding = []
    for n, m, size, step, pad, dilation in zip(
        x.shape[2:], y.shape[2:], shape[2:], window.stride, window.padding, window.dilation, strict=True
    ):
        padding.append((pad, _reach(size, dilation) + _reach(m, step) - 1 - n - pad))
    return x.builder.convolution(
        x,
        y,
        dimension_numbers=_numbers("fb", "io", "fb", x.ndim - 2),
        shape=shape,
        strides=window.dilation,
        padding=padding,
        rhs_dilation=window.stride,
        batch_groups=window.groups,
        accumulate=opmath(x.dtype),
    )


# ------------------------------------------------------------------------------------------------- forward


def _refuse(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The errors that PyTorch's meta kernel leaves to the backend, in the words of PyTorch and of the device."""
    if not x.dtype.is_floating_point:
        raise RuntimeError(
            f"{op}(): expected the dtype of the input tensor to be neither long nor complex, but got {dtype_name(x.dtype)}"
        )
    for name, other in (("weight", weight), ("bias", bias)):
        if other is not None and other.dtype != x.dtype:
            raise RuntimeError(f"Input type ({_type_name(x)}) and {name} type ({_type_name(other)}) should be the same")


def _type_name(x: torch.Tensor) -> str:
    names = {
        torch.float32: "float",
        torch.float64: "double",
        torch.bfloat16: "c10::BFloat16",
        torch.float16: "c10::Half",
    }
    return names.get(x.dtype, dtype_name(x.dtype))


def _meta(
    input: torch.Tensor,  # noqa: A002  # the schema's name
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> torch.Tensor:
    """PyTorch's checks and sizes; a channels_last input gives a channels_last result."""
    _refuse("convolution", input, weight, bias)
    _check_shapes(input, weight, bias, padding, transposed, groups)
    plain = torch.ops.aten.convolution.default(
        input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    return torch.empty(plain.shape, dtype=plain.dtype, device="meta", memory_format=_format(input))


def _format(x: torch.Tensor) -> torch.memory_format:
    for rank, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == rank and x.is_contiguous(memory_format=form) and not x.is_contiguous():
            return form
    return torch.contiguous_format


def _check_shapes(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: list[int], transposed: bool, groups: int
) -> None:
    sizes = list(weight.shape)
    if weight.dim() != x.dim():
        raise RuntimeError(
            f"Expected {weight.dim()}-dimensional input for {weight.dim()}-dimensional weight {sizes}, "
            f"but got {x.dim()}-dimensional input of size {list(x.shape)} instead"
        )
    if weight.shape[0] < groups or weight.shape[0] % groups:
        raise RuntimeError(
            f"Given groups={groups}, expected weight to be {'at least' if weight.shape[0] < groups else 'divisible by'} "
            f"{groups} at dimension 0, but got weight of size {sizes} instead"
        )
    expected = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != expected:
        verb = f"Given transposed={transposed}, weight" if transposed else f"Given groups={groups}, weight"
        raise RuntimeError(
            f"{verb} of size {sizes}, expected input{list(x.shape)} to have {expected} channels, "
            f"but got {x.shape[1]} channels instead"
        )
    features = weight.shape[1] * groups if transposed else weight.shape[0]
    if bias is not None and (bias.dim() != 1 or bias.shape[0] != features):
        prefix = f"Given transposed={transposed}" if transposed else f"Given weight of size {sizes}"
        raise RuntimeError(
            f"{prefix}, expected bias to be 1-dimensional with {features} elements, "
            f"but got bias of size {list(bias.shape)} instead"
        )


def _convolution(
    cx: Context,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> Value:
    if 0 in cx.output.size:
        return cx.builder.full(0, cx.output.size, cx.output.dtype)
    spatial = cx.output.size[2:]
    window = _Window.of(len(spatial), stride, padding, dilation, groups)
    result = (_spread if transposed else _correlate)(x, weight, window, spatial)
    if bias is not None:
        result = result + bias.convert(result.dtype).reshape((bias.numel, *[1] * len(spatial)))
    return result.convert(cx.output.dtype)


for _name in ("convolution", "convolution_overrideable"):
    lowering(_name + _SIGNATURE, meta=_meta, dots=True)(_convolution)


# ------------------------------------------------------------------------------------------------- backward


def _backward_meta(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002  # the schema's name
    weight: torch.Tensor,
    output_mask: list[bool],
    **_: Any,  # the schema's name
) -> tuple[torch.Tensor | None, ...]:
    _refuse("convolution_backward", grad_output, weight, input)
    form = _format(input)  # as CPU: both gradients follow the input
    gradients = [torch.empty(t.shape, dtype=t.dtype, device="meta", memory_format=form) for t in (input, weight)]
    bias = grad_output.new_empty((grad_output.shape[1],))
    return tuple(g if wanted else None for g, wanted in zip((*gradients, bias), output_mask, strict=True))


def _gradients(
    cx: Context,
    y: Value,
    x: Value,
    weight: Value,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    output_mask: list[bool],
) -> list[Value | None]:
    window = _Window.of(x.ndim - 2, stride, padding, dilation, groups)
    results: list[Value | None] = [None, None, None]
    if output_mask[0]:
        results[0] = (_correlate if transposed else _spread)(y, weight, window, x.shape[2:])
    if output_mask[1]:
        pair = (y, x) if transposed else (x, y)
        results[1] = _kernel_gradient(*pair, window, weight.shape)
    if output_mask[2]:
        results[2] = y.convert(opmath(y.dtype)).sum([0, *range(2, y.ndim)])
    return [None if r is None else r.convert(y.dtype) for r in results]


def _gradients_with_bias_sizes(cx: Context, y: Value, x: Value, weight: Value, bias_sizes: Any, *rest: Any) -> Any:
    return _gradients(cx, y, x, weight, *rest)


lowering(
    "convolution_backward" + _BACKWARD.format("SymInt[]? bias_sizes, ", "(Tensor, Tensor, Tensor)"),
    meta=_backward_meta,
    dots=True,
)(_gradients_with_bias_sizes)
lowering(
    "convolution_backward_overrideable"
    + _BACKWARD.format("", "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)"),
    meta=_backward_meta,
    dots=True,
)(_gradients)
