"""The package tree as an installation has it, made of links, for tools that read files instead of importing them.

The folders of ``emutpu.backend``, ``emutpu.simulator`` and others stand beside ``./emutpu``. Python finds them there
(``emutpu.__path__``); grimp and mypy look for a subpackage only inside its parent's folder.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

__all__ = ["ROOT", "lay_out", "package_folders"]

ROOT = Path(__file__).resolve().parent.parent


def package_folders(root: Path = ROOT) -> dict[str, Path]:
    """Import name → folder of the packages that ``pyproject.toml`` maps, ``emutpu`` first."""
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    return {name: root / folder for name, folder in sorted(settings["package-dir"].items())}


def lay_out(target: Path, root: Path = ROOT) -> Path:
    """Fill the empty folder ``target`` with links to the packages of ``root``, so that it looks like site-packages."""
    for name, folder in package_folders(root).items():
        here = target.joinpath(*name.split("."))
        if "." in name:
            here.symlink_to(folder, target_is_directory=True)
            continue
        here.mkdir()
        for entry in folder.iterdir():
            (here / entry.name).symlink_to(entry, target_is_directory=entry.is_dir())
    return target
