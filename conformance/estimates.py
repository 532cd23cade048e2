"""Full-size estimates of many programs: a pass of dry-run workers, and the file of JSON lines that keeps what they found.

The package comes with the estimates of its manifest, made by ``emutpu conformance predict --suite full``; a pass of one's own
adds to them, and what has an estimate is not run again.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from emutpu.conformance import manifest
from emutpu.conformance.pool import Limits, Task, work_off
from emutpu.conformance.prediction import Memory
from emutpu.conformance.runner import selected

__all__ = ["FILE", "MODE", "estimate", "memory"]

FILE = "full-size.jsonl"
MODE = "full-size"
_PACKAGED = "full_size.jsonl"
_KEPT = ("parameters", "weight_bytes", "bytes", "dtype", "forward", "note")
Line = dict[str, Any]


def memory(folder: Path, limit: int) -> Memory:
    """The whole lines of estimates in ``folder`` over those of the package; ``limit`` is what one device has, in bytes."""
    found = _read(folder)
    return Memory(limit, {name: entry for name, entry in found.items() if entry.get("bytes") is not None})


def estimate(
    suite: str,
    only: str | None,
    folder: Path,
    *,
    chip: str,
    jobs: int,
    limits: Limits,
    progress: Callable[[int, int], None],
    fresh: bool = False,
) -> dict[str, Any]:
    """Estimate the programs of a suite that have none, or with ``fresh`` all, and keep the lines in ``folder``. Those that
    stand for most models come first.

    ``progress`` is told how many are done, and of how many. Gives counts, and the programs that have no estimate with why.
    """
    programs = selected(suite, (1, 1), only)
    folder.mkdir(parents=True, exist_ok=True)
    _drop_half_a_line(folder / FILE)
    known = {} if fresh else _read(folder)
    rows = collections.Counter(model.program for model in manifest.models())
    missing = [program for program in programs if program.name not in known]
    left = [Task(program.name, MODE) for program in sorted(missing, key=lambda program: -rows[program.name])]
    made: dict[str, Line] = {}
    with (folder / FILE).open("w" if fresh else "a", encoding="utf-8") as stream:

        def finished(answer: dict[str, Any]) -> None:
            line = _line(answer)
            made[line["program"]] = line
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            progress(len(made), len(left))

        work_off(left, jobs=jobs, environment=_variables(chip), limits=limits, finished=finished)
    everything = known | made
    here = [everything[program.name] for program in programs]
    return {
        "suite": suite,
        "programs": len(here),
        "estimated": sum(line.get("bytes") is not None for line in here),
        "forward": sum(bool(line.get("forward")) for line in here),
        "failed": {line["program"]: line["error"] for line in here if line.get("bytes") is None},
    }


def _line(answer: Mapping[str, Any]) -> Line:
    found = answer.get("estimate")
    if found is None:
        return {
            "program": answer["program"],
            "error": f"{answer['outcome']}: {answer['error']}".partition("\n")[0][:200],
        }
    return {"program": answer["program"]} | {name: found[name] for name in _KEPT}


def _variables(chip: str) -> dict[str, str]:
    """Of a worker: the dry client, with made-up values where a model reads one, and memory without a limit."""
    return {
        "EMUTPU_CHIP": chip,
        "EMUTPU_CLIENT": "dry_run",
        "EMUTPU_DRY_VALUES": "0",
        "EMUTPU_HBM": "unlimited",
        "EMUTPU_BEYOND": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def _read(folder: Path) -> dict[str, Line]:
    """By program; what the folder says wins."""
    packaged = files("emutpu.conformance").joinpath("data", _PACKAGED)
    return {line["program"]: line for source in (packaged, folder / FILE) for line in _lines(source)}


def _lines(source: Any) -> Iterator[Line]:
    if source.is_file():
        for line in source.read_text(encoding="utf-8").split("\n")[:-1]:  # a pass may be writing the last one
            yield json.loads(line)


def _drop_half_a_line(path: Path) -> None:
    """A killed pass may have left one at the end of its file."""
    if path.is_file():
        text = path.read_text(encoding="utf-8")
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
