"""Runs programs of the model suite on the CPU alone: ``python -m tools.corpus [--only PATTERN] [--suite reps] [--jobs N]``.

What fails here is a defect of the suite: its shrinking, its inputs, or a library. Prints the failures by cause, and writes
the fingerprints of what ran into the manifest (not with ``--dry``).
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from emutpu.conformance.gates import CPU_ONLY
from emutpu.conformance.pool import Limits, Task, work_off
from emutpu.conformance.runner import selected
from tools.manifest import DATA

__all__ = ["main"]

_ENVIRONMENT = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
_LIMITS = Limits(60, 6 * 2**30)
_NAMES = 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write. Gives the exit code: 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="full", choices=("smoke", "reps", "full"))
    parser.add_argument("--only", help="only programs with such a name, as in 'timm/*'")
    parser.add_argument("--shard", default="1/1", help="i/n")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--dry", action="store_true", help="write no fingerprints")
    options = parser.parse_args(arguments)
    number, of = (int(part) for part in options.shard.split("/"))
    programs = selected(options.suite, (number, of), options.only)
    answers: list[dict[str, Any]] = []
    work_off(
        [Task(program.name, CPU_ONLY) for program in programs],
        jobs=options.jobs,
        environment=_ENVIRONMENT,
        limits=_LIMITS,
        finished=answers.append,
    )
    failed = _print(answers)
    if not options.dry:
        _write({answer["program"]: answer["fingerprint"] for answer in answers if answer.get("fingerprint")})
    return 1 if failed else 0


def _print(answers: Sequence[Mapping[str, Any]]) -> int:
    counts = collections.Counter(answer["outcome"] for answer in answers)
    causes: dict[str, list[str]] = {}
    for answer in sorted(answers, key=lambda answer: answer["program"]):
        if answer["outcome"] != "pass":
            where = (answer["traceback"] or [""])[-1].rpartition("site-packages/")[2].partition(" ")[0]
            cause = re.sub(r"\d+", "#", (answer["error"] or "").partition("\n")[0][:160])
            causes.setdefault(f"{answer['outcome']}: {cause} {where}", []).append(answer["program"])
    for cause, names in sorted(causes.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):4} {cause}\n     {' '.join(names[:_NAMES])}")
    slow = sorted(answers, key=lambda answer: -answer["seconds"])[:_NAMES]
    print("slowest:", ", ".join(f"{answer['program']} {answer['seconds']:.1f} s" for answer in slow))
    prints = {answer.get("fingerprint") for answer in answers} - {None}
    print(f"{len(answers)} programs, {len(prints)} distinct; {dict(counts)}")
    return len(answers) - counts["pass"]


def _write(fingerprints: Mapping[str, str]) -> None:
    path = DATA / "programs.jsonl"
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        program = json.loads(line)
        program["fingerprint"] = fingerprints.get(program["name"], program["fingerprint"])
        lines.append(json.dumps(program, ensure_ascii=False, separators=(",", ":")) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
