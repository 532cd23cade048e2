"""``emutpu run`` and the group of commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import FAKE_DEVICE, Command, child_environment

Write = Callable[[str], str]
Valid = Callable[[Any, str], dict[str, Any]]

SHOW = (
    "import os, sys\nprint(sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith(('EMUTPU', 'TORCH'))})\n"
)


def test_help_lists_the_commands(emutpu: Command) -> None:
    """Every command module is found by its name."""
    result = emutpu("--help")
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("run", "doctor", "demo"))


@pytest.mark.parametrize("command", ["run", "doctor", "demo"])
def test_help_of_every_command(emutpu: Command, command: str) -> None:
    """``--help`` works on each command and shows ``--json``."""
    result = emutpu(command, "--help")
    assert result.returncode == 0
    assert "--json" in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["doctor", "--help"], ["demo", "--help"]])
def test_help_imports_neither_torch_nor_jax(arguments: list[str]) -> None:
    """Help is fast because nothing heavy is imported for it."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "emutpu", *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in result.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"torch", "jax", "jaxlib", "numpy", "rich"}


def test_version(emutpu: Command) -> None:
    """``--version`` prints the package's version."""
    from emutpu import __version__

    assert __version__ in emutpu("--version").stdout


def test_unknown_command_is_wrong_usage(emutpu: Command) -> None:
    """A command that does not exist exits with 2 and no traceback."""
    result = emutpu("runn")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


def test_unknown_variable_is_a_warning(emutpu: Command, program: Write) -> None:
    """A misspelt EMUTPU_* variable is named with its closest name and stops nothing."""
    result = emutpu("run", program(""), EMUTPU_CHPI="v5e")
    assert result.returncode == 0
    assert "unknown environment variable EMUTPU_CHPI (did you mean EMUTPU_CHIP?)" in result.stderr


@pytest.mark.parametrize("code", [0, 1, 3, 77])
def test_exit_code_is_the_programs(emutpu: Command, program: Write, valid: Valid, tmp_path: Path, code: int) -> None:
    """The program's exit code passes through, into the report too."""
    result = emutpu("run", "--json", "report.json", program(f"import sys; sys.exit({code})"))
    assert result.returncode == code
    assert valid((tmp_path / "report.json").read_text(), "run")["exit_code"] == code


def test_signal_that_kills_the_program(emutpu: Command, program: Write, valid: Valid, tmp_path: Path) -> None:
    """A killed program exits with 128 + n, and the report says which signal and why counts are missing."""
    text = FAKE_DEVICE + "import signal; os.kill(os.getpid(), signal.SIGKILL)"
    result = emutpu("run", "--json", "report.json", program(text))
    assert result.returncode == 128 + signal.SIGKILL
    document = valid((tmp_path / "report.json").read_text(), "run")
    assert (document["exit_code"], document["signal"]) == (137, "SIGKILL")
    assert document["ops"]["dispatched"] is None
    assert "SIGKILL" in document["notes"]["ops"]


def test_exception_of_the_program_keeps_the_report(emutpu: Command, program: Write) -> None:
    """An uncaught exception of the program exits with 1, shows its own traceback, and is still reported."""
    result = emutpu("run", "--json", "-", program(FAKE_DEVICE + "raise KeyError('mine')"))
    assert result.returncode == 1
    assert "KeyError: 'mine'" in result.stderr
    assert json.loads(result.stdout)["ops"]["dispatched"] == 43


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_reach_the_program(tmp_path: Path, number: signal.Signals) -> None:
    """A signal sent to ``emutpu run`` is the program's to handle."""
    script = tmp_path / "program.py"
    script.write_text(
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *a: sys.exit(9))\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-m", "emutpu", "run", str(script)]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A test run in the background inherits an ignored SIGINT, and would test that.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509  # this test starts no threads
    ) as process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=30) == 9


def test_report_of_a_device_program(emutpu: Command, program: Write, valid: Valid, tmp_path: Path) -> None:
    """What the program's process counted is in the report and in the summary."""
    result = emutpu("run", "--json", "report.json", program(FAKE_DEVICE + "print('result')"))
    assert result.stdout == "result\n"
    document = valid((tmp_path / "report.json").read_text(), "run")
    assert document["ops"] == {"dispatched": 43, "by_name": {"aten.add.Tensor": 40, "aten.mm": 3}}
    assert document["compiles"]["hits"] == 41
    assert document["peak_hbm_bytes"] == 8192
    assert document["wall_seconds"] > 0
    for shown in ("aten.add.Tensor", "95.3% hits", "train.py:7", "8 KiB", "not hardware"):
        assert shown in result.stderr


def test_processes_of_a_program_are_added_up(emutpu: Command, program: Write, tmp_path: Path) -> None:
    """A program that starts another one on the device is reported as a whole."""
    again = (
        "import subprocess\nif len(sys.argv) == 1: subprocess.run([sys.executable, __file__, 'child'], check=True)\n"
    )
    emutpu("run", "--json", "report.json", program(FAKE_DEVICE + again))
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["processes"] == 2
    assert document["ops"]["dispatched"] == 86


def test_json_on_standard_output_is_alone_there(emutpu: Command, program: Write, valid: Valid) -> None:
    """With ``--json -`` the program's own output goes to standard error."""
    result = emutpu("run", "--json", "-", program("print('from the program')"))
    assert valid(result.stdout, "run")["chip"] == "v5e"
    assert "from the program" in result.stderr


