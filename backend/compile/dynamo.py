"""The Dynamo backend ``"tpu"``: AOTAutograd with the min-cut partitioner around the graph compiler."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from emutpu.backend.compile import autograd_cache
from emutpu.backend.compile.assembly import CompiledGraph, compile_graph
from emutpu.backend.compile.asynchronous import submit
from emutpu.backend.compile.observe import debug_of, note_recompile, record
from emutpu.backend.compile.passes import before_autograd, mark_activation_checkpoints
from emutpu.backend.compile.settings import CompileSettings, parse
from emutpu.backend.dynamism.program import BoundedGraph, bounded_graph, has_symbols
from emutpu.backend.quirks import reproduces
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE

__all__ = ["compile_for_device", "cpu_backend", "uses_device"]

_graphs = itertools.count()


def uses_device(module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether an input, a parameter or any value of a Dynamo graph is on the device."""
    if any(_here(leaf) for leaf in pytree.tree_leaves(list(inputs))):
        return True
    if any(_here(tensor) for tensor in itertools.chain(module.parameters(), module.buffers())):
        return True
    return any(
        _here(leaf) for node in module.graph.nodes for leaf in pytree.tree_leaves(node.meta.get("example_value"))
    )


def _here(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE.type


def cpu_backend() -> str:
    """What compiles graphs of the CPU: Inductor, or ``aot_eager`` where there is no C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError):
        return "aot_eager"
    return "inductor"


def compile_for_device(module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
    """What Dynamo calls with a graph. ``kwargs`` are ``mode`` and ``options`` of ``torch.compile``.

    Raises what :func:`settings.parse` raises, and what compiling raises.
    """
    settings = parse(kwargs.pop("options", None), **kwargs)
    if not uses_device(module, inputs):
        from torch._dynamo.backends.registry import lookup_backend

        compiled: Callable[..., Any] = lookup_backend("aot_eager")(module, list(inputs))
        return compiled
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    note_recompile(module)
    if reproduces():
        _guard_offsets(module)
    before_autograd(module)
    name = settings.name or f"graph_{next(_graphs)}"
    compilers: dict[str, Callable[..., Any]] = {
        "fw_compiler": functools.partial(_compile_forward, settings, f"{name}_fwd", training=True),
        "bw_compiler": functools.partial(_compile_backward, settings, f"{name}_bwd"),
        "inference_compiler": functools.partial(_compile_forward, settings, f"{name}_fwd"),
    }
    configuration = runtime().configuration
    kept = settings.serializable and configuration is not None and configuration.aot_cache
    if kept:
        compilers = {which: autograd_cache.cached(compiler) for which, compiler in compilers.items()}
    compiler = aot_autograd(
        **compilers,
        decompositions={torch.ops.aten.linear_backward.default: _linear_backward},
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    with autograd_cache.caching(settings, inputs) if kept else contextlib.nullcontext():
        return compiler(module, inputs)


def _linear_backward(
    x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]
) -> Any:  # NotImplemented leaves the op as it is
    """Of a weight that is a single row without a dimension of rows: the shapes that PyTorch infers for it are wrong."""
    if weight.dim() != 1:
        return NotImplemented
    makers: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: grad.unsqueeze(-1) * weight,
        lambda: (grad.unsqueeze(-1) * x).sum(list(range(grad.dim()))),
        grad.sum,
    )
    return tuple(make() if wanted else None for make, wanted in zip(makers, mask, strict=True))


def _guard_offsets(module: fx.GraphModule) -> None:
    """Compile again for an argument at another storage offset, as TorchTPU 0.2.0 does (quirk ``compile-offset-guards``)."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import TensorProperty, TensorPropertySource

    for node in module.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        if argument is not None and argument.source is not None and _here(node.meta.get("example_value")):
            source = TensorPropertySource(argument.source, TensorProperty.STORAGE_OFFSET)
            install_guard(source.make_guard(GuardBuilder.EQUALS_MATCH))


def _compile(
    settings: CompileSettings, name: str, module: fx.GraphModule, inputs: Sequence[Any], *, training: bool = False
) -> CompiledGraph | BoundedGraph:
    def note(compiled: CompiledGraph) -> None:
        record(compiled)
        if settings.debug_callback is not None:
            settings.debug_callback(debug_of(compiled, serializable=settings.serializable))

    if has_symbols(module):
        return bounded_graph(settings, name, module, training=training, note=note)
    compiled = compile_graph(module, name)
    note(compiled)
    return compiled


def _compile_forward(
    settings: CompileSettings, name: str, module: fx.GraphModule, inputs: Sequence[Any], *, training: bool = False
) -> CompiledGraph | BoundedGraph:
    if settings.async_compile and not has_symbols(module):  # a bounded graph is built for bounds, at its first call
        submit(module, name)
    return _compile(settings, name, module, inputs, training=training)


def _compile_backward(
    settings: CompileSettings, name: str, module: fx.GraphModule, inputs: Sequence[Any]
) -> CompiledGraph | BoundedGraph:
    mark_activation_checkpoints(module.graph)
    return _compile(settings, name, module, inputs)
