"""What stands in the way on the chip: kernels, memory at full size, sizes that depend on values."""

from __future__ import annotations

import json
import sys

import pytest

from emutpu.conformance import estimates, pool, prediction
from emutpu.conformance.pool import Limits
from emutpu.conformance.prediction import Memory
from emutpu.conformance.torchvision_schemas import declare

declare()
LLAMA = "transformers/LlamaForCausalLM"
GIB = 2**30
SIZES = Memory(
    16 * GIB, {LLAMA: {"parameters": 7 * 10**9, "bytes": 14 * GIB}, "timm/x": {"parameters": 10, "bytes": GIB}}
)


def predict(ops=("aten.mm.default",), mode="strict", sizes=SIZES, builder="transformers", program=LLAMA, model_id=None):
    """The prediction of a Llama, but for what the test changes."""
    return prediction.predict(program, mode, ops, sizes, builder=builder, model_id=model_id)


def test_nothing_in_the_way():
    """Kernels are there and it fits."""
    assert predict() == prediction.Prediction((), (), (), 14 * GIB, "default configuration")


def test_missing_kernels():
    """Named, and what emutpu launches for `nonzero` is none."""
    found = predict(["aten.addbmm.default", "aten.nonzero_static.default"])
    assert found.limits == ("missing kernel: addbmm",)
    assert found.missing_kernels == ("addbmm",)


@pytest.mark.parametrize(
    ("model_id", "fits", "told"),
    [
        (None, True, "default configuration"),
        ("a/tiny", True, "default configuration"),
        ("a/Llama-7B", True, "id"),
        ("a/Llama-13b-chat", False, "id"),
        ("a/Llama-70B-125m", False, "id"),
    ],
)
def test_memory_of_a_row(model_id, fits, told):
    """The program's estimate, scaled to what the id names."""
    found = predict(model_id=model_id)
    assert found.size == told
    assert (found.limits == ()) is fits
    if not fits:
        assert found.limits[0].startswith("memory: ")
        assert f"GiB of 16.0 GiB ({told})" in found.limits[0]


def test_memory_that_nobody_estimated():
    """It is not judged, and says so by having no figure."""
    assert predict(sizes=None, model_id="a/x-70B") == prediction.Prediction((), (), (), None, None)
    assert predict(program="transformers/Other").bytes is None
    assert predict(program="timm/x", builder="timm", model_id="a/x-70b").size == "architecture"


@pytest.mark.parametrize(
    ("mode", "limited"), [("strict", False), ("defer", False), ("compile", True), ("bounded", True)]
)
def test_static_shapes(mode, limited):
    """Sizes that depend on values: eager modes wait for them, a compiled program cannot have them."""
    found = predict(["aten.nonzero.default", "aten.nonzero_static.default", "aten._unique2.default"], mode)
    assert found.data_dependent == ("_unique2", "nonzero")
    assert (found.limits == ("static shapes: _unique2", "static shapes: nonzero")) is limited


@pytest.mark.parametrize(
    ("model_id", "count"),
    [
        ("meta-llama/Llama-3.1-70B-Instruct", 70e9),
        ("facebook/opt-125m", 125e6),
        ("mistralai/Mixtral-8x7B-v0.1", 56e9),
        ("Qwen/Qwen3-30B-A3B", 30e9),
        ("Qwen/Qwen2.5-0.5B", 0.5e9),
        ("LiquidAI/LFM2.5-350M-Base", 350e6),
        ("scchiu/gpt_oss_120b_lora_v1", 120e9),
        ("openai-community/gpt2-xl", None),
        ("tiiuae/x-4bit", None),
        ("70b-org/x", None),
    ],
)
def test_parameters_that_an_id_names(model_id, count):
    """Billions and millions, of all experts, the largest."""
    assert prediction.named_parameters(model_id) == count


