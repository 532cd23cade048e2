"""Cuts a graph of AOTAutograd into pieces: what the device does in one region, and what the host does between.

Host pieces hold what works on CPU tensors, copies to the host, collectives (the device compiles each alone), and ops
whose kernels must read values. A graph without any of them is one piece.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from emutpu.backend.storage import DEVICE

__all__ = ["Piece", "cut", "is_collective", "is_random_state", "on_device", "output_arguments", "tensors_of"]

_COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})
_PASSIVE = frozenset({"placeholder", "get_attr", "output"})


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive work in one place. ``outputs`` are the nodes whose values later pieces, or the caller, need."""

    device: bool
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def tensors_of(node: fx.Node) -> list[torch.Tensor]:
    """The (fake) tensors among a node's values."""
    return [leaf for leaf in pytree.tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]


def on_device(node: fx.Node) -> bool:
    """Whether the node gives a tensor of the device."""
    return any(tensor.device.type == DEVICE.type for tensor in tensors_of(node))


def output_arguments(graph: fx.Graph) -> list[Any]:
    """What the graph returns: nodes and constants."""
    (output,) = graph.find_nodes(op="output")
    returned = output.args[0]
    return list(returned) if isinstance(returned, tuple | list) else [returned]


def cut(graph: fx.Graph, eager: frozenset[fx.Node] = frozenset()) -> list[Piece]:
    """The pieces of ``graph`` in the order in which they run. ``eager`` are nodes that cannot be part of a region."""
    places = _places(graph, eager)
    stages = _stages(graph, places)
    by_stage: dict[int, list[fx.Node]] = {}
    for node, stage in stages.items():
        by_stage.setdefault(stage, []).append(node)
    returned = {node for node in pytree.tree_leaves(output_arguments(graph)) if isinstance(node, fx.Node)}
    pieces = []
    for stage in sorted(by_stage):
        nodes = by_stage[stage]
        pieces.append(_piece(nodes, stages, stage, returned))
    return pieces


def _piece(nodes: Sequence[fx.Node], stages: dict[fx.Node, int], stage: int, returned: set[fx.Node]) -> Piece:
    own = set(nodes)
    inputs = dict.fromkeys(given for node in nodes for given in node.all_input_nodes if given not in own)
    outputs = [
        node for node in nodes if node in returned or any(stages.get(user, stage) != stage for user in node.users)
    ]
    return Piece(stage % 2 == 1, tuple(nodes), tuple(inputs), tuple(outputs))


def _places(graph: fx.Graph, eager: frozenset[fx.Node]) -> dict[fx.Node, bool]:
    """For each node that does something, whether the device does it."""
    places: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if node.op in _PASSIVE:
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in places:
            places[node] = places[source]  # so that only single values go from piece to piece
        elif node in eager or _collective(node):
            places[node] = False
        elif tensors_of(node):
            places[node] = on_device(node)
        else:
            # Without a value of its own (an effect, or a pair with a random state): where its operands are.
            places[node] = any(on_device(given) for given in node.all_input_nodes) or _device_argument(node)
    return places


def _device_argument(node: fx.Node) -> bool:
    device = node.kwargs.get("device")
    return isinstance(device, torch.device) and device.type == DEVICE.type


def is_random_state(node: fx.Node) -> bool:
    """Whether an input is a saved random state. Its size is the CPU's, and means nothing here."""
    restoring = torch._prims.rng_prims.run_with_rng_state
    return bool(node.users) and all(user.target is restoring and user.args[0] is node for user in node.users)


def is_collective(node: fx.Node) -> bool:
    """Whether the node is a functional collective, or waits for one."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in _COLLECTIVES


def _collective(node: fx.Node) -> bool:
    """Whether the node is a collective that the graph is cut at: any but one of a single rank that is declared safe
    (``custom["spmd_safe"]``, by ``torch.fx.traceback.annotate``), which is part of the region.
    """
    if not is_collective(node):
        return False
    source = node.args[0] if str(node.target).endswith("wait_tensor.default") else None
    if isinstance(source, fx.Node) and is_collective(source):
        return _collective(source)
    safe = bool((node.meta.get("custom") or {}).get("spmd_safe"))
    return not (safe and _ranks(node) == 1)


def _ranks(node: fx.Node) -> int:
    from torch.distributed import distributed_c10d

    names = [value for value in node.args if isinstance(value, str)]
    return distributed_c10d._get_group_size_by_name(distributed_c10d.GroupName(names[-1])) if names else 0


def _mutates(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _random(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "rng_state" in target._name
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _stages(graph: fx.Graph, places: dict[fx.Node, bool]) -> dict[fx.Node, int]:
    """The earliest stage of each node: even ones are the host's, odd ones the device's.

    What writes comes after everything before it, and random ops stay in their order.
    """
    stages: dict[fx.Node, int] = {}
    drawn = latest = 0
    for node, device in places.items():
        stage = int(device)
        if _mutates(node):
            stage = max(stage, latest)
        if _random(node):
            stage = max(stage, drawn)
        for given in node.all_input_nodes:
            stage = max(stage, stages.get(given, 0))
        stage += stage % 2 != int(device)
        stages[node] = stage
        latest = max(latest, stage)
        if _random(node):
            drawn = stage
    return stages
