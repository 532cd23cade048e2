"""Runs a function at several sizes under one bound, on the device and on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

OPTIONS = {"bucket_size": 8}


class Bounded:
    """A compiled function whose arguments have dynamic dimensions; ``check`` runs it at a size.

    ``make`` gives the arguments for a size and a generator: tensors on the CPU. ``dims`` are the dynamic dimension of
    each (None for a static one). Padding is poisoned by the executables themselves: what is undefined there is not zero.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        make: Callable[[int, torch.Generator], Sequence[torch.Tensor]],
        dims: Sequence[int | tuple[int, ...] | None],
        *,
        least: int = 2,
        most: int = 12,
        gradients: bool = True,
    ) -> None:
        self.function = function
        self.make = make
        self.dims = dims
        self.least, self.most = least, most
        self.gradients = gradients
        self.graphs: list[Any] = []
        self.compiled = torch.compile(
            function, backend="tpu", fullgraph=True, options=OPTIONS | {"debug_callback": self.graphs.append}
        )

    def check(self, size: int, seed: int = 0) -> None:
        """Values, shapes, strides and gradients equal the CPU's."""
        given = self.make(size, torch.Generator().manual_seed(seed))
        host = [self._leaf(tensor.clone()) for tensor in given]
        device = [self._leaf(tensor.to("tpu")) for tensor in given]
        for tensor, dim in zip(device, self.dims, strict=True):
            for each in () if dim is None else (dim,) if isinstance(dim, int) else dim:
                torch._dynamo.mark_dynamic(tensor, each, min=self.least, max=self.most)
        expected = pytree.tree_leaves(self.function(*host))
        found = pytree.tree_leaves(self.compiled(*device))
        self._compare(found, expected)
        if not self.gradients:
            return
        for pair in (expected, found):
            total = sum((leaf * _weights(leaf)).sum() for leaf in pair if leaf.requires_grad)
            total.backward()
        self._compare([t.grad for t in device], [t.grad for t in host])

    def _leaf(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.requires_grad_(self.gradients and tensor.is_floating_point())

    def _compare(self, found: Sequence[Any], expected: Sequence[Any]) -> None:
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            if not isinstance(theirs, torch.Tensor):
                assert ours == theirs
                continue
            assert ours.shape == theirs.shape
            assert ours.stride() == theirs.stride() or not theirs.is_contiguous()
            # Gradients are sums that cancel: an element errs by a share of what was added, not of what is left.
            size = theirs.detach().double().nan_to_num(posinf=0, neginf=0).abs()
            scale = max(1.0, float(size.max())) if size.numel() else 1.0
            torch.testing.assert_close(
                ours.detach().cpu(), theirs.detach(), rtol=2e-5, atol=2e-5 * scale, equal_nan=True
            )


def _weights(tensor: torch.Tensor) -> torch.Tensor:
    """Different ones for all elements, of any device."""
    ramp = torch.arange(tensor.numel(), dtype=torch.float32).remainder(7) - 2.5
    return ramp.reshape(tensor.shape).to(tensor.device)
