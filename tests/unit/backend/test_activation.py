"""Activation: what ``import torch`` does with emutpu installed, on every kind of host. Each case is a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Passes = Callable[..., str]
BANNER = "emutpu: emulated v5e, not hardware\n"
IMPORT_LIMIT = 0.060  # seconds of CPU time that `import torch` may grow by


def package(folder: Path, name: str, text: str) -> str:
    """A package ``name`` in a new folder, which is returned."""
    (folder / "stubs" / name).mkdir(parents=True, exist_ok=True)
    (folder / "stubs" / name / "__init__.py").write_text(text)
    return str(folder / "stubs")


def test_one_line_at_first_use(run: Run) -> None:
    """Nothing is printed by ``import torch``; the first op prints one line on stderr, later ones none."""
    assert run("import torch, emutpu; print(emutpu.is_emulated())").stdout == "True\n"
    assert run("import torch").stderr == ""
    result = run("""
        import sys, torch, emutpu
        print("imported", file=sys.stderr)
        for _ in range(3):
            (torch.ones(2, device="tpu") + 1).cpu()
        print("done", file=sys.stderr)
    """)
    assert result.stderr == f"imported\n{BANNER}done\n"


def test_chip_is_named(run: Run) -> None:
    """The line names the chip."""
    result = run("import torch\ntorch.ones(2, device='tpu')", EMUTPU_CHIP="v6e")
    assert result.stderr == "emutpu: emulated v6e, not hardware\n"


def test_highest_by_one_product(run: Run) -> None:
    """EMUTPU_HOST_HIGHEST=native: an operand that no bfloat16 holds stays finite, as it does not on a chip."""
    product = """
        import torch
        with torch.get_device_module("tpu").precision(torch.get_device_module("tpu").Precision.HIGHEST):
            print(bool((torch.full((2, 2), 3.4e38, device="tpu") @ torch.eye(2, device="tpu")).isfinite().all()))
    """
    assert run(product).stdout == "False\n"
    assert run(product, EMUTPU_HOST_HIGHEST="native").stdout == "True\n"
    assert "EMUTPU_HOST_HIGHEST" in run(product, EMUTPU_HOST_HIGHEST="six").stderr


def test_host_without_a_tpu(run: Run) -> None:
    """EMUTPU_CHIP=none: the key keeps its name, ``tpu`` is no device, and nothing is patched."""
    result = run(
        """
        import torch, emutpu
        assert torch._C._get_privateuse1_backend_name() == "privateuseone"
        assert not hasattr(torch, "tpu") and not emutpu.is_emulated() and not torch.accelerator.is_available()
        assert torch.get_float32_matmul_precision() == "highest"
        try:
            torch.ones(2, device="tpu")
        except RuntimeError as error:
            assert "Expected one of cpu, cuda" in str(error), error
        else:
            raise SystemExit("no error")
        """,
        EMUTPU_CHIP="none",
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_forbidden(run: Run) -> None:
    """EMUTPU_FORBID=1 makes ``import torch`` fail, with the way out."""
    result = run("import torch", EMUTPU_FORBID="1")
    assert result.returncode == 1
    assert "EMUTPU_FORBID=1 refuses emulated devices" in result.stderr
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in result.stderr


def test_unknown_chip(run: Run) -> None:
    """A chip that does not exist stops the import, naming variable, value and choices."""
    result = run("import torch", EMUTPU_CHIP="v9")
    assert result.returncode == 1
    assert "EMUTPU_CHIP='v9' is not valid: expected one of v4, v5e, v5p, v6e, v7, v8i, v8t, none" in result.stderr


def test_unknown_variable(run: Run) -> None:
    """A misspelt variable is a warning with the closest name."""
    result = run("import torch\nprint((torch.ones(1, device='tpu') + 1).item())", EMUTPU_CHIPS="v5p")
    assert (result.returncode, result.stdout) == (0, "2.0\n")
    assert "emutpu: unknown environment variable EMUTPU_CHIPS; did you mean EMUTPU_CHIP?" in result.stderr


ASIDE = """
import torch, emutpu
assert torch._C._get_privateuse1_backend_name() == "{owner}"
assert not emutpu.is_emulated() and not hasattr(torch, "tpu")
"""


def test_steps_aside_for_torch_tpu(run: Run, tmp_path: Path) -> None:
    """With the real package importable, one message and no device."""
    result = run(ASIDE.format(owner="privateuseone"), path=package(tmp_path, "torch_tpu", ""))
    assert result.returncode == 0, result.stderr
    assert result.stderr == (
        "emutpu: stepping aside: torch_tpu is installed, so 'tpu' is the real backend; uninstall one of the two\n"
    )


def test_steps_aside_for_hardware(run: Run, tmp_path: Path) -> None:
    """With a TPU on the PCI bus, one message and no device; other vendors' devices do not count."""
    for name, vendor in (("0000:00:04.0", "0x8086"), ("0000:00:05.0", "0x1ae0")):
        (tmp_path / "pci" / name).mkdir(parents=True)
        (tmp_path / "pci" / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / "pci" / name / "class").write_text("0x120000\n")
    (tmp_path / "other" / "0000:00:04.0").mkdir(parents=True)
    (tmp_path / "other" / "0000:00:04.0" / "vendor").write_text("0x8086\n")
    text = """
import pathlib, torch
from emutpu import _activation
_activation._PCI_DEVICES = pathlib.Path({folder!r})
_activation.load()
"""
    aside = run(
        text.format(folder=str(tmp_path / "pci")) + ASIDE.format(owner="privateuseone"),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert aside.returncode == 0, aside.stderr
    assert aside.stderr.startswith("emutpu: stepping aside: a real TPU is attached")
    assert aside.stderr.count("\n") == 1
    active = run(
        text.format(folder=str(tmp_path / "other")) + "print(torch.empty(1, device='tpu').device)",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert (active.returncode, active.stdout) == (0, "tpu:0\n"), active.stderr


def test_steps_aside_for_another_owner(run: Run) -> None:
    """When another package renamed PrivateUse1 first, one message that names it."""
    text = """
import torch
torch.utils.rename_privateuse1_backend("npu")
from emutpu import _activation
_activation.load()
"""
    result = run(text + ASIDE.format(owner="npu"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr
    assert result.stderr == (
        "emutpu: stepping aside: PrivateUse1 already belongs to the backend 'npu'; only one package can own it\n"
    )


def test_torch_too_old(run: Run, tmp_path: Path) -> None:
    """One ImportError with both versions and the remedy, before anything private is touched."""
    stubs = package(tmp_path, "torch", "__version__ = '2.5.1+cpu'\n")
    result = run("from emutpu._activation import load\nload()", path=stubs)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ImportError: emutpu needs torch 2.13 or newer, found 2.5.1+cpu: ")


@pytest.mark.parametrize("missing", ["jax", "jaxlib"])
def test_jax_missing(run: Run, tmp_path: Path, missing: str) -> None:
    """``import torch`` works without JAX; the first op raises one ImportError that says what to install."""
    stubs = package(tmp_path, missing, f'raise ModuleNotFoundError("No module named {missing!r}")\n')
    result = run(
        """
        import torch
        x = torch.empty(2, device="tpu")
        print(x.shape)
        x + 1
        """,
        path=stubs,
    )
    assert (result.returncode, result.stdout) == (1, "torch.Size([2])\n"), result.stderr
    last = result.stderr.splitlines()[-1]
    assert "emutpu runs its programs with JAX, which cannot be imported here" in last
    assert "pip install 'jax" in last


def test_import_stays_light(passes: Passes) -> None:
    """``import torch`` imports neither jax nor Dynamo, and neither the lowerings nor the client."""
    passes("""
        import sys, torch
        heavy = ("jax", "jaxlib", "torch._dynamo", "emutpu.backend.lowering", "emutpu.simulator.cpu_client")
        loaded = [name for name in heavy if name in sys.modules]
        assert not loaded, loaded
        torch.empty(2, device="tpu").view(1, 2)
        assert "jax" not in sys.modules
    """)


def test_import_stays_quick(passes: Passes) -> None:
    """Activation, everything that it imports included, takes at most 60 ms of CPU time.

    Of five processes the quickest is judged: what else the machine does adds to the others (52 and 84 ms were seen side by
    side while another worker ran), and nothing takes away. They may keep bytecode, as an installed package has it: where
    that is forbidden, half of the time is the compilation of the sources (86 in place of 43 ms).
    """
    text = """
        import time, torch
        before = time.process_time()
        from emutpu._activation import load
        load()
        print(time.process_time() - before)
        import emutpu
        assert emutpu.is_emulated()
    """
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONDONTWRITEBYTECODE": ""}
    times = [float(passes(text, **variables)) for _ in range(5)]
    assert min(times) <= IMPORT_LIMIT, times


def test_off_switch(passes: Passes) -> None:
    """TORCH_DEVICE_BACKEND_AUTOLOAD=0 leaves torch alone."""
    passes(ASIDE.format(owner="privateuseone"), TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.parametrize("module", ["registration", "storage", "lowering.pointwise"])
def test_a_module_of_the_backend_before_torch(passes: Passes, module: str) -> None:
    """It is in the middle of its own import when torch activates the device, and complete afterwards."""
    passes(f"""
        import sys
        import emutpu.backend.{module} as module
        import torch
        from emutpu.backend import registration

        assert sys.modules[module.__name__] is module
        assert (torch.ones(2, device="tpu") + 1).tolist() == [2, 2]
        assert registration.loaded()
    """)
