"""``emutpu ops``: coverage, the sweep against the CPU, and comparison of two reports."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from emutpu.cli import _sweep, _sweepers

Valid = Callable[[Any, str], dict[str, Any]]


def test_targets(emutpu: Command, valid: Valid) -> None:
    """The counts add up, and only what TorchTPU lacks too is missing of what models use."""
    result = emutpu("ops", "--json", "-")
    assert result.returncode == 0, result.stderr
    document = valid(result.stdout, "ops")
    for target in document["targets"].values():
        assert target["covered"] + len(target["missing"]) == target["total"]
    assert document["targets"]["core_aten"]["missing"] == []
    assert document["targets"]["torchtpu"]["total"] == 673
    assert document["registered"] > 1000
    assert document["opinfo"] is None
    assert "opinfo" in document["notes"]
    lacking = set(document["targets"]["models"]["missing"])
    assert all("_aa" in name or "linear1d" in name or name == "_weight_norm_interface_backward" for name in lacking)
    beyond = valid(emutpu("ops", "--json", "-", EMUTPU_BEYOND="1").stdout, "ops")
    assert beyond["beyond"]
    assert beyond["targets"]["models"]["missing"] == []


def test_sweep(emutpu: Command, valid: Valid) -> None:
    """Two entries of the database; what the device lacks is unsupported, not an error."""
    result = emutpu("ops", "--sweep", "--only", "sin[ch]", "--json", "-")
    document = valid(result.stdout, "ops")
    swept = document["opinfo"]
    assert swept["tested"] == swept["ok"] + sum(len(swept[k]) for k in ("mismatch", "unsupported", "error"))
    assert swept["entries"] == 2
    assert {item["name"] for item in swept["unsupported"]} == {"sinc"}
    assert (swept["mismatch"], swept["error"], result.returncode) == ([], [], 0)


def test_comparison(emutpu: Command, valid: Valid, tmp_path: Path) -> None:
    """What is missing now and was not then is lost, and an exit code of 1."""
    document = valid(emutpu("ops", "--json", "-").stdout, "ops")
    (tmp_path / "same.json").write_text(json.dumps(document))
    same = emutpu("ops", "--compare", "same.json", "--json", "-")
    assert same.returncode == 0
    assert all(change == {"lost": [], "gained": []} for change in valid(same.stdout, "ops")["compare"].values())
    missing = document["targets"]["torchtpu"]["missing"]
    lost = missing.pop(0)
    missing.append("add.Tensor")
    (tmp_path / "old.json").write_text(json.dumps(document))
    changed = emutpu("ops", "--compare", "old.json", "--json", "-")
    assert changed.returncode == 1
    assert valid(changed.stdout, "ops")["compare"]["torchtpu"] == {"lost": [lost], "gained": ["add.Tensor"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compare", "nowhere.json"), "cannot be read"),
        (("--only", "add"), "--only chooses what --sweep runs"),
        (("--sweep", "--only", "no_such_op"), "no entry of the op database matches"),
        (("--jobs", "0"), "--jobs"),
    ],
)
def test_wrong_usage(emutpu: Command, arguments: tuple[str, ...], message: str) -> None:
    """Exit code 2 and one sentence."""
    result = emutpu("ops", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_device(emutpu: Command) -> None:
    """A host without a TPU has nothing to count."""
    result = emutpu("ops", EMUTPU_CHIP="none")
    assert (result.returncode, "there is no device" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "patience", "message"), [("no_such_entry", 280, "ended with code 1"), ("add", 0.05, "no answer within")]
)
def test_a_dead_or_silent_process_is_a_finding(name: str, patience: float, message: str) -> None:
    """And the sweep goes on with another process."""
    results = _sweepers.sweep([name], jobs=1, samples=1, patience=patience, progress=lambda _: None)
    (item,) = results[name]
    assert (item["kind"], item["outcome"]) == ("process", "error")
    assert message in item["message"]
    assert _sweepers.summary(results)["error"][0]["name"] == name


def test_a_wrong_result_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep sees a value, a dtype, a shape and a device that are not the CPU's."""
    op = _sweep.database()["sin"]
    assert {item["outcome"] for item in _sweep.examine("sin", op, 1)} == {"ok"}
    true = op.op
    for wrong in (
        lambda x: true(x) if x.device.type == "cpu" else true(x) * 1.01,
        lambda x: true(x) if x.device.type == "cpu" else true(x).bfloat16(),
        lambda x: true(x) if x.device.type == "cpu" else true(x)[:1],
        lambda x: true(x.cpu()),
    ):
        monkeypatch.setattr(op, "op", lambda x, wrong=wrong, **_: wrong(x))
        outcomes = {item["kind"]: item["outcome"] for item in _sweep.examine("sin", op, 1)}
        assert outcomes["forward"] == "mismatch"
