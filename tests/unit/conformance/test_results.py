"""What is kept of whole runs, in ``docs/results``."""

import json
from pathlib import Path

import pytest

from emutpu.conformance.manifest import programs
from tools import results

FOLDER = Path(__file__).parents[3] / "docs" / "results"
ANSWER = {
    "program": "timm/vit",
    "mode": "defer",
    "outcome": "crash",
    "error": "ValueError: no\n  at a line",
    "tier1": False,
    "tier2": None,
    "logit_error": 1.23456e-6,
    "gradient_error": None,
    "seconds": 1.26,
    "fingerprint": "0123",
    "ops": {"aten.add.Tensor": 3, "aten.nonzero.default": 2},
    "traceback": ["a", "b"],
}


def test_trimmed():
    """The first line of an error, values to two digits, nothing that is empty, ops that a prediction asks for; the last answer of two."""
    (kept,) = results.trimmed([json.dumps(ANSWER | {"outcome": "pass"}), json.dumps(ANSWER)])
    assert kept == {
        "program": "timm/vit",
        "mode": "defer",
        "outcome": "crash",
        "error": "ValueError: no",
        "tier1": False,
        "fingerprint": "0123",
        "ops": {"aten.nonzero.default": 2},
        "logit_error": 1.2e-6,
        "seconds": 1.3,
    }


def test_trimmed_again():
    """What was kept can be given again, and a worker that died named no ops."""
    (kept,) = results.trimmed([json.dumps(ANSWER)])
    assert list(results.trimmed([json.dumps(kept)])) == [kept]
    (died,) = results.trimmed([json.dumps({"program": "timm/vit", "mode": "defer", "outcome": "crash"})])
    assert "ops" not in died


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_kept_runs_hold_the_bounds(path):
    """Nearly every program of the manifest, each once; 99 % of the attempted pass tier 1, and of their representatives tier 2."""
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = [answer["program"] for answer in answers]
    assert len(set(names)) == len(names) > 0.95 * len(programs())
    assert set(names) <= programs().keys()
    attempted = [answer for answer in answers if answer["outcome"] not in {"not run", "corpus bug"}]
    first = [answer.get("tier1", False) for answer in attempted]
    assert sum(first) >= 0.99 * len(first)
    second = [answer.get("tier2", False) for answer in attempted if programs()[answer["program"]].representative]
    assert sum(second) >= 0.99 * len(second)
