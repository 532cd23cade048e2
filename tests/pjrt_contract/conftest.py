"""One client of each kind, made once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from emutpu.backend.pjrt import Client, CompileOptions
from emutpu.simulator import CLIENTS, make_client


@pytest.fixture(scope="session", params=sorted(CLIENTS))
def client(request: pytest.FixtureRequest) -> Client:
    """Each client."""
    return make_client(request.param)


@pytest.fixture(scope="session", params=["cpu", "quick", "interpreter"])
def computing(request: pytest.FixtureRequest) -> Client:
    """Each client that computes; ``quick`` is the CPU client with as little effort as it can."""
    return make_client("cpu", quick=True) if request.param == "quick" else make_client(request.param)


@pytest.fixture(params=sorted(CLIENTS))
def fresh(request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of its own for a test that closes it."""
    made = make_client(request.param)
    yield made
    made.close()


@pytest.fixture(scope="session")
def options() -> CompileOptions:
    """The default options."""
    return CompileOptions()
