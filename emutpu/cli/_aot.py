"""Modules through the real TPU compiler: the worker process, its crashes, and the cache of its answers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from emutpu import _aot_worker
from emutpu._report import installed_version
from emutpu.cli._exit import EmulatorExit, EmulatorFailure

__all__ = ["TOPOLOGIES", "Job", "cache_folder", "compiled", "require_libtpu"]

# The smallest topology that libtpu knows of each chip; modules are compiled for its first device.
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7": "tpu7x:2x2x1"}
_SECONDS = 900
_FORMAT = 1
_LOG_LINE = re.compile(r"^[IWEF]\d{4} |^WARNING|^=== Source|^\S*libtpu_init")
_NO_LIBTPU = (
    "the real TPU compiler is not installed: pip install 'emutpu[aot]' (libtpu 0.0.42.1, about 230 MB; it needs no TPU)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One module for one chip. ``file``, ``line`` and ``code`` are the user's line, None where it is not known."""

    path: Path
    name: str
    chip: str
    effort: str
    file: str | None = None
    line: int | None = None
    code: str | None = None

    def key(self, version: str) -> str:
        """Hash of everything that decides the compiler's answer."""
        parts = (str(_FORMAT), version, TOPOLOGIES[self.chip], self.effort)
        return hashlib.sha256("\0".join(parts).encode() + b"\0" + self.path.read_bytes()).hexdigest()


def require_libtpu() -> str:
    """The version of libtpu. Raises EmulatorFailure with the remedy where it is absent."""
    version = installed_version("libtpu")
    if version is None:
        raise EmulatorFailure(EmulatorExit.NO_COMPILER, _NO_LIBTPU)
    return version


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where answers are kept: below ``EMUTPU_CACHE_DIR``, else the user's cache directory."""
    root = environment.get("EMUTPU_CACHE_DIR")
    if root:
        return Path(root) / "aot"
    home = environment.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "emutpu" / "aot"


def compiled(jobs: list[Job], version: str, cache: Path | None) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Every job with its answer, which has ``cached`` beside the worker's fields; chip by chip.

    A module on which the compiler crashes or hangs is an answer that is not ok, and is not remembered. Raises
    EmulatorFailure when the compiler does not start.
    """
    for chip in dict.fromkeys(job.chip for job in jobs):
        with contextlib.closing(_Worker(TOPOLOGIES[chip])) as worker:
            for job in (job for job in jobs if job.chip == chip):
                place = None if cache is None else cache / f"{job.key(version)}.json"
                known = _remembered(place)
                if known is not None:
                    yield job, known | {"cached": True}
                    continue
                answer, lasting = worker.ask(job)
                if place is not None and lasting:
                    _remember(place, answer)
                yield job, answer | {"cached": False}


def _remembered(place: Path | None) -> dict[str, Any] | None:
    try:
        found = json.loads(place.read_text(encoding="utf-8")) if place else None
    except (OSError, ValueError):
        return None  # absent, or cut short: asked again and replaced
    return found if isinstance(found, dict) and "ok" in found else None


def _remember(place: Path, answer: dict[str, Any]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor, partial = tempfile.mkstemp(dir=place.parent)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)
    os.replace(partial, place)


class _Worker:
    """A compiler process, started when it is first asked and again after it died."""

    def __init__(self, topology: str) -> None:
        self._topology = topology
        self._child: subprocess.Popen[str] | None = None
        self._log: IO[str] = tempfile.TemporaryFile(  # noqa: SIM115 (lives as long as the worker; close() closes it)
            "w+", encoding="utf-8", errors="replace"
        )

    def ask(self, job: Job) -> tuple[dict[str, Any], bool]:
        """The answer, and whether asking again would give the same."""
        if self._child is None:
            self._start()
        self._log.seek(0)
        self._log.truncate()
        answer = self._exchange({"path": str(job.path), "effort": job.effort})
        if answer is not None:
            return answer, True
        code = self._stop()
        reason = f"did not answer in {_SECONDS} s" if code == 0 else f"ended with exit code {code}"
        return {"ok": False, "error": f"the TPU compiler {reason}: {self._last_words()}"}, False

    def close(self) -> None:
        if self._child is not None:
            self._stop()
        self._log.close()

    def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EMUTPU_")}
        self._child = subprocess.Popen(
            [sys.executable, "-P", _aot_worker.__file__, self._topology],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment,
        )  # fmt: skip
        hello = self._exchange(None)
        if hello is None or not hello["ready"]:
            reason = self._last_words() if hello is None else hello["error"]
            self._stop()
            raise EmulatorFailure(
                EmulatorExit.NO_COMPILER, f"the TPU compiler did not start for {self._topology}: {reason}"
            )

    def _exchange(self, job: dict[str, Any] | None) -> dict[str, Any] | None:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            if job is not None:
                child.stdin.write(json.dumps(job) + "\n")
                child.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([child.stdout], [], [], _SECONDS)
        line = child.stdout.readline() if ready else ""
        answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return answer

    def _stop(self) -> int:
        """End the process; its exit code if it had ended by itself, else 0."""
        child, self._child = self._child, None
        assert child is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            if child.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    child.stdin.close()
            return child.wait(timeout=5)
        child.kill()
        child.wait()
        return 0

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines()]
        telling = [line for line in lines if line.startswith("F") or (line and not _LOG_LINE.match(line))]
        return telling[0] if telling else "no message"
