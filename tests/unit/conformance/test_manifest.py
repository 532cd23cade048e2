"""The manifest is well formed, large enough, true to the installed packages, and invents nothing."""

import collections
import importlib.util
import json
import re

import jsonschema
import pytest

from emutpu.conformance import manifest
from emutpu.conformance.torchvision_schemas import declare
from tools.layout import ROOT

declare()
SCHEMA = json.loads((ROOT / "emutpu" / "schemas" / "conformance-manifest.v1.json").read_text(encoding="utf-8"))
DATA = ROOT / "conformance" / "data"


@pytest.mark.parametrize(("file", "kind"), [("programs.jsonl", "program"), ("models.jsonl", "model")])
def test_every_line_follows_the_schema(file, kind):
    """Fields, types and the closed vocabularies."""
    validator = jsonschema.Draft202012Validator(SCHEMA["$defs"][kind])
    for line in (DATA / file).read_text(encoding="utf-8").splitlines():
        validator.validate(json.loads(line))


def test_rows_are_unique_and_complete():
    """An id occurs once, names a program and a source that exist, and every program stands for a model."""
    ids = collections.Counter(model.id for model in manifest.models())
    assert [name for name, count in ids.items() if count > 1] == []
    assert {model.program for model in manifest.models()} == set(manifest.programs())
    assert {model.source for model in manifest.models()} == set(manifest.sources())
    assert sum(1 for _ in manifest.rows()) == len(ids)


def test_size():
    """What the suite promises: rows with hub ids, representatives, causal language models."""
    kinds = collections.Counter(model.kind for model in manifest.models())
    assert kinds["hub"] >= 5000
    assert len(manifest.select("reps")) >= 657
    assert len({program.fingerprint for program in manifest.programs().values()} - {None}) >= 1400
    assert len(manifest.select("smoke")) == 40
    programs = manifest.programs()
    assert sum(programs[model.program].task == "causal-lm" for model in manifest.models()) >= 839


def test_a_group_has_one_representative():
    """Counting representatives counts groups."""
    groups = collections.Counter(program.group for program in manifest.select("reps"))
    assert set(groups.values()) == {1}
    assert set(groups) == {program.group for program in manifest.programs().values()}


def test_hub_ids_look_like_hub_ids():
    """Owner and name, or the name alone of the hub's oldest models."""
    wrong = [m.id for m in manifest.models() if m.kind == "hub" and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", m.id)]
    assert wrong == []


def test_programs_with_one_fingerprint_are_alike():
    """The first of them stands for all; what has no fingerprint stands for itself."""
    programs = manifest.programs()
    for name, first in manifest.alike().items():
        assert programs[name].fingerprint == programs[first].fingerprint
        assert first == name or programs[name].fingerprint is not None


def test_an_expected_failure_says_why():
    """A program without a working recipe is known by its outcome and cause, and has no fingerprint; every other has one."""
    failing = [program for program in manifest.programs().values() if program.expected != "pass"]
    assert all(re.match(r"(corpus bug|not run|crash|timeout): .", program.expected) for program in failing)
    assert all(program.fingerprint is None for program in failing)
    assert all(program.fingerprint for program in manifest.programs().values() if program.expected == "pass")


def test_unknown_suite():
    """A wrong name says what there is."""
    with pytest.raises(ValueError, match="smoke, reps, full"):
        manifest.select("nightly")


def test_programs_are_what_the_installed_packages_give():
    """``python -m tools.manifest`` would write the same bytes: classes, families, order and settings.

    litgpt is in no extra (it asks for an older huggingface_hub), so its programs are compared where somebody installed it.
    """
    pytest.importorskip("timm", reason="the library is not installed")
    from tools.manifest import installed_programs

    without = [] if importlib.util.find_spec("litgpt") else ["litgpt"]
    lines = (DATA / "programs.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    assert installed_programs(without) == "".join(line for line in lines if json.loads(line)["builder"] not in without)
