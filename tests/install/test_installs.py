"""Wheel, sdist and editable installs each work from the repository root and from elsewhere, however they are reached."""

import os
import shutil
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tools.layout import ROOT, package_folders

KINDS = ("wheel", "sdist", "editable")
SUBPACKAGES = ("emutpu.cli", "emutpu.backend.pjrt", "emutpu.simulator", "emutpu.conformance")
WHERE = f"""
import importlib, pathlib, emutpu
for name in {SUBPACKAGES!r}:
    importlib.import_module(name)
print(pathlib.Path(emutpu.__file__).parent)
print(pathlib.Path(importlib.import_module("emutpu.backend.pjrt").__file__).parent)
"""
AUTOLOAD = """
import torch
there = torch.arange(6.0).to("tpu").reshape(2, 3)
assert there.device.type == "tpu", there.device
assert torch.equal((there + there).cpu(), torch.arange(6.0).reshape(2, 3) * 2)
"""


def _run(command, folder, **environment):
    """Run a command to its end in a folder; fail with its output unless it exits 0."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    kept |= environment
    done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _pip(*arguments, python=sys.executable):
    command = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *arguments]
    _run([*command, "--no-deps", "--no-index", "--no-build-isolation"], ROOT)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A copy of what a checkout holds, so that building leaves nothing in the real one."""
    copy = tmp_path_factory.mktemp("checkout") / "emutpu"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in package_folders().values():
        shutil.copytree(folder, copy / folder.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    return copy


@pytest.fixture(scope="session")
def sources(checkout, tmp_path_factory):
    """What each kind of installation is made from. The sdist is made by the build backend itself."""
    made = tmp_path_factory.mktemp("dist")
    build = f"from setuptools import build_meta as b; print(b.build_sdist({str(made)!r}))"
    sdist = made / _run([sys.executable, "-c", build], checkout).splitlines()[-1]
    _pip("wheel", "--wheel-dir", str(made), str(checkout))
    shutil.rmtree(checkout / "build", ignore_errors=True)
    (wheel,) = made.glob("*.whl")
    return {"wheel": [str(wheel)], "sdist": [str(sdist)], "editable": ["--editable", str(checkout)]}


@pytest.fixture(scope="session")
def interpreters(sources, tmp_path_factory):
    """The Python of an environment per kind: emutpu as installed there, everything else as in the running one."""
    found = {}
    for kind, source in sources.items():
        folder = tmp_path_factory.mktemp(kind)
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        purelib = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
        # A path in a .pth file comes after the environment's own and its own .pth files are not read: an emutpu that is
        # installed in the running environment, editable or not, stays behind the one under test.
        others = [path for path in (sysconfig.get_path("purelib"), *site.getsitepackages()) if Path(path).is_dir()]
        (purelib / "others.pth").write_text("\n".join(dict.fromkeys(others)) + "\n", encoding="utf-8")
        _pip("install", "--quiet", *source, python=python)
        found[kind] = python
    return found


@pytest.fixture(params=KINDS)
def kind(request):
    """How emutpu was installed."""
    return request.param


@pytest.fixture(params=["root", "elsewhere"])
def folder(request, checkout, tmp_path):
    """Where the user's shell stands: in a checkout, where ./emutpu shadows what is installed, or anywhere else."""
    return checkout if request.param == "root" else tmp_path


@pytest.fixture
def expected(kind, folder, checkout, interpreters):
    """The folders that ``emutpu`` and ``emutpu.backend`` must come from."""
    if kind == "editable" or folder == checkout:
        return [checkout / "emutpu", checkout / "backend"]
    (library,) = (interpreters[kind].parent.parent / "lib").glob("python*")
    return [library / "site-packages" / "emutpu", library / "site-packages" / "emutpu" / "backend"]


def test_python_c(kind, folder, interpreters, expected):
    """``python -c`` imports the face and every layer from the installation under test."""
    found = _run([interpreters[kind], "-c", WHERE], folder).splitlines()
    assert [Path(line).resolve() for line in found] == [path.resolve() for path in expected]


def test_python_m_pytest(kind, folder, interpreters, expected, tmp_path_factory):
    """``python -m pytest`` does, in the process that runs the tests."""
    places = [str(path.resolve()) for path in expected]
    body = WHERE.replace("print(", "found.append(").replace("\n", "\n    ")
    text = (
        f"def test_where():\n    found = []\n    {body}\n    assert [str(p.resolve()) for p in found] == {places!r}\n"
    )
    file = tmp_path_factory.mktemp("suite") / "test_where.py"
    file.write_text(text, encoding="utf-8")
    command = [interpreters[kind], "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    assert "1 passed" in _run(command, folder, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_torch_autoload(kind, folder, interpreters):
    """``import torch`` alone brings the device."""
    _run([interpreters[kind], "-c", AUTOLOAD], folder, TORCH_DEVICE_BACKEND_AUTOLOAD="1")


def test_command(kind, interpreters, tmp_path):
    """The ``emutpu`` command is installed and explains itself."""
    assert "Usage" in _run([interpreters[kind].parent / "emutpu", "--help"], tmp_path)


def test_types_and_schemas_are_installed(interpreters, checkout):
    """A wheel carries py.typed and every JSON schema."""
    (library,) = (interpreters["wheel"].parent.parent / "lib").glob("python*")
    installed = library / "site-packages" / "emutpu"
    wanted = [file.relative_to(checkout / "emutpu") for file in (checkout / "emutpu").rglob("*.json")]
    for file in [Path("py.typed"), *wanted]:
        assert (installed / file).is_file(), file
