"""The command line, and the processes in which the cases run."""

from __future__ import annotations

import argparse
import cProfile
import importlib
import json
import os
import pkgutil
import pstats
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import tools.bench
from emutpu._report import write_document
from tools.bench.case import Case, Plan
from tools.bench.report import Outcome, document, measurement_from, table
from tools.layout import ROOT

__all__ = ["cases", "main"]

_TIMEOUT = 900
_LINES = 30
_WIDTH = 150


def cases() -> dict[str, Case]:
    """Every case of every module of this package that has ``CASES``, by name."""
    found: dict[str, Case] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(tools.bench.__path__)):
        if module != "__main__":
            rows = getattr(importlib.import_module(f"tools.bench.{module}"), "CASES", ())
            found |= {case.name: case for case in rows}
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the document; 1 with ``--check`` if a bound fails or a case cannot be measured."""
    known = cases()
    options = _parser(known).parse_args(arguments)
    if options.child is not None:
        return _child(known[options.child], Plan(options.quick), options.json)
    if options.list:
        print("\n".join(f"{case.name:<18}{case.what}; against {case.against}" for case in known.values()))
        return 0
    if options.profile is not None:
        return _profile(known[options.profile], inside=options.inside)
    outcomes = [_measure(known[name], quick=options.quick) for name in options.only or known]
    console = Console(stderr=options.json == "-")
    console.width = max(console.width, _WIDTH)
    console.print(table(outcomes))
    if options.json is not None:
        write_document(document(outcomes, quick=options.quick), options.json)
    return 1 if options.check and not all(outcome.ok for outcome in outcomes) else 0


def _parser(known: dict[str, Case]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description=tools.bench.__doc__)
    parser.add_argument("--only", nargs="+", choices=known, metavar="NAME", help="measure these cases only")
    parser.add_argument("--json", metavar="PATH", help="write the results to PATH, or to standard output for -")
    parser.add_argument("--list", action="store_true", help="name the cases and measure none")
    parser.add_argument("--quick", action="store_true", help="few rounds: a look, not a measurement")
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bound does not hold")
    parser.add_argument("--profile", choices=known, metavar="NAME", help="show where the time of one case goes")
    parser.add_argument("--child", choices=known, help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser


def _command(case: Case, *arguments: str) -> tuple[list[str], dict[str, str]]:
    return [sys.executable, "-m", "tools.bench", *arguments], {**os.environ, **case.environment}


def _measure(case: Case, *, quick: bool) -> Outcome:
    """Run a case in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="emutpu-bench-") as folder:
        path = Path(folder) / "measurement.json"
        more = ("--quick",) if quick else ()
        command, environment = _command(case, "--child", case.name, "--json", str(path), *more)
        environment["EMUTPU_CACHE_DIR"] = str(Path(folder) / "cache")
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Outcome(case, None, f"not done after {_TIMEOUT} s")
        if done.returncode:
            return Outcome(case, None, _ended(done.returncode, done.stderr))
        return Outcome(case, measurement_from(json.loads(path.read_text(encoding="utf-8"))))


def _ended(code: int, said: str) -> str:
    """Why a case has no measurement: the signal that ended its process, or the code and the last line that it said."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return ": ".join([how, *said.strip().splitlines()[-1:]])


def _child(case: Case, plan: Plan, path: str) -> int:
    measured = case.run(plan)
    Path(path).write_text(json.dumps({"pairs": measured.pairs, "extra": dict(measured.extra)}), encoding="utf-8")
    return 0


def _profile(case: Case, *, inside: bool) -> int:
    """The functions in which most of the subject's time is spent, in a process of its own."""
    if not inside:
        command, environment = _command(case, "--profile", case.name, "--inside")
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    subject = case.subject()
    for _ in range(3):
        subject()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(case.calls):
        subject()
    profiler.disable()
    print(f"{case.name}: {case.what}; {case.calls} calls")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(_LINES)
    return 0
