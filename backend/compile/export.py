"""Exported programs and FX graphs as canonical StableHLO: text, bytecode, portable artifact, with the users' lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from emutpu._jaxlib import portable_artifact
from emutpu.backend.compile.graph import Piece, output_arguments
from emutpu.backend.compile.locations import node_origin
from emutpu.backend.compile.replay import Drawn, Fresh, Held, Hosted, NeedsContents, Replayed, Taken, replay
from emutpu.backend.dtypes import numpy_dtype, torch_dtype
from emutpu.backend.errors import describe
from emutpu.backend.hlo import Builder, Value

DEVICE_TYPE = "tpu"

__all__ = ["Argument", "ExportedMlir", "exported_to_mlir", "fx_to_mlir"]


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """An argument of the module's ``main``, row-major.

    ``kind`` is ``parameter``, ``buffer``, ``constant``, ``input`` or ``random_state`` (ui64[3]: seed, offset, 0);
    ``name`` the parameter's qualified name or the input's.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True)
class ExportedMlir:
    """A module and its interface. Results come in the order of the graph: mutated buffers first, then what it returns.

    ``results`` are the graph's names of them, ``constants`` what the graph returns beside (position, value).
    """

    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    constants: tuple[tuple[int, Any], ...]
    _builder: Builder
    _bytecode: bytes

    def serialize_text(self, enable_debug_info: bool = False) -> str:
        """The module as text, with the user's line of each op if asked for."""
        return self._builder.text(locations=enable_debug_info)

    def serialize_bytecode(self) -> bytes:
        """MLIR bytecode: for this release of StableHLO."""
        return self._bytecode

    def serialize_portable_artifact(self, version: str | None = None) -> bytes:
        """A portable artifact for consumers of StableHLO ``version`` (None: the oldest that this release can write)."""
        return portable_artifact(self._bytecode, version)


def exported_to_mlir(exported: torch.export.ExportedProgram) -> ExportedMlir:
    """The module of an exported program, traced on any device. Raises what a lowering raises, with the user's line.

    Raises NotImplementedError for symbolic sizes and for ops that need values on the host.
    """
    from torch.export.graph_signature import InputKind

    functional = exported.run_decompositions({})
    kinds = {
        InputKind.PARAMETER: "parameter",
        InputKind.BUFFER: "buffer",
        InputKind.CONSTANT_TENSOR: "constant",
        InputKind.USER_INPUT: "input",
    }
    names = {}
    for spec in functional.graph_signature.input_specs:
        kind = kinds.get(spec.kind)
        if kind is None:
            raise NotImplementedError(f"an exported program's input of kind {spec.kind} has no StableHLO type")
        names[spec.arg.name] = (kind, spec.target or spec.arg.name)
    return _module(functional.graph_module, names)


def fx_to_mlir(module: fx.GraphModule) -> ExportedMlir:
    """The module of a functional FX graph of ATen ops whose nodes carry (fake) values, as AOTAutograd gives them."""
    names = {node.name: ("input", node.name) for node in module.graph.find_nodes(op="placeholder")}
    return _module(module, names)


def _module(module: fx.GraphModule, names: dict[str, tuple[str, str]]) -> ExportedMlir:
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(module.graph, copied)
    graph.output(returned)
    made = fx.GraphModule(module, graph)
    for old, new in copied.items():
        new.meta = dict(old.meta)
        value = new.meta.get("val")
        if new.op == "placeholder" and isinstance(value, torch.Tensor):
            new.meta["val"] = value.new_empty(value.shape)  # an argument of the module is row-major
        if new.op == "get_attr":
            _move_attribute(made, new)
    _to_device(graph)
    piece, results, constants = _whole(graph)
    try:
        replayed = replay(piece, made, "main")
    except NeedsContents as error:
        origin = node_origin(error.node)
        line = f", issued at {describe(*origin[1:])}" if origin is not None else ""
        raise NotImplementedError(
            f"{error}{line}: a module cannot. Compute it outside of the program that is exported, or with torch.where or scan"
        ) from error
    return _emitted(piece, replayed, names, results, constants)


