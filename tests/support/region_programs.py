"""Programs recorded in this process: what `emutpu regions` does in one of its own."""

from __future__ import annotations

import gc
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from emutpu.backend.deferred.log import LOG
from emutpu.backend.deferred.queue import current_queue
from emutpu.backend.deferred.recorder import Recorder
from emutpu.backend.options import EagerMode, override
from emutpu.backend.runtime import runtime
from emutpu.cli._launch import Outcome
from emutpu.cli._regions import advice, analysis, collect

Document = dict[str, Any]
Recorded = Callable[[str], Document]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    """A recorder that watches, in DEFER_AND_FUSE, on an empty queue."""
    torch.ones(1, device="tpu").add_(1)
    runtime().materialize("synchronize()")
    made = Recorder(tmp_path, inputs=True)
    with override(mode=EagerMode.DEFER_AND_FUSE):
        current_queue().detector.reset()
        LOG.observer = made
        try:
            yield made
        finally:
            LOG.observer = None
            gc.enable()
            gc.collect()
    runtime().materialize("synchronize()")


@pytest.fixture
def recorded(recorder: Recorder, tmp_path: Path) -> Recorded:
    """``recorded(text)``: run a program and give the document of its regions, with advice."""

    def run(text: str) -> Document:
        path = tmp_path / "program.py"
        path.write_text(text)
        runpy.run_path(str(path), run_name="program")
        LOG.observer = None
        recorder.write()
        recording = collect.Recording(Outcome(0, None, 0.0, ()), (recorder.document(),), tmp_path)
        document = collect.document_of(recording, "v5e", ["program.py"])
        regions = document["regions"]
        analysis.add_steps(regions)
        analysis.add_changes(regions)
        analysis.add_costs(document, tmp_path, "v5e")
        document["summary"] = analysis.summary(document)
        document["advice"] = advice.advise(regions, recording.issued, document["summary"]["hit_rate"])
        return document

    return run


@pytest.fixture
def kinds(recorded: Recorded) -> Callable[[str], dict[str, Document]]:
    """``kinds(text)``: the advice that a program gets, by kind."""
    return lambda text: {item["kind"]: item for item in recorded(text)["advice"]}
