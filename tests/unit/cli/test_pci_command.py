"""``emutpu pci`` and ``emutpu run --pci``: what a program sees in /sys and /dev."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from emutpu import _namespace
from emutpu.simulator import pci
from emutpu.simulator.topology import slice_named

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Write = Callable[[str], str]

_LOOK = """
import os
from jax._src import hardware_utils
print(hardware_utils.num_available_tpu_chips_and_device_id())
print(sorted(os.listdir("/dev/vfio")), open("/dev/null").read() == "", len(open("/dev/urandom", "rb").read(4)))
"""


@pytest.fixture
def namespaces(tmp_path: Path) -> None:
    """Skip where the system lets nobody make a mount namespace."""
    pci.write_tree(slice_named("v5e-1"), tmp_path / "probe")
    attempt = subprocess.run(
        [sys.executable, "-I", _namespace.__file__, str(tmp_path / "probe")],
        capture_output=True,
        text=True,
        check=False,
    )
    if attempt.returncode:
        pytest.skip(f"no mount namespaces here: {attempt.stderr.strip()}")


def test_writes_a_tree(emutpu: Command, tmp_path: Path) -> None:
    """The tree of a slice's host, and a line for every function."""
    result = emutpu("pci", "tree", "v7-8")
    assert result.returncode == 0, result.stderr
    assert "v7-8, host 0 of 1: 8 PCI functions" in result.stdout
    assert len(pci.attached(tmp_path / "tree")) == 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["tree", "v5e-3"], 2, "the closest legal N are"),
        (["tree", "v5e-4", "--host", "1"], 2, "there is no host 1"),
        (["tree", "v8t-1"], 2, "pci_device is not published"),
        ([".", "v5e-4"], 1, "is not empty"),
    ],
)
def test_mistakes(emutpu: Command, program: Write, arguments: list[str], code: int, message: str) -> None:
    """An impossible slice is wrong usage, a directory that cannot be used a failure; no traceback either way."""
    program("")  # something in the way
    result = emutpu("pci", *arguments)
    assert result.returncode == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("namespaces")
def test_a_program_sees_the_chips(emutpu: Command, program: Write) -> None:
    """Inside --pci jax finds the slice where it looks for hardware, and /dev still works; outside nothing changes."""
    before = sorted(os.listdir("/dev"))
    result = emutpu("run", "--pci", "--topology", "v5e-4", program(_LOOK))
    assert result.returncode == 0, result.stderr
    assert "(4, <TpuVersion.v5e: 5>)" in result.stdout
    assert "['0', '1', '2', '3', 'vfio'] True 4" in result.stdout
    assert sorted(os.listdir("/dev")) == before


@pytest.mark.usefixtures("namespaces")
def test_the_emulator_stays_in_a_fake_tree(emutpu: Command, program: Write) -> None:
    """Emulated chips are no real TPU to step aside for: the device works, as the one that the variable chooses."""
    text = "import torch\nprint((torch.ones(2, device='tpu') + 1).tolist(), torch.tpu._get_local_device_attributes())"
    result = emutpu("run", "--pci", "--topology", "v5e-4", program(text), TPU_VISIBLE_DEVICES="2")
    assert result.returncode == 0, result.stderr
    assert "[2.0, 2.0]" in result.stdout
    assert "'id': 2, 'coords': (0, 1, 0)" in result.stdout
    assert "emulated v5e-4, not hardware" in result.stderr
    assert "stepping aside" not in result.stderr


@pytest.mark.usefixtures("namespaces")
def test_the_tree_decides_where_the_environment_does_not(emutpu: Command, program: Write, tmp_path: Path) -> None:
    """In a namespace (or container) with a tree, emutpu emulates its slice; asking for another one is an error."""
    pci.write_tree(slice_named("v6e-4"), tmp_path / "tree", taken=os.listdir("/sys/bus/pci/devices"))
    inside = [sys.executable, "-I", _namespace.__file__, str(tmp_path / "tree"), sys.executable, "-c"]
    root = str(Path(__file__).parents[3])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("EMUTPU_")} | {"PYTHONPATH": root}
    text = "import torch, emutpu; print(emutpu.is_emulated(), torch.tpu.get_device_name())"
    result = subprocess.run([*inside, text], env=clean, capture_output=True, text=True, check=False, timeout=120)
    assert "True TPU v6e" in result.stdout, result.stderr
    wrong = clean | {"EMUTPU_CHIP": "v5e"}
    result = subprocess.run(
        [*inside, "import torch"], env=wrong, capture_output=True, text=True, check=False, timeout=120
    )
    assert "the emulated PCI tree on this host is of v6e-4" in result.stderr


@pytest.mark.usefixtures("namespaces")
def test_exit_codes_pass_through(emutpu: Command, program: Write) -> None:
    """The program's own exit code, also from inside the namespace."""
    assert emutpu("run", "--pci", program("raise SystemExit(7)")).returncode == 7


def test_a_system_without_namespaces(emutpu: Command, program: Write, tmp_path: Path) -> None:
    """Where the kernel refuses, --pci is exit code 72 with the remedy, and the program does not run."""
    refusing = tmp_path / "emutpu_refusing.py"
    refusing.write_text(
        "import sys\nfrom emutpu import _namespace\nfrom emutpu.cli import main\n"
        f"_namespace.__file__ = {str(tmp_path / 'refuse.py')!r}\nmain(sys.argv[1:])\n"
    )
    (tmp_path / "refuse.py").write_text("import sys\nsys.exit('Operation not permitted (unshare)')\n")
    environment = dict(os.environ) | {"PYTHONPATH": str(Path(__file__).parents[3])}
    result = subprocess.run(
        [sys.executable, str(refusing), "run", "--pci", program("open('ran', 'w')")],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert result.returncode == 72
    assert "does not allow: Operation not permitted (unshare)" in result.stderr
    assert "emutpu pci DIR v5e-1" in result.stderr
    assert not (tmp_path / "ran").exists()
