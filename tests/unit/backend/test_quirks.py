"""Known bugs of TorchTPU 0.2.0: right results and one warning by default, the bugs when they are asked for."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))

from quirk_programs import PROGRAMS, outcome

from emutpu.backend import direct, options, quirks
from emutpu.backend.quirks import QUIRKS, QuirkWarning, guarded
from emutpu.backend.registration import load, registered
from tools import quirks as tool

BY_NAME = {quirk.name: quirk for quirk in QUIRKS}
ABORTS = "TorchTPU 0.2.0 aborts the process here"
WRONG: dict[str, Any] = {
    "tied-weights": False,
    "attention-masked-row": [[1.0, 2.0], [2.0, 4.0]],
    "attention-mask-gradient": "expected attn_mask not to require grad",
    "ctc-flat-targets": ABORTS,
    "pdist-gradient-one-row": True,
    "multinomial-seed": False,
    "index-gradient-apart": "another",
    "grid-gradient": [-1.0, -3.0],
    "avg-pool1d-gradient": [False, 1.0, 1.0],
    "replicate-pad-crop-gradient": ABORTS,
    "index-reduce": ABORTS,
    "batch-norm-out-bfloat16": ABORTS,
    "scatter-mean-integers": [-3, 5, 0],
    "index-select-scalar-index": "index_select(): expected index to be 1D, got shape []",
    "foreach-norm-nan": "2.0",
    "argmax-nan": [2, 0],
    "bfloat16-floor": [17.0, 17.0, 0.0],
}


def _kernels() -> set[str]:
    load()
    return {*registered(), *direct.COMPOSITES, *quirks.composites()}


def _flat(value: Any) -> list[Any]:
    """The leaves, as JSON would give them back."""
    return tree_leaves(json.loads(json.dumps(value)))


def test_the_table() -> None:
    """Names are unique; every row is reproduced, or says why not; every overload exists, and has our kernel."""
    assert len(BY_NAME) == len(QUIRKS)
    for quirk in QUIRKS:
        reproduced = quirk.effect is not None or quirk.silent or quirk.name == "tied-weights"
        assert reproduced != bool(quirk.missing), quirk.name
        for overload in quirk.overloads:
            base, _, variant = overload.partition(".")
            assert getattr(getattr(torch.ops.aten, base), variant or "default")
            assert overload in _kernels(), overload


def test_every_reproduced_bug_is_met() -> None:
    """A program for each that changes a result."""
    reproduced = {quirk.name for quirk in QUIRKS if not quirk.missing and not quirk.silent}
    assert reproduced == set(PROGRAMS) == set(WRONG)


@pytest.mark.parametrize("name", PROGRAMS)
def test_right_by_default_and_told_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's result, one warning that names the bug, the release, the line and the setting, and none the second time."""
    monkeypatch.setattr(quirks, "_told", set())
    with options.override(bounds_checks=BY_NAME[name].reads), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert _flat(outcome(name, "tpu")) == pytest.approx(_flat(outcome(name, "cpu")))
    told = [str(w.message) for w in caught if issubclass(w.category, QuirkWarning) and f"'{name}'" in str(w.message)]
    (text,) = told
    assert text.startswith("emutpu: TorchTPU 0.2.0 gets this wrong: ")
    assert "EMUTPU_QUIRKS=0.2.0" in text


@pytest.mark.parametrize("name", [quirk.name for quirk in QUIRKS if quirk.reads])
def test_values_are_read_only_where_costly_checks_are_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug that depends on values costs no read by default."""
    monkeypatch.setattr(quirks, "_told", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuirkWarning)
        outcome(name, "tpu")


def test_asked_for(passes: Any) -> None:
    """EMUTPU_QUIRKS=0.2.0 gives the release's results, and an exception in place of an abort."""
    printed = passes(
        f"""
        import json, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import torch
        from quirk_programs import PROGRAMS, outcome
        print(json.dumps({{name: outcome(name, "tpu") for name in PROGRAMS}}))
        """,
        EMUTPU_QUIRKS="0.2.0",
    )
    results = json.loads(printed.splitlines()[-1])
    for name, wrong in WRONG.items():
        right = json.loads(json.dumps(outcome(name, "cpu")))
        if wrong == "another":
            assert results[name] != right
            assert sum(results[name]) == sum(right)
        elif isinstance(wrong, str) and name != "foreach-norm-nan":
            assert wrong in results[name], name
            assert "quirk_programs.py" in results[name], name
        else:
            assert _flat(results[name]) == pytest.approx(_flat(wrong)), name
            assert results[name] != right, name


def test_only_the_reported_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of pdist and padded targets of CTC go to the kernel, here a stand-in."""
    monkeypatch.setattr(quirks, "reproduces", lambda release: True)
    gradient = guarded("_pdist_backward", lambda *_: "right")
    assert gradient(torch.ones(0), torch.ones(1, 3), 2.0, torch.ones(0)).isnan().all()
    assert gradient(torch.ones(1), torch.ones(2, 3), 2.0, torch.ones(1)) == "right"
    loss = guarded("_ctc_loss", lambda *_: "right")
    with pytest.raises(RuntimeError, match=ABORTS):
        loss(torch.ones(4, 1, 3), torch.tensor([1, 2]), [4], [2])
    assert loss(torch.ones(4, 1, 3), torch.tensor([[1, 2]]), [4], [2]) == "right"


def test_the_document() -> None:
    """docs/quirks.md is what the table says."""
    assert tool.TARGET.read_text(encoding="utf-8") == tool.rendered(), "run python -m tools.quirks"
