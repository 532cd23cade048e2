"""Programs that are compiled and compared with CPU PyTorch at the highest precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils import _pytree as pytree

from emutpu.backend.options import override
from emutpu.backend.runtime import runtime


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test starts without compiled frames, at the highest precision."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with override(precision=torch.tpu.Precision.HIGHEST):
        yield
    torch._dynamo.reset()


def moved(values, device):
    """A copy of all tensors on ``device``."""
    return pytree.tree_map(
        lambda v: v.detach().clone().to(device).requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v,
        values,
    )


@pytest.fixture
def same() -> Callable[..., object]:
    """``same(f, *args)``: f compiled on the device equals f on the CPU, gradients and mutations of arguments included."""

    def check(function, *args, tolerance: float = 1e-5, **settings):
        mine, theirs = moved(args, "tpu"), moved(args, "cpu")
        compiled = torch.compile(function, backend="tpu", **settings)
        actual, expected = compiled(*mine), function(*theirs)
        close(actual, expected, tolerance)
        results = [t for t in pytree.tree_leaves(expected) if isinstance(t, torch.Tensor) and t.requires_grad]
        if results:
            for found in (actual, expected):
                sum(t.float().square().sum() for t in pytree.tree_leaves(found) if t.requires_grad).backward()
            close(
                [a.grad for a in mine if isinstance(a, torch.Tensor)],
                [a.grad for a in theirs if isinstance(a, torch.Tensor)],
                tolerance,
            )
        close(mine, theirs, tolerance)
        return actual

    return check


def close(actual, expected, tolerance: float = 1e-5) -> None:
    """Structure, dtypes, sizes, strides and values agree."""
    left, right = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(left) == len(right)
    for a, e in zip(left, right, strict=True):
        if not isinstance(e, torch.Tensor):
            assert a == e
            continue
        assert a.dtype == e.dtype
        assert a.stride() == e.stride()
        torch.testing.assert_close(a.detach().cpu(), e.detach(), rtol=tolerance, atol=tolerance)


@pytest.fixture
def compiles() -> Callable[[], int]:
    """``compiles()``: modules compiled since the test began, or since the last call."""
    seen = [runtime().cache.misses]

    def since() -> int:
        found = runtime().cache.misses - seen[0]
        seen[0] = runtime().cache.misses
        return found

    return since


@pytest.fixture
def launches() -> Callable[[], int]:
    """``launches()``: regions launched since the test began, or since the last call."""
    seen = [runtime().region_launches]

    def since() -> int:
        found = runtime().region_launches - seen[0]
        seen[0] = runtime().region_launches
        return found

    return since
