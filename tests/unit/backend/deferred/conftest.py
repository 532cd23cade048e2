"""Everything in this folder runs in DEFER_AND_FUSE, on an empty queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from emutpu.backend.deferred.log import LOG, RegionRecord
from emutpu.backend.deferred.queue import current_queue
from emutpu.backend.options import EagerMode, override
from emutpu.backend.runtime import runtime

Regions = Callable[[], list[RegionRecord]]


@pytest.fixture(autouse=True)
def deferring() -> Iterator[None]:
    """Defer in this thread; what a test leaves pending is done before the next."""
    torch.ones(1, device="tpu").add_(1)  # the lowerings are loaded
    runtime().materialize("synchronize()")
    with override(mode=EagerMode.DEFER_AND_FUSE):
        current_queue().detector.reset()
        yield
    runtime().materialize("synchronize()")


@pytest.fixture
def regions() -> Regions:
    """``regions()``: what was launched since the test began, or since the last call."""
    seen = [LOG.launched]

    def since() -> list[RegionRecord]:
        found = LOG.records(seen[0])
        seen[0] = LOG.launched
        return found

    return since
