"""Ops that only move data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import check_backward, check_forward

NAMES = [
    "cat",
    "stack",
    "repeat",
    "flip",
    "roll",
    "rot90",
    "tril",
    "triu",
    "diag_embed",
    "diagonal",
    "diagonal_scatter",
    "select_scatter",
    "slice_scatter",
    "as_strided_scatter",
    "unfold",
    "as_strided",
    "split",
    "unbind",
    "block_diag",
    "nn.functional.pad.constant",
    "nn.functional.pixel_shuffle",
    "nn.functional.pixel_unshuffle",
    "nn.functional.channel_shuffle",
]
FORWARD_ONLY = ["tril_indices", "triu_indices"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU."""
    check_forward(name, dtype, limit=6 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("name", NAMES)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


GAPS = {
    "rows cut short": lambda x: x[..., :5],
    "a start further in": lambda x: x[:, 2:4, 1:],
    "transposed": lambda x: x[..., 1:6].transpose(1, 2),
    "every other": lambda x: x[..., ::2],
    "not nested": lambda x: torch.as_strided(x, (3, 4), (5, 2)),
}


@pytest.mark.parametrize("mode", ["strict", "defer", "compile"])
@pytest.mark.parametrize("view", GAPS.values(), ids=GAPS)
def test_results_with_gaps(view: Callable[[torch.Tensor], torch.Tensor], mode: str) -> None:
    """The scatter ops keep the strides of a view that leaves gaps in its storage, and its values, as the CPU's do."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = view(x)
        first = torch.slice_scatter(seen, torch.full_like(seen[..., 1:3], -7.0), -1, 1, 3)
        return first, torch.select_scatter(first, torch.full_like(first[0], -9.0), 0, 0)

    x = torch.arange(2 * 4 * 8, dtype=torch.float32).reshape(2, 4, 8)
    run = torch.compile(program, backend="tpu") if mode == "compile" else program
    modes = torch.tpu.EagerMode
    with torch.tpu.set_eager_mode(modes.DEFER_AND_FUSE if mode == "defer" else modes.DEFER_NEVER):
        results = run(x.to("tpu"))
    for actual, expected in zip(results, program(x), strict=True):
        assert actual.stride() == expected.stride()
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0)
