"""Kernels that prepare their arguments on the host, or are other ops put together below autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend.errors import user_line

__all__ = ["KERNELS"]

Tensor = torch.Tensor
Lengths = Sequence[int]
aten = torch.ops.aten


def _launch(name: str, *args: Any, **kwargs: Any) -> Any:
    from emutpu.backend.registration import kernel

    return kernel(name).function(*args, **kwargs)


# ------------------------------------------------------------------------------------------------------ CTC


def _lengths(log_probs: Tensor, input_lengths: Lengths, target_lengths: Lengths) -> None:
    """Raise RuntimeError, in PyTorch's words, for lengths that do not fit the batch."""
    time, batch = log_probs.shape[:2]
    if len(input_lengths) != batch:
        raise RuntimeError("input_lengths must be of size batch_size")
    if len(target_lengths) != batch:
        raise RuntimeError("target_lengths must be of size batch_size")
    for at, length in enumerate(input_lengths):
        if length < 0:
            raise RuntimeError(f"Expected input_lengths to have value at least 0, but got value {length}")
        if length > time:
            raise RuntimeError(
                f"Expected input_lengths to have value at most {time}, but got value {length} (while checking arguments "
                f"for ctc_loss, sample {at})"
            )
    for length in target_lengths:
        if length < 0:
            raise RuntimeError(f"Expected target_lengths to have value at least 0, but got value {length}")


def _padded(targets: Tensor, target_lengths: Lengths) -> Tensor:
    """Targets as [N, longest]; concatenated ones are taken apart. What is beyond a length is not read."""
    longest = max(target_lengths, default=0)
    if targets.dim() == 2:
        if targets.shape[1] < longest:
            raise RuntimeError(
                f"Expected tensor to have size at least {longest} at dimension 1, but got size {targets.shape[1]} for "
                "argument #2 'targets' (while checking arguments for ctc_loss)"
            )
        return targets[:, :longest]
    if sum(target_lengths) != targets.shape[0]:
        raise RuntimeError(
            f"Expected tensor to have size {sum(target_lengths)} at dimension 0, but got size {targets.shape[0]} for "
            "argument #2 'targets' (while checking arguments for ctc_loss)"
        )
    if not longest:
        return targets.new_zeros((len(target_lengths), 0))
    starts = [sum(target_lengths[:at]) for at in range(len(target_lengths))]
    last = targets.shape[0] - 1
    places = [[min(start + s, last) for s in range(longest)] for start in starts]
    return targets[torch.tensor(places).to(targets.device)]


def _prepared(
    log_probs: Tensor, targets: Tensor, input_lengths: Lengths, target_lengths: Lengths
) -> tuple[Tensor, Tensor, Tensor]:
    _lengths(log_probs, input_lengths, target_lengths)
    device = log_probs.device
    lengths = [torch.tensor(list(v), dtype=torch.int64).to(device) for v in (input_lengths, target_lengths)]
    return _padded(targets.to(device), target_lengths), lengths[0], lengths[1]


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Negative log-likelihoods [N] and log_alpha [N, T, 2S + 1] of log-probabilities [T, N, C]."""
    if not 0 <= blank < log_probs.shape[2]:
        raise RuntimeError("blank must be in label range")
    prepared = _prepared(log_probs, targets, input_lengths, target_lengths)
    found: tuple[Tensor, Tensor] = _launch("_ctc_loss.Tensor", log_probs, *prepared, blank, zero_infinity)
    return found


def ctc_loss_tensor(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """As :func:`ctc_loss`; lengths on the device are read first."""
    return ctc_loss(log_probs, targets, input_lengths.tolist(), target_lengths.tolist(), blank, zero_infinity)


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """The gradient towards the log-probabilities [T, N, C]."""
    prepared = _prepared(log_probs, targets, input_lengths, target_lengths)
    found: Tensor = _launch(
        "_ctc_loss_backward.Tensor", grad, log_probs, *prepared, neg_log_likelihood, log_alpha, blank, zero_infinity
    )
    return found


def ctc_loss_backward_tensor(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Tensor:
    """As :func:`ctc_loss_backward`; lengths on the device are read first."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    return ctc_loss_backward(grad, log_probs, targets, *lengths, neg_log_likelihood, log_alpha, blank, zero_infinity)


# ------------------------------------------------------------------------------------------------ assertions


def assert_async(self: Tensor) -> None:
    """Raise RuntimeError unless the one element of ``self`` is not zero. Waits for it."""
    assert_async_msg(self, "Expected Tensor with single nonzero value, but got zero")


def assert_async_msg(self: Tensor, assert_msg: str) -> None:
    """As :func:`assert_async`, with the caller's message."""
    if self.numel() != 1:
        raise RuntimeError(
            "Boolean value of Tensor with "
            + ("no values is ambiguous" if not self.numel() else "more than one value is ambiguous")
        )
    if not self.item():
        raise RuntimeError(f"{assert_msg}\n  issued at {user_line()}")


# ------------------------------------------------------------------------------------------- under other names


def _helper(op: torch._ops.OpOverload[..., Any]) -> Callable[..., None]:
    """``_cummax_helper`` and its like write into results that are there."""

    def kernel(self: Tensor, values: Tensor, indices: Tensor, dim: int) -> None:
        found_values, found_indices = op(self, dim)
        values.copy_(found_values)
        indices.copy_(found_indices)

    return kernel


def native_norm(self: Tensor, p: Any = 2) -> Tensor:
    """``norm`` over all elements."""
    return aten.norm.Scalar(self, p)  # type: ignore[no-any-return]  # untyped op


def native_norm_dims(self: Tensor, p: Any, dim: Sequence[int], keepdim: bool, dtype: torch.dtype | None) -> Tensor:
    """``norm`` over dimensions."""
    if dtype is None:
        return aten.norm.ScalarOpt_dim(self, p, dim, keepdim)  # type: ignore[no-any-return]  # untyped op
    return aten.norm.ScalarOpt_dim_dtype(self, p, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]  # untyped op


# ------------------------------------------------------------------------------------------------ attention


def cudnn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """The fused attention under the name that programs for CUDA call."""
    return aten._scaled_dot_product_fused_attention_overrideable(
        query, key, value, attn_bias, dropout_p, is_causal, return_debug_mask, scale=scale
    )


def cudnn_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    attn_bias: Tensor | None,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
) -> Any:
    """Towards query, key and value."""
    gradients = _launch(
        "_scaled_dot_product_fused_attention_overrideable_backward",
        *(grad_out, query, key, value, attn_bias, [True, True, True, False], out, logsumexp, cum_seq_q, cum_seq_k),
        *(max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset),
        scale=scale,
    )
    return tuple(gradients[:3])


KERNELS: dict[str, Callable[..., Any]] = {
    "_assert_async": assert_async,
    "_assert_async.msg": assert_async_msg,
    "_ctc_loss": ctc_loss,
    "_ctc_loss.Tensor": ctc_loss_tensor,
    "_ctc_loss_backward": ctc_loss_backward,
    "_ctc_loss_backward.Tensor": ctc_loss_backward_tensor,
    "_cummax_helper": _helper(aten.cummax.default),
    "_cummin_helper": _helper(aten.cummin.default),
    "_scaled_dot_product_cudnn_attention": cudnn_attention,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_attention_backward,
    "native_norm": native_norm,
    "native_norm.ScalarOpt_dim_dtype": native_norm_dims,
}
