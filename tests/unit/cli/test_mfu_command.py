"""``emutpu mfu``: table, JSON and page."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from emutpu.cli.mfu import command

_LLAMA = ("llama-3-405b", "--sequence", "8192", "--tokens-per-second", "500")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments)


def test_as_a_user_runs_it(emutpu: Callable[..., subprocess.CompletedProcess[str]], valid: Any) -> None:
    """The command prints a document that follows its schema, with the published utilisation."""
    result = emutpu("mfu", *_LLAMA, "--json", "-")
    assert result.returncode == 0, result.stderr
    document = valid(result.stdout, "mfu")
    assert document["mfu"]["causal"] == pytest.approx(0.547, abs=0.001)
    assert document["mfu"]["full"] == pytest.approx(0.569, abs=0.001)
    assert document["with_lm_head"]["mfu"] == document["mfu"]
    assert document["without_lm_head"]["mfu"]["causal"] < document["mfu"]["causal"]
    assert document["notes"] == {}


def test_choices(tmp_path: Path, valid: Any) -> None:
    """Forward is a third of training; the headline follows --no-lm-head; without a throughput the MFU is null, with reason."""
    path = tmp_path / "mfu.json"
    assert _run(*_LLAMA[:3], "--forward", "--no-lm-head", "--json", str(path)).exit_code == 0
    forward = valid(path.read_text(), "mfu")
    assert _run(*_LLAMA, "--no-lm-head", "--json", str(path)).exit_code == 0
    training = valid(path.read_text(), "mfu")
    assert forward["mfu"] == {"causal": None, "full": None}
    assert "tokens-per-second" in forward["notes"]["mfu"]
    assert training["flops_per_token"]["full"] == pytest.approx(3 * forward["flops_per_token"]["full"])
    assert training["flops_per_token"] == training["without_lm_head"]["flops_per_token"]


def test_table() -> None:
    """Four rows: causal and full, with and without LM head; an unknown vocabulary is said."""
    result = _run("muse-glimmer-30b", "--sequence", "5120", "--tokens-per-second", "25700", "--forward")
    assert "causal attention, without LM head │           51.91 │ 57.8%" in result.output
    assert "vocabulary is not known" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a MODEL and --sequence"),
        (("llama-3-8b",), "give a MODEL and --sequence"),
        (("llama", "--sequence", "10"), "neither a file nor a known model"),
        (("llama-3-8b", "--sequence", "10", "--chip", "v9"), "unknown TPU chip"),
        (("llama-3-8b", "--sequence", "10", "--dtype", "fp8", "--chip", "v5e"), "v5e has no published fp8 peak"),
        (("llama-3-8b", "--sequence", "10", "--chip", "v8t"), "no published bf16 peak"),
        (("llama-3-8b", "--sequence", "0"), "0 is not in the range"),
        (("llama-3-8b", "--sequence", "10", "--tokens-per-second", "0"), "is not in the range"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    """Wrong usage exits with 2 and says what is wrong."""
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_list() -> None:
    """The known models by name."""
    assert "qwen3-235b-a22b" in _run("--list").output.split()


def test_page(tmp_path: Path) -> None:
    """The page is complete in itself, carries the counted parts, and a model's name cannot break out of it."""
    config = tmp_path / "<script>alert(1)<.json"
    config.write_text(json.dumps({
        "layers": 2, "width": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "ffn": 16, "vocabulary": 10
    }))  # fmt: skip
    path = tmp_path / "mfu.html"
    assert _run(str(config), "--sequence", "6", "--html", str(path)).exit_code == 0
    text = path.read_text()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    assert "<script>alert" not in text
    assert not re.search(r"__[A-Z]+__", text)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text).group(1))  # type: ignore[union-attr]  # None fails the test, as it should
    assert data["components"]["lm_head"] == 160
    assert _run(str(config), "--sequence", "6", "--html", str(tmp_path / "no/mfu.html")).exit_code != 0
