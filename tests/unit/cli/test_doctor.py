"""``emutpu doctor`` and its checks."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import Command

from emutpu.cli import _checks
from emutpu.cli._checks import Check
from emutpu.cli._versions import Bounds

Valid = Callable[[Any, str], dict[str, Any]]


def by_name(checks: Any) -> dict[str, Check]:
    """Index findings by name."""
    return {check.name: check for check in checks}


def test_document(emutpu: Command, valid: Valid) -> None:
    """The JSON document is valid, alone on standard output, and agrees with the exit code."""
    result = emutpu("doctor", "--json", "-", EMUTPU_CHIP="none")
    document = valid(result.stdout, "doctor")
    names = {check["name"] for check in document["checks"]}
    assert {"python", "torch", "jax", "jaxlib", "conflict.torch_tpu", "topology", "cache", "memory", "smoke"} <= names
    assert document["ok"] == (result.returncode == 0)
    assert document["chip"] == "none"
    assert {row["name"] for row in document["environment"]} >= {"EMUTPU_CHIP", "TORCH_TPU_LAUNCH_BLOCKING"}


def test_a_finding_is_exit_code_1(emutpu: Command, valid: Valid) -> None:
    """One failing check makes the document not ok, with a remedy, and the command exit with 1."""
    result = emutpu("doctor", "--json", "-", EMUTPU_CHIP="v99", EMUTPU_CLEINT="cpu", EMUTPU_FORBID="1")
    assert result.returncode == 1
    document = valid(result.stdout, "doctor")
    found = {check["name"]: check for check in document["checks"]}
    assert not document["ok"]
    assert found["environment.values"]["status"] == "fail"
    assert "v5e" in found["environment.values"]["fix"]
    assert (found["environment.unknown"]["status"], found["environment.unknown"]["fix"]) == (
        "warn",
        "did you mean EMUTPU_CLIENT?",
    )
    assert found["environment.forbid"]["status"] == "fail"
    assert "Traceback" not in result.stderr


def test_variables_are_listed(emutpu: Command) -> None:
    """``--env`` prints every variable with its value or default and its meaning."""
    from emutpu._settings import VARIABLES

    shown = emutpu("doctor", "--env", EMUTPU_CHIP="none").stdout
    assert all(variable.name in shown and variable.meaning in shown for variable in VARIABLES)
    assert "EMUTPU_CHIP=none" in shown
    assert "EMUTPU_CLIENT (default cpu)" in shown


@pytest.mark.parametrize(
    ("version", "status", "words"),
    [
        ("2.13.0+cpu", "ok", ""),
        ("2.12.1", "fail", "too old"),
        ("2.14.0", "fail", "too new"),
        (None, "fail", "not installed"),
    ],
)
def test_pairing(version: str | None, status: str, words: str) -> None:
    """Versions are compared with the declared bounds, and the remedy repeats them."""
    check = _checks._paired("torch", version, Bounds(">=2.13.0,<2.14"), "emutpu")
    assert check.status == status
    assert words in check.message
    assert status == "ok" or check.fix == 'pip install "torch>=2.13.0,<2.14"'


def test_missing_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without jax fails with the command that installs it."""
    installed = _checks._version
    monkeypatch.setattr(_checks, "_version", lambda name: None if name == "jax" else installed(name))
    found = by_name(_checks._versions({}))
    assert found["jax"].status == "fail"
    assert found["jax"].fix is not None
    assert found["jax"].fix.startswith('pip install "jax>=')
    assert found["torch"].status == "ok"


def test_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without metadata torch cannot find emutpu, and the doctor says how to install it."""

    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    (check,) = _checks._versions({})
    assert (check.name, check.status) == ("installation", "fail")


def test_conflicting_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real TorchTPU is a failure; another backend of torch is a warning with its name."""
    entries = [
        SimpleNamespace(name=name, dist=SimpleNamespace(name=name), value="")
        for name in ("emutpu", "torch_tpu", "torch_other")
    ]
    monkeypatch.setattr(_checks, "_backends", lambda: entries)
    found = by_name(_checks._entry_points({}))
    assert found["autoload.entry_point"].status == "ok"
    assert found["conflict.torch_tpu"].status == "fail"
    assert found["conflict.backends"].status == "warn"
    assert "torch_other" in found["conflict.backends"].message


