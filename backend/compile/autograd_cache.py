"""PyTorch's AOTAutograd cache with our compiled graphs in it (``EMUTPU_AOT_CACHE=1``): a later process traces nothing and
compiles nothing.

The cache is PyTorch's: its folder, its keys, and a pickle of its own records. What is ours in a record is the bytes of an
artifact, which are verified when they are loaded. Keys have TorchTPU's prefix and hold what decides our code, and the
storage offsets of the arguments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._inductor.output_code import OutputCode

from emutpu.backend.compile import artifact
from emutpu.backend.compile.assembly import CompiledGraph
from emutpu.backend.compile.settings import CompileSettings
from emutpu.backend.options import LOCAL
from emutpu.backend.runtime import runtime

__all__ = ["cached", "caching"]

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Any]


@dataclasses.dataclass
class CachedGraph(OutputCode):
    """A compiled graph as the cache keeps it: ``data`` is its artifact, ``graph`` what is called."""

    graph: Any = None
    data: bytes = b""

    def __post_init__(self) -> None:
        self._boxed_call = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.graph(inputs)

    def prepare_for_serialization(self) -> None:
        """Become bytes. Raises BypassAOTAutogradCache for a graph that cannot be saved."""
        if not isinstance(self.graph, CompiledGraph):
            raise BypassAOTAutogradCache("a graph with bounded dimensions cannot be saved")
        try:
            self.data = artifact.dumps(self.graph)
        except NotImplementedError as error:
            raise BypassAOTAutogradCache(str(error)) from error
        self.graph = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:  # PyTorch's
        """Load it, if it came from the cache. Raises RejectedEntry."""
        if self.graph is None:
            self.graph = artifact.loads(self.data)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """There is none."""


def cached(compiler: Compiler) -> Compiler:
    """A compiler whose results the cache can keep."""

    def compile_(module: fx.GraphModule, inputs: Sequence[Any]) -> CachedGraph:
        return CachedGraph(compiler(module, inputs))

    made: Compiler = SerializableAOTDispatchCompiler(CachedGraph, compile_)
    return made


@contextlib.contextmanager
def caching(settings: CompileSettings, inputs: Sequence[Any]) -> Iterator[None]:
    """Inside, AOTAutograd looks into the cache, with our part of the key."""
    offsets = [int(value.storage_offset()) for value in inputs if isinstance(value, torch.Tensor)]
    decides = (
        LOCAL.state.options.canonical(),
        runtime().binary_fingerprint(),
        settings.name,
        settings.async_compile,
        offsets,
    )
    tag = f"torchtpu_{hashlib.sha256(repr(decides).encode()).hexdigest()}"
    # A record holds both directions, and is made in here: so the backward pass is not left to the first call of it.
    with (
        torch._functorch.config.patch(bundled_autograd_cache=True, force_non_lazy_backward_lowering=True),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]  # the module adds it to itself
    ):
        yield
