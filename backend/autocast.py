"""Autocast on the device: which ops run in the lower precision, which in float32. All others take their operands as they are.

The two lists are TorchTPU 0.2.0's registrations for key AutocastPrivateUse1. A wrapper stands only on that key, so ops
outside an autocast region never pass through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["FLOAT32", "LOWER_PRECISION", "kernels"]

_C: Any = torch._C
_AUTOCAST = _C.DispatchKeySet(_C.DispatchKey.AutocastPrivateUse1)

LOWER_PRECISION = frozenset(
    [
        "_addmm_activation",
        "_convolution",
        "_convolution.deprecated",
        "_native_multi_head_attention",
        "_scaled_dot_product_flash_attention",
        "_thnn_fused_lstm_cell",
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bmm",
        "chain_matmul",
        "conv1d",
        "conv1d.padding",
        "conv2d",
        "conv2d.padding",
        "conv3d",
        "conv3d.padding",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "convolution",
        "einsum",
        "gru_cell",
        "linalg_multi_dot",
        "linalg_vecdot",
        "linear",
        "lstm_cell",
        "matmul",
        "mm",
        "mv",
        "prelu",
        "rnn_relu_cell",
        "rnn_tanh_cell",
        "scaled_dot_product_attention",
    ]
)
FLOAT32 = frozenset(
    [
        "_grid_sampler_2d_cpu_fallback",
        "_lu_with_info",
        "adaptive_avg_pool3d",
        "adaptive_max_pool3d",
        "avg_pool3d",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cdist",
        "cholesky_inverse",
        "cholesky_solve",
        "cosine_embedding_loss",
        "cross_entropy_loss",
        "ctc_loss.IntList",
        "ctc_loss.Tensor",
        "fake_quantize_per_tensor_affine",
        "fft_fft",
        "fft_fft2",
        "fft_fftn",
        "fft_hfft",
        "fft_ifft",
        "fft_ifft2",
        "fft_ifftn",
        "fft_ihfft",
        "fft_irfft",
        "fft_irfft2",
        "fft_irfftn",
        "fft_rfft",
        "fft_rfft2",
        "fft_rfftn",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "geqrf",
        "grid_sampler",
        "grid_sampler_2d",
        "grid_sampler_3d",
        "hinge_embedding_loss",
        "huber_loss",
        "inverse",
        "kl_div",
        "l1_loss",
        "linalg_cholesky",
        "linalg_cholesky_ex",
        "linalg_cond",
        "linalg_cond.p_str",
        "linalg_eig",
        "linalg_eigh",
        "linalg_eigvals",
        "linalg_eigvalsh",
        "linalg_householder_product",
        "linalg_inv",
        "linalg_inv_ex",
        "linalg_lstsq",
        "linalg_matrix_rank",
        "linalg_matrix_rank.atol_rtol_float",
        "linalg_matrix_rank.atol_rtol_tensor",
        "linalg_matrix_rank.tol_tensor",
        "linalg_qr",
        "linalg_solve",
        "linalg_svd",
        "linalg_svdvals",
        "linalg_tensorinv",
        "linalg_tensorsolve",
        "lu_solve",
        "margin_ranking_loss",
        "max_pool3d",
        "max_unpool2d",
        "max_unpool3d",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "multilabel_margin_loss_forward",
        "nanquantile",
        "nanquantile.scalar",
        "nll_loss",
        "nll_loss2d",
        "orgqr",
        "ormqr",
        "pinverse",
        "poisson_nll_loss",
        "polar",
        "prod",
        "prod.dim_int",
        "quantile",
        "quantile.scalar",
        "reflection_pad1d",
        "reflection_pad2d",
        "replication_pad1d",
        "replication_pad2d",
        "replication_pad3d",
        "smooth_l1_loss",
        "soft_margin_loss",
        "stft",
        "stft.center",
        "svd",
        "trace",
        "triangular_solve",
        "triplet_margin_loss",
        "view_as_complex",
    ]
)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors of the device in ``dtype``, float64 excepted; lists item by item."""
    if isinstance(value, torch.Tensor):
        eligible = value.device.type == "tpu" and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if eligible else value
    if isinstance(value, list | tuple):
        return type(value)([_cast(item, dtype) for item in value])
    return value


@functools.cache
def _overload(name: str) -> torch._ops.OpOverload[..., Any]:
    """Looked up at the first call: 135 of them would cost ``import torch`` 5 ms."""
    base, _, variant = name.partition(".")
    found: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops.aten, base), variant or "default")
    return found


def _kernel(name: str, dtype_now: Callable[[], torch.dtype]) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op = _overload(name)
        with _C._ExcludeDispatchKeyGuard(_AUTOCAST):
            dtype = dtype_now()
            return op(*_cast(args, dtype), **{key: _cast(value, dtype) for key, value in kwargs.items()})

    return kernel


def kernels() -> dict[str, Callable[..., Any]]:
    """Overload → wrapper for key AutocastPrivateUse1."""
    lower = {name: _kernel(name, lambda: torch.get_autocast_dtype("tpu")) for name in LOWER_PRECISION}
    return lower | {name: _kernel(name, lambda: torch.float32) for name in FLOAT32}
