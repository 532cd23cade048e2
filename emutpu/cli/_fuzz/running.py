"""Runs of the program under perturbations."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emutpu._report import Document
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._fuzz.outputs import difference

__all__ = ["Program", "Result"]

_TAIL = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a run came to: exit code (128 + n for signal n), standard output, the named result, how often it did what.

    ``timed_out`` runs were killed. ``ops`` and ``launches`` are None where the process wrote no counts.
    """

    exit_code: int
    output: str
    errors: str
    result: Any
    ops: int | None
    launches: int | None
    timed_out: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program, how it is run, and what counts as the same."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    name: str | None
    rtol: float
    atol: float

    def run(self, perturbations: Sequence[Document], timeout: float) -> Result:
        """One run. Raises EmulatorFailure when the interpreter cannot be started."""
        report, plan = self.folder / "report.json", self.folder / "plan.json"
        report.unlink(missing_ok=True)
        content = {"perturbations": list(perturbations), "report": str(report), "result": self.name}
        plan.write_text(json.dumps(content), encoding="utf-8")
        environment = {
            **os.environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
            "PYTHONHASHSEED": "0",
            **self.environment,
            "EMUTPU_FUZZ": str(plan),
        }
        try:
            child = subprocess.Popen(
                [sys.executable, *self.arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise EmulatorFailure(
                EmulatorExit.PROGRAM_NOT_STARTED, f"the Python interpreter could not be started: {error}"
            ) from error
        output, errors, timed_out = _wait(child, timeout)
        counts: Document = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
        return Result(code, output, errors, counts.get("result"), counts.get("ops"), counts.get("launches"), timed_out)

    def difference(self, expected: Result, found: Result) -> str | None:
        """How a run differs from the undisturbed one, None if it does not."""
        if found.timed_out:
            return "the program hangs"
        if found.exit_code != expected.exit_code:
            lines = found.errors.strip().splitlines()[-_TAIL:]
            return "\n".join([f"the exit code is {found.exit_code} instead of {expected.exit_code}", *lines])
        return difference(expected.output, found.output, self.rtol, self.atol) or difference(
            expected.result, found.result, self.rtol, self.atol, f"`{self.name}`"
        )


def _wait(child: subprocess.Popen[str], timeout: float) -> tuple[str, str, bool]:
    try:
        return *child.communicate(timeout=timeout), False
    except subprocess.TimeoutExpired:
        _kill(child)
        return *child.communicate(), True
    except BaseException:  # any, Ctrl-C too: no program is left behind, and it goes on
        _kill(child)
        child.wait()
        raise


def _kill(child: subprocess.Popen[str]) -> None:
    """The program with what it started."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
