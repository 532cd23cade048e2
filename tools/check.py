"""Every check of the repository, timed: ``./tools/test`` installs what is needed and calls this, CI calls that.

``python -m tools.check`` runs all steps, ``python -m tools.check lint unit`` some, ``--list`` names them. A folder
``tests/<suite>`` with test files is a step of its own, and ``suites`` means all of those. Exit code 0 only if every step passed; a step that runs no test
has failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.layout import ROOT

__all__ = ["Outcome", "Step", "main", "run", "steps", "table"]

# The other ends of the declared range of jax; the suites themselves run with the newest.
OLDER_JAX = ("0.8.3", "0.9.2")
# Suites whose tests share folders or measure time.
ONE_PROCESS = frozenset({"install"})
# Its cache makes a second run of the step a matter of a minute or two.
_SMOKE = "reports/conformance/smoke"


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A name and the commands that must all exit 0. ``report`` is the JUnit file its tests are counted from, if any."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    report: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step: ``seconds`` is wall time; the counts are of tests, None where there are none to count."""

    name: str
    ok: bool
    seconds: float
    passed: int | None = None
    failed: int | None = None
    skipped: int | None = None


def steps(root: Path = ROOT) -> tuple[Step, ...]:
    """All steps in the order in which they run: cheap ones first, then a suite per folder of ``tests``, the models, then tox."""
    python = sys.executable
    found = [
        Step(
            "lint",
            (
                (python, "-m", "ruff", "check"),
                (python, "-m", "ruff", "format", "--check"),
                (python, "-m", "tools.static", "layers"),
            ),
        ),
        Step("types", ((python, "-m", "tools.static", "types"),)),
    ]
    reports = root / "reports" / os.environ.get("TOX_ENV_NAME", "")
    for folder in sorted(path for path in (root / "tests").iterdir() if any(path.rglob("test_*.py"))):
        report = reports / f"junit-{folder.name}.xml"
        workers = "0" if folder.name in ONE_PROCESS else "2"
        pytest = (python, "-m", "pytest", f"tests/{folder.name}", "-n", workers)
        command = (*pytest, "-m", "not nightly", f"--junitxml={report}")
        found.append(Step(folder.name, (command,), report))
    found.append(Step("conformance", conformance(python)))
    environment = f"py{sys.version_info.major}{sys.version_info.minor}-jax"
    found += [
        Step(f"jax-{version}", ((python, "-m", "tox", "-qe", environment + version.replace(".", "")),))
        for version in OLDER_JAX
    ]
    return tuple(found)


def conformance(python: str) -> tuple[tuple[str, ...], ...]:
    """The commands that run the model suite's ``smoke``: all of it in Strict, less in the modes that cost more.

    The step is to take six minutes of two cores with an empty cache: in processor time some 340 s for Strict's forty programs and
    122 s for DeferAndFuse's 25. Left out are timm's fifteen in DeferAndFuse (they make two thirds of the modules) and in torch.compile
    all but six encoders: Dynamo traces what generates for half a minute and more, cached or not. ``emutpu conformance run
    --suite smoke --mode defer --mode compile`` runs these.
    """
    suite = (python, "-m", "emutpu", "conformance", "run", "--suite", "smoke", "--jobs", "2", "--results", _SMOKE)
    return (
        (*suite, "--mode", "strict"),
        (*suite, "--mode", "defer", "--only", "*/[A-Z]*"),
        (*suite, "--mode", "compile", "--only", "*For[MQSTI]*"),
    )


def run(step: Step, root: Path = ROOT) -> Outcome:
    """Run a step's commands, all of them even after one failed, with their output going where ours goes."""
    if step.report is not None:
        step.report.unlink(missing_ok=True)
    started = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    codes = [
        subprocess.run(command, cwd=root, env=environment, stdin=subprocess.DEVNULL, check=False).returncode
        for command in step.commands
    ]
    seconds = time.monotonic() - started
    ok = not any(codes)
    if step.report is None:
        return Outcome(step.name, ok, seconds)
    if not step.report.exists():
        return Outcome(step.name, ok=False, seconds=seconds)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ET.parse(step.report).getroot().iter("testsuite"):  # noqa: S314 - the pytest started above wrote it
        for key in counts:
            counts[key] += int(suite.get(key, "0"))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return Outcome(step.name, ok and failed == 0 and passed > 0, seconds, passed, failed, counts["skipped"])


def table(outcomes: Iterable[Outcome]) -> str:
    """The outcomes as lines of text, with the total time in the last."""
    rows = list(outcomes)
    lines = [f"{'step':<16}{'result':<8}{'passed':>8}{'failed':>8}{'skipped':>8}{'minutes':>9}"]
    for row in rows:
        counts = "".join(f"{'' if count is None else count:>8}" for count in (row.passed, row.failed, row.skipped))
        lines.append(f"{row.name:<16}{'ok' if row.ok else 'FAILED':<8}{counts}{row.seconds / 60:>9.1f}")
    lines.append(f"{'total':<48}{sum(row.seconds for row in rows) / 60:>9.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named steps, or all, and print the table; 0 if all passed, 1 if one failed, 2 for an unknown name."""
    known = {step.name: step for step in steps()}
    parser = argparse.ArgumentParser(prog="tools/test", description=__doc__)
    parser.add_argument(
        "step", nargs="*", help="default: all of " + ", ".join(known) + "; `suites` for all test suites"
    )
    parser.add_argument("--list", action="store_true", help="name the steps and run none")
    parser.add_argument("--setup-seconds", type=float, help="what the installation took, for the table")
    options = parser.parse_args(arguments)
    suites = [step.name for step in known.values() if step.report is not None]
    wanted = [name for given in options.step or known for name in (suites if given == "suites" else [given])]
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"no such step: {', '.join(unknown)}; there are {', '.join(known)}")
    if options.list:
        print("\n".join(known))
        return 0
    outcomes = []
    if options.setup_seconds is not None:
        outcomes.append(Outcome("setup", ok=True, seconds=options.setup_seconds))
    for name in wanted:
        print(f"\n===== {name}", flush=True)
        outcomes.append(run(known[name]))
    print("\n" + table(outcomes), flush=True)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
