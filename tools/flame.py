"""Flame graphs of the host's work in a training step, nothing computed: ``python -m tools.flame`` writes them into docs/.

py-spy (the extra ``profile``) samples a process that repeats a benchmark's subject on the dry-run client, once everything is
compiled. It needs the right to look into another process of the user, which some containers withhold.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.layout import ROOT

__all__ = ["GRAPHS", "main", "record"]

GRAPHS = ("bert_host", "resnet18_host")
"""Benchmark cases of :mod:`tools.bench.training`."""

_PROGRAM = """
import sys
from tools.bench.training import CASES
step = next(case for case in CASES if case.name == sys.argv[1]).subject()
for _ in range(3):
    step()
print("ready", flush=True)
while True:
    step()
"""


def _py_spy() -> str:
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.exists() else shutil.which("py-spy")
    if found is None:
        raise SystemExit("tools.flame: py-spy is not installed: pip install 'emutpu[profile]'")
    return found


def record(name: str, seconds: int, folder: Path) -> int:
    """Sample one case for ``seconds`` into ``folder/flame-<name>.svg``; py-spy's exit code, 1 if the case failed."""
    target = folder / f"flame-{name}.svg"
    environment = os.environ | {"EMUTPU_CLIENT": "dry_run", "HF_HUB_OFFLINE": "1"}
    subject = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, name], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert subject.stdout is not None
        if subject.stdout.readline() != "ready\n":
            return 1
        options = ["--duration", str(seconds), "--rate", "100", "--nonblocking", "--function", "--output", str(target)]
        command = [_py_spy(), "record", "--pid", str(subject.pid), *options]
        code = subprocess.run(command, check=False).returncode
    finally:
        subject.kill()
        subject.wait()
    if code == 0:
        text = target.read_text(encoding="utf-8")
        for prefix in (ROOT, Path(sys.prefix)):
            text = text.replace(f"{prefix}{os.sep}", "")
        target.write_text(text, encoding="utf-8")
    return code


def main() -> int:
    """Record the named graphs, or all; 0 if all were written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", nargs="*", help=f"default: {', '.join(GRAPHS)}")
    parser.add_argument("--seconds", type=int, default=15, help="of sampling (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where to (default: docs)")
    options = parser.parse_args()
    if unknown := set(options.case) - set(GRAPHS):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(GRAPHS)}")
    return max(record(name, options.seconds, options.folder) for name in options.case or GRAPHS)


if __name__ == "__main__":
    sys.exit(main())
