import tomllib
from pathlib import Path

import pytest

from tools.layout import ROOT, lay_out, package_folders

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = {
    line.split("==")[0].lower().replace("_", "-"): line.split("==")[1].split(";")[0].strip()
    for line in (ROOT / "tools" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#") and "!= " not in line
}


def _packages_on_disk():
    for name, folder in package_folders().items():
        for init in folder.rglob("__init__.py"):
            yield ".".join((name, *init.parent.relative_to(folder).parts))


def test_every_package_is_listed():
    """A package missing from the explicit list would work in a checkout and be absent from the wheel."""
    assert sorted(PROJECT["tool"]["setuptools"]["packages"]) == sorted(_packages_on_disk())


def test_every_folder_with_modules_is_a_package():
    """A folder of modules without __init__.py is importable in a checkout only."""
    for folder in package_folders().values():
        for module in folder.rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module


def test_data_files_are_shipped():
    """Every file of the packages that is not Python is covered by package-data."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for name, folder in package_folders().items():
        for file in folder.rglob("*"):
            if file.is_dir() or "__pycache__" in file.parts or file.suffix == ".py":
                continue
            assert any(file in set(folder.glob(pattern)) for pattern in patterns.get(name, [])), file


def test_version_is_written_once_more_only():
    """``emutpu.__version__`` is readable without installed metadata and equals the distribution's version."""
    import emutpu

    assert emutpu.__version__ == PROJECT["project"]["version"]


def _requirements():
    extras = PROJECT["project"]["optional-dependencies"]
    return {*PROJECT["project"]["dependencies"], *(entry for extra in extras.values() for entry in extra)}


@pytest.mark.parametrize("requirement", sorted(_requirements()))
def test_constraints_pin_what_the_project_declares(requirement):
    """tools/constraints.txt holds a version inside the declared bounds for every dependency of every extra."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    assert parsed.specifier.contains(PINS[parsed.name.lower().replace("_", "-")]), f"run tools/pin: {requirement}"


def test_constraints_refuse_the_cuda_build():
    """On Linux the pin names the CPU build, so that pip fails rather than downloads gigabytes of CUDA libraries."""
    assert PINS["torch"].endswith("+cpu")
    assert not [name for name in PINS if name.startswith(("nvidia", "cuda", "triton"))]


def test_layout_looks_like_an_installation(tmp_path: Path):
    """The linked tree holds every listed package at the place where an installation has it."""
    tree = lay_out(tmp_path)
    for package in PROJECT["tool"]["setuptools"]["packages"]:
        assert tree.joinpath(*package.split("."), "__init__.py").is_file(), package
