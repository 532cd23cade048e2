"""Failures surface at the read, name the op and the read, and leave everything else usable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from emutpu.backend.pjrt import Fault, FaultInjectingClient, FaultSite, InternalError
from emutpu.backend.runtime import runtime


@contextmanager
def faults(*injected: Fault) -> Iterator[None]:
    """Fail as told while inside."""
    real = runtime().client
    runtime().replace_client(FaultInjectingClient(real, injected))
    try:
        yield
    finally:
        runtime().replace_client(real)


def test_a_region_that_does_not_compile() -> None:
    """The op that fails alone is named with its line, and so is the read; all values of the region raise."""
    with faults(Fault(FaultSite.COMPILE, InternalError("no such luck"), op="*sin*", nth=0)):
        x = torch.ones(2, device="tpu") * 2
        y = x.sin()
        z = y + 1
        with pytest.raises(RuntimeError, match="no such luck") as caught:
            z.cpu()
        text = str(caught.value)
        assert text.startswith("sin(): ")
        assert "y = x.sin()" in text
        assert "materialized by .cpu() at" in text
        assert "z.cpu()" in text
        with pytest.raises(RuntimeError, match="no such luck"):
            y.tolist()
        assert (torch.ones(2, device="tpu") * 3).tolist() == [3, 3]


def test_a_region_that_fails_on_the_device() -> None:
    """An asynchronous failure arises at the read, with the op's line and the read's."""
    with faults(Fault(FaultSite.EXECUTE, InternalError("core halted"), op="*sin*", nth=0)):
        x = torch.ones(2, device="tpu") * 2
        y = x.sin()
        z = y + 1
        with pytest.raises(RuntimeError, match="core halted") as caught:
            z.cpu()
        assert "aten.sin.default issued at" in str(caught.value)
        assert "y = x.sin()" in str(caught.value)
        assert "z.cpu()" in str(caught.value)
        assert (torch.ones(2, device="tpu") * 3).tolist() == [3, 3]


def test_exit_with_pending_work() -> None:
    """An interpreter that ends with pending values, also in cycles and module globals, exits with 0 and says nothing."""
    program = (
        "import torch\n"
        "x = torch.ones(3, device='tpu')\n"
        "holder = {'y': (x * 2).sin()}\n"
        "holder['me'] = holder\n"
        "z = torch.rand(3, device='tpu') + x\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env={**os.environ, "TORCH_TPU_DEFER_AND_FUSE": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0
    assert result.stderr.replace("emutpu: emulated v5e, not hardware", "").strip() == ""
