"""Ops whose result's size is in the data: a counting launch, one read of the count, a launch of that exact size.

The read waits for the device, as it does there. Everything else here is what an index op has to do on the host before
its launch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend import bounds
from emutpu.backend.copies import local_scalar
from emutpu.backend.errors import op_label, user_line
from emutpu.backend.runtime import runtime

__all__ = ["BEYOND", "KERNELS", "OTHER_KERNELS", "with_enough_elements", "without_masks"]

Kernel = Callable[..., Any]
_MASKS = (torch.bool, torch.uint8)
_BYTES = "indexing with dtype torch.uint8 is now deprecated, please use a dtype torch.bool instead."


def _launch(name: str, *args: Any, **kwargs: Any) -> Any:
    from emutpu.backend.registration import kernel

    return kernel(name).function(*args, **kwargs)


def nonzero(self: torch.Tensor) -> torch.Tensor:
    """Positions of what is not zero, int64 [count, self.dim()]."""
    count = int(_launch("nonzero", self).item())
    found: torch.Tensor = _launch("nonzero_static", self, size=count)
    return found


# -------------------------------------------------------------------------------------- masks among the indices


def without_masks(made: Any) -> Kernel:
    """Around ``index`` and ``index_put``: masks become positions, indices come to the device, bounds are checked."""
    function: Kernel = made.function
    writes = made.op._schema.name.startswith("aten::index_put")
    inplace = made.signature.inplace

    def kernel(
        self: torch.Tensor, indices: Sequence[torch.Tensor | None], values: Any = None, accumulate: bool = False
    ) -> Any:
        if writes:
            mask = None if accumulate else _lone_mask(self, indices, values)
            if mask is not None:
                fill = values.reshape(())
                return self.masked_fill_(mask, fill) if inplace else self.masked_fill(mask, fill)
        if any(i is not None and (i.dtype in _MASKS or i.device != self.device) for i in indices):
            indices = _positions(made.name, self, indices)
        if bounds.enabled():
            for dim, index in enumerate(indices):
                if index is not None:
                    bounds.check(made.name, index, self.shape[dim], dim, wraps=True)
        if all(index is None for index in indices):
            indices = [torch.arange(self.shape[0], device=self.device)]
        return function(self, indices, values, accumulate) if writes else function(self, indices)

    return kernel


def _lone_mask(self: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> torch.Tensor | None:
    """The mask, ready to broadcast, when one value is written through one mask: then no positions are needed."""
    given = [(at, index) for at, index in enumerate(indices) if index is not None]
    if values.numel() != 1 or values.dtype != self.dtype or len(given) != 1:
        return None
    at, mask = given[0]
    if mask.dtype not in _MASKS or mask.device != self.device or mask.shape != self.shape[at : at + mask.dim()]:
        return None
    return mask.to(torch.bool)[(..., *[None] * (self.dim() - at - mask.dim()))]


def _positions(op: str, self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    masks = 0
    for at, index in enumerate(indices):
        if index is None:
            found.append(None)
        elif index.dtype in _MASKS:
            masks += 1
            if index.dtype == torch.uint8:
                warnings.warn(_BYTES, UserWarning, stacklevel=2)
            if masks == 2 and op == "aten.index.Tensor":
                _refuse("index(): expected at most one bool index tensor")
            _check_mask(self, index, at, len(found))
            found += [column.to(self.device) for column in index.nonzero().unbind(1)]
            if op == "aten.index.Tensor" and index.device == self.device:
                # The device counts a second time, inside its index kernel: one more wait, one more region.
                int(_launch("nonzero", index).item())
        else:
            if index.device.type == "cpu" and index.numel() and len(found) < self.dim():
                bounds.check(op, index, self.shape[len(found)], len(found), wraps=True)
            found.append(index.to(self.device))
    return found


def _check_mask(self: torch.Tensor, mask: torch.Tensor, at: int, dim: int) -> None:
    for offset, extent in enumerate(mask.shape):
        if dim + offset >= self.dim() or extent != self.shape[dim + offset]:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {offset} does not match the shape of the indexed "
                f"tensor {list(self.shape)} at index {dim + offset}"
            )


def with_enough_elements(made: Any) -> Kernel:
    """Around ``masked_scatter``: with bounds checks on, the source must hold as many elements as the mask takes."""
    function: Kernel = made.function

    def kernel(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> Any:
        if bounds.enabled():
            wanted = int(_launch("nonzero", mask.expand(torch.broadcast_shapes(self.shape, mask.shape))).item())
            if wanted > source.numel():
                raise RuntimeError(
                    f"{op_label(made.name)}(): expected source to have at least {wanted} elements, as many as the mask "
                    f"selects, got {source.numel()}\n  issued at {user_line()}"
                )
        return function(self, mask, source)

    return kernel


def masked_select(self: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The elements under the mask, one dimension. Raises RuntimeError for masks that are not bool."""
    if mask.dtype not in _MASKS:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    self, mask = torch.broadcast_tensors(self, mask)
    if self.dim() == 0:
        self, mask = self.reshape(1), mask.reshape(1)
    if self.dim() > 1:
        return self[tuple(nonzero(mask).unbind(1))]
    return self.gather(0, nonzero(mask).select(1, 0))


