"""The checks that need the installed layout: ``python -m tools.static layers`` and ``python -m tools.static types``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.layout import ROOT, lay_out, package_folders

__all__ = ["layers", "main", "types"]


def _run(command: list[str], tree: Path) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def layers(root: Path = ROOT) -> tuple[int, str]:
    """Exit code and output of import-linter over the packages of ``root``; 0 when every contract holds."""
    with tempfile.TemporaryDirectory() as made:
        tree = lay_out(Path(made), root)
        command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
        return _run([*command, "--no-cache", "--no-logo", str(root / "pyproject.toml")], tree)


def types(root: Path = ROOT) -> tuple[int, str]:
    """Exit code and output of mypy --strict over the packages and ``tools``, with paths as in the repository."""
    with tempfile.TemporaryDirectory() as made:
        tree = lay_out(Path(made), root)
        (tree / "tools").symlink_to(root / "tools", target_is_directory=True)
        command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml")]
        command += ["--cache-dir", str(root / ".mypy_cache"), "-p", "emutpu", "-p", "tools"]
        code, text = _run(command, tree)
    for name, folder in package_folders(root).items():
        if "." in name:
            text = text.replace(name.replace(".", os.sep) + os.sep, folder.name + os.sep)
    return code, text


def main() -> int:
    """Run one of the checks, print what it says and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.static", description=__doc__)
    parser.add_argument("check", choices=["layers", "types"])
    code, text = {"layers": layers, "types": types}[parser.parse_args().check]()
    print(text, end="")
    return code


if __name__ == "__main__":
    sys.exit(main())
