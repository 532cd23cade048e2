"""``emutpu conformance``: a program of the suite from the command line to the site, and comparisons."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Command

from emutpu.cli import conformance
from emutpu.conformance import runner
from emutpu.conformance.pool import Limits

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
    report = valid((tmp_path / "site" / "report.json").read_text(), "conformance")
    assert [run["run"] for run in report["trends"]["runs"]] == [1]
    costs = {result["mode"]: result["modelled"] for result in report["results"]}
    assert set(costs["strict"]) == {"v5e", "v5p", "v6e", "v7"}
    for mode, by_chip in costs.items():
        assert all(cost["seconds"] > 0 and cost["unmodelled"] == 0 for cost in by_chip.values()), mode
        assert by_chip["v7"]["flops"] == by_chip["v5e"]["flops"] > 0
    assert costs["defer"]["v5e"]["launches"] < costs["strict"]["v5e"]["launches"]
    assert all(result["peak_hbm_bytes"] > 0 for result in report["results"])
    assert next(r for r in report["results"] if r["mode"] == "defer")["region_reasons"][".cpu()"] > 0
    assert report["hardware"] is None

    assert emutpu("conformance", "compare", "1", "run.json", "--results", "results").returncode == 0
    for model in document["models"]:
        if model["mode"] == "defer":
            model["status"] = "mismatch"
    (tmp_path / "worse.json").write_text(json.dumps(document))
    compared = emutpu("conformance", "compare", "run.json", "worse.json", "--json", "-")
    assert compared.returncode == 1
    found = valid(compared.stdout, "conformance-compare")
    assert found["agreement"] == {"both pass": 1, "both fail": 0, "before alone": 1, "after alone": 0}
    worse = found["worse"]
    assert [(entry["program"], entry["mode"]) for entry in worse] == [
        ("transformers/DistilBertForQuestionAnswering", "defer")
    ]


def test_compare_with_a_chip(emutpu: Command, valid: Valid, tmp_path: Path) -> None:
    """JSON lines of a chip, made elsewhere: what fails there and was predicted to pass is named, and the exit code is 1."""
    program = "timm/resnet18"
    lines = [
        {"program": program, "mode": "strict", "outcome": "pass"},
        {"program": "timm/vgg11", "mode": "strict", "outcome": "pass"},
    ]
    (tmp_path / "emulated.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chip = [line | {"hardware": "TPU v5 lite"} for line in lines]
    (tmp_path / "chip.jsonl").write_text("".join(json.dumps(line) + "\n" for line in chip))
    assert emutpu("conformance", "compare", "emulated.jsonl", "chip.jsonl").returncode == 0
    chip[0] |= {"outcome": "crash", "error": "INTERNAL: Mosaic failed"}
    (tmp_path / "chip.jsonl").write_text("".join(json.dumps(line) + "\n" for line in chip))
    result = emutpu("conformance", "compare", "emulated.jsonl", "chip.jsonl", "--json", "found.json")
    assert result.returncode == 1, result.stderr
    assert "timm/resnet18 strict: pass -> crash (predicted_on_chip): INTERNAL: Mosaic failed" in result.stdout
    found = valid((tmp_path / "found.json").read_text(), "conformance-compare")
    assert found["agreement"] == {"both pass": 1, "both fail": 0, "before alone": 1, "after alone": 0}
    reported = emutpu("conformance", "report", "chip.jsonl", "--out", "site")
    assert reported.returncode == 0, reported.stderr
    assert "TPU v5 lite, hardware" in (tmp_path / "site" / "index.html").read_text()

    parts = ("emulated.jsonl", "more.jsonl")
    (tmp_path / "more.jsonl").write_text(json.dumps(lines[0] | {"mode": "defer", "outcome": "crash"}) + "\n")
    together = emutpu(
        "conformance", "report", *parts, "--baseline", "emulated.jsonl", "--out", "site", "--json", "all.json"
    )
    assert together.returncode == 0, together.stderr
    document = valid((tmp_path / "all.json").read_text(), "conformance")
    assert document["of_programs"] == {"crash": 1, "pass": 2}
    assert document["trends"]["baseline"]["worse"] == []
    assert document["device_bytes"]["v5e"] == 16 * 2**30


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "--shard", "3/2"), "i/n"),
        (("run", "--only", "nothing/*"), "no program"),
        (("run", "--chip", "none"), "no device"),
        (("report", "--results", "nowhere"), "holds no runs"),
        (("compare", "a.json", "b.json"), "cannot be read"),
        (("compare", "bad.jsonl", "bad.jsonl"), "see its line 2"),
        (("compare", "odd.jsonl", "odd.jsonl"), "none of the outcomes"),
        (("report", "good.jsonl", "--baseline", "1"), "holds no runs"),
        (("report", "good.jsonl", "bare.json"), "rows alone"),
    ],
)
def test_wrong_usage(emutpu: Command, arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    """Two lines and exit code 2, never a traceback."""
    good = {"program": "timm/resnet18", "mode": "strict", "outcome": "pass"}
    (tmp_path / "bad.jsonl").write_text(json.dumps(good) + '\n{"program": "timm/resnet18"}\n')
    (tmp_path / "good.jsonl").write_text(json.dumps(good) + "\n")
    (tmp_path / "bare.json").write_text(json.dumps({"schema": "emutpu.conformance/1", "models": []}))
    (tmp_path / "odd.jsonl").write_text(json.dumps(good | {"outcome": "fine"}) + "\n")
    result = emutpu("conformance", *arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_small_runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One worker whatever --jobs says, that leaves room on 7 GB and is replaced often."""
    asked: dict[str, Any] = {}

    class Stop(Exception):
        pass

    def run(*given: Any, **options: Any) -> int:
        asked.update(options)
        raise Stop

    monkeypatch.setattr(runner, "run", run)
    arguments = ["run", "--small-runner", "--jobs", "4", "--timeout", "70", "--results", str(tmp_path)]
    result = CliRunner().invoke(conformance.command, arguments)
    assert isinstance(result.exception, Stop)
    assert asked["jobs"] == 1
    assert asked["limits"] == Limits(70, 5 * 2**30, 20)
    assert asked["executor"] == runner.LOCAL


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wrong usage, with the remedy, before anything is written."""
    monkeypatch.setitem(sys.modules, "ray", None)
    arguments = ["run", "--executor", "ray", "--results", str(tmp_path / "results")]
    result = CliRunner().invoke(conformance.command, arguments)
    assert result.exit_code == 2
    assert "pip install 'emutpu[ray]'" in result.output
    assert not (tmp_path / "results").exists()
