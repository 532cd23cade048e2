"""Which overloads have a kernel: those that models use, and none that the device lacks.

``tests/data`` holds how many of 2,646 traced models use each overload (forward alone, and with a training step), and the
overloads that TorchTPU 0.2.0 has no kernel for.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from emutpu.backend import registration
from emutpu.backend.lowering import LOWERINGS

DATA = Path(__file__).parents[2] / "data"

# The traces were made on a CPU; the device reaches these ops under other names.
ELSEWHERE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_fused_attention_overrideable_backward",
    "convolution": "convolution_overrideable",
    "convolution_backward": "convolution_backward_overrideable",
    "mkldnn_rnn_layer": "_thnn_fused_lstm_cell",
    "mkldnn_rnn_layer_backward": "_thnn_fused_lstm_cell_backward_impl",
}
COMPOSITE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


# Non-functional composites that call nothing which could be missing.
COMPLETE = frozenset({"as_strided_", "bernoulli.p", "new_empty_strided"})
# Of the overloads that models use, these wait for their lowerings.
NOT_YET = frozenset({"_fft_c2c", "_fft_c2r", "_fft_r2c"})


def _covered(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = ELSEWHERE.get(name, name)
    if name in COMPLETE or has(f"aten::{name}", "PrivateUse1"):
        return True
    return not _is_structured(name) and any(has(f"aten::{name}", key) for key in COMPOSITE[:2])


@pytest.mark.parametrize("histogram", ["model_op_histogram_train.json", "model_op_histogram_forward.json"])
def test_overloads_of_real_models(histogram: str) -> None:
    """Every overload that the traced models use has a kernel, decomposes, or is beyond the device too."""
    registration.load()
    listed = [name for name in json.loads((DATA / histogram).read_text()) if name.startswith("aten.")]
    names = [name.removeprefix("aten.").removesuffix(".default") for name in listed]
    assert len(names) > 250
    open_names = {name for name in names if not _covered(name)}
    beyond = {name for name in open_names if name in LOWERINGS and LOWERINGS[name].beyond}
    assert open_names - beyond - NOT_YET == set()


def test_composites_taken_for_complete() -> None:
    """What the coverage test takes for complete does run."""
    x = torch.rand(3, 4).to("tpu")
    assert x.new_empty_strided((2, 3), (3, 1)).stride() == (3, 1)
    assert torch.equal(x.clone().as_strided_((2, 2), (1, 2)).cpu(), x.cpu().as_strided((2, 2), (1, 2)))
    assert set(torch.bernoulli(x, 0.5).cpu().flatten().tolist()) <= {0.0, 1.0}


def test_rows_beyond_the_device_say_so() -> None:
    """A lowering that the device lacks is registered only when asked for: a test that passes here must pass there."""
    missing = set((DATA / "torchtpu_missing_overloads.txt").read_text().split())
    # A structured op reports its out= overload as missing, the one that its functional form calls.
    outs = {name.partition(".")[0] for name in missing if name.endswith((".out", ".values", ".X", ".L"))}
    undeclared = []
    for row in LOWERINGS.values():
        base, _, variant = row.name.partition(".")
        structured = not variant and base in outs and _is_structured(row.name)
        if (row.name in missing or structured) and row.dispatched and not row.beyond:
            undeclared.append(row.name)
    assert undeclared == []


def _is_structured(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return bool(has(f"aten::{name}", COMPOSITE[2]))
