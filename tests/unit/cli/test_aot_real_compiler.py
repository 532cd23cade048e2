"""``emutpu aot-check`` with the real TPU compiler: what must fail on a chip fails here, what runs there compiles."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.aot_programs import FAILING, FITS, VMEM_KERNEL
from tools.layout import ROOT

try:
    importlib.metadata.version("libtpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("libtpu is not installed: pip install 'emutpu[aot]' (700 MB unpacked)", allow_module_level=True)

_SCHEMA = json.loads((ROOT / "emutpu/schemas/aot-check.v1.json").read_text())


def _check(folder: Path, *arguments: str, code: int) -> dict[str, Any]:
    """Run the command in ``folder`` with a cache of its own, expect ``code``, and give the valid document."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EMUTPU_")}
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment |= {"PYTHONPATH": paths, "EMUTPU_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "emutpu", "aot-check", "--json", "report.json", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads((folder / "report.json").read_text())
    jsonschema.validate(document, _SCHEMA, cls=jsonschema.Draft202012Validator)
    return document


@pytest.mark.parametrize("name", FAILING)
def test_what_must_fail_on_a_chip(name: str, tmp_path: Path) -> None:
    """HBM, layout, dtype, unsupported op, dynamic shape: the compiler's own words at the module."""
    text, words = FAILING[name]
    (tmp_path / "bad.mlir").write_text(text)
    (row,) = _check(tmp_path, "bad.mlir", code=1)["modules"]
    assert not row["ok"]
    assert words in row["error"]
    assert row["hbm_bytes"] is None


def test_a_kernel_that_does_not_fit_vmem(tmp_path: Path) -> None:
    """A Pallas kernel whose window is larger than VMEM is refused, with the sizes."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "EMUTPU_CHIP": "none"}
    lowered = subprocess.run(
        [sys.executable, "-c", VMEM_KERNEL], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    (tmp_path / "kernel.mlir").write_text(lowered.stdout)
    (row,) = _check(tmp_path, "kernel.mlir", code=1)["modules"]
    assert "would exceed memory" in row["error"]
    assert "space=vmem" in row["error"]


def test_what_fits(tmp_path: Path) -> None:
    """A product compiles for both chips, with memory and cycles, and the second time from the cache."""
    (tmp_path / "good.mlir").write_text(FITS)
    arguments = ("--chip", "v5e", "--chip", "v6e", "good.mlir")
    first = _check(tmp_path, *arguments, code=0)
    assert [row["chip"] for row in first["modules"]] == ["v5e", "v6e"]
    for row in first["modules"]:
        assert row["hbm_bytes"] >= 2 * 512 * 512 * 2
        assert row["cycles"] > 0
        assert row["flops"] >= 2 * 512**3
        assert not row["cached"]
    again = _check(tmp_path, *arguments, code=0)
    assert [row | {"cached": False} for row in again["modules"]] == first["modules"]
    assert all(row["cached"] for row in again["modules"])


def test_a_program(tmp_path: Path) -> None:
    """Modules of a program at its lines; the one too large for a v5e, in a dry run, fails at its own line."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "a = torch.ones(65536, 16, device='tpu')\n"
        "b = a * 2\n"
        "c = a @ b.t()\n"
    )  # fmt: skip
    document = _check(tmp_path, "--dry-run", "program.py", code=1)
    by_line = {row["line"]: row for row in document["modules"]}
    assert by_line[3]["ok"]
    assert by_line[3]["file"].endswith("program.py")
    assert not by_line[4]["ok"]
    assert by_line[4]["code"] == "c = a @ b.t()"
    assert "Ran out of memory on HBM" in by_line[4]["error"]


def test_scalars_of_64_bits(tmp_path: Path) -> None:
    """What TorchTPU passes as f64 and i64 scalars, and 64-bit tensors, the real compiler takes."""
    (tmp_path / "program.py").write_text(
        "import torch\n"
        "a = torch.arange(8, device='tpu')\n"
        "(a.double() * 1.5 + a).sum().item()\n"
    )  # fmt: skip
    document = _check(tmp_path, "--chip", "v5e", "--chip", "v6e", "program.py", code=0)
    assert document["summary"]["v5e"]["ok"] == len(document["modules"]) // 2 > 2


# Each with as little as reaches everything that it compiles.
EXAMPLES = {
    "lstm_language_model": ("--device", "tpu", "--steps", "1"),
    "digits_cnn": ("--device", "tpu", "--steps", "1"),
    "bert_finetuning": ("--device", "tpu", "--steps", "1"),
    "timm_training": ("--device", "tpu", "--steps", "1"),
    "llama_generation": ("--device", "tpu", "--tokens", "2"),
    "llama_8b_dry_run": ("--layers", "2", "--steps", "1"),
}
_RUN = """
from tests.support import torchvision_schemas
torchvision_schemas.declare()
import runpy
runpy.run_path({path!r}, run_name="__main__")
"""


def test_every_example_is_checked() -> None:
    """No example of the repository is left out below."""
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} - {"__init__"} == set(EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_compile(example: str, tmp_path: Path) -> None:
    """Every module of the example compiles on v5e and v6e; those of the one that needs 95 GiB a chip on v5p."""
    (tmp_path / f"{example}.py").write_text(_RUN.format(path=str(ROOT / "examples" / f"{example}.py")))
    where = ("--dry-run", "--chip", "v5p") if "dry_run" in example else ("--chip", "v5e", "--chip", "v6e")
    document = _check(tmp_path, *where, f"{example}.py", *EXAMPLES[example], code=0)
    counts = list(document["summary"].values())
    assert all(set(count) == {"ok"} and count["ok"] > 1 for count in counts)
    assert counts == counts[:1] * len(counts)
