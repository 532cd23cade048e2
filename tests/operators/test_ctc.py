"""Connectionist temporal classification against CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, check_backward, check_forward

from emutpu.backend.runtime import runtime

TIME, BATCH, CLASSES, LONGEST = 12, 4, 6, 4
TOLERANCE = (1e-4, 2e-5)
generator = torch.Generator().manual_seed(0)
SCORES = torch.randn(TIME, BATCH, CLASSES, generator=generator)
TARGETS = torch.randint(1, CLASSES, (BATCH, LONGEST), generator=generator)
TARGETS[0] = torch.tensor([2, 2, 3, 3])  # equal neighbours need a blank between them


def _run(device: str, scores: torch.Tensor, targets: torch.Tensor, *lengths: Any, **options: Any) -> Any:
    """The loss, and the gradient of the scores."""
    leaf = scores.to(device).requires_grad_() if device != "cpu" else scores.clone().requires_grad_()
    loss = F.ctc_loss(leaf.log_softmax(-1), targets.to(device), *lengths, **options)
    loss.sum().backward()
    return loss.detach(), leaf.grad


def _same(*arguments: Any, **options: Any) -> None:
    assert_same(
        _run("tpu", *arguments, **options), _run("cpu", *arguments, **options), what="ctc_loss", tolerance=TOLERANCE
    )


def test_database() -> None:
    """PyTorch's samples."""
    check_forward("nn.functional.ctc_loss", torch.float32, limit=6)
    check_backward("nn.functional.ctc_loss", limit=4, tolerance=TOLERANCE)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_lengths(reduction: str) -> None:
    """Sequences and targets of different lengths, an empty target among them."""
    _same(SCORES, TARGETS, torch.tensor([12, 9, 12, 5]), torch.tensor([4, 2, 0, 3]), reduction=reduction)


def test_concatenated_targets() -> None:
    """Targets in one row, lengths as lists, and a blank that is not 0."""
    lengths = [4, 2, 0, 3]
    row = torch.cat([TARGETS[n, :length] for n, length in enumerate(lengths)])
    _same(SCORES, row, [12, 9, 12, 5], lengths)
    _same(SCORES, row - 1, [12, 9, 12, 5], lengths, blank=CLASSES - 1)


@pytest.mark.parametrize("zero_infinity", [True, False])
def test_impossible_alignments(zero_infinity: bool) -> None:
    """Targets longer than their sequences: an infinite loss, and a gradient of NaN or, on demand, zero."""
    lengths = torch.tensor([12, 2, 3, 1]), torch.tensor([4, 4, 0, 1])
    _same(SCORES, TARGETS, *lengths, zero_infinity=zero_infinity, reduction="none")


def test_no_time() -> None:
    """Sequences of no length: certain for the empty target, impossible for others."""
    lengths = torch.tensor([12, 0, 0, 1]), torch.tensor([4, 4, 0, 1])
    given = SCORES.log_softmax(-1)
    expected = F.ctc_loss(given, TARGETS, *lengths, reduction="none")
    assert_same(F.ctc_loss(given.to("tpu"), TARGETS.to("tpu"), *lengths, reduction="none"), expected, what="no time")


def test_other_lengths_do_not_recompile() -> None:
    """Lengths are inputs."""
    _run("tpu", SCORES, TARGETS, torch.tensor([12, 9, 12, 5]), torch.tensor([4, 2, 0, 3]))
    misses = runtime().cache.misses
    _run("tpu", SCORES, TARGETS, torch.tensor([11, 9, 10, 5]), torch.tensor([4, 1, 0, 3]))
    assert runtime().cache.misses == misses


def test_lengths_that_do_not_fit() -> None:
    """PyTorch's own messages."""
    given = SCORES.log_softmax(-1).to("tpu")
    with pytest.raises(RuntimeError, match="at most 12"):
        F.ctc_loss(given, TARGETS.to("tpu"), [13, 9, 12, 5], [4, 2, 0, 3])
    with pytest.raises(RuntimeError, match="size batch_size"):
        F.ctc_loss(given, TARGETS.to("tpu"), [12, 9], [4, 2, 0, 3])