def entry(program, predicted, *limits, emulated=True, size=1):
    """A row of a document."""
    return {
        "program": program,
        "mode": "strict",
        "emulated": emulated,
        "predicted_on_chip": predicted,
        "prediction_limits": list(limits),
        "full_size_bytes": size,
    }


def test_summary():
    """Rows by what stands in their way; a program is predicted when one of its rows is."""
    rows = [
        entry("a", True),
        entry("a", False, "memory: 2 of 1"),
        entry("b", False, "memory: 2 of 1", "missing kernel: x", "missing kernel: y"),
        entry("c", False, emulated=False, size=None),
        entry("d", None, emulated=None),
    ]
    assert prediction.summary(rows, SIZES) == {
        "programs": {"attempted": 3, "passed": 1},
        "limits": {"not emulated": 1, "memory": 2, "missing kernel": 1},
        "memory_judged": 3,
        "device_bytes": 16 * GIB,
    }


# --------------------------------------------------------------------------------------------------- estimates

STAND_IN = """
import json, os, sys
for line in sys.stdin:
    task = json.loads(line)
    found = {"parameters": 5, "weight_bytes": 20, "bytes": 30, "dtype": "float32", "forward": True, "note": None, "seconds": 1.0}
    bad = task["program"].endswith("resnet18")
    answer = {"program": task["program"], "mode": task["mode"], "outcome": "corpus bug" if bad else "pass", "resident_bytes": 1,
              "error": os.environ["EMUTPU_CLIENT"] if bad else None, "estimate": None if bad else found}
    print(json.dumps(answer), flush=True)
"""


def estimate(folder, only, fresh=True, suite="smoke"):
    """A pass over programs of the suite."""
    seen = []
    found = estimates.estimate(
        suite,
        only,
        folder,
        chip="v5e",
        jobs=1,
        limits=Limits(120, 4 * GIB),
        progress=lambda done, total: seen.append((done, total)),
        fresh=fresh,
    )
    return found, seen


def test_a_pass_is_kept_and_not_repeated(monkeypatch, tmp_path):
    """Lines in a file, also of what has no estimate; half a line of a killed pass is made again."""
    monkeypatch.setattr(estimates, "_PACKAGED", "none.jsonl")
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", STAND_IN])
    monkeypatch.setattr(estimates, "_PACKAGED", "nothing.jsonl")
    found, seen = estimate(tmp_path, "timm/res*")
    assert found == {
        "suite": "smoke",
        "programs": 2,
        "estimated": 1,
        "forward": 1,
        "failed": {"timm/resnet18": "corpus bug: dry_run"},
    }
    assert seen == [(1, 2), (2, 2)]
    again, seen = estimate(tmp_path, "timm/res*", fresh=False)
    assert (again, seen) == (found, [])
    path = tmp_path / estimates.FILE
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert estimate(tmp_path, "timm/res*", fresh=False)[1] == [(1, 1)]
    memory = estimates.memory(tmp_path, 16 * GIB)
    assert memory.estimates["timm/resnext50_32x4d"]["bytes"] == 30
    assert memory.limit == 16 * GIB


def test_real_estimates(tmp_path):
    """GPT-2 has 124 million parameters, its head tied; the forward of a network takes more than its weights."""
    pytest.importorskip("timm", reason="the library is not installed")
    found, _ = estimate(tmp_path, "*/[rG]*[t2][L1]*[8l]")
    assert found["failed"] == {}
    lines = {line["program"]: line for line in map(json.loads, (tmp_path / estimates.FILE).read_text().splitlines())}
    gpt2, resnet = lines["transformers/GPT2LMHeadModel"], lines["timm/resnet18"]
    assert gpt2["parameters"] == 124_439_808
    assert gpt2["dtype"] == "bfloat16"
    assert gpt2["weight_bytes"] == 2 * gpt2["parameters"]
    assert resnet["parameters"] == 11_689_512
    assert resnet["forward"]
    assert 1.1 < resnet["bytes"] / resnet["weight_bytes"] < 3
