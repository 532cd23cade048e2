"""What TorchTPU's known bugs do, as code: when a call meets one, and what comes out instead of the right result.

``when`` functions take the arguments of the overload as the dispatcher passes them; ``effect`` functions take the overload's
name and kernel before those. A bug that ends the process is an exception here: an emulator never takes the program down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from emutpu.backend.errors import op_label, user_line

__all__ = [
    "aborts",
    "always",
    "argmax_without_nan",
    "attention_over_masked_rows",
    "bfloat16_floor",
    "flat_targets",
    "floors_bfloat16",
    "forgets_gradient",
    "grid_gradient_negated",
    "grid_wants_gradient",
    "holds_nan",
    "index_gradient_misplaced",
    "indices_apart",
    "integer_mean",
    "is_bfloat16",
    "mask_wants_gradient",
    "masked_row",
    "negative_padding",
    "norm_without_nan",
    "one_row",
    "pdist_gradient_nan",
    "refuses_index",
    "refuses_mask_gradient",
    "scalar_index",
    "seeded",
    "smallest_norm",
    "truncated_mean",
    "unseeded",
    "wants_gradient",
]

Kernel = Callable[..., Any]


def aborts(overload: str, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """In place of the process's end."""
    raise RuntimeError(
        f"{op_label(overload)}(): TorchTPU 0.2.0 aborts the process here, and EMUTPU_QUIRKS=0.2.0 asks for its bugs\n"
        f"  aten.{overload} issued at {user_line()}\n  docs/quirks.md describes it; unset EMUTPU_QUIRKS for the result"
    )


# ------------------------------------------------------------------------------------------------------- attention


def masked_row(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any) -> bool:
    """Some query may attend to nothing. Reads the mask."""
    boolean = attn_mask is not None and attn_mask.dtype == torch.bool
    return boolean and not bool(attn_mask.any(-1).all())  # type: ignore[union-attr]  # not None


