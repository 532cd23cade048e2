"""``options={"async_compile": True}``: the first call queues the compilation and raises AsyncCompilationSubmitted, later
ones run. :func:`async_compile` does that for several functions, :func:`resolve_compilations` waits for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback

from emutpu.backend.cache import Acquired
from emutpu.backend.compile.assembly import compile_graph
from emutpu.backend.compile.program import DeviceProgram

__all__ = ["AsyncCompilationSubmitted", "AsyncCompiledArtifact", "async_compile", "resolve_compilations", "submit"]


@dataclasses.dataclass(slots=True, eq=False)
class AsyncCompiledArtifact:
    """A graph that is being compiled. ``function`` is the compiled function where :func:`async_compile` made it."""

    name: str
    keys: tuple[str, ...]
    futures: tuple[Future[Acquired], ...]
    function: Callable[..., Any] | None = None

    def done(self) -> bool:
        """Whether nothing of it is left to compile."""
        return all(future.done() for future in self.futures)

    def wait(self) -> None:
        """Wait until it is compiled. Raises what the compiler raises."""
        for future in self.futures:
            future.result()


class AsyncCompilationSubmitted(ShortenTraceback):
    """The compilation of a graph was queued: call again, or wait for ``artifact`` first. Dynamo lets this type pass."""

    def __init__(self, artifact: AsyncCompiledArtifact) -> None:
        super().__init__(
            f"the compilation of {artifact.name} was submitted: resolve_compilations([error.artifact]) waits for it, and a "
            "later call runs it",
            first_useful_frame=None,
        )
        self.artifact = artifact


def submit(module: fx.GraphModule, name: str) -> None:
    """Queue what the graph needs and is neither compiled nor queued, and raise AsyncCompilationSubmitted; nothing happens
    where there is nothing to queue. Raises what lowerings raise, with the user's line.
    """
    found: list[tuple[str, Future[Acquired]]] = []

    def start(program: DeviceProgram) -> None:
        queued = program.submit()
        if queued is not None:
            found.append(queued)

    compile_graph(module, name, start)
    if found:
        keys, futures = zip(*found, strict=True)
        raise AsyncCompilationSubmitted(AsyncCompiledArtifact(name, keys, futures))


def async_compile(
    function: Callable[..., Any], warmup_inputs: Sequence[Any], *, no_grad: bool = True, **options: Any
) -> AsyncCompiledArtifact:
    """Compile ``function`` as one static graph for ``warmup_inputs`` without waiting; ``artifact.function`` is the result.

    ``no_grad`` compiles for inference. ``options`` are those of ``torch.compile``.
    """
    compiled = torch.compile(
        function, backend="tpu", fullgraph=True, dynamic=False, options=options | {"async_compile": True}
    )
    with torch.set_grad_enabled(not no_grad and torch.is_grad_enabled()):
        try:
            compiled(*warmup_inputs)
        except AsyncCompilationSubmitted as submitted:
            submitted.artifact.function = compiled
            return submitted.artifact
    return AsyncCompiledArtifact(getattr(function, "__name__", "graph"), (), (), compiled)


def resolve_compilations(artifacts: Iterable[AsyncCompiledArtifact]) -> int:
    """Wait for all of them; gives how many there were. Raises the first one's error that failed."""
    count = 0
    for artifact in artifacts:
        artifact.wait()
        count += 1
    return count
