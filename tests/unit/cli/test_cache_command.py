"""``emutpu cache``: what it counts, finds and removes, as a table and as JSON."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Command

from emutpu.backend import cache_upkeep
from emutpu.backend.cache_entry import pack
from emutpu.backend.cache_setup import TierSettings
from emutpu.backend.cache_store import DirectoryStore

BINARY = "0123456789abcdef"
SECRET = "a secret of the tests"


def stem(number: int) -> str:
    """One of many keys."""
    return "_".join([f"{number:016x}"] * 3)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A persistent root with three good entries."""
    store = DirectoryStore(tmp_path / "cache", (BINARY,), shared_parts=0, cap=1 << 30)
    for number in range(3):
        store.write(stem(number), pack(stem(number), BINARY, bytes(1000), 1.0))
        os.utime(store.path / f"{stem(number)}.bin", (number, number))
    return tmp_path / "cache"


@pytest.fixture
def name() -> Iterator[str]:
    """A name of a shared-memory cache that nobody else uses; what is there is removed."""
    made = f"tests-{uuid.uuid4().hex}"
    yield made
    folder = TierSettings(tier2=made).tier2_root()
    if folder.exists():
        cache_upkeep.clear(folder)
        (folder / cache_upkeep.PRUNE_LOCK).unlink(missing_ok=True)
        folder.rmdir()


def tiers(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows by name."""
    return {row["name"]: row for row in document["tiers"]}


def test_stats(emutpu: Command, valid: Callable[[Any, str], dict[str, Any]], root: Path, name: str) -> None:
    """Entries and bytes of each tier; a tier that holds nothing yet is no error, and is not made."""
    done = emutpu("cache", "stats", "--tier2", name, "--json", "-", TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT=str(root))
    assert done.returncode == 0, done.stderr
    rows = tiers(valid(done.stdout, "cache"))
    size = sum(path.stat().st_size for path in (root / BINARY).iterdir())
    assert (rows["tier3"]["path"], rows["tier3"]["entries"], rows["tier3"]["bytes"]) == (str(root), 3, size)
    assert (rows["tier2"]["entries"], rows["tier2"]["bytes"], rows["tier2"]["corrupt"]) == (0, 0, 0)
    assert rows["tier2"]["path"].endswith(f"torch_tpu_cache/{name}")
    assert not Path(rows["tier2"]["path"]).exists()
    assert str(root) in done.stderr.replace("\n", "") or "tier3" in done.stderr


def test_verify(emutpu: Command, valid: Callable[[Any, str], dict[str, Any]], root: Path, name: str) -> None:
    """A bad entry is named with the reason and exit code 1; with a secret, unsigned ones are bad."""
    command = ("cache", "verify", "--tier2", name, "--tier3", str(root), "--json", "-")
    assert emutpu(*command).returncode == 0
    os.truncate(root / BINARY / f"{stem(1)}.bin", 500)
    done = emutpu(*command)
    row = tiers(valid(done.stdout, "cache"))["tier3"]
    assert done.returncode == 1
    assert row["corrupt"] == 1
    assert row["findings"] == [{"entry": f"{BINARY}/{stem(1)}.bin", "reason": "truncated or extended: 500 bytes"}]
    signed = emutpu(*command, EMUTPU_CACHE_KEY=SECRET)
    assert tiers(valid(signed.stdout, "cache"))["tier3"]["corrupt"] == 3
    assert SECRET not in signed.stdout + signed.stderr


def test_prune_and_clear(emutpu: Command, valid: Callable[[Any, str], dict[str, Any]], root: Path, name: str) -> None:
    """The least recently used go first; clear removes all, and nothing that is not of the cache."""
    (root / "mine.txt").write_text("mine")
    common = ("--tier2", name, "--tier3", str(root), "--json", "-")
    done = emutpu("cache", "prune", *common, "--max-bytes", "2500")
    row = tiers(valid(done.stdout, "cache"))["tier3"]
    assert (row["removed"], row["entries"]) == (1, 2)
    assert not (root / BINARY / f"{stem(0)}.bin").exists()
    row = tiers(valid(emutpu("cache", "clear", *common).stdout, "cache"))["tier3"]
    assert (row["removed"], row["entries"], row["bytes"]) == (2, 0, 0)
    assert (root / "mine.txt").exists()


def test_wrong_usage(emutpu: Command, root: Path) -> None:
    """Names that leave the directory and sizes that are none are wrong usage; a root open to others is refused."""
    for arguments in (["stats", "--tier2", "../../etc"], ["prune", "--max-bytes", "many"], ["nonsense"]):
        done = emutpu("cache", *arguments)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
    root.chmod(0o777)
    done = emutpu("cache", "clear", "--tier3", str(root))
    assert done.returncode == 74
    assert f"chmod 700 {root}" in done.stderr
    assert len(list((root / BINARY).glob("*.bin"))) == 3
    for variable in ({"TORCH_TPU_TIER2_COMPILATION_CACHE": "../x"}, {"EMUTPU_CACHE_KEY": "short"}):
        done = emutpu("cache", "stats", **variable)
        assert done.returncode == 2
        assert next(iter(variable)) in done.stderr
        assert "'short'" not in done.stderr


def test_the_secret_is_not_shown(emutpu: Command) -> None:
    """``emutpu doctor --env`` says that there is a secret, not what it is."""
    done = emutpu("doctor", "--env", EMUTPU_CACHE_KEY=SECRET, EMUTPU_CHIP="none")
    assert "EMUTPU_CACHE_KEY=***" in done.stdout
    assert SECRET not in done.stdout


def test_run_reports_the_tiers(
    emutpu: Command,
    program: Callable[[str], str],
    valid: Callable[[Any, str], dict[str, Any]],
    name: str,
    tmp_path: Path,
) -> None:
    """The second run of a program compiles nothing: `compiles.by_tier` says where the executables came from."""
    script = program("import torch\nprint((torch.ones(3, device='tpu') * 2).sum().item())")
    runs = []
    for _ in range(2):
        done = emutpu("run", "--json", "report.json", script, TORCH_TPU_TIER2_COMPILATION_CACHE=name)
        assert (done.returncode, done.stdout.strip()) == (0, "6.0"), done.stderr
        runs.append(valid((tmp_path / "report.json").read_text(), "run"))
    first, second = (run["compiles"] for run in runs)
    assert first["misses"] == first["by_tier"]["2"]["misses"] == first["by_tier"]["2"]["writes"] > 0
    assert (second["misses"], second["by_tier"]["2"]["hits"]) == (0, first["misses"])
    assert second["requests"] == second["hits"] == sum(tier["hits"] for tier in second["by_tier"].values())
