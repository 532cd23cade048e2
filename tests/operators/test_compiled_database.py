"""PyTorch's op database through ``torch.compile``: float32's first sample, forward and backward, as eager."""

from __future__ import annotations

import pytest
import torch
from compiled_database import WITHOUT_GRAPH, judge

from emutpu.cli import _sweep

_CI_SAMPLE = 40  # one entry in so many runs in CI, all of them at night
DATABASE = {name: op for name, op in _sweep.database().items() if torch.float32 in op.supported_dtypes("cpu")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if not number % _CI_SAMPLE else [pytest.mark.nightly])
        for number, name in enumerate(DATABASE)
    ],
)
def test_compiled_as_eager(name) -> None:
    """What passes eagerly passes compiled, and in a graph but for the named ops; those have none."""
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        verdicts = judge(DATABASE[name])
    for kind, verdict in verdicts.items():
        if verdict.eager != _sweep.OK:
            continue
        assert verdict.compiled == _sweep.OK, f"{kind}: {verdict.message}"
        broken = bool(verdict.breaks) and not verdict.graphs
        assert broken == (name in WITHOUT_GRAPH), f"{kind}: {verdict}"


def test_few_ops_are_named() -> None:
    """At most 35 entries run without a graph, all of them in the database."""
    assert len(WITHOUT_GRAPH) <= 35
    assert set(WITHOUT_GRAPH) <= set(DATABASE)
