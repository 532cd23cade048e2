"""How the device names an op in its graphs: the name of the kernel that TorchTPU 0.2.0 registers for it.

A structured op is its ``out`` overload. In-place and functional forms are one op. Reading a tensor that is not the whole
value of its storage as it lies there is an ``as_strided`` before the op, writing part of a storage an
``as_strided_inverse`` after it. From the recordings in ``tests/data/regions``.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["READ", "WRITE", "display"]

READ = "as_strided"
WRITE = "as_strided_inverse"

_OVERLOADS = {
    "_to_copy": "copy_",
    "arange": "arange.start_out",
    "arange.start": "arange.start_out",
    "arange.start_step": "arange.start_out",
    "clone": "copy_",
    "eq.Tensor": "eq.out",
    "fill_.Scalar": "fill_.Scalar",
    "fill_.Tensor": "fill_.Tensor",
    "index.Tensor": "index.Tensor_out",
    "index_put": "index_put_",
    "max": "max",
    "max.dim": "max.dim_max",
    "max.other": "maximum.out",
    "min": "min",
    "min.dim": "min.dim_min",
    "min.other": "minimum.out",
    "native_dropout": "dropout",
    "nonzero": "nonzero_size",
    "nonzero_static": "nonzero",
    "sum": "sum.IntList_out",
    "sum.dim_IntList": "sum.IntList_out",
    "tanh_backward": "tanh_backward.grad_input",
    "threshold_backward": "threshold_backward.grad_input",
    "zero_": "zeros",
}
# Kernels of their own, not structured.
_PLAIN = frozenset(
    [
        "convolution",
        "convolution_backward",
        "equal",
        "full",
        "gelu",
        "linear",
        "linear_backward",
        "mse_loss_backward",
        "native_dropout_backward",
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_batch_norm",
        "ones",
        "ones_like",
        "relu",
        "stack",
        "where",
        "zeros",
        "zeros_like",
    ]
)
_DRAWS = frozenset(["uniform", "normal", "random", "exponential", "bernoulli", "geometric", "cauchy", "log_normal"])
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
_FOREACH_WITH_SCALARS = frozenset(
    ["add", "sub", "mul", "div", "lerp", "pow", "maximum", "minimum", "clamp_max", "clamp_min"]
)
_FOREACH_TERNARY = frozenset(["addcmul", "addcdiv"])


@functools.cache
def display(name: str) -> str:
    """The device's name of an overload: ``add.out`` for ``aten.add_.Tensor``."""
    overload = name.removeprefix("aten.").removesuffix(".default")
    base, _, variant = overload.partition(".")
    if overload in _OVERLOADS:
        return _OVERLOADS[overload]
    if base.startswith("_foreach_"):
        return _foreach(base.rstrip("_"))
    functional = base.removesuffix("_") if not base.endswith("__") else base
    as_functional = f"{functional}.{variant}" if variant else functional
    if as_functional in _OVERLOADS:
        return _OVERLOADS[as_functional]
    if functional in _DRAWS:
        return f"{functional}_"
    if functional in _PLAIN:
        return functional
    if functional in _COMPARISONS and variant == "Scalar":
        return f"{functional}.Scalar_out"
    return f"{functional}.out" if _has_out(functional) else overload


def _foreach(base: str) -> str:
    kind = base.removeprefix("_foreach_")
    if kind in _FOREACH_WITH_SCALARS:
        return f"{base}.common"
    return f"{base}.Tensor" if kind in _FOREACH_TERNARY else base


def _has_out(base: str) -> bool:
    packet = getattr(torch.ops.aten, base, None)
    return packet is not None and any(name.endswith("out") for name in packet.overloads())
