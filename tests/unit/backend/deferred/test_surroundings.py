"""Streams, forks and data loaders while work is pending."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from emutpu.backend.runtime import runtime
from emutpu.backend.streams import current_stream, set_stream
from emutpu.simulator.clients import make_client
from emutpu.simulator.topology import single_chip


def test_streams_have_lists_of_their_own(regions) -> None:
    """Entering and leaving a stream does what is pending; a value of another stream is done when it is read here."""
    x = torch.ones(2).to("tpu")
    y = x * 2
    stream = torch.tpu.Stream()
    with torch.tpu.stream(stream):
        (entered,) = regions()
        z = y.sin()
        assert regions() == []
    (left,) = regions()
    assert (entered.reason, left.reason) == ("synchronize()", "synchronize()")
    assert torch.allclose(z.cpu(), torch.full((2,), 2.0).sin())
    before = current_stream()
    w = x * 3
    set_stream(stream)
    try:
        v = w + 1  # w is pending on the stream before
        assert v.tolist() == [4, 4]
        pending = x * 5
    finally:
        set_stream(before)
    assert (pending + w).tolist() == [8, 8]


def test_events_do_what_is_pending(regions) -> None:
    """Recording an event is a read, querying it is none."""
    y = torch.ones(2).to("tpu") * 2
    event = torch.tpu.Event()
    event.record()
    (region,) = regions()
    assert region.reason == "synchronize()"
    y = y + 1
    assert event.query()
    assert regions() == []
    assert y.tolist() == [3, 3]


_FORK = """
import os, sys, torch
x = torch.ones(3, device="tpu")
print(x.sum().item())
pending = (x * 2).sin()
child = os.fork()
if child == 0:
    told = 0
    for use in (lambda: pending.cpu(), lambda: x + 1, lambda: torch.ones(2, device="tpu"), torch.accelerator.synchronize):
        try:
            use()
        except RuntimeError as error:
            told += "forked subprocess" in str(error)
    del pending, x
    os._exit(40 + told)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(round(pending.sum().item(), 4))
"""

_LOADER = """
import torch
from torch.utils.data import DataLoader, TensorDataset

total = torch.zeros((), device="tpu")
print(total.item())
data = TensorDataset(torch.arange(12.0).reshape(12, 1))
for workers in (0, 2):
    for epoch in range(2):
        for (batch,) in DataLoader(data, batch_size=4, num_workers=workers):
            total += (batch.to("tpu") * 2).sum()
print(total.item())
"""


def _run(program: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "TORCH_TPU_DEFER_AND_FUSE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_forked_child_is_told() -> None:
    """With work pending: every use in the child raises and names the remedy, it exits, and the parent's work goes on."""
    assert _run(_FORK) == ["3.0", "44", str(round(3 * torch.tensor(2.0).sin().item(), 4))]


def test_data_loaders_with_workers() -> None:
    """Workers that are forked while work is pending load batches; the sums are right."""
    assert _run(_LOADER) == ["0.0", str(float(4 * 2 * sum(range(12))))]


def test_random_states_leave_with_their_client() -> None:
    """What a draw left on the device is of no use to another client: its draws begin from the seed and the offset."""
    real = runtime().client
    torch.manual_seed(7)
    expected = [torch.rand(3, device="tpu").tolist() for _ in range(3)]
    torch.manual_seed(7)
    found = [torch.rand(3, device="tpu").tolist()]
    try:
        runtime().replace_client(make_client("interpreter", single_chip("v5e")))
        found.append(torch.rand(3, device="tpu").tolist())
    finally:
        runtime().replace_client(real)
    found.append(torch.rand(3, device="tpu").tolist())
    assert found == expected
