"""What can be seen of compiling: recompilations with their reasons, structured traces, the debug callback's argument."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any

from torch import fx

from emutpu.backend.compile.assembly import CompiledGraph
from emutpu.backend.compile.locations import node_origin
from emutpu.backend.location import locate
from emutpu.backend.runtime import runtime

__all__ = ["CompileDebug", "debug_of", "note_recompile", "recompilations", "record"]

_SIZE = re.compile(
    r"tensor '(?P<name>.+?)' size mismatch at index (?P<dim>\d+)\. expected (?P<old>\d+), actual (?P<new>\d+)"
)
_LOCAL = re.compile(r"L\['(\w+)'\]")


@dataclasses.dataclass(frozen=True, slots=True)
class CompileDebug:
    """What ``options={"debug_callback": …}`` is called with, once for each graph that was compiled.

    ``mlir_texts`` are the canonical modules of its regions, ``graph_module_debug_strs`` the graphs of ATen ops.
    """

    name: str
    mlir_texts: tuple[str, ...]
    graph_module_debug_strs: tuple[str, ...]
    keys: tuple[str, ...]
    compiled: CompiledGraph = dataclasses.field(repr=False)
    serializable: bool = True

    def serialize(self) -> bytes:
        """The compiled graph as an artifact (:func:`artifact.loads` loads it).

        Raises NotImplementedError for a graph that cannot be saved, or was compiled with ``serializable=False``.
        """
        from emutpu.backend.compile import artifact

        if not self.serializable:
            raise NotImplementedError(f"{self.name} was compiled with options={{'serializable': False}}")
        return artifact.dumps(self.compiled)

    @property
    def mlir_text(self) -> str:
        """All modules, one after the other."""
        return "\n".join(self.mlir_texts)

    @property
    def graph_module_debug_str(self) -> str:
        """All graphs, one after the other."""
        return "\n".join(self.graph_module_debug_strs)

    def fingerprint(self) -> str:
        """The logical keys of the regions: equal for equal programs, in every process."""
        return "+".join(self.keys)


def debug_of(compiled: CompiledGraph, *, serializable: bool = True) -> CompileDebug:
    """Describe a compiled graph. Builds its modules once more, for their text."""
    launches = [program.prepare() for program in compiled.device_pieces]
    texts = [x.replayed.region.text(x.replayed.origins) for x in launches if x.replayed.region is not None]
    keys = [str(x.key) for x in launches if x.replayed.region is not None]
    return CompileDebug(
        compiled.name, tuple(texts), (_graph_text(compiled),), tuple(keys), compiled, serializable=serializable
    )


def _graph_text(compiled: CompiledGraph) -> str:
    text: str = compiled.module.print_readable(print_output=False)
    return text


def record(compiled: CompiledGraph) -> None:
    """Write the graph and its modules into the structured trace (``TORCH_TRACE``), under TorchTPU's names."""
    from torch._logging._internal import trace_structured

    def artifact(name: str) -> Any:
        return lambda: {"name": name, "encoding": "string"}

    trace_structured("artifact", metadata_fn=artifact("torchtpu_fx_graph"), payload_fn=lambda: _graph_text(compiled))
    trace_structured(
        "artifact",
        metadata_fn=artifact("torchtpu_stablehlo_graph"),
        payload_fn=lambda: debug_of(compiled).mlir_text,
    )


def note_recompile(module: fx.GraphModule) -> None:
    """Called with each graph of Dynamo's: count it with its reason, and its first line, if it is not the function's first."""
    from torch._dynamo.utils import get_metrics_context

    reason = get_metrics_context()._metrics.get("recompile_reason")
    if not reason:
        return
    origin = next(filter(None, map(node_origin, module.graph.nodes)), None)
    location = locate(*origin[1:]) if origin is not None else None
    where = f"{os.path.basename(location.file)}:{location.line}" if location is not None else "an unknown line"
    runtime().recompiles[_described(str(reason)), where] += 1


def _described(reason: str) -> str:
    """``dim 0 of `x`, 8→5``, or the first failed guard as Dynamo words it."""
    found = _SIZE.search(reason)
    if found is not None:
        local = _LOCAL.fullmatch(found["name"])
        name = local[1] if local is not None else found["name"]
        return f"dim {found['dim']} of `{name}`, {found['old']}→{found['new']}"
    first = reason.strip().splitlines()[0]
    return first.partition("#")[0].partition(": ")[2].strip() or first


def recompilations() -> list[str]:
    """One line for each cause, most frequent first: ``recompiled 3×: dim 0 of `x`, 8→5, train.py:30``."""
    return [f"recompiled {count}×: {what}, {where}" for (what, where), count in runtime().recompiles.most_common()]
