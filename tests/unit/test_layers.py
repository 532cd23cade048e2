"""The layer contracts hold, and each of them can be broken."""

import shutil

import pytest

from tools.layout import ROOT, package_folders
from tools.static import layers


@pytest.fixture
def copy(tmp_path):
    """A copy of the packages and their contracts, to break."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for folder in package_folders().values():
        shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_contracts_hold():
    """The repository as it is keeps every contract."""
    code, text = layers()
    assert code == 0, text


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("backend/intruder.py", "import emutpu.simulator", "face over backend"),
        ("backend/lowering/intruder.py", "from emutpu import cli", "face over backend"),
        ("simulator/intruder.py", "import emutpu.backend.statistics", "face over backend"),
        ("simulator/intruder.py", "from emutpu.backend import lowering", "face over backend"),
        ("simulator/intruder.py", "import torch.nn", "knows nothing of PyTorch"),
        ("simulator/intruder.py", "def f() -> None:\n    import torch", "knows nothing of PyTorch"),
        ("conformance/intruder.py", "from emutpu.backend import pjrt", "only what a user can use"),
        ("conformance/intruder.py", "import emutpu.simulator", "only what a user can use"),
        ("emutpu/_jaxlib.py", "import emutpu.backend.pjrt", "face over backend"),
        ("backend/pjrt.py", "import torch", "stand on nothing"),
        ("emutpu/newcomer.py", "", "face over backend"),
    ],
)
def test_a_broken_contract_is_reported(copy, module, line, contract):
    """An import across a border, also inside a function, or a module without a place fails the contract named."""
    path = copy / module
    before = path.read_text(encoding="utf-8") if path.exists() else '"""A module."""\n'
    path.write_text(f"{before}\n{line}\n", encoding="utf-8")
    code, text = layers(copy)
    assert code == 1, text
    assert any(contract in row and "BROKEN" in row for row in text.splitlines()), text


@pytest.mark.parametrize("line", ["from emutpu.backend.pjrt import Client", "import emutpu._jaxlib"])
def test_what_a_client_may_import(copy, line):
    """The simulator may use the protocol and the leaves."""
    (copy / "simulator" / "newcomer.py").write_text(f'"""A client."""\n{line}\n', encoding="utf-8")
    code, text = layers(copy)
    assert code == 0, text
