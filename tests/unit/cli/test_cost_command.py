"""``emutpu cost``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from tools.layout import ROOT

Valid = Callable[[Any, str], dict[str, Any]]
MODULE = ROOT / "tests" / "data" / "libtpu_aot" / "mlp_b4096_1024_4096.mlir"


@pytest.mark.parametrize("level", ["eager", "compiled"])
def test_document(emutpu: Command, valid: Valid, level: str) -> None:
    """The JSON document is valid, alone on standard output, and its kernels add up to the whole."""
    result = emutpu("cost", str(MODULE), "--chip", "v5e", "--level", level, "--json", "-")
    assert result.returncode == 0
    document = valid(result.stdout, "cost")
    assert (document["chip"], document["level"], document["bound"]) == ("v5e", level, "mxu")
    assert sum(kernel["flops"] for kernel in document["fusions"]) == document["flops"]
    assert sum(kernel["bytes"] for kernel in document["fusions"]) == document["hbm_bytes"]
    assert document["peak_hbm_bytes"] >= document["argument_bytes"] + document["output_bytes"]


def test_table(emutpu: Command) -> None:
    """People see that it is a model, the error bar, the kernels and, for a chip without recordings, whose habits it has."""
    result = emutpu("cost", str(MODULE), "--chip", "v4")
    assert result.returncode == 0
    for words in ("modelled, not measured", "between x", "dot_general", "assumed: v4"):
        assert words in result.stdout


def test_bytecode(emutpu: Command, tmp_path: Path) -> None:
    """A module as bytecode costs what its text costs."""
    from emutpu._jaxlib import context, ir

    module = tmp_path / "module.mlir"
    with module.open("wb") as file:
        ir.Module.parse(MODULE.read_text(encoding="utf-8"), context=context()).operation.write_bytecode(file)
    text, bytecode = (
        json.loads(emutpu("cost", str(path), "--chip", "v6e", "--json", "-").stdout) for path in (MODULE, module)
    )
    assert {**text, "module": None} == {**bytecode, "module": None}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chip", "v99"), "unknown TPU chip"),
        (("--chip", "v8t"), "not published"),
        ((), "--chip"),
        (("--chip", "v5e", "--level", "fast"), "eager"),
    ],
)
def test_wrong_usage(emutpu: Command, arguments: tuple[str, ...], words: str) -> None:
    """A chip or level that does not exist is exit code 2 with one message and no traceback."""
    result = emutpu("cost", str(MODULE), *arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_malformed_module(emutpu: Command, tmp_path: Path) -> None:
    """A file that is no module is exit code 2 and says so."""
    module = tmp_path / "bad.mlir"
    module.write_text("this is not MLIR", encoding="utf-8")
    result = emutpu("cost", str(module), "--chip", "v5e")
    assert result.returncode == 2
    assert "malformed" in result.stderr
    assert "Traceback" not in result.stderr
