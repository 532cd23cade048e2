"""Ops whose result's size is in the data: a counting launch, one read of the count, a launch of that exact size.

The read waits for the device, as it does there. Everything else here is what an index op has to do on the host before
its launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from emutpu.backend import bounds

__all__ = ["KERNELS", "without_masks"]

Kernel = Callable[..., Any]
_MASKS = (torch.bool, torch.uint8)


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
            indices = _positions(self, indices)
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


def _positions(self: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for at, index in enumerate(indices):
        if index is None:
            found.append(None)
        elif index.dtype in _MASKS:
            _check_mask(self, index, at, len(found))
            found += [column.to(self.device) for column in index.nonzero().unbind(1)]
        else:
            if index.device.type == "cpu" and index.numel() and len(found) < self.dim():
                bounds.check("aten.index", index, self.shape[len(found)], len(found), wraps=True)
            found.append(index.to(self.device))
    return found


def _check_mask(self: torch.Tensor, mask: torch.Tensor, at: int, dim: int) -> None:
    for offset, extent in enumerate(mask.shape):
        if dim + offset >= self.dim() or extent != self.shape[dim + offset]:
            raise IndexError(
                f"The shape of the mask {list(mask.shape)} at index {offset} does not match the shape of the indexed "
                f"tensor {list(self.shape)} at index {dim + offset}"
            )


def index_put_impl_(
    self: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> torch.Tensor:
    """``index_put_`` under the name that autograd's formulas call."""
    return torch.ops.aten.index_put_.default(self, indices, values, accumulate)  # type: ignore[no-any-return]  # untyped op


KERNELS: dict[str, Kernel] = {
    "nonzero": nonzero,
    "_index_put_impl_": index_put_impl_,
}
