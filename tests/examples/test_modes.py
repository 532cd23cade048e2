"""The example programs in Debug and DEFER_AND_FUSE: equal to the CPU, and found again once a loop is steady."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from emutpu.backend.deferred.log import LOG
from emutpu.backend.deferred.queue import current_queue
from emutpu.examples import bert_finetuning, digits_cnn, llama_generation, lstm_language_model, timm_training
from tests.examples.test_examples import PARITY

# Steps, and how many it takes until all is known: the second first has optimizer state. Where the repeated-op rule cuts
# in the backward pass, the loss is there before it is read, and a step's end is done with the next step's first read.
TRAININGS: dict[str, tuple[Callable[..., list[float]], int, int]] = {
    "digits": (digits_cnn.train, 5, 2),
    "bert": (bert_finetuning.train, 5, 3),
    "lstm": (lstm_language_model.train, 5, 3),
    "timm": (timm_training.train, 4, 2),
}
CI = {("digits", "DEFER_AND_FUSE"), ("lstm", "DEFER_NEVER_AND_LAUNCH_BLOCKING")}
MODES = ("DEFER_AND_FUSE", "DEFER_NEVER_AND_LAUNCH_BLOCKING")


def _cases(*names: str) -> list[Any]:
    return [
        pytest.param(name, mode, id=f"{name}-{mode.lower()}", marks=() if (name, mode) in CI else pytest.mark.nightly)
        for name in names
        for mode in MODES
    ]


@pytest.fixture(autouse=True)
def _highest() -> Iterator[None]:
    """CPU is the oracle at six-pass matmuls."""
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        yield


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "mode"), _cases(*TRAININGS))
def test_losses_follow_the_cpu(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every loss agrees. In DEFER_AND_FUSE nothing is compiled once the loop is steady."""
    train, steps, learning = TRAININGS[name]
    expected = train("cpu", steps, 0)
    ends: list[int] = []
    item = torch.Tensor.item

    def read(tensor: torch.Tensor) -> Any:
        value = item(tensor)
        if tensor.device.type == "tpu":  # AdamW reads its step counters on the host
            ends.append(LOG.launched)
        return value

    monkeypatch.setattr(torch.Tensor, "item", read)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode[mode]):
        current_queue().detector.reset()
        actual = train("tpu", steps, 0)
    assert actual == pytest.approx(expected, rel=PARITY)
    assert len(ends) == steps
    if mode == "DEFER_AND_FUSE":
        later = [region for region in LOG.records(ends[learning - 1]) if region.index < ends[-1]]
        assert len(later) >= steps - learning
        assert [f"{r.reason}, {len(r.ops)} ops at {r.ops[0].location}" for r in later if not r.hit] == []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("name", "mode"), _cases("llama"))
def test_generation_gives_equal_tokens(name: str, mode: str) -> None:
    """The same token ids."""
    expected = llama_generation.generate("cpu", 8, 0)
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode[mode]):
        assert llama_generation.generate("tpu", 8, 0) == expected
