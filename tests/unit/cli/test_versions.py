"""Releases and bounds agree with ``packaging`` on what our metadata contains."""

from __future__ import annotations

import importlib.metadata

import pytest
from packaging.requirements import Requirement as Oracle
from packaging.specifiers import SpecifierSet

from emutpu.cli._versions import Bounds, Requirement, release

VERSIONS = ["2.12.9", "2.13.0", "2.13.0+cpu", "2.13.1", "2.14", "2.14.0", "3.0", "0.10.2", "0.8.3", "0.11"]


@pytest.mark.parametrize("bounds", [">=2.13.0,<2.14", "<=0.10.2,>=0.10.2", ">=2", "==2.13.0", "!=2.14", ""])
@pytest.mark.parametrize("version", VERSIONS)
def test_bounds_agree_with_packaging(bounds: str, version: str) -> None:
    """Containment is packaging's, local labels aside."""
    assert Bounds(bounds).contains(version) == SpecifierSet(bounds).contains(version.partition("+")[0])


@pytest.mark.parametrize("owner", ["emutpu", "jax", "rich"])
def test_requirements_agree_with_packaging(owner: str) -> None:
    """Unconditional requirements of real distributions are read as packaging reads them."""
    for line in importlib.metadata.requires(owner) or ():
        oracle, ours = Oracle(line), Requirement.parse(line)
        assert ours.conditional == (oracle.marker is not None)
        if not ours.conditional:
            assert (ours.name, SpecifierSet(str(ours.bounds))) == (oracle.name, oracle.specifier)


@pytest.mark.parametrize("call", [lambda: release("cpu"), lambda: Bounds("~=2.1"), lambda: Requirement.parse(">=1")])
def test_other_forms_are_refused(call: object) -> None:
    """What cannot be read raises, and is never taken for satisfied."""
    with pytest.raises(ValueError, match="not a"):
        call()  # type: ignore[operator]  # the parameter is one of the lambdas
