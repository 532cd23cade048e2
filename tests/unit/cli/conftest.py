"""Run the command line as a user does: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parents[3]

# A program that pretends to have used the device: what the report machinery sees of a runtime, without a backend.
FAKE_DEVICE = """
import os, sys, types
from emutpu._report import install_exit_report
from emutpu.backend.statistics import CompileStatistics, FallbackRecord, Statistics

class Runtime:
    initialized = True
    mode = "strict"
    client = types.SimpleNamespace(name="cpu")
    def statistics(self, *, modelled):
        return Statistics(
            ops={"aten.mm": 3, "aten.add.Tensor": 40},
            compiles=CompileStatistics(requests=43, hits=41, misses=2, seconds=0.25),
            fallbacks=(FallbackRecord("aten.median", 2, "train.py:7"),),
            live_buffers=1, live_hbm_bytes=4096, peak_hbm_bytes=8192,
        )

fake = types.ModuleType("emutpu.backend.runtime")
fake.runtime = Runtime
sys.modules["emutpu.backend.runtime"] = fake
install_exit_report(os.environ["EMUTPU_REPORT"])
"""

Command = Callable[..., "subprocess.CompletedProcess[str]"]

PATIENCE = 280  # seconds; just under the limit of a test: a busy machine is slow, and only a hang is a failure


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of a user: no ``EMUTPU_*`` variable but those given, and this checkout importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMUTPU_", "TORCH_TPU_"))}
    return kept | {"PYTHONPATH": str(ROOT)} | variables


@pytest.fixture
def emutpu(tmp_path: Path) -> Command:
    """``emutpu("run", "x.py", EMUTPU_CHIP="v5p")``: run one command in ``tmp_path`` and give what it printed."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "emutpu", *arguments]
        environment = child_environment(**variables)
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )

    return run


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Write a program into ``tmp_path`` and give its file name."""

    def write(text: str) -> str:
        (tmp_path / "program.py").write_text(text)
        return "program.py"

    return write


@pytest.fixture
def valid() -> Callable[[Any, str], dict[str, Any]]:
    """Check a document (or its text) against the schema ``name``, and give it."""

    def check(document: Any, name: str) -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(document) if isinstance(document, str) else document
        schema = json.loads((ROOT / "emutpu" / "schemas" / f"{name}.v1.json").read_text())
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(parsed, schema, cls=jsonschema.Draft202012Validator)
        return parsed

    return check
