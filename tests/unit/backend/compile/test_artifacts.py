"""Compiled graphs as artifacts: saved, loaded in this and another process, refused where they are not whole."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from emutpu.backend.cache_entry import RejectedEntry
from emutpu.backend.compile import artifact
from emutpu.backend.compile.assembly import CompiledGraph
from emutpu.backend.runtime import runtime


def graphs_of(function, *args) -> list[CompiledGraph]:
    """The compiled graphs of a call without gradients."""
    found: list[CompiledGraph] = []
    options = {"debug_callback": lambda debug: found.append(debug.compiled)}
    with torch.no_grad():
        torch.compile(function, backend="tpu", options=options)(*args)
    return found


def norm(x, y):
    """A result, a view of an argument, a mutated argument, and a 0-d CPU tensor among the arguments."""
    x.add_(1)
    return torch.softmax(x @ y, -1) * 2.5, y.t()


def test_a_loaded_graph_gives_the_same(compiles) -> None:
    """Results, mutations and views; the native code is loaded, nothing compiled."""
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    (compiled,) = graphs_of(norm, x.to("tpu"), y.to("tpu"))
    data = artifact.dumps(compiled)
    compiles()
    loaded = artifact.loads(data)
    given = [x.to("tpu"), y.to("tpu")]
    softmax, transposed = loaded(list(given))
    expected = norm(x, y)
    torch.testing.assert_close(softmax.cpu(), expected[0])
    assert transposed.untyped_storage().data_ptr() == given[1].untyped_storage().data_ptr()
    torch.testing.assert_close(given[0].cpu(), x)
    assert compiles() == 0
    for _ in range(3):
        loaded(list(given))
    torch.testing.assert_close(given[0].cpu(), x + 3)


def test_random_numbers_and_closures() -> None:
    """Draws come from the generator's state at the call; a tensor that the function closes over is an argument."""
    table = torch.arange(6.0, device="tpu")

    def f(x):
        return x * table + torch.rand(6, device="tpu")

    x = torch.ones(6, device="tpu")
    loaded = [artifact.loads(artifact.dumps(graph)) for graph in graphs_of(f, x)]
    torch.manual_seed(4)
    expected = f(x)
    torch.manual_seed(4)
    assert len(loaded) == 1
    given = [x] if loaded[0]._count == 1 else [x, table]
    torch.testing.assert_close(loaded[0](given)[0], expected)


def test_another_environment_compiles_the_module(monkeypatch, compiles) -> None:
    """Native code of another machine or release is not loaded: the module in the artifact is compiled."""
    x = torch.randn(3, 3)
    (compiled,) = graphs_of(lambda x: x.exp() @ x, x.to("tpu"))
    data = artifact.dumps(compiled)
    monkeypatch.setattr(type(runtime()), "binary_fingerprint", lambda self: "another")
    monkeypatch.setattr(runtime().client, "deserialize", None, raising=False)
    torch.testing.assert_close(artifact.loads(data)([x.to("tpu")])[0].cpu(), x.exp() @ x)


def test_what_is_not_whole_is_refused(monkeypatch) -> None:
    """Every changed byte, every truncation, a stranger's file, and with a secret an unsigned one."""
    (compiled,) = graphs_of(lambda x: x + 1, torch.ones(2, device="tpu"))
    data = artifact.dumps(compiled)
    signature = range(56, 88)  # which nobody looks at without a secret
    for place in range(0, len(data), max(1, len(data) // 50)):
        bad = bytearray(data)
        bad[place] ^= 0x40
        if place in signature:
            continue
        with pytest.raises(RejectedEntry):
            artifact.loads(bytes(bad))
    for size in (0, 10, 100, len(data) - 1):
        with pytest.raises(RejectedEntry):
            artifact.loads(data[:size])
    monkeypatch.setattr(type(runtime()), "cache_secret", b"a secret of enough bytes")
    with pytest.raises(RejectedEntry, match="unsigned"):
        artifact.loads(data)
    signed = artifact.dumps(compiled)
    assert artifact.loads(signed)([torch.ones(2, device="tpu")])[0].tolist() == [2, 2]


def test_files(tmp_path: Path) -> None:
    """A file of mode 0600; one that others may write, or a link, is refused; nothing is overwritten."""
    (compiled,) = graphs_of(lambda x: x - 1, torch.ones(2, device="tpu"))
    path = tmp_path / "graph"
    artifact.save(compiled, path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert artifact.load(path)([torch.ones(2, device="tpu")])[0].tolist() == [0, 0]
    with pytest.raises(FileExistsError):
        artifact.save(compiled, path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["graph"]
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(RejectedEntry, match="symbolic link"):
        artifact.load(tmp_path / "link")
    path.chmod(0o622)
    with pytest.raises(RejectedEntry, match="others may write"):
        artifact.load(path)


def test_other_options_are_said() -> None:
    """A graph that was compiled for one matmul precision does not run under another."""
    x = torch.ones(2, 2, device="tpu")
    (compiled,) = graphs_of(lambda x: x @ x, x)
    loaded = artifact.loads(artifact.dumps(compiled))
    with torch.tpu.precision(torch.tpu.Precision.HIGH), pytest.raises(RuntimeError, match="precision=HIGHEST"):
        loaded([x])


def test_what_cannot_be_saved_is_said() -> None:
    """Work on the host between two pieces."""
    found = graphs_of(lambda x: (x + 1).cpu().sin().to("tpu") * 2, torch.ones(2, device="tpu"))
    with pytest.raises(NotImplementedError, match="works on the host between"):
        [artifact.dumps(graph) for graph in found]


def test_another_process(tmp_path: Path) -> None:
    """An artifact is loaded where nothing was traced: no Dynamo, no compilation."""
    x = torch.arange(6.0).reshape(2, 3)
    (compiled,) = graphs_of(lambda x: (x @ x.t()).relu(), x.to("tpu"))
    artifact.save(compiled, tmp_path / "graph")
    program = f"""
        import torch
        from emutpu.backend.compile import artifact
        from emutpu.backend.runtime import runtime
        x = torch.arange(6.0).reshape(2, 3).to("tpu")
        with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
            made = artifact.load({str(tmp_path / "graph")!r})([x])[0]
        print(made.tolist(), runtime().cache.misses)
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*str((x @ x.t()).relu().tolist()).split(), "0"]
