"""Which commit of emutpu a run was made with, and which commits lie between two runs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["between", "current"]

_SOURCES = ("backend", "simulator", "conformance", "emutpu", "pyproject.toml")
_IN_CI = ("GITHUB_SHA", "CI_COMMIT_SHA")
_PATIENCE = 20


def current() -> dict[str, Any]:
    """``commit`` of the checkout that emutpu is imported from, and whether its sources differ from it (``changed``).

    An installed emutpu has no checkout: then the commit that a CI service names in the environment, or None.
    """
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return {"commit": next((os.environ[name] for name in _IN_CI if os.environ.get(name)), None), "changed": False}
    return {"commit": commit, "changed": bool(_git("status", "--porcelain", "--", *_SOURCES))}


def between(good: str | None, bad: str | None) -> list[dict[str, str]] | None:
    """The commits after ``good`` up to ``bad``, the newest first, as ``commit`` and ``subject``.

    None where that cannot be told: no checkout here, or it lacks one of the two.
    """
    if not good or not bad:
        return None
    found = _git("log", "--format=%H %s", f"{good}..{bad}", "--")
    if found is None:
        return None
    lines = (line.partition(" ") for line in found.splitlines())
    return [{"commit": commit, "subject": subject} for commit, _, subject in lines]


def _git(*arguments: str) -> str | None:
    """What git says of the checkout that holds this package; None without one, or where git refuses."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
