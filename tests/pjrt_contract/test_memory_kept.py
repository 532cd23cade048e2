"""What the CPU client does to the process's allocator, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_FAULTS = """
import resource, numpy as np
from emutpu.backend.pjrt import CompileOptions
from emutpu.simulator.clients import make_client
kind = "tensor<1048576xf32>"
module = f"func.func public @main(%x: {kind}) -> {kind} {{ %y = stablehlo.add %x, %x : {kind} return %y : {kind} }}"
client = make_client("cpu")
executable = client.compile(module.encode(), CompileOptions())
x = client.from_host(np.ones(1 << 20, np.float32))
def launch(times):
    for _ in range(times):
        client.to_host(executable.launch([x])[0])
launch(100)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
launch(50)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 50)
"""
_PAGES = 1024  # of a result


def _faults(**settings: str) -> float:
    """Fresh pages for each launch in a new process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS], env=kept | settings, capture_output=True, text=True, check=True, timeout=120
    )
    return float(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the options are those of glibc's malloc")
def test_results_take_memory_that_was_freed() -> None:
    """A launch gets the pages that an earlier result gave up."""
    assert _faults() < _PAGES / 8


@pytest.mark.skipif(sys.platform != "linux", reason="the options are those of glibc's malloc")
def test_an_allocator_that_was_set_up_stays() -> None:
    """Whoever wants large blocks from the system gets each of them from there."""
    assert _faults(MALLOC_MMAP_THRESHOLD_="65536") > _PAGES / 2
