"""A compiled graph: its pieces in order, as a function with PyTorch's boxed calling convention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from emutpu.backend.compile.graph import Piece, cut, output_arguments
from emutpu.backend.compile.locations import node_origin
from emutpu.backend.compile.program import DeviceProgram
from emutpu.backend.compile.replay import NeedsContents
from emutpu.backend.deferred.values import NO_CONTENTS
from emutpu.backend.errors import describe
from emutpu.backend.runtime import runtime

__all__ = ["CompiledGraph", "compile_graph"]

Step = DeviceProgram | Piece


class CompiledGraph:
    """Call it with a list of inputs, which it empties; gives the list of outputs.

    ``device_pieces`` are its regions in order, ``host_pieces`` counts what runs between them on the host.
    """

    def __init__(self, module: fx.GraphModule, steps: Sequence[Step], name: str) -> None:
        self._boxed_call = True  # on the object: wrappers copy what they find there
        self.name = name
        self.module = module
        self.steps = tuple(steps)
        self.device_pieces = tuple(step for step in steps if isinstance(step, DeviceProgram))
        self.host_pieces = len(steps) - len(self.device_pieces)
        self._placeholders = list(module.graph.find_nodes(op="placeholder"))
        self.returned = output_arguments(module.graph)
        self._run = self._one() if len(steps) == 1 and self.device_pieces else self._in_order

    def __call__(self, inputs: list[Any]) -> list[Any]:
        return self._run(inputs)

    def _one(self) -> Callable[[list[Any]], list[Any]]:
        """The usual case: one region, which all inputs go into and all outputs come from."""
        program = self.device_pieces[0]
        piece = program.piece
        place = {node: n for n, node in enumerate(self._placeholders)}
        if any(node not in place for node in piece.inputs):
            return self._in_order
        sources = [place[node] for node in piece.inputs]
        made = {node: n for n, node in enumerate(piece.outputs)}
        if any(isinstance(node, fx.Node) and node not in made for node in self.returned):
            return self._in_order
        order = [made[node] if isinstance(node, fx.Node) else None for node in self.returned]
        fixed = [None if isinstance(node, fx.Node) else node for node in self.returned]
        direct = order == list(range(len(made)))

        def run(inputs: list[Any]) -> list[Any]:
            values = [inputs[n] for n in sources]
            inputs.clear()
            outputs = program(values)
            if direct:
                return outputs
            return [given if n is None else outputs[n] for n, given in zip(order, fixed, strict=True)]

        return run

    def _in_order(self, inputs: list[Any]) -> list[Any]:
        values: dict[fx.Node, Any] = dict(zip(self._placeholders, inputs, strict=True))
        inputs.clear()
        for step in self.steps:
            piece = step.piece if isinstance(step, DeviceProgram) else step
            for node in piece.inputs:
                if node.op == "get_attr" and node not in values:
                    values[node] = _attribute(self.module, str(node.target))
            if isinstance(step, DeviceProgram):
                values.update(zip(piece.outputs, step([values[node] for node in piece.inputs]), strict=True))
            else:
                _interpret(piece, values)
        return [self._value(node, values) for node in self.returned]

    def _value(self, node: Any, values: dict[fx.Node, Any]) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node.op == "get_attr":
            return _attribute(self.module, str(node.target))
        return values[node]


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _interpret(piece: Piece, values: dict[fx.Node, Any]) -> None:
    """Run a host piece op by op, on real tensors."""
    with torch.no_grad(), torch._C._DisableAutocast():
        for node in piece.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: values[given])
            target: Any = node.target
            if node.op == "call_method":
                values[node] = getattr(args[0], target)(*args[1:], **kwargs)
            else:
                values[node] = target(*args, **kwargs)


def compile_graph(
    module: fx.GraphModule, name: str, start: Callable[[DeviceProgram], object] = DeviceProgram.prepare
) -> CompiledGraph:
    """Cut and compile a graph of ATen ops. ``name`` names its modules (``<name>``, or ``<name>_split<i>``); ``start`` is
    called with each piece of the device to compile it.

    Raises what lowerings and the compiler raise, with the user's line of the op.
    """
    eager: frozenset[fx.Node] = frozenset()
    while True:
        pieces = cut(module.graph, eager)
        count = sum(piece.device for piece in pieces)
        steps: list[Step] = []
        try:
            for piece in pieces:
                if not piece.device:
                    steps.append(piece)
                    continue
                number = sum(isinstance(step, DeviceProgram) for step in steps)
                program = DeviceProgram(piece, module, name if count == 1 else _split_name(name, number))
                start(program)
                steps.append(program)
        except NeedsContents as error:
            _refuse_branches(error)
            eager |= {error.node}
            continue
        return CompiledGraph(module, steps, name)


_BRANCHES = frozenset({"cond", "while_loop", "while_loop_stack_output"})


def _refuse_branches(error: NeedsContents) -> None:
    """Raise NotImplementedError for a branch that the device would decide. TorchTPU 0.2.0 lowers ``scan`` and
    ``associative_scan``; of other ops with programs inside it runs PyTorch's own code, on placeholder tensors without values.
    """
    innermost = error
    while isinstance(innermost.__cause__, NeedsContents):
        innermost = innermost.__cause__
    node, configuration = innermost.node, runtime().configuration
    target, beyond = node.target, configuration is not None and configuration.beyond
    if beyond or not isinstance(target, torch._ops.HigherOrderOperator) or target._name not in _BRANCHES:
        return
    origin = node_origin(node)
    line = f"\n  issued at {describe(*origin[1:])}" if origin is not None else ""
    raise NotImplementedError(
        f"{target._name}: {NO_CONTENTS}{line}\n  A compiled graph cannot branch on a value of the device: use torch.where "
        "or scan, or break the graph there (torch._dynamo.graph_break()). EMUTPU_BEYOND=1 lets the host decide."
    ) from error


def _split_name(name: str, number: int) -> str:
    base, _, direction = name.rpartition("_")
    return f"{base}_split{number}_{direction}"
