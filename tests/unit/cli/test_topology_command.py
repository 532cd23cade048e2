"""``emutpu topology``: figures, picture and JSON of a slice."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from emutpu.cli._slice_svg import draw
from emutpu.simulator.topology import slice_named

Command = Callable[..., "subprocess.CompletedProcess[str]"]
_SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", ["v5e-8", "v5p-128", "v7-64", "2xv5e-16", "v8i-2"])
def test_document(emutpu: Command, valid: Callable[[Any, str], dict[str, Any]], name: str) -> None:
    """The JSON document follows its schema and agrees with the slice; what is not published is null with a reason."""
    result = emutpu("topology", name, "--json", "-")
    assert result.returncode == 0, result.stderr
    document = valid(result.stdout, "topology")
    where = slice_named(name)
    assert (document["chips"], document["devices"], document["hosts"]) == (where.chips, where.devices, where.hosts)
    assert document["name"] == name
    assert len(document["coords"]) == where.devices
    assert len({(entry["id"], entry["core"]) for entry in document["coords"]}) == where.devices
    if document["pci"] is None:
        assert "not published" in document["notes"]["pci"]
    else:
        assert len(document["pci"]) == where.devices
    assert document["legal_world_sizes"] == where.legal_world_sizes


def test_terminal(emutpu: Command) -> None:
    """Figures in a table, and one layer with the host of every chip."""
    result = emutpu("topology", "v5e-16")
    assert "16 (4x4)" in result.stdout
    assert "4 of 2x2 chips" in result.stdout
    assert "[0]=[0]-[1]=[1]" in result.stdout
    assert "[2]=[2]-[3]=[3]" in result.stdout


def test_list(emutpu: Command) -> None:
    """All legal slices of a chip."""
    result = emutpu("topology", "--list", "v5e")
    assert result.stdout.split() == ["v5e-1", "v5e-4", "v5e-8", "v5e-16", "v5e-32", "v5e-64", "v5e-128", "v5e-256"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give the NAME"),
        (["v5e-3"], "the closest legal N are"),
        (["v5e-4", "--list", "v5e"], "give the NAME"),
        (["--list", "v9"], "unknown TPU chip"),
    ],
)
def test_mistakes(emutpu: Command, arguments: list[str], message: str) -> None:
    """Wrong usage exits with 2 and says why."""
    result = emutpu("topology", *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("name", ["v5e-1", "v5e-256", "v5p-256", "v7-64", "v8t-1"])
def test_picture(name: str) -> None:
    """The SVG is well-formed and shows every chip, device, host and link once."""
    where = slice_named(name)
    root = ET.fromstring(draw(where))
    classes = [element.get("class") for element in root.iter()]
    layers = where.shape[2]
    in_layers = [(a, b) for a, b in where.links() if a[2] == b[2]]
    rings = [pair for pair in in_layers if max(abs(a - b) for a, b in zip(*pair, strict=True)) > 1]
    assert classes.count("chip") == where.chips
    assert classes.count("host") == where.hosts * (layers if where.hosts == 1 else 1)
    assert classes.count("link") == len(in_layers) - len(rings)
    assert classes.count("ring") == 2 * len(rings)
    labels = [element.text for element in root.iter(f"{_SVG}text") if element.get("class") == "id"]
    assert labels == [str(number) for number in range(where.devices)]
    width, height = float(str(root.get("width"))), float(str(root.get("height")))
    assert width < 2600
    assert height > 100


def test_picture_to_a_file(emutpu: Command, tmp_path: Path) -> None:
    """--svg writes the picture; a directory that is not there is a failure without a traceback."""
    assert emutpu("topology", "v5e-4", "--svg", "slice.svg").returncode == 0
    assert (tmp_path / "slice.svg").read_text() == draw(slice_named("v5e-4"))
    result = emutpu("topology", "v5e-4", "--svg", "absent/slice.svg")
    assert result.returncode == 73
    assert "Traceback" not in result.stderr


def test_large_slices_are_drawn_in_part() -> None:
    """A slice of more layers than a picture can hold says how many it shows."""
    text = draw(slice_named("v7-4x4x116"))
    assert "the first 32 of 116 layers" in text
