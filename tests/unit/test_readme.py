"""What the README promises is there."""

import os
import re
import subprocess
import sys
import tomllib

import pytest

from tools.layout import ROOT
from tools.readme import features, with_table

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_table_is_what_the_data_says():
    """The table of what works was written by ``python -m tools.readme`` and not edited since."""
    assert with_table(README) == README


def test_every_named_test_is_collected():
    """Each feature names tests, and pytest finds every one of them."""
    named = sorted({test for feature in features() for test in feature.tests})
    assert all(feature.tests for feature in features())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in named:
        assert re.search(rf"^{re.escape(test)}(\[|$)", done.stdout, re.MULTILINE), test


@pytest.mark.parametrize("command", sorted(set(re.findall(r"\./(tools/\w+)", README))))
def test_commands_exist(command):
    """Every command of the README is an executable file of the repository."""
    assert os.access(ROOT / command, os.X_OK), command


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", README))))
def test_links_lead_somewhere(link):
    """Every link of the README is a file of the repository."""
    assert (ROOT / link).exists(), link


def test_versions_are_the_declared_ones():
    """The table of versions names both ends of the declared range of jax, and the lowest torch."""
    declared = " ".join(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"])
    tried = dict(re.findall(r"^\| (torch|jax)[^|]*\| ([^|]*) \|$", README, re.MULTILINE))
    low, high = re.search(r"jax>=([\d.]+),<=([\d.]+)", declared).groups()
    assert {low, high} <= set(tried["jax"].split(", "))
    assert re.search(r"torch>=([\d.]+)", declared)[1] == tried["torch"].split()[0]