# ----------------------------------------------------------------------------------------------------- unique

Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _refuse(message: str) -> None:
    """Options that the device has not: refused here too, unless lowerings beyond it are asked for."""
    configuration = runtime().configuration
    if configuration is None or not configuration.beyond:
        raise NotImplementedError(f"{message}\n  issued at {user_line()}")


def _selected(
    source: torch.Tensor, dim: int, groups: torch.Tensor, starts: torch.Tensor, inverse: bool, counts: bool
) -> Groups:
    """One of each group of ``source``: read how many there are, then take them."""
    count = int(starts[-1].item())
    first = starts[:count]
    none = groups.new_empty((0,))
    sizes = starts[1 : count + 1] - first if counts else none
    return source.index_select(dim, first), groups if inverse else none, sizes


def unique2(
    self: torch.Tensor, ordered: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Groups:
    """The distinct elements in order, each element's place among them, and how often each occurs."""
    if not ordered:
        _refuse("unique2(): sorted=False is not yet supported")
    if self.numel() == 0:
        none = self.new_empty((0,), dtype=torch.int64)
        return self.new_empty((0,)), none.reshape(self.shape) if return_inverse else none, none.clone()
    values, groups, starts = _launch("_unique2", self, return_inverse=return_inverse)
    return _selected(values, 0, groups.reshape(self.shape), starts, return_inverse, return_counts)


def unique_dim(
    self: torch.Tensor, dim: int, ordered: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> Groups:
    """The distinct slices along ``dim`` in lexicographic order."""
    dim = _slices(self, dim)
    if self.numel() == 0:
        return _no_slices(self)
    rows, groups, starts = _launch("unique_dim", self, dim)
    found, groups, sizes = _selected(rows, 0, groups, starts, True, True)
    return found.movedim(0, dim).contiguous(), groups, sizes


def unique_dim_consecutive(
    self: torch.Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> Groups:
    """One of each run of equal slices along ``dim``."""
    dim = _slices(self, dim)
    if self.numel() == 0:
        return _no_slices(self)
    _, groups, starts = _launch("unique_consecutive", self, dim=dim)
    return _selected(self, dim, groups, starts, True, True)


def _slices(self: torch.Tensor, dim: int) -> int:
    """``dim``, not negative. Raises RuntimeError, as PyTorch does, when the slices have no elements but exist."""
    if self.dim() == 0:
        raise IndexError("There are no dimensions along which to be unique")
    dim = range(self.dim())[dim]
    if self.shape[dim] and not self.numel():
        raise RuntimeError("There are 0 sized dimensions, and they aren't selected, so unique cannot be applied")
    return dim


def _no_slices(self: torch.Tensor) -> Groups:
    none = self.new_empty((0,), dtype=torch.int64)
    return self.new_empty(self.shape), none, none.clone()


def unique_consecutive(
    self: torch.Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Groups:
    """One of each run of equal elements, or of equal slices along ``dim``."""
    if dim is not None:
        return unique_dim_consecutive(self, dim, return_inverse, return_counts)
    if self.numel() == 0:
        none = self.new_empty((0,), dtype=torch.int64)
        return self.new_empty((0,)), none.reshape(self.shape) if return_inverse else none, none.clone()
    _, groups, starts = _launch("unique_consecutive", self)
    return _selected(self.reshape(-1), 0, groups.reshape(self.shape), starts, return_inverse, return_counts)


# ----------------------------------------------------------------------------------------------------- repeats


def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """0 ``repeats[0]`` times, then 1 ``repeats[1]`` times, … A given ``output_size`` is trusted and saves the read."""
    if repeats.dim() != 1:
        raise RuntimeError("repeat_interleave only accept 1D vector as repeat")
    if repeats.dtype not in (torch.int64, torch.int32):
        raise RuntimeError("repeats has to be Long or Int tensor")
    if repeats.numel() == 0:
        return torch.empty_like(repeats)
    if output_size is None:
        output_size, least = _launch("repeat_interleave.Tensor", repeats).tolist()
        if least < 0:
            raise RuntimeError("repeats can not be negative")
    numbers: torch.Tensor = _launch("repeat_interleave.Tensor", repeats, output_size=output_size)
    return numbers


# ----------------------------------------------------------------------------------------------------- random


def randperm_(n: int, *, generator: torch.Generator | None, out: torch.Tensor) -> torch.Tensor:
    """A random permutation of 0, 1, …, n - 1, in ``out``'s dtype."""
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got{n}")
    if out.shape != (n,):
        out.resize_(n)
    if n:
        _launch("randperm.generator_out", n, generator=generator, out=out)
    return out


def multinomial(
    self: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Indices drawn with the given weights. The device takes no generator of the caller's."""
    if generator is not None:
        _refuse("multinomial(): a generator is not yet supported")
    if bounds.enabled() and not bool(((self >= 0) & (self < float("inf"))).all().item()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    if not self.dtype.is_floating_point:
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if self.dim() not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    if self.numel() == 0:
        return self.new_empty((*self.shape[:-1], num_samples), dtype=torch.int64)
    drawn: torch.Tensor = _launch("multinomial", self, num_samples, replacement, generator=generator)
    return drawn


def bernoulli_out(self: torch.Tensor, *, generator: torch.Generator | None = None, out: torch.Tensor) -> torch.Tensor:
    """Ones with the probabilities ``self`` into ``out``, which is resized if need be."""
    if out.shape != self.shape:
        out.resize_(self.shape)
    return out.bernoulli_(self, generator=generator)


def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """True when shapes and all elements are equal; waits for the device."""
    if self.device != other.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and "
            f"{other.device}!\n  issued at {user_line()}"
        )
    if self.dtype != other.dtype:
        raise RuntimeError(f"Expected all tensors to have the same dtype, but found {self.dtype} and {other.dtype}")
    if self.shape != other.shape or self.numel() == 0:
        return self.shape == other.shape
    return bool(local_scalar(_launch("equal", self.resolve_conj(), other.resolve_conj()), "item()"))


def index_put_impl_(
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    """``index_put_`` under the name that autograd's formulas call."""
    return torch.ops.aten.index_put_.default(self, indices, values, accumulate)  # type: ignore[no-any-return]  # untyped op


# Functional kernels: their out= overloads are derived.
KERNELS: dict[str, Kernel] = {
    "_unique2": unique2,
    "masked_select": masked_select,
    "multinomial": multinomial,
    "nonzero": nonzero,
    "repeat_interleave.Tensor": repeat_interleave,
    "unique_consecutive": unique_consecutive,
    "unique_dim": unique_dim,
    "unique_dim_consecutive": unique_dim_consecutive,
}

# The real device has none of these.
BEYOND = frozenset({"unique_dim"})

OTHER_KERNELS: dict[str, Kernel] = {
    "_index_put_impl_": index_put_impl_,
    "bernoulli.out": bernoulli_out,
    "equal": equal,
    "randperm.generator_out": randperm_,
}
