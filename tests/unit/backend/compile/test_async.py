"""``async_compile``: the first call submits and raises, later ones run what was compiled."""

from __future__ import annotations

import pytest
import torch

from emutpu.backend.compile.asynchronous import AsyncCompilationSubmitted, async_compile, resolve_compilations


def test_the_first_call_submits(compiles) -> None:
    """It raises with an artifact, which can be waited for; the second call compiles nothing more and gives the result."""
    x = torch.arange(5.0, device="tpu")
    compiled = torch.compile(lambda x: x.sin() * 3.25, backend="tpu", options={"async_compile": True})
    compiles()
    with pytest.raises(AsyncCompilationSubmitted, match=r"was submitted: resolve_compilations") as raised:
        compiled(x)
    artifact = raised.value.artifact
    assert len(artifact.keys) == 1
    assert resolve_compilations([artifact]) == 1
    assert artifact.done()
    assert compiles() == 1
    torch.testing.assert_close(compiled(x).cpu(), torch.arange(5.0).sin() * 3.25)
    assert compiles() == 0


def test_a_call_before_it_is_resolved_waits(compiles) -> None:
    """Calling again at once joins the compilation that is under way."""
    x = torch.arange(7.0, device="tpu")
    compiled = torch.compile(lambda x: (x.cos() * 1.75).sum(), backend="tpu", options={"async_compile": True})
    compiles()
    with pytest.raises(AsyncCompilationSubmitted):
        compiled(x)
    torch.testing.assert_close(compiled(x).cpu(), (torch.arange(7.0).cos() * 1.75).sum())
    assert compiles() == 1


def test_several_functions_at_once(compiles) -> None:
    """``async_compile`` gives the functions; all are compiled once they are resolved."""
    x = torch.randn(2, 3).to("tpu")
    compiles()
    functions = [lambda x: (x + 2.5) @ x.t(), lambda x: (x + 3.5) @ x.t()]
    artifacts = [async_compile(function, (x,)) for function in functions]
    assert resolve_compilations(artifacts) == 2
    assert compiles() == 2
    host = x.cpu()
    with torch.no_grad():
        for artifact, function in zip(artifacts, functions, strict=True):
            torch.testing.assert_close(artifact.function(x).cpu(), function(host))
    assert compiles() == 0


def test_training_with_an_asynchronous_forward() -> None:
    """The backward pass is compiled when it is needed."""
    w = torch.ones(3, device="tpu", requires_grad=True)
    compiled = torch.compile(lambda w: (w * w.exp()).sum(), backend="tpu", options={"async_compile": True})
    with pytest.raises(AsyncCompilationSubmitted):
        compiled(w)
    compiled(w).backward()
    torch.testing.assert_close(w.grad.cpu(), torch.full((3,), 2 * torch.e))


def test_a_lowerings_error_is_raised_at_once() -> None:
    """What cannot be lowered is no submission: the op's own error, at the call."""
    compiled = torch.compile(lambda x: torch.linalg.eigvals(x), backend="tpu", options={"async_compile": True})  # noqa: PLW0108  # Dynamo wants a function
    with pytest.raises(Exception, match="linalg_eig"):
        compiled(torch.eye(3, device="tpu"))


def test_nothing_to_compile() -> None:
    """A graph without device work has nothing to submit."""
    x = torch.ones(2, device="tpu")
    artifact = async_compile(lambda x: x, (x,))
    assert resolve_compilations([artifact]) == 1
    assert artifact.function(x) is x
