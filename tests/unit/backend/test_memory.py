"""Device memory: tiles, the device's own donation rule, and running out of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from emutpu.backend.cell import MEMORY
from emutpu.backend.pjrt import ErrorBuffer
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of

MIB = 2**20
HERE = Path(__file__)


def line_with(comment: str) -> int:
    """The number of the line of this file that ends with ``# comment``."""
    lines = HERE.read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if line.endswith(f"  # {comment}"))


@contextmanager
def free_memory(nbytes: int | None) -> Iterator[None]:
    """Leave ``nbytes`` of the device's memory free; None takes the limit away."""
    gc.collect()
    limit = MEMORY.limit
    MEMORY.limit = None if nbytes is None else MEMORY.live + nbytes
    runtime().meter.refresh()
    try:
        yield
    finally:
        MEMORY.limit = limit
        runtime().meter.refresh()


def peak_over_live() -> int:
    """Peak since the last call beyond what is live now; a new peak starts here."""
    beyond = MEMORY.peak - MEMORY.live
    torch.accelerator.reset_peak_memory_stats()
    return beyond


def test_tiles_are_filled_up() -> None:
    """129 rows of 3 bfloat16 take what the TPU compiler gives them, and ``memory_allocated`` tells so."""
    gc.collect()
    before = torch.accelerator.memory_allocated()
    x = torch.ones(129, 3, dtype=torch.bfloat16, device="tpu")
    assert torch.accelerator.memory_allocated() - before == 4 * 256 * 2
    assert x.untyped_storage().nbytes() == 129 * 3 * 2


def test_only_whole_contiguous_targets_are_reused() -> None:
    """In place over a whole tensor costs no memory; through a strided view the device makes a second tensor meanwhile."""
    x = torch.ones(MIB, device="tpu")
    peak_over_live()
    x.add_(1)
    assert peak_over_live() == 0
    x.view(1024, 1024).mul_(2)
    assert peak_over_live() == 0
    x[::2].add_(1)
    assert peak_over_live() >= 4 * MIB
    keeper = x.detach()
    saved = cell_of(keeper)
    assert saved is not None
    held = saved.value
    x.add_(1)
    assert peak_over_live() == 4 * MIB
    del held


def test_factories_count_once() -> None:
    """``torch.zeros`` is an empty tensor that is filled: it needs its memory once, and fits where it fits once."""
    with free_memory(6 * MIB):
        x = torch.zeros(MIB, device="tpu")
        assert x[0].item() == 0
        assert torch.arange(float(MIB // 4), device="tpu")[1].item() == 1


def test_temporaries_and_results_make_the_peak() -> None:
    """A result counts while its operands live, also when it is dropped at once."""
    x = torch.ones(MIB, device="tpu")
    peak_over_live()
    x + 1
    assert peak_over_live() >= 4 * MIB


def test_out_of_memory_is_raised_at_the_read() -> None:
    """64 GiB do not fit a v5e: nothing is computed, the read raises, and names op, line, remedy and who holds the memory."""
    gc.collect()
    before = MEMORY.live
    small = torch.ones(MIB, device="tpu")  # holder
    large = torch.ones(1 << 16, 1 << 18, device="tpu")  # large
    total = (large + 1).sum()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        total.item()  # read
    text = str(caught.value)
    assert text.startswith(
        "local_scalar_dense(): the TPU ran out of memory while awaiting the materialization of value"
    )
    assert "Error allocating device buffer: Attempting to allocate 64.00G. That was not possible. There are" in text
    assert f"aten.ones.default issued at {__file__}:{line_with('large')}" in text
    assert f"read at {__file__}:{line_with('read')}" in text
    assert f"4.00M float32[1048576] by aten.ones.default at {__file__}:{line_with('holder')}" in text
    assert "EMUTPU_HBM=unlimited" in text
    assert "checkpoint" in text
    del large, total, caught
    gc.collect()
    assert MEMORY.live == before + 4 * MIB
    assert (small + 1)[0].item() == 2


def test_a_failed_tensor_holds_no_memory() -> None:
    """What could not be allocated is not counted: everything else goes on, and writing it anew works."""
    x = torch.ones(2 * MIB, device="tpu")
    with free_memory(4 * MIB):
        before = MEMORY.live
        y = x * 2
        cell = cell_of(y)
        assert cell is not None
        assert cell.value.__class__ is ErrorBuffer
        assert MEMORY.live == before
        assert (torch.ones(4, device="tpu") + 1).tolist() == [2, 2, 2, 2]
    with pytest.raises(torch.OutOfMemoryError, match=r"synchronize\(\): the TPU ran out of memory"):
        torch.accelerator.synchronize()  # nobody has read it
    torch.accelerator.synchronize()
    y.fill_(3)
    assert MEMORY.live == before + 8 * MIB
    assert y[0].item() == 3


def test_out_of_memory_in_a_transfer() -> None:
    """A copy to the device that does not fit raises where it is read, with the line that sent it."""
    host = torch.zeros(2 * MIB)
    with free_memory(MIB):
        x = host.to("tpu")  # sent
        with pytest.raises(torch.OutOfMemoryError, match=r"Attempting to allocate 8\.00M") as caught:
            x.cpu()
    assert f"{__file__}:{line_with('sent')}" in str(caught.value)


def test_without_a_limit() -> None:
    """Unlimited memory goes on past the chip's, and the peak tells how far."""
    with free_memory(MIB):
        limit = MEMORY.limit
        assert limit is not None
        with free_memory(None):
            torch.accelerator.reset_peak_memory_stats()
            x = torch.ones(MIB, device="tpu") + 1
            assert x[0].item() == 2
            assert torch.accelerator.max_memory_allocated() >= limit + 7 * MIB