def test_program_gets_its_own_arguments(emutpu: Command, program: Write) -> None:
    """Everything after the script is the program's, even what looks like an option of ours."""
    result = emutpu("run", "--chip", "v5p", program(SHOW), "--json", "x", "--help", "--", "-m")
    assert result.stdout.startswith("['--json', 'x', '--help', '--', '-m']")


@pytest.mark.parametrize("option", [["-m", "shown"], ["-mshown"], ["--chip", "v5e", "-m", "shown"]])
def test_module_gets_its_own_arguments(emutpu: Command, tmp_path: Path, option: list[str]) -> None:
    """``-m MODULE`` ends our options, as it ends Python's."""
    (tmp_path / "shown.py").write_text(SHOW)
    result = emutpu("run", *option, "--chip", "none", "-m")
    assert result.stdout.startswith("['--chip', 'none', '-m']")


def test_options_become_the_childs_environment(emutpu: Command, program: Write) -> None:
    """The child's ``import torch`` sees every option, and autoload is on whatever the shell says."""
    options = ["--chip", "v6e", "--mode", "debug", "--precision", "highest", "--allow-fallback"]
    result = emutpu("run", *options, program(SHOW), TORCH_DEVICE_BACKEND_AUTOLOAD="0", TORCH_TPU_DEFER_AND_FUSE="1")
    for pair in (
        "'EMUTPU_CHIP': 'v6e'",
        "'TORCH_TPU_LAUNCH_BLOCKING': '1'",
        "'TORCH_TPU_DEFER_AND_FUSE': '0'",
        "'EMUTPU_PRECISION': 'highest'",
        "'EMUTPU_ALLOW_FALLBACK': '1'",
        "'TORCH_DEVICE_BACKEND_AUTOLOAD': '1'",
    ):
        assert pair in result.stdout


def test_variables_of_the_shell_are_kept(emutpu: Command, program: Write) -> None:
    """Without an option, the shell's variable holds, and the report names that chip."""
    result = emutpu("run", "--json", "-", program(SHOW), EMUTPU_CHIP="v5p")
    assert json.loads(result.stdout)["chip"] == "v5p"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to run"),
        (["absent.py"], "no file 'absent.py'"),
        (["."], "without a __main__.py"),
        (["--bogus", "program.py"], "--bogus"),
        (["--chip", "v99", "program.py"], "v99"),
        (["--precision", "medium", "program.py"], "medium"),
        (["--pci", "--chip", "none", "program.py"], "emulates a host without one"),
        (["--pci", "--chip", "v8i", "program.py"], "pci_device is not published"),
        (["--topology", "v5e-7", "program.py"], "the closest legal N are 1, 4, 8"),
        (["--topology", "cube", "program.py"], "expected CHIP-SIZE"),
        (["--topology", "v5p-2", "--chip", "v5e", "program.py"], "contradicts"),
        (["--json", "absent/report.json", "program.py"], "no directory"),
        (["--json", ".", "program.py"], "cannot be written"),
    ],
)
def test_wrong_usage(emutpu: Command, program: Write, tmp_path: Path, arguments: list[str], message: str) -> None:
    """A mistake exits with 2, says what is wrong, shows no traceback, and does not run the program."""
    program("open('ran', 'w')")
    result = emutpu("run", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "ran").exists()


def test_bad_variable_is_wrong_usage(emutpu: Command, program: Write) -> None:
    """A value that a variable cannot have is found before the program starts."""
    result = emutpu("run", program(""), EMUTPU_CLIENT="gpu")
    assert result.returncode == 2
    assert "EMUTPU_CLIENT='gpu'" in result.stderr
    assert "Traceback" not in result.stderr


def test_forbidden(emutpu: Command, program: Write, tmp_path: Path) -> None:
    """EMUTPU_FORBID=1 is a failure of the emulator, and nothing runs."""
    result = emutpu("run", program("open('ran', 'w')"), EMUTPU_FORBID="1")
    assert result.returncode == 77
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("topology", "chip"), [("v5p-2", "v5p"), ("v7-2", "v7"), ("2xv5e-16", "v5e")])
def test_topology_selects_the_chip(emutpu: Command, program: Write, topology: str, chip: str) -> None:
    """The name of a slice implies the chip."""
    result = emutpu("run", "--topology", topology, program(SHOW))
    assert f"'EMUTPU_CHIP': '{chip}'" in result.stdout
    assert f"'EMUTPU_TOPOLOGY': '{topology}'" in result.stdout


def test_chip_wins_over_a_slice_from_the_environment(emutpu: Command, program: Write) -> None:
    """An option on the command line replaces the variable, also when that named a slice of another chip."""
    result = emutpu("run", "--chip", "v6e", program(SHOW), EMUTPU_TOPOLOGY="v5e-8")
    assert "'EMUTPU_CHIP': 'v6e'" in result.stdout
    assert result.returncode == 0


def test_defect_of_the_emulator_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An exception inside emutpu exits with 70 and shows its traceback."""
    from emutpu.cli import _main, run

    def broken(*arguments: object, **options: object) -> int:
        raise LookupError("a defect")

    monkeypatch.setattr(run, "run_program", broken)
    with pytest.raises(SystemExit) as raised:
        _main.main(["run", "-m", "this"])
    assert raised.value.code == 70
    assert "LookupError: a defect" in capsys.readouterr().err


def test_interpreter_that_cannot_start(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """No interpreter is exit code 71, without a traceback."""
    from emutpu.cli import _main

    monkeypatch.setattr(sys, "executable", os.devnull)
    with pytest.raises(SystemExit) as raised:
        _main.main(["run", "-m", "this"])
    assert raised.value.code == 71
    assert "could not be started" in capsys.readouterr().err
