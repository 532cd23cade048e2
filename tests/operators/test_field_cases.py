"""Programs that failed elsewhere: the device gives what the CPU gives, and what the report says is right."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from field_cases import CASES, LACKING, FieldCase

from tools.layout import ROOT


def _parameters(cases: list[FieldCase]) -> list:
    return [pytest.param(case, id=case.name) for case in cases]


@pytest.fixture(autouse=True)
def _highest():
    """CPU is the oracle at six-pass matmuls."""
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        yield


@pytest.mark.parametrize("case", _parameters(CASES))
def test_the_cpu_is_right(case: FieldCase) -> None:
    """The oracle itself: CPU PyTorch gives the answer that the report calls right."""
    answer = case.program("cpu")
    assert case.right is ... or answer == case.right


@pytest.mark.parametrize("case", _parameters([case for case in CASES if case.lacks is None]))
def test_the_device_agrees(case: FieldCase) -> None:
    """The same program, the same answer."""
    assert case.program("tpu") == case.program("cpu")


@pytest.mark.parametrize("case", _parameters(LACKING))
def test_what_the_real_device_lacks(case: FieldCase) -> None:
    """The real device has no kernel, so its NotImplementedError is right here, and EMUTPU_BEYOND=1 gives the CPU's answer."""
    with pytest.raises(NotImplementedError, match=rf"operator 'aten::{case.lacks}' is not implemented for TPU"):
        case.program("tpu")
    program = (
        "import sys; sys.path.insert(0, 'tests/operators'); import torch, field_cases as f\n"
        f"case = next(case for case in f.CASES if case.name == {case.name!r})\n"
        "assert case.program('tpu') == case.program('cpu')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=_beyond(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _beyond() -> dict[str, str]:
    return {**os.environ, "EMUTPU_BEYOND": "1"}
