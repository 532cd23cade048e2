"""The outcomes of whole runs of the model suite, as they are kept in ``docs/results``: what a later run is compared with.

    python -m tools.results reports/conformance/run-3.jsonl >docs/results/full-defer.jsonl
    emutpu conformance compare docs/results/full-defer.jsonl 4
    emutpu conformance report docs/results/full-*.jsonl

Each line has what :mod:`emutpu.conformance` says of one program, without tracebacks and modelled time, and of its ops those
alone that stand in the way of a prediction for the chip.
"""

from __future__ import annotations

import argparse
import fileinput
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from emutpu.conformance.prediction import data_dependent, missing_kernels

__all__ = ["main", "trimmed"]

_KEPT = (
    "program",
    "mode",
    "outcome",
    "stage",
    "error",
    "op",
    "tier1",
    "tier2",
    "trained",
    "tokens_equal",
    "ill_conditioned",
    "fingerprint",
)
_MEASURED = ("logit_error", "gradient_error", "seconds", "processor_seconds")
_LONGEST = 200


def trimmed(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The answers in ``lines`` of JSON, shortened: measured values to two digits, errors to their first line. Of a program
    that ran again in the same mode the last.
    """
    answers = map(json.loads, lines)
    for answer in {(answer["program"], answer["mode"]): answer for answer in answers}.values():
        kept = {name: answer[name] for name in _KEPT if answer.get(name) not in (None, [], "")}
        if "error" in kept:
            kept["error"] = kept["error"].splitlines()[0][:_LONGEST]
        given = answer.get("ops", {})  # a worker that died names none
        ops = {op: count for op, count in given.items() if missing_kernels([op]) or data_dependent([op])}
        kept |= {"ops": ops} if ops else {}
        kept |= {name: float(f"{answer[name]:.2g}") for name in _MEASURED if answer.get(name)}
        yield kept


def main() -> None:
    """Print the answers of the given files, trimmed."""
    parser = argparse.ArgumentParser(
        description="Outcomes of a run of the model suite, without what they were found by."
    )
    parser.add_argument("runs", nargs="+", type=Path, help="files run-<n>.jsonl of a history")
    with fileinput.input(parser.parse_args().runs, encoding="utf-8") as lines:
        sys.stdout.writelines(json.dumps(answer) + "\n" for answer in trimmed(lines))


if __name__ == "__main__":
    main()
