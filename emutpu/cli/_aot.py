"""Modules through the real TPU compiler: the worker process, its crashes, and the cache of its answers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from emutpu import _aot_worker
from emutpu._report import installed_version
from emutpu._workers import Child, End, Ended, Limits
from emutpu.cli._exit import EmulatorExit, EmulatorFailure

__all__ = ["TOPOLOGIES", "Job", "cache_folder", "compiled", "require_libtpu"]

# The smallest topology that libtpu knows of each chip; modules are compiled for its first device.
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7": "tpu7x:2x2x1"}
_SECONDS = 900
_GRACE = 5.0  # seconds for the compiler to end by itself: libtpu tidies up
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
        self._child: Child | None = None

    def ask(self, job: Job) -> tuple[dict[str, Any], bool]:
        """The answer, and whether asking again would give the same."""
        child = self._child
        if child is None:
            child = self._child = self._start()
        said = len(child.words())
        try:
            answer: dict[str, Any] = child.ask({"path": str(job.path), "effort": job.effort})
        except Ended as ended:
            self.close()
            died = ended.end is End.DIED
            reason = f"ended with exit code {ended.code}" if died else f"did not answer in {_SECONDS} s"
            return {"ok": False, "error": f"the TPU compiler {reason}: {_last_words(ended.words[said:])}"}, False
        return answer, True

    def close(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.close(_GRACE)

    def _start(self) -> Child:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("EMUTPU_")}
        command = [sys.executable, "-P", _aot_worker.__file__, self._topology]
        child = Child(command, environment, Limits(clock=_SECONDS))
        try:
            hello = child.hear()
        except Ended as ended:
            reason = _last_words(ended.words)
        else:
            if hello["ready"]:
                return child
            reason = hello["error"]
        child.close(_GRACE)
        raise EmulatorFailure(
            EmulatorExit.NO_COMPILER, f"the TPU compiler did not start for {self._topology}: {reason}"
        )


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines()]
    telling = [line for line in lines if line.startswith("F") or (line and not _LOG_LINE.match(line))]
    return telling[0] if telling else "no message"
