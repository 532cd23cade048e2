"""``emutpu conformance``: a program of the suite from the command line to the site, and comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

Valid = Callable[[Any, str], dict[str, Any]]


def test_list(emutpu: Command, valid: Valid) -> None:
    """Programs with the models that they stand for, without importing any of the libraries."""
    result = emutpu("conformance", "list", "--suite", "full", "--only", "timm/resnet18", "--json", "-")
    assert result.returncode == 0, result.stderr
    document = valid(result.stdout, "conformance-list")
    assert document["programs"] == 1
    assert document["rows"] == len(document["models"]) > 3
    assert {"timm/resnet18.a1_in1k"} <= {model["id"] for model in document["models"]}


def test_run_report_and_compare(emutpu: Command, valid: Valid, tmp_path: Path) -> None:
    """One program in two modes: both tiers passed, a site, no change against itself, and a regression has its name."""
    pytest.importorskip("transformers")
    options = ("--only", "*/DistilBertForQuestionAnswering", "--mode", "strict", "--mode", "defer")
    result = emutpu("conformance", "run", *options, "--results", "results", "--json", "run.json")
    assert result.returncode == 0, result.stderr + result.stdout
    document = valid((tmp_path / "run.json").read_text(), "conformance")
    assert document["of_programs"] == {"pass": 2}
    assert document["tier1"]["passed"] == document["tier2"]["passed"] == document["rows"] > 0
    strict, defer = (next(m for m in document["models"] if m["mode"] == mode) for mode in ("strict", "defer"))
    assert strict["fingerprint"] == defer["fingerprint"]
    assert max(strict["max_rel_error"], defer["max_rel_error"]) < 1e-5
    assert min(strict["compiles"], defer["compiles"], strict["ops"], defer["ops"]) > 0
    assert strict["fallbacks"] == 0

    reported = emutpu("conformance", "report", "--results", "results", "--out", "site")
    assert reported.returncode == 0, reported.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    assert len(list((tmp_path / "site" / "programs").iterdir())) == 2

    assert emutpu("conformance", "compare", "1", "run.json", "--results", "results").returncode == 0
    for model in document["models"]:
        if model["mode"] == "defer":
            model["status"] = "mismatch"
    (tmp_path / "worse.json").write_text(json.dumps(document))
    compared = emutpu("conformance", "compare", "run.json", "worse.json", "--json", "-")
    assert compared.returncode == 1
    worse = valid(compared.stdout, "conformance-compare")["worse"]
    assert [(entry["program"], entry["mode"]) for entry in worse] == [
        ("transformers/DistilBertForQuestionAnswering", "defer")
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--shard", "3/2"), "i/n"),
        (("run", "--only", "nothing/*"), "no program"),
        (("run", "--chip", "none"), "no device"),
        (("report", "--results", "nowhere"), "holds no runs"),
        (("compare", "a.json", "b.json"), "cannot be read"),
    ],
)
def test_wrong_usage(emutpu: Command, arguments: tuple[str, ...], says: str) -> None:
    """Two lines and exit code 2, never a traceback."""
    result = emutpu("conformance", *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