def test_missing_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation that torch cannot find is a failure."""
    monkeypatch.setattr(_checks, "_backends", list)
    assert by_name(_checks._entry_points({}))["autoload.entry_point"].status == "fail"


def _device(root: Path, address: str, vendor: str, kind: str) -> None:
    folder = root / address
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor + "\n")
    (folder / "class").write_text(kind + "\n")


def test_real_tpu_is_seen(tmp_path: Path) -> None:
    """An accelerator of the vendor is a conflict; the same vendor's network card and other makers' devices are not."""
    _device(tmp_path, "0000:00:01.0", "0x1ae0", "0x020000")
    _device(tmp_path, "0000:00:02.0", "0x10de", "0x120000")
    assert by_name(_checks._hardware({}, tmp_path))["conflict.hardware"].status == "ok"
    _device(tmp_path, "0000:00:03.0", "0x1ae0", "0x120000")
    check = by_name(_checks._hardware({}, tmp_path))["conflict.hardware"]
    assert check.status == "fail"
    assert "0000:00:03.0" in check.message


@pytest.mark.parametrize(
    ("environment", "name", "status"),
    [
        ({}, "environment.values", "ok"),
        ({}, "environment.autoload", "ok"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, "environment.autoload", "fail"),
        ({"EMUTPU_BEYOND": "perhaps"}, "environment.values", "fail"),
        ({"EMUTPU_XYZZY": "1"}, "environment.unknown", "warn"),
        ({"EMUTPU_CHIP": "none"}, "environment.chip", "warn"),
        ({"JAX_PLATFORMS": "cuda"}, "environment.jax", "fail"),
    ],
)
def test_environment(environment: dict[str, str], name: str, status: str) -> None:
    """Each finding about the environment, by the variable that causes it."""
    assert by_name(_checks._environment(environment))[name].status == status


def test_cpu_among_jax_platforms_is_fine() -> None:
    """JAX_PLATFORMS may name others beside the CPU."""
    assert "environment.jax" not in by_name(_checks._environment({"JAX_PLATFORMS": "cuda,cpu"}))


def test_variable_set_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the process itself, a variable that changed after the settings were read is a warning with its name."""
    from emutpu import _settings

    monkeypatch.delenv("EMUTPU_BEYOND", raising=False)
    _settings.reload()
    assert by_name(_checks._late({}))["environment.late"].status == "ok"
    monkeypatch.setenv("EMUTPU_BEYOND", "1")
    check = by_name(_checks._late({}))["environment.late"]
    assert check.status == "warn"
    assert "EMUTPU_BEYOND" in check.message
    _settings._captured.cache_clear()


@pytest.mark.parametrize(
    ("environment", "status", "words"),
    [
        ({}, "ok", "v5e-1; this process sees device 0"),
        ({"TPU_VISIBLE_DEVICES": "0"}, "ok", "device 0"),
        ({"TPU_VISIBLE_DEVICES": "1"}, "fail", "only device 0 exists"),
        ({"EMUTPU_TOPOLOGY": "v5e-4", "TPU_VISIBLE_DEVICES": "3,1"}, "ok", "v5e-4; this process sees device 3, 1"),
        ({"EMUTPU_TOPOLOGY": "v5e-7"}, "fail", "the closest legal N are"),
        ({"EMUTPU_TOPOLOGY": "v5e-4", "EMUTPU_CHIP": "v6e"}, "fail", "the chip of EMUTPU_TOPOLOGY"),
    ],
)
def test_topology(environment: dict[str, str], status: str, words: str, tmp_path: Path) -> None:
    """The slice must be legal and the devices that the process is given must exist in it."""
    check = by_name(_checks._topology(environment, tmp_path))["topology"]
    assert check.status == status
    assert words in check.message


