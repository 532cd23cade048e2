"""What happens around a client: missing JAX, the user's configuration, fork, names of clients and chips."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from emutpu.backend.pjrt import Device
from emutpu.simulator import make_client
from emutpu.simulator.chips import CHIPS, chip
from emutpu.simulator.topology import single_chip

HEADER = """
import numpy as np
from emutpu.backend.pjrt import CompileOptions, FailedPrecondition
from emutpu.simulator import make_client
"""


def python(code: str) -> str:
    """Standard output of a fresh interpreter that runs ``code``."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("missing", ["jax", "jaxlib"])
def test_missing_jax(missing: str) -> None:
    """Without jax or jaxlib there is one ImportError that says what to install."""
    out = python(
        f"import sys; sys.modules[{missing!r}] = None\n"
        "try:\n    import emutpu._jaxlib\n"
        "except ImportError as error: print(type(error).__name__, error)\n"
    )
    assert out.startswith("JaxNotFound")
    assert "pip install" in out


def test_configuration_is_untouched() -> None:
    """Using a client changes neither JAX's configuration nor XLA_FLAGS, and the user's arrays stay 32-bit."""
    out = python(
        "import os, jax\n"
        "before = dict(jax.config.values), os.environ.get('XLA_FLAGS')\n" + HEADER + "client = make_client('cpu')\n"
        "big = client.to_host(client.from_host(np.array(2**40)))\n"
        "import jax.numpy as jnp\n"
        "print(int(big) == 2**40, before == (dict(jax.config.values), os.environ.get('XLA_FLAGS')), jnp.arange(3).dtype)\n"
    )
    assert out.split() == ["True", "True", "int32"]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies of threads are Linux's")
def test_pools_yield_to_the_program() -> None:
    """XLA's threads do not preempt the thread that feeds them; that one, and threads made later, stay as they were."""
    out = python(
        "import os, threading\n" + HEADER + "before = set(os.listdir('/proc/self/task'))\n"
        "client = make_client('cpu')\n"
        "policies = set()\n"
        "for task in set(os.listdir('/proc/self/task')) - before:\n"
        "    try:\n"
        "        policies.add(os.sched_getscheduler(int(task)))\n"
        "    except ProcessLookupError:\n"
        "        pass  # a thread that has just ended\n"
        "later = []\n"
        "thread = threading.Thread(target=lambda: later.append(os.sched_getscheduler(0)))\n"
        "thread.start(); thread.join()\n"
        "print(policies == {os.SCHED_BATCH}, os.sched_getscheduler(0) == later[0] == os.SCHED_OTHER)\n"
    )
    assert out.split() == ["True", "True"]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="scheduling policies of threads are Linux's")
def test_a_sandbox_that_forbids_policies() -> None:
    """Where a thread's policy may not be changed, the client comes up all the same."""
    out = python(
        "import os\ndef refuse(*_):\n    raise PermissionError('not here')\nos.sched_setscheduler = refuse\n"
        + HEADER
        + "print(make_client('cpu').name)\n"
    )
    assert out.strip() == "cpu"


def test_nothing_heavy_is_imported() -> None:
    """The table of clients imports neither jax nor torch."""
    out = python("import sys, emutpu.simulator\nprint([name for name in ('jax', 'torch') if name in sys.modules])")
    assert out.strip() == "[]"


def test_fork() -> None:
    """A forked child is refused at once instead of hanging in the compiler."""
    module = "b'module { func.func @main(%a: tensor<f32>) -> tensor<f32> { return %a : tensor<f32> } }'"
    out = python(
        HEADER + "import os, warnings\nwarnings.simplefilter('ignore')\nclient = make_client('cpu')\n"
        f"client.compile({module}, CompileOptions())\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try:\n"
        f"        client.compile({module}, CompileOptions())\n"
        "    except FailedPrecondition as error:\n"
        "        os._exit(0 if 'spawn' in str(error) else 1)\n"
        "    os._exit(2)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert out.strip() == "0"


def test_no_cpu_platform() -> None:
    """Where JAX_PLATFORMS excludes the CPU, the error says so."""
    out = python(
        "import os; os.environ['JAX_PLATFORMS'] = 'cuda'\nfrom emutpu.backend.pjrt import DeviceUnavailable\n" + HEADER +
        "try:\n    make_client('cpu')\nexcept DeviceUnavailable as error: print(error)\n"
    )  # fmt: skip
    assert "JAX_PLATFORMS" in out


def test_names() -> None:
    """Unknown clients and chips are ValueErrors that list the known ones and guess what was meant."""
    with pytest.raises(ValueError, match="known are cpu, interpreter, dry_run; did you mean 'dry_run'"):
        make_client("dryrun")
    with pytest.raises(ValueError, match="known are v4, v5e, v5p, v6e, v7, v8i, v8t; did you mean 'v6e'"):
        chip("v6")


@pytest.mark.parametrize("name", CHIPS)
def test_chips(name: str) -> None:
    """The topology of a chip shows as many devices as software sees."""
    spec = chip(name)
    topology = single_chip(name)
    assert topology.chip == name
    assert len(topology.devices) == spec.devices
    assert topology.devices[-1] == Device(spec.devices - 1, spec.kind, core_on_chip=spec.devices - 1)
