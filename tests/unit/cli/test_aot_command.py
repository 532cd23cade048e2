"""``emutpu aot-check`` without the real compiler: recording, the worker's crashes, the cache, and the missing libtpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from emutpu._modules import recorded
from emutpu.cli import _aot, aot_check
from emutpu.cli._exit import EmulatorExit, EmulatorFailure

# A compiler that refuses modules with the word "bad", dies of "crash", and counts what it is asked.
_FAKE_WORKER = """
import json, os, sys
print(json.dumps({"ready": sys.argv[-1] != "tpu7x:2x2x1", "error": "no such topology"}), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    open(os.environ["ASKED"], "a").write(job["path"] + "\\n")
    text = open(job["path"], "rb").read()
    if b"crash" in text:
        sys.stderr.write("F0000 check failed: crash\\n")
        sys.stderr.flush()
        os._exit(134)
    ok = b"bad" not in text
    print(json.dumps({"ok": ok, "error": None if ok else "INVALID_ARGUMENT: bad", "cycles": 7, "flops": 1.0,
                      "argument_bytes": 1, "output_bytes": 2, "temporary_bytes": 4, "optimal_seconds": None}), flush=True)
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake compiler in the real one's place; gives the file that lists what it was asked."""
    fake = tmp_path / "fake" / "emutpu" / "_aot_worker.py"
    fake.parent.mkdir(parents=True)
    (fake.parent / "__init__.py").touch()
    fake.write_text(_FAKE_WORKER)
    asked = tmp_path / "asked"
    asked.touch()
    monkeypatch.setattr(_aot._aot_worker, "__file__", str(fake))
    monkeypatch.setattr(aot_check, "require_libtpu", lambda: "0.0.42.1")
    monkeypatch.setenv("ASKED", str(asked))
    monkeypatch.setenv("EMUTPU_CACHE_DIR", str(tmp_path / "cache"))
    return asked


def _jobs(folder: Path, *texts: str, chip: str = "v5e") -> list[_aot.Job]:
    jobs = []
    for number, text in enumerate(texts):
        path = folder / f"{number}.mlir"
        path.write_text(text)
        jobs.append(_aot.Job(path, f"module_{number}", chip, "O1", "train.py", 10 + number))
    return jobs


def test_a_crash_is_an_answer(tmp_path: Path, compiler: Path) -> None:
    """A module that kills the compiler fails with its last words, those after it are compiled, and it is asked again."""
    jobs = _jobs(tmp_path, "good", "crash", "bad", "fine")
    for _ in range(2):
        answers = [answer for _, answer in _aot.compiled(jobs, "1", tmp_path / "cache")]
        assert [answer["ok"] for answer in answers] == [True, False, False, True]
        assert answers[1]["error"] == "the TPU compiler ended with exit code 134: F0000 check failed: crash"
        assert answers[2]["error"] == "INVALID_ARGUMENT: bad"
    asked = compiler.read_text().split()
    assert [asked.count(str(job.path)) for job in jobs] == [1, 2, 1, 1]


def test_keys(tmp_path: Path) -> None:
    """What decides the answer is in the key: the module, chip, effort and version of the compiler."""
    (job,) = _jobs(tmp_path, "good")
    other = _aot.Job(job.path, "other name", "v5e", "O1")
    assert job.key("1") == other.key("1")
    different = {
        job.key("1"), job.key("2"),
        _aot.Job(job.path, "", "v6e", "O1").key("1"),
        _aot.Job(job.path, "", "v5e", "O2").key("1"),
        _jobs(tmp_path, "another")[0].key("1"),
    }  # fmt: skip
    assert len(different) == 5


def test_a_damaged_cache_is_asked_again(tmp_path: Path, compiler: Path) -> None:
    """An answer that was cut short is no answer."""
    jobs = _jobs(tmp_path, "good")
    list(_aot.compiled(jobs, "1", tmp_path / "cache"))
    (entry,) = (tmp_path / "cache").glob("*.json")
    entry.write_text('{"ok": tr')
    ((_, answer),) = _aot.compiled(jobs, "1", tmp_path / "cache")
    assert answer["ok"]
    assert not answer["cached"]


def test_a_compiler_that_does_not_start(tmp_path: Path, compiler: Path) -> None:
    """The reason, once, as a failure of the emulator."""
    with pytest.raises(EmulatorFailure, match="did not start for tpu7x:2x2x1: no such topology") as raised:
        list(_aot.compiled(_jobs(tmp_path, "good", chip="v7"), "1", None))
    assert raised.value.code is EmulatorExit.NO_COMPILER


def test_libtpu_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear message with the remedy."""
    monkeypatch.setattr(_aot, "installed_version", lambda name: None)
    with pytest.raises(EmulatorFailure, match=r"pip install 'emutpu\[aot\]'"):
        _aot.require_libtpu()


def test_document_of_a_module(tmp_path: Path, compiler: Path, valid: Callable[[Any, str], dict[str, Any]]) -> None:
    """A module file for two chips: rows that follow the schema, exit code 1 for a refusal."""
    (tmp_path / "bad.mlir").write_text("bad")
    report = tmp_path / "report.json"
    arguments = ["--chip", "v5e", "--chip", "v6e", "--json", str(report), str(tmp_path / "bad.mlir")]
    result = CliRunner().invoke(aot_check.command, arguments, standalone_mode=False)
    assert result.return_value == 1
    document = valid(report.read_text(), "aot-check")
    assert [row["ok"] for row in document["modules"]] == [False, False]
    assert document["summary"] == {"v5e": {"failed": 1}, "v6e": {"failed": 1}}
    assert document["modules"][0]["modelled"]["cycles"] is None
    assert document["modules"][0]["modelled"]["reason"]
    assert "INVALID_ARGUMENT: bad" in result.stderr


def test_a_program_at_its_lines(tmp_path: Path, compiler: Path, valid: Callable[[Any, str], dict[str, Any]]) -> None:
    """Modules come with the line that made them; a program that fails is not ok, and what it reached is checked."""
    program = tmp_path / "program.py"
    program.write_text("import torch\na = torch.ones(3, device='tpu')\nb = (a + 1) * 2\nraise SystemExit(3)\n")
    report = tmp_path / "report.json"
    arguments = ["--json", str(report), str(program)]
    result = CliRunner().invoke(aot_check.command, arguments, standalone_mode=False)
    assert result.return_value == 1, result.output
    document = valid(report.read_text(), "aot-check")
    assert document["exit_code"] == 3
    assert "exit code 3" in document["notes"]["program"]
    lines = {row["name"]: (row["file"], row["line"]) for row in document["modules"]}
    assert lines["aten.mul.Tensor"] == (str(program), 3)
    assert all(row["ok"] and row["modelled"]["cycles"] > 0 for row in document["modules"])


def test_recording(tmp_path: Path) -> None:
    """Each module once, also one that the client refuses, with effort and order."""
    import torch  # noqa: F401 (where the line is found knows torch's frames, and torch must load emutpu, not the reverse)

    from emutpu._modules import RecordingClient
    from emutpu.backend.pjrt import CompileOptions, Effort, InvalidArgument
    from emutpu.simulator import make_client

    client = RecordingClient(make_client("dry_run"), str(tmp_path / "modules"))
    for _ in range(2):
        with pytest.raises(InvalidArgument):
            client.compile(b"no module", CompileOptions())
    names = [facts["name"] for _, facts in recorded(tmp_path / "modules")]
    assert names == ["a module that the CPU refuses too"]
    options = CompileOptions(effort=Effort.O2)
    with pytest.raises(InvalidArgument):
        client.compile(b"no module", options)
    assert [facts["effort"] for _, facts in recorded(tmp_path / "modules")] == ["O1", "O2"]
