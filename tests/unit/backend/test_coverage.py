"""Which overloads have a kernel: those that models use, and none that the device lacks."""

from __future__ import annotations

import pytest
import torch

from emutpu import _facts as facts
from emutpu.backend import registration
from emutpu.backend.lowering import LOWERINGS
from emutpu.cli._coverage import covered, is_structured, targets

# Sparse and nested tensors, and a helper of quantisation-aware training.
NOT_YET = {
    "_fused_moving_avg_obs_fq_helper",
    "_nested_from_padded_tensor",
    "_nested_get_jagged_dummy",
    "_nested_get_lengths",
    "_nested_get_max_seqlen",
    "_nested_get_min_seqlen",
    "_nested_get_offsets",
    "_nested_get_ragged_idx",
    "_nested_get_values",
    "_nested_view_from_jagged",
}


@pytest.mark.parametrize("histogram", ["model_op_histogram_train.json", "model_op_histogram_forward.json"])
def test_overloads_of_real_models(histogram: str) -> None:
    """Every overload that the traced models use has a kernel, decomposes, or is beyond the device too."""
    registration.load()
    listed = [name for name in facts.histogram(histogram) if name.startswith("aten.")]
    names = [name.removeprefix("aten.").removesuffix(".default") for name in listed]
    assert len(names) > 250
    open_names = {name for name in names if not covered(name)}
    assert open_names - {name for name in open_names if name in LOWERINGS and LOWERINGS[name].beyond} == set()


def test_overloads_of_the_device() -> None:
    """What TorchTPU 0.2.0 has a kernel for is here too, but for a list that does not grow."""
    registration.load()
    target = targets()["torchtpu"]
    assert target.total == 673
    assert set(target.missing) == NOT_YET


def test_composites_taken_for_complete() -> None:
    """What the coverage test takes for complete does run."""
    x = torch.rand(3, 4).to("tpu")
    assert x.new_empty_strided((2, 3), (3, 1)).stride() == (3, 1)
    assert torch.equal(x.clone().as_strided_((2, 2), (1, 2)).cpu(), x.cpu().as_strided((2, 2), (1, 2)))
    assert torch.equal(torch.ops.aten.copy(x, torch.ones(4, device="tpu")).cpu(), torch.ones(3, 4))
    assert set(torch.bernoulli(x, 0.5).cpu().flatten().tolist()) <= {0.0, 1.0}


def test_rows_beyond_the_device_say_so() -> None:
    """A lowering that the device lacks is registered only when asked for: a test that passes here must pass there."""
    missing = set(facts.read("torchtpu_missing_overloads.txt"))
    # A structured op reports its out= overload as missing, the one that its functional form calls.
    outs = {name.partition(".")[0] for name in missing if name.endswith((".out", ".values", ".X", ".L"))}
    undeclared = []
    for row in LOWERINGS.values():
        base, _, variant = row.name.partition(".")
        structured = not variant and base in outs and is_structured(row.name)
        if (row.name in missing or structured) and row.dispatched and not row.beyond:
            undeclared.append(row.name)
    assert undeclared == []


def test_derived_overloads_that_the_device_lacks() -> None:
    """A derived out= overload is left out where the device has none: ``index_select`` writes nowhere."""
    registration.load()
    missing = set(facts.read("torchtpu_missing_overloads.txt"))
    assert missing & set(registration.registered()) == set()
    x = torch.rand(3, 4, device="tpu")
    with pytest.raises(NotImplementedError, match=r"index_select\.out"):
        torch.index_select(x, 0, torch.tensor([0], device="tpu"), out=torch.empty(0, device="tpu"))
