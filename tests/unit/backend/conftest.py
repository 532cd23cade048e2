"""Run programs in processes of their own: what used to crash, and what happens once per process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(text, EMUTPU_CHIP="v5p")``: run a program and give the finished process; ``path`` goes before the checkout."""

    def start(text: str, *, path: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        program = tmp_path / "program.py"
        program.write_text(textwrap.dedent(text))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMUTPU_", "TORCH_TPU_"))}
        kept["PYTHONPATH"] = os.pathsep.join(part for part in (path, str(ROOT)) if part)
        return subprocess.run(
            [sys.executable, str(program)],
            cwd=tmp_path,
            env=kept | variables,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    return start


@pytest.fixture
def passes(run: Run) -> Callable[..., str]:
    """Run a program that must exit with 0; gives its standard output."""

    def check(text: str, **variables: str) -> str:
        result = run(text, **variables)
        assert result.returncode == 0, f"exit {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    return check
