"""Model tests import their support modules plainly, stay offline, and say how many models wait for the night."""

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parent))

from tests.support import torchvision_schemas

torchvision_schemas.declare()

_DESELECTED = pytest.StashKey[int]()
_session: pytest.Config | None = None


def pytest_configure(config: pytest.Config) -> None:
    """pytest_deselected is not told the configuration."""
    globals()["_session"] = config
    config.stash[_DESELECTED] = 0


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count the nightly tests that this run leaves out."""
    if _session is not None and "not nightly" in _session.option.markexpr:
        _session.stash[_DESELECTED] += sum("nightly" in item.keywords for item in items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of xdist hands its count to the process that reports."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["nightly_deselected"] = session.config.stash[_DESELECTED]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """Every worker collects the same tests, so the largest count is the count."""
    output = getattr(node, "workeroutput", {})
    if _session is not None:
        _session.stash[_DESELECTED] = max(_session.stash[_DESELECTED], output.get("nightly_deselected", 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The printed count."""
    if config.stash[_DESELECTED]:
        terminalreporter.write_line(
            f"{config.stash[_DESELECTED]} nightly model tests deselected; run them with -m nightly"
        )
