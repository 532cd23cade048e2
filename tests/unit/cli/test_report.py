"""Run documents: made by a process, merged, written."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FAKE_DEVICE, child_environment
from rich.console import Console

from emutpu import _report
from emutpu.backend.statistics import (
    CompileStatistics,
    FallbackRecord,
    ModelledStatistics,
    RegionStatistics,
    Statistics,
    TierStatistics,
)
from emutpu.cli._summary import print_summary

Valid = Callable[[Any, str], dict[str, Any]]


def statistics(adds: int, peak: int) -> Statistics:
    """A small statistics object."""
    return Statistics(
        ops={"aten.mm": 2, "aten.add.Tensor": adds, "aten.never_called": 0},
        compiles=CompileStatistics(
            requests=adds + 2,
            hits=adds,
            misses=2,
            seconds=0.5,
            tiers=(TierStatistics(1, None, adds - 1, 3), TierStatistics(2, "/dev/shm/x", 1, 2, writes=2, seconds=0.25)),
        ),
        fallbacks=(FallbackRecord("aten.median", 1, "a.py:3"),),
        regions=(RegionStatistics(".cpu()", 3, 20, 1), RegionStatistics("debug_mode", adds, adds, 0)),
        live_buffers=0,
        live_hbm_bytes=0,
        peak_hbm_bytes=peak,
    )


def test_document_of_a_process(valid: Valid) -> None:
    """Ops are sorted by count, and what is not modelled is null with a reason."""
    document = valid(_report.run_document("v5e", statistics(5, 100), client="cpu", mode="strict"), "run")
    assert list(document["ops"]["by_name"].items()) == [("aten.add.Tensor", 5), ("aten.mm", 2)]
    assert document["ops"]["dispatched"] == 7
    assert set(document["modelled"].values()) == {None}
    assert document["fallbacks"] == [{"op": "aten.median", "count": 1, "location": "a.py:3"}]
    assert {"modelled"} <= document["notes"].keys()
    assert document["regions"][0] == {"reason": "debug_mode", "count": 5, "ops": 5, "hits": 0}
    assert document["regions"][1] == {"reason": ".cpu()", "count": 3, "ops": 20, "hits": 1}
    assert list(document["compiles"]["by_tier"]) == ["1", "2"]
    assert document["compiles"]["by_tier"]["2"]["writes"] == 2


def test_process_without_a_device_reports_zeros(valid: Valid) -> None:
    """A process that never initialised the device dispatched nothing, which is a fact and not a gap."""
    document = valid(_report.run_document("v5e", None), "run")
    assert document["ops"] == {"dispatched": 0, "by_name": {}}
    assert document["compiles"]["requests"] == 0
    assert document["notes"]["client"]


def test_merge_adds_counts_and_keeps_the_fullest_device(valid: Valid) -> None:
    """Processes of one program: counts add up, equal fallbacks join, peak memory is the largest."""
    used = [_report.run_document("v5e", statistics(n, n * 100), client="cpu", mode="strict") for n in (1, 4)]
    merged = valid(_report.merge([_report.run_document("v5e", None), *used]), "run")
    assert merged["processes"] == 3
    assert merged["client"] == "cpu"
    assert merged["ops"] == {"dispatched": 9, "by_name": {"aten.add.Tensor": 5, "aten.mm": 4}}
    assert merged["compiles"]["requests"] == 9
    assert [tuple(row.values()) for row in merged["regions"]] == [(".cpu()", 6, 40, 2), ("debug_mode", 5, 5, 0)]
    assert merged["compiles"]["seconds"] == 1.0
    assert {tier: row["hits"] for tier, row in merged["compiles"]["by_tier"].items()} == {"1": 3, "2": 2}
    assert merged["compiles"]["by_tier"]["2"]["seconds"] == 0.5
    assert merged["fallbacks"] == [{"op": "aten.median", "count": 2, "location": "a.py:3"}]
    assert merged["peak_hbm_bytes"] == 400


def test_merging_nothing_is_an_error() -> None:
    """No reports are no program."""
    with pytest.raises(ValueError, match="at least one"):
        _report.merge([])


def test_document_is_written_whole(tmp_path: Path) -> None:
    """The file holds the document, is readable as the umask says, and leaves no temporary file."""
    path = tmp_path / "report.json"
    path.write_text("old")
    _report.write_document({"a": 1}, str(path))
    assert json.loads(path.read_text()) == {"a": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    assert path.stat().st_mode & 0o400


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A document that cannot be replaced raises and leaves nothing behind."""
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError):
        _report.write_document({"a": 1}, str(tmp_path / "absent" / "report.json"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["folder"]


def _run(tmp_path: Path, text: str, report: str) -> subprocess.CompletedProcess[str]:
    environment = child_environment(EMUTPU_REPORT=str(tmp_path / report))
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_exit_hook_writes_a_valid_document(tmp_path: Path, valid: Valid) -> None:
    """A process with EMUTPU_REPORT writes its own run document, whatever exit code it ends with."""
    result = _run(tmp_path, FAKE_DEVICE + "sys.exit(5)", "report.json")
    assert result.returncode == 5, result.stderr
    document = valid((tmp_path / "report.json").read_text(), "run")
    assert document["ops"]["dispatched"] == 43
    assert document["peak_hbm_bytes"] == 8192
    assert document["exit_code"] is None
    assert document["notes"]["exit_code"]
    assert document["wall_seconds"] > 0


def test_exit_hook_names_files_by_process_and_skips_forks(tmp_path: Path) -> None:
    """``{pid}`` keeps processes apart, and a forked child that ends with sys.exit does not report for its parent."""
    fork = "pid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n    print(os.getpid())\n"
    result = _run(tmp_path, FAKE_DEVICE + fork, "{pid}.json")
    assert [path.name for path in tmp_path.iterdir()] == [f"{int(result.stdout)}.json"]


def test_exit_hook_does_not_initialise_the_device(tmp_path: Path) -> None:
    """A process that never touched the backend imports neither torch nor jax in order to say so."""
    text = """
import atexit, sys
atexit.register(lambda: print(sorted(m for m in sys.modules if m in ("torch", "jax", "emutpu.backend.runtime"))))
from emutpu._report import install_exit_report
install_exit_report("report.json")
"""
    assert _run(tmp_path, text, "unused.json").stdout.strip() == "[]"
    assert json.loads((tmp_path / "report.json").read_text())["ops"]["dispatched"] == 0


def test_unwritable_report_is_said_and_keeps_the_exit_code(tmp_path: Path) -> None:
    """The program's result does not depend on its report."""
    result = _run(tmp_path, FAKE_DEVICE, os.path.join("absent", "report.json"))
    assert result.returncode == 0
    assert "the run report was not written" in result.stderr
    assert "Traceback" not in result.stderr


MODELLED = ModelledStatistics(
    seconds=2.0,
    device_seconds=1.5,
    host_seconds=0.5,
    host_issue=5e-6,
    launches=7,
    flops=4e14,
    hbm_bytes=1e12,
    transfer_bytes=0,
    steps=2,
    step_seconds=0.5,
    peak_flops=1e15,
    masked_flops=1e14,
    between_steps=(0.5, 2e14, 1e14),
    ici_bytes=3 * 2**30,
    ici_use=0.25,
    hbm_use=0.5,
    error_bar=1.0,
    bound={"mxu": 1.5},
    top=(),
    unmodelled={},
    assumptions=(),
)


def test_utilisation_causal_and_full(valid: Valid) -> None:
    """Both follow from FLOPs, seconds and peak by the formula of ``emutpu mfu``, over the run and over the steps."""
    made = dataclasses.replace(statistics(1, 1), modelled=MODELLED)
    modelled = valid(_report.run_document("v5e", made, client="cpu", mode="strict"), "run")["modelled"]
    assert (modelled["mfu"], modelled["mfu_causal"]) == (pytest.approx(0.2), pytest.approx(0.15))
    assert (modelled["step_mfu"], modelled["step_mfu_causal"]) == (pytest.approx(0.4), pytest.approx(0.2))
    assert (modelled["masked_flops"], modelled["ici_bytes"]) == (1e14, 3 * 2**30)


def test_a_mask_that_is_not_seen_leaves_no_causal_figure(valid: Valid) -> None:
    """NaN masked FLOPs are null in the report, with the reason; the utilisation of all FLOPs stays."""
    unseen = dataclasses.replace(MODELLED, masked_flops=math.nan, between_steps=(0.5, 2e14, math.nan))
    document = valid(
        _report.run_document(
            "v5e", dataclasses.replace(statistics(1, 1), modelled=unseen), client="cpu", mode="strict"
        ),
        "run",
    )
    modelled = document["modelled"]
    assert modelled["mfu"] == pytest.approx(0.2)
    assert (modelled["mfu_causal"], modelled["step_mfu_causal"], modelled["masked_flops"]) == (None, None, None)
    assert "mask" in document["notes"]["modelled.mfu_causal"]
    json.dumps(document, allow_nan=False)


def test_summary_names_both_utilisations() -> None:
    """The summary gives one figure where no mask was found, and the links' share where they were used."""

    def shown(modelled: ModelledStatistics) -> str:
        made = dataclasses.replace(statistics(1, 1), modelled=modelled)
        document = _report.run_document("v5e", made, client="cpu", mode="strict")
        document |= {"wall_seconds": 1.0, "exit_code": 0}
        output = io.StringIO()
        print_summary(document, Console(file=output, width=200))
        return output.getvalue()

    text = shown(MODELLED)
    assert "MFU 15.00% causal, 20.00% full of all FLOPs that run" in text
    assert "ICI and DCN busy 25.0% (3 GiB)" in text
    plain = shown(dataclasses.replace(MODELLED, masked_flops=0.0, between_steps=(0.5, 2e14, 0.0), ici_use=None))
    assert "MFU 20.00% of all FLOPs that run" in plain
    assert "causal" not in plain
    assert "no traffic between chips" in plain
    unseen = shown(dataclasses.replace(MODELLED, masked_flops=math.nan))
    assert "MFU 20.00% full (causal not known: a mask came as a tensor) of all FLOPs" in unseen
