"""The table of environment variables."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from emutpu import _settings


@pytest.fixture(autouse=True)
def clean_settings() -> Iterator[None]:
    """What a test makes the process read is forgotten afterwards."""
    yield
    _settings._captured.cache_clear()


def test_defaults() -> None:
    """An empty environment is one strict v5e on the CPU client."""
    defaults = _settings.read({})
    assert (defaults.chip, defaults.client, defaults.forbid, defaults.precision) == ("v5e", "cpu", False, None)
    assert defaults.visible_devices is None


def test_names_are_those_of_the_simulator() -> None:
    """The leaf cannot import the tables of chips and clients, so it repeats their names: they must agree."""
    from emutpu.simulator import CLIENTS
    from emutpu.simulator.chips import CHIPS

    assert {*_settings.CHIPS} == {*CHIPS, _settings.NO_CHIP}
    assert {*_settings.CLIENTS} == {*CLIENTS}


def test_table_and_fields_agree() -> None:
    """Every row fills one field of Settings, and no name occurs twice."""
    fields = [field.name for field in dataclasses.fields(_settings.Settings)]
    assert [variable.field for variable in _settings.VARIABLES] == fields
    assert len({variable.name for variable in _settings.VARIABLES}) == len(fields)
    assert all(variable.meaning and variable.accepted for variable in _settings.VARIABLES)


def test_a_slice_implies_its_chip() -> None:
    """EMUTPU_TOPOLOGY decides the chip; a different EMUTPU_CHIP beside it is an error."""
    assert _settings.read({"EMUTPU_TOPOLOGY": "v6e-8"}).chip == "v6e"
    assert _settings.read({"EMUTPU_TOPOLOGY": "2xv5p-4x4x4", "EMUTPU_CHIP": "v5p"}).chip == "v5p"
    with pytest.raises(_settings.SettingError, match=r"EMUTPU_CHIP='v5e' .* the chip of EMUTPU_TOPOLOGY=v6e-8"):
        _settings.read({"EMUTPU_TOPOLOGY": "v6e-8", "EMUTPU_CHIP": "v5e"})
    for bad in ("v6e", "v99-8", "none-1", "v5e-", "v5e-1x1x1x1"):
        with pytest.raises(_settings.SettingError, match="EMUTPU_TOPOLOGY"):
            _settings.read({"EMUTPU_TOPOLOGY": bad})


@pytest.mark.parametrize(
    ("name", "good", "value", "bad"),
    [
        ("TPU_CHIPS_PER_PROCESS_BOUNDS", "2,2,1", (2, 2, 1), "2,2"),
        ("TPU_PROCESS_BOUNDS", "1,1,1,2", (1, 1, 1, 2), "0,1,1"),
        ("TPU_PROCESS_ADDRESSES", "a:1, b:2", ("a:1", "b:2"), None),
        ("CLOUD_TPU_TASK_ID", "3", 3, "-1"),
        ("TPU_VISIBLE_CHIPS", "1,0", (1, 0), "1,1"),
        ("EMUTPU_COST_CHIPS", "v5p,V6E,v5p", ("v5p", "v6e"), "v5p,none"),
    ],
)
def test_variables_that_hold_several_values(name: str, good: str, value: object, bad: str | None) -> None:
    """Bounds, addresses, the task's number and chips are parsed, and nonsense is refused."""
    variable = next(row for row in _settings.VARIABLES if row.name == name)
    assert variable.value_in({name: good}) == value
    if bad is not None:
        with pytest.raises(_settings.SettingError, match=name):
            variable.value_in({name: bad})


@pytest.mark.parametrize("text", ["1", "true", "YES", " on ", "t"])
def test_flags_are_read_leniently(text: str) -> None:
    """The usual words for true are accepted in any case."""
    assert _settings.read({"EMUTPU_BEYOND": text}).beyond
    assert _settings.read({"TORCH_TPU_LAUNCH_BLOCKING": text}).launch_blocking


def test_unparsable_value_of_torchtpu_counts_as_unset() -> None:
    """TorchTPU's variables fall back to their default, as in the real product."""
    assert not _settings.read({"TORCH_TPU_DEFER_AND_FUSE": "perhaps"}).defer_and_fuse


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("EMUTPU_CHIP", "v5x", "v5e, v5p"),
        ("EMUTPU_FORBID", "perhaps", "0 or 1"),
        ("EMUTPU_CLIENT", "gpu", "interpreter"),
        ("EMUTPU_QUIRKS", "0.1", "0.2.0"),
        ("TPU_VISIBLE_DEVICES", "0,zero", "device numbers"),
        ("TPU_VISIBLE_DEVICES", "0,0", "distinct"),
    ],
)
def test_bad_value_names_variable_value_and_choices(name: str, value: str, accepted: str) -> None:
    """A bad value raises one exception that says all a user needs."""
    with pytest.raises(_settings.SettingError) as raised:
        _settings.read({name: value})
    assert name in str(raised.value)
    assert repr(value) in str(raised.value)
    assert accepted in str(raised.value)


def test_empty_value_counts_as_unset() -> None:
    """``EMUTPU_CHIP=`` in a shell is no chip name."""
    assert _settings.read({"EMUTPU_CHIP": ""}).chip == "v5e"


def test_visible_devices() -> None:
    """Device numbers keep their order."""
    assert _settings.read({"TPU_VISIBLE_DEVICES": "2,0"}).visible_devices == (2, 0)


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A later change of the environment has no effect but is noticed; reload reads again."""
    monkeypatch.setenv("EMUTPU_CHIP", "v5p")
    assert _settings.reload().chip == "v5p"
    assert _settings.changed_since_read() == []
    monkeypatch.setenv("EMUTPU_CHIP", "v6e")
    monkeypatch.setenv("EMUTPU_BEYOND", "1")
    assert _settings.settings().chip == "v5p"
    assert _settings.changed_since_read() == ["EMUTPU_CHIP", "EMUTPU_BEYOND"]
    assert _settings.reload().chip == "v6e"


def test_unknown_variables_come_with_the_closest_name() -> None:
    """Misspelt names are found with a suggestion; names unlike any have none; others' variables are ignored."""
    found = _settings.unknown_variables({"EMUTPU_CHPI": "v5e", "EMUTPU_XYZZY": "1", "EMUTPU_CHIP": "v5e", "HOME": "/"})
    assert found == [("EMUTPU_CHPI", "EMUTPU_CHIP"), ("EMUTPU_XYZZY", None)]


def test_paths_are_absolute() -> None:
    """A relative path means the directory of the start, wherever the program changes to."""
    assert _settings.read({"EMUTPU_CACHE_DIR": "cache"}).cache_dir == os.path.join(os.getcwd(), "cache")


def test_is_a_leaf() -> None:
    """The module imports the standard library only."""
    tree = ast.parse(Path(_settings.__file__).read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    assert not imported & {"emutpu", "torch", "jax", "jaxlib", "numpy", ""}
