"""Run a program in a fresh interpreter on the emulated device and collect the reports of its processes."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

from emutpu import _report
from emutpu._report import Document
from emutpu.cli._exit import EmulatorExit, EmulatorFailure

__all__ = ["Outcome", "launch", "report_of"]

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)
_STDERR = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """How the program ended. ``exit_code`` is 128 + n for signal n, as a shell reports it; ``seconds`` is wall time."""

    exit_code: int
    signal: str | None
    seconds: float
    reports: tuple[Document, ...]


def launch(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    prefix: Sequence[str] = (),
    stdout_to_stderr: bool = False,
) -> Outcome:
    """Run ``python *arguments`` with ``environment`` on top of this process's, and wait for it.

    ``prefix`` is a command that becomes the interpreter, as ``env`` does.

    Signals sent to this process reach the program. Raises EmulatorFailure when the interpreter cannot be started.
    """
    with tempfile.TemporaryDirectory(prefix="emutpu-run-") as folder:
        variables = {
            **os.environ,
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
            **environment,
            "EMUTPU_REPORT": os.path.join(folder, "{pid}.json"),
        }
        started = time.perf_counter()
        code = _run([*prefix, sys.executable, *arguments], variables, _STDERR if stdout_to_stderr else None)
        seconds = time.perf_counter() - started
        reports = tuple(_load(path) for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*.json"))))
    if code >= 0:
        return Outcome(code, None, seconds, reports)
    return Outcome(128 - code, signal.Signals(-code).name, seconds, reports)


def report_of(outcome: Outcome, chip: str) -> Document:
    """The run document of a program that has ended."""
    if outcome.reports:
        document = _report.merge(outcome.reports)
    else:
        document = _report.empty_run(chip, _why_no_report(outcome))
    notes = {name: text for name, text in document["notes"].items() if name not in ("wall_seconds", "exit_code")}
    return document | {
        "wall_seconds": outcome.seconds,
        "exit_code": outcome.exit_code,
        "signal": outcome.signal,
        "notes": notes,
    }


def _why_no_report(outcome: Outcome) -> str:
    if outcome.signal is not None:
        return f"the program was killed by {outcome.signal} before it could write a report"
    return (
        "the program wrote no report: it never imported torch with emutpu active, or ended without exit handlers "
        "(os._exit); `emutpu doctor` checks the installation"
    )


def _load(path: str) -> Document:
    with open(path, encoding="utf-8") as stream:
        document: Document = json.load(stream)
    return document


def _run(command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with _signals_to_child() as adopt:
        try:
            child = subprocess.Popen(command, env=environment, stdout=stdout)
        except OSError as error:
            raise EmulatorFailure(
                EmulatorExit.PROGRAM_NOT_STARTED, f"the Python interpreter could not be started: {error}"
            ) from error
        adopt(child)
        return child.wait()


class _Forwarder:
    """Passes signals on to the child; one that comes before the child exists is delivered when it does."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.early: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.child is None:
            self.early.append(number)
        elif number not in _KEYBOARD or not _in_foreground():
            self.child.send_signal(number)

    def adopt(self, child: subprocess.Popen[bytes]) -> None:
        self.child = child
        for number in self.early:
            child.send_signal(number)


def _in_foreground() -> bool:
    """Whether a terminal sends its keyboard signals to this process group, and so to the child as well."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def _signals_to_child() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    forwarder = _Forwarder()
    previous = {number: signal.getsignal(number) for number in _FORWARDED + _KEYBOARD}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:  # nohup: the child must ignore it too
            signal.signal(number, forwarder)
    try:
        yield forwarder.adopt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
