"""The manifest of the model suite: which models there are, and the program that each of them is at a small size.

Two files of JSON lines in ``data/`` hold it, and ``data/sources.json`` says where the rows come from. A *model* has an id
and the architecture that its source records for it; a *program* is what is built and run. Models of one architecture share
a program: it runs once, and its outcome is credited to each of them. ``python -m tools.manifest`` writes all three files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

__all__ = ["SUITES", "Model", "Program", "Row", "Source", "alike", "models", "programs", "rows", "select", "sources"]

SUITES = ("smoke", "reps", "full")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A pinned package that records ids or architectures. ``snapshot`` is the date that it states for its list, or None."""

    name: str
    version: str
    snapshot: str | None
    licence: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """What is built and run.

    ``shrink`` names the rule that makes it small, ``options`` are settings beside the rule, ``inputs`` names the recipe of
    its inputs. ``gain`` is the standard deviation of a weight times the root of its fan-in. ``group`` is the family, one
    program of which is its ``representative``. ``fingerprint`` names the ops of a forward and their order without shapes;
    None until it was traced. ``expected`` is ``pass``, or why another outcome is expected.
    """

    name: str
    builder: str
    architecture: str
    task: str
    shrink: str
    options: Mapping[str, Any]
    inputs: str
    gain: float
    seed: int
    group: str
    representative: bool
    smoke: bool
    fingerprint: str | None
    expected: str


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """An id. ``kind`` is ``hub`` for an id on the Hugging Face hub, ``weights`` for a name of published weights in the
    package, ``architecture`` for a class that no source records an id of.
    """

    id: str
    kind: str
    source: str
    licence: str | None
    program: str


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A model with its source and its program: a row of every table and report."""

    model: Model
    source: Source
    program: Program


def _lines(name: str) -> Iterator[dict[str, Any]]:
    text = files("emutpu.conformance").joinpath("data", name).read_text(encoding="utf-8")
    return (json.loads(line) for line in text.splitlines())


@functools.cache
def sources() -> Mapping[str, Source]:
    """The sources by name."""
    text = files("emutpu.conformance").joinpath("data", "sources.json").read_text(encoding="utf-8")
    return {entry["name"]: Source(**entry) for entry in json.loads(text)}


@functools.cache
def programs() -> Mapping[str, Program]:
    """The programs by name, in the order of the file, which is the order in which they run."""
    return {entry["name"]: Program(**entry) for entry in _lines("programs.jsonl")}


@functools.cache
def models() -> Sequence[Model]:
    """All models."""
    return tuple(Model(**entry) for entry in _lines("models.jsonl"))


@functools.cache
def alike() -> Mapping[str, str]:
    """For every program the first one with the same fingerprint: it says all about a device that the others could say.

    A program that has no fingerprint, for it was not traced or does not run on the CPU, is alike to itself only.
    """
    first: dict[str, str] = {}
    return {name: first.setdefault(program.fingerprint or name, name) for name, program in programs().items()}


def rows() -> Iterator[Row]:
    """Every model with its source and program."""
    return (Row(model, sources()[model.source], programs()[model.program]) for model in models())


def select(suite: str) -> list[Program]:
    """The programs of a suite. Raises ValueError for a name that is not in ``SUITES``."""
    if suite not in SUITES:
        raise ValueError(f"there is no suite {suite!r}: choose one of {', '.join(SUITES)}")
    return [
        program
        for program in programs().values()
        if suite == "full" or (program.smoke if suite == "smoke" else program.representative)
    ]