def attention_over_masked_rows(
    overload: str,
    kernel: Kernel,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *a: Any,
    **k: Any,
) -> Any:
    """A finite number stands for "masked", so a row of nothing else averages all values."""
    mask = k.pop("attn_mask", mask)
    if mask is not None and mask.dtype == torch.bool:
        lowest = torch.scalar_tensor(torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
        mask = torch.where(mask, torch.zeros_like(lowest), lowest)
    return kernel(query, key, value, mask, *a, **k)


def mask_wants_gradient(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *_: Any, **__: Any
) -> bool:
    """The mask is trained (a relative position bias)."""
    return attn_mask is not None and attn_mask.requires_grad


def refuses_mask_gradient(overload: str, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """No attention with a trained mask."""
    raise RuntimeError(
        "scaled_dot_product_attention(): expected attn_mask not to require grad (TorchTPU 0.2.0, asked for by EMUTPU_QUIRKS)\n"
        f"  issued at {user_line()}"
    )


# ---------------------------------------------------------------------------------------------------------- random


def unseeded(overload: str, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """Draws from a state that nobody seeded; the seeded one does not move."""
    from emutpu.backend.rng import DEFAULT_GENERATOR

    state, seeded_ = DEFAULT_GENERATOR.get_state(), DEFAULT_GENERATOR.seeded
    DEFAULT_GENERATOR.seed()
    try:
        return kernel(*args, **kwargs)
    finally:
        DEFAULT_GENERATOR.set_state(state)
        DEFAULT_GENERATOR.seeded = seeded_


# -------------------------------------------------------------------------------------------------------- indexing


def _apart(indices: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """The place of the first index tensor and the rank of the broadcast indices, when the tensors are not neighbours."""
    places = [place for place, index in enumerate(indices) if index is not None]
    if len(places) < 2 or places[-1] - places[0] == len(places) - 1:
        return None
    return places[0], max(index.dim() for index in indices if index is not None)


def indices_apart(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> bool:
    """The gradient of ``x[:, i, :, i]`` is being added up."""
    return unsafe and accumulate and _apart(indices) is not None


def index_gradient_misplaced(
    overload: str,
    kernel: Kernel,
    self: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Any:
    """The gradient is read as if the indexed dimensions stood where the first index stands, not in front."""
    found = _apart(indices) if unsafe and accumulate else None
    if found is not None and values.dim() > found[0]:
        first, rank = found
        shape = list(values.shape)
        swapped = values.reshape(*shape[rank : rank + first], *shape[:rank], *shape[rank + first :])
        values = swapped.movedim(list(range(first, first + rank)), list(range(rank)))
    return kernel(self, indices, values, accumulate, unsafe)


def scalar_index(self: Tensor, dim: int, index: Tensor, **_: Any) -> bool:
    """A 0-d index, as the gradient of index_add and index_copy passes one on."""
    return index.dim() == 0


def refuses_index(overload: str, kernel: Kernel, self: Tensor, dim: int, index: Tensor, **kwargs: Any) -> Any:
    """Its own text."""
    if index.dim() == 0:
        raise RuntimeError(f"index_select(): expected index to be 1D, got shape []\n  issued at {user_line()}")
    return kernel(self, dim, index, **kwargs)


def integer_mean(self: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, **_: Any) -> bool:
    """A mean of integers."""
    return reduce == "mean" and not self.dtype.is_floating_point


def truncated_mean(
    overload: str,
    kernel: Kernel,
    self: Tensor,
    dim: int,
    index: Tensor,
    src: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
    out: Tensor | None = None,
) -> Any:
    """Means of integers round towards zero; PyTorch rounds down."""
    if not integer_mean(self, dim, index, src, reduce):
        extra = {} if out is None else {"out": out}
        return kernel(self, dim, index, src, reduce, include_self=include_self, **extra)
    total = torch.scatter_reduce(self, dim, index, src, "sum", include_self=include_self)
    one = torch.ones_like(self) if include_self else torch.zeros_like(self)
    count = torch.scatter_add(one, dim, index, torch.ones_like(src)).clamp(min=1)
    mean = torch.div(total, count, rounding_mode="trunc")
    if out is not None:
        return out.copy_(mean)
    return self.copy_(mean) if overload.startswith("scatter_reduce_.") else mean


# ------------------------------------------------------------------------------------------------------- gradients


def grid_wants_gradient(
    grad: Tensor, input_: Tensor, grid: Tensor, a: int, b: int, c: bool, mask: Sequence[bool]
) -> bool:
    """The gradient for the grid was asked for."""
    return mask[1]


def grid_gradient_negated(overload: str, kernel: Kernel, *args: Any) -> Any:
    """The wrong sign, which is what a largest relative difference of 2 in the recordings says."""
    for_input, for_grid = kernel(*args)
    return for_input, -for_grid if args[-1][1] else for_grid


def one_row(grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> bool:
    """Distances within one row: there are none."""
    return self.shape[0] == 1


def pdist_gradient_nan(overload: str, kernel: Kernel, grad: Tensor, self: Tensor, p: float, pdist: Tensor) -> Any:
    """NaN for the single row."""
    return torch.full_like(self, math.nan) if one_row(grad, self, p, pdist) else kernel(grad, self, p, pdist)


def negative_padding(grad: Tensor, self: Tensor, padding: Sequence[int]) -> bool:
    """A pad that crops."""
    return min(padding) < 0


def wants_gradient(self: Tensor, *_: Any, **__: Any) -> bool:
    """The input is being differentiated."""
    return self.requires_grad and torch.is_grad_enabled()


def forgets_gradient(overload: str, kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    """The values without a graph behind them."""
    return kernel(*args, **kwargs).detach()


# --------------------------------------------------------------------------------------------------------- values


def _result_dtype(self: Any, other: Any) -> torch.dtype:
    return torch.result_type(self, other)


def floors_bfloat16(self: Any, other: Any, *, rounding_mode: str | None = "floor") -> bool:
    """Floor division or remainder of bfloat16."""
    return rounding_mode == "floor" and _result_dtype(self, other) == torch.bfloat16


def bfloat16_floor(overload: str, kernel: Kernel, self: Any, other: Any, *, rounding_mode: str | None = "floor") -> Any:
    """The quotient is rounded to bfloat16 before it is rounded down, so 16.97 becomes 17."""
    given = {"rounding_mode": rounding_mode} if overload.startswith("div") else {}
    if not floors_bfloat16(self, other, rounding_mode=rounding_mode):
        return kernel(self, other, **given)
    quotient = torch.floor(torch.true_divide(self, other))
    result = self - other * quotient if overload.startswith("remainder") else quotient
    return self.copy_(result) if overload.partition(".")[0].endswith("_") else result


def is_bfloat16(input_: Tensor, *_: Any, **__: Any) -> bool:
    """The input is bfloat16."""
    return input_.dtype == torch.bfloat16


def smallest_norm(self: Sequence[Tensor], ord: Any = 2, dtype: torch.dtype | None = None) -> bool:  # noqa: A002  # the schema's name
    """The norm that is the smallest magnitude."""
    return bool(ord == -math.inf)


def norm_without_nan(
    overload: str,
    kernel: Kernel,
    self: Sequence[Tensor],
    ord: Any = 2,  # noqa: A002  # the schema's name
    dtype: torch.dtype | None = None,
) -> Any:
    """NaN never is the smallest."""
    if smallest_norm(self, ord):
        self = [torch.where(x.isnan(), math.inf, x) if x.dtype.is_floating_point else x for x in self]
    return kernel(self, ord, dtype=dtype)


def holds_nan(self: Tensor, *_: Any, **__: Any) -> bool:
    """Reads the input."""
    return self.dtype.is_floating_point and bool(self.isnan().any())


def argmax_without_nan(overload: str, kernel: Kernel, self: Tensor, *args: Any, **kwargs: Any) -> Any:
    """NaN never is the extreme one; PyTorch has it win."""
    if self.dtype.is_floating_point:
        self = torch.where(self.isnan(), -math.inf if overload == "argmax" else math.inf, self)
    return kernel(self, *args, **kwargs)


def flat_targets(log_probs: Tensor, targets: Tensor, *_: Any, **__: Any) -> bool:
    """CTC targets of all samples in one dimension."""
    return targets.dim() == 1


def always(*_: Any, **__: Any) -> bool:
    """Every call."""
    return True


def seeded(self: Tensor, *_: Any, generator: torch.Generator | None = None, **__: Any) -> bool:
    """The default generator, after the program seeded it."""
    from emutpu.backend.rng import DEFAULT_GENERATOR

    return generator is None and DEFAULT_GENERATOR.seeded