def _to_device(graph: fx.Graph) -> None:
    """Every op on the device, wherever the program was traced, and every value that leaves it row-major."""
    for node in graph.nodes:
        if node.kwargs.get("device") is not None:
            node.kwargs = dict(node.kwargs) | {"device": torch.device(DEVICE_TYPE)}
    (output,) = graph.find_nodes(op="output")
    returned = []
    with graph.inserting_before(output):
        for given in output_arguments(graph):
            if not isinstance(given, fx.Node) or not isinstance(given.meta.get("val"), torch.Tensor):
                returned.append(given)
                continue
            dense = graph.call_function(
                torch.ops.aten.clone.default, (given,), {"memory_format": torch.contiguous_format}
            )
            value = given.meta["val"]
            dense.meta = {"val": value.new_empty(value.shape), "stack_trace": given.meta.get("stack_trace")}
            dense.meta["name"] = given.name
            returned.append(dense)
    output.args = (tuple(returned),)


def _move_attribute(module: fx.GraphModule, node: fx.Node) -> None:
    found: Any = module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    if isinstance(found, torch.Tensor) and found.device.type != DEVICE_TYPE:
        name = f"_on_device_{node.name}"
        module.register_buffer(name, found.detach().to(DEVICE_TYPE))
        node.target = name


def _whole(graph: fx.Graph) -> tuple[Piece, list[str], list[tuple[int, Any]]]:
    """All of the graph as one piece; names of its results; constants among what it returns."""
    inputs = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    outputs, names, constants = [], [], []
    for position, given in enumerate(output_arguments(graph)):
        if isinstance(given, fx.Node) and "name" in given.meta:
            outputs.append(given)
            names.append(given.meta["name"])
        else:
            constants.append((position, None if isinstance(given, fx.Node) else given))
    return Piece(True, tuple(nodes), tuple(inputs), tuple(outputs)), names, constants


def _emitted(
    piece: Piece,
    replayed: Replayed,
    names: dict[str, tuple[str, str]],
    results: Sequence[str],
    constants: Sequence[tuple[int, Any]],
) -> ExportedMlir:
    builder = Builder("main")
    arguments: list[Argument] = []
    given: dict[int, Value] = {}
    for position, node in enumerate(piece.inputs):
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            kind, name = names.get(node.name, ("input", node.name))
            arguments.append(Argument(kind, name, tuple(value.shape), value.dtype))
            given[position] = builder.argument(tuple(value.shape), value.dtype)
    inputs = []
    for argument in _all_inputs(replayed):
        if isinstance(argument, Taken | Hosted):
            inputs.append(given[argument.position].reshape(argument.layout.dims))
        elif isinstance(argument, Drawn):
            arguments.append(Argument("random_state", "random_state", (3,), torch.uint64))
            inputs.append(builder.argument((3,), torch.uint64))
        elif isinstance(argument, np.ndarray):
            inputs.append(builder.constant(argument, torch_dtype(argument.dtype)))
        else:
            raise NotImplementedError(f"{argument} cannot be part of an exported module")
    values = replayed.region.emit(builder, inputs, replayed.origins) if replayed.region is not None else []
    made = []
    for output in replayed.outputs:
        assert isinstance(output, Fresh), "every result was cloned"
        assert isinstance(output.result, int)
        made.append(values[output.result].reshape(output.size))
    bytecode = builder.finish(made)
    return ExportedMlir(tuple(arguments), tuple(results), tuple(constants), builder, bytecode)


def _all_inputs(replayed: Replayed) -> list[Any]:
    """The region's inputs in order, those that became constants as arrays."""
    if replayed.region is None:
        return []
    key = replayed.region.key
    constants = {c.number: np.frombuffer(c.data, numpy_dtype(c.dtype)).reshape(c.shape) for c in key.constants}
    rest = iter(replayed.arguments)
    found: list[Any] = []
    for number in range(key.inputs):
        argument: Any = constants[number] if number in constants else next(rest)
        found.append(_held(argument) if isinstance(argument, Held) else argument)
    return found


def _held(argument: Held) -> np.ndarray[Any, Any]:
    from emutpu.backend.runtime import runtime

    return np.asarray(runtime().client.to_host(argument.buffer))