def test_emulated_tree_is_no_hardware(tmp_path: Path) -> None:
    """An emulated PCI tree is no conflict: it is named, and decides what the process sees."""
    from emutpu.simulator import pci
    from emutpu.simulator.topology import slice_named

    pci.write_tree(slice_named("v5e-4"), tmp_path)
    (tmp_path / "dev/vfio/1").unlink()
    check = by_name(_checks._hardware({}, tmp_path / pci.DEVICES))["conflict.hardware"]
    assert check.status == "ok"
    assert "an emulated PCI tree of v5e-4" in check.message
    seen = by_name(_checks._topology({"EMUTPU_TOPOLOGY": "v5e-4"}, tmp_path))["topology"].message
    assert seen == "v5e-4; this process sees device 0, 2, 3"


@pytest.mark.parametrize(("mode", "status"), [(0o700, "ok"), (0o755, "warn"), (0o770, "fail"), (0o702, "fail")])
def test_cache_directory(tmp_path: Path, mode: int, status: str) -> None:
    """A cache holds native code, so nobody else may write it, nor should read it."""
    tmp_path.chmod(mode)
    check = by_name(_checks._cache({"EMUTPU_CACHE_DIR": str(tmp_path)}))["cache"]
    assert check.status == status
    assert status == "ok" or check.fix == f"chmod 700 {tmp_path}"
    tmp_path.chmod(0o700)


def test_cache_directory_of_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of another user is refused, whatever its mode."""
    tmp_path.chmod(0o700)
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert by_name(_checks._cache({"EMUTPU_CACHE_DIR": str(tmp_path)}))["cache"].status == "fail"


def test_absent_cache_directory(tmp_path: Path) -> None:
    """A directory that does not exist comes with the command that makes it."""
    check = by_name(_checks._cache({"EMUTPU_CACHE_DIR": str(tmp_path / "absent")}))["cache"]
    assert check.status == "fail"
    assert check.fix is not None
    assert check.fix.startswith("mkdir -m 700")


@pytest.mark.parametrize(("free", "status"), [(8 << 30, "ok"), (2 << 30, "warn"), (1 << 20, "fail"), (None, "warn")])
def test_memory(monkeypatch: pytest.MonkeyPatch, free: int | None, status: str) -> None:
    """Little memory is a warning, hardly any a failure, and an unknown amount is said to be so."""
    monkeypatch.setattr(_checks, "_free_memory", lambda: free)
    assert by_name(_checks._memory({}))["memory"].status == status


def test_free_memory_is_plausible() -> None:
    """Some memory is free, and not more than the host has."""
    free = _checks._free_memory()
    assert free is not None
    assert 0 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "status", "words"),
    [
        (0, 'noise\n{"values": [2.0, 2.0], "import": 1.0, "first_op": 0.5}\n', "", "ok", "1 + 1 = 2"),
        (0, '{"values": [0.0, 0.0], "import": 1.0, "first_op": 0.5}\n', "", "fail", "[0.0, 0.0]"),
        (1, "", "KeyError: 'cause'\n\nTraceback:\n  x\nRuntimeError: effect\n", "fail", "effect <- KeyError: 'cause'"),
        (-11, "", "", "fail", "-11"),
    ],
)
def test_smoke_result(code: int, stdout: str, stderr: str, status: str, words: str) -> None:
    """The smoke check passes only on the right value, and shows the cause of a failure."""
    check = _checks._judge_smoke(code, stdout, stderr)
    assert check.status == status
    assert words in check.message


def test_smoke_is_not_run_without_a_device() -> None:
    """A device that is switched off is a warning, not a failure of the device."""
    (check,) = _checks._smoke({"EMUTPU_CHIP": "none"})
    assert check.status == "warn"


def test_persistent_cache(tmp_path: Path) -> None:
    """A remote root needs a secret; a directory that others may write is no place for native code."""
    name = "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT"

    def status(root: str, **others: str) -> str:
        return by_name(_checks._persistent_cache({name: root} | others))["cache.persistent"].status

    assert status("") == "ok"
    assert (status("s3://bucket/x"), status("s3://bucket/x", EMUTPU_CACHE_KEY="k" * 16)) == ("fail", "ok")
    assert status(str(tmp_path / "absent")) == "ok"
    tmp_path.chmod(0o777)
    assert (status(str(tmp_path)), status(f"file://{tmp_path}")) == ("fail", "fail")
    tmp_path.chmod(0o700)
    assert status(str(tmp_path)) == "ok"
