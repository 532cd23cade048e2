"""FLOPs that a mask of attention discards: what a chip computes and a model does not use.

Found in the graph itself. A selection by positions (a causal mask, a sliding window) masks the scores, as adding a very
negative number does; what reaches the scores element by element (their gradient, the probabilities) is masked with them.
Every product that makes or takes such values is attention. A mask over queries and keys that arrives as a tensor may be
causal or not: the FLOPs that it discards are then unknown, which is said.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from .graph import Graph, Node
from .masks import UnseenMaskError, hidden_share, varies_with_both
from .tables import ELEMENTWISE
from .work import flops

__all__ = ["UNSEEN", "masked_flops"]

UNSEEN = "attention is masked by a tensor made elsewhere: whether it is causal, and what it discards, is not known here"
_THROUGH = ELEMENTWISE | {"reshape", "transpose", "copy"}
_PRODUCTS = ("dot_general", "online_softmax")
_NEGLIGIBLE = -1e4  # a score below this takes no part
_MOST_STEPS = 24


def masked_flops(graph: Graph) -> float:
    """FLOPs of a simplified graph's products that masks of attention discard; 0 without one, NaN where a mask is not seen.

    Counted as :mod:`emutpu.simulator.mfu` does: of a sequence of S, half is seen; of L queries and S keys, the part below
    the diagonal from the first corner.
    """
    if not any(node.op == "select" or (node.op == "dot_general" and node.attrs[0].lhs_batch) for node in graph.nodes):
        return 0.0
    scores = _masked_scores(graph)
    found: dict[int, tuple[Node, float]] = {}
    for node in graph.nodes:
        mask = _mask(node)
        if mask is None:
            if id(node) in scores and _unseen(node):
                return math.nan
            continue
        try:
            hidden = hidden_share(mask.predicate, hides=mask.hides)
        except UnseenMaskError:
            if id(node) in scores and varies_with_both(mask.predicate):
                return math.nan
            continue
        for product in _products(node, mask.masked):
            found.setdefault(id(product), (product, hidden))
    return sum(flops(product) * hidden for product, hidden in found.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Mask:
    """``masked`` takes no part where ``predicate`` is ``hides``; None where scalar arguments decide which way it is."""

    predicate: Node
    masked: Node
    hides: bool | None


def _mask(node: Node) -> _Mask | None:
    """What an operation masks: a selection between a value and a scalar, or the sum with a selection of scalars."""
    if node.op == "select":
        predicate, *branches = node.inputs
        for position, branch in enumerate(branches):
            if _is_scalar(branch) and (branch.value is None or branch.value == 0 or branch.value < _NEGLIGIBLE):
                return _Mask(predicate, branches[1 - position], hides=position == 0)
    if node.op == "add":
        for source, other in (node.inputs, node.inputs[::-1]):
            added = _spread_from(source)
            if added.op != "select" or not all(map(_is_scalar, added.inputs[1:])):
                continue
            chosen, otherwise = (branch.value for branch in added.inputs[1:])
            known = [value for value in (chosen, otherwise) if value is not None]
            if known and min(known) < _NEGLIGIBLE:
                return _Mask(added.inputs[0], other, hides=chosen is not None and chosen == min(known))
            if len(known) < 2:
                return _Mask(added.inputs[0], other, hides=None)
    return None


def _is_scalar(node: Node) -> bool:
    return node.value is not None or _spread_from(node).spec.size == 1


def _spread_from(node: Node) -> Node:
    while node.op in ("broadcast_in_dim", "reshape", "convert") and node.value is None:
        node = node.inputs[0]
    return node


def _masked_scores(graph: Graph) -> set[int]:
    """Ids of the operations between a batched product and a softmax over its rows."""
    found: set[int] = set()
    for node in graph.nodes:
        if node.op != "exponential" or node.inputs[0].op != "subtract":
            continue
        path: list[int] = []
        value = node.inputs[0].inputs[0]
        for _ in range(_MOST_STEPS):
            if value.op == "dot_general":
                found.update(path if value.attrs[0].lhs_batch else ())
                break
            wide = [s for s in value.inputs if s.spec.size == value.spec.size and _leads_to_product(s)]
            if value.op not in _THROUGH or not wide:
                break
            path.append(id(value))
            value = wide[0]
    return found


def _leads_to_product(node: Node) -> bool:
    for _ in range(_MOST_STEPS):
        if node.op == "dot_general":
            return True
        wide = [source for source in node.inputs if source.spec.size == node.spec.size and source.value is None]
        if node.op not in _THROUGH or not wide:
            return False
        node = max(wide, key=lambda source: source.op != "parameter")
    return False


def _unseen(node: Node) -> bool:
    """Whether scores are added to a tensor over queries and keys that is an argument of the module."""
    if node.op not in ("add", "multiply"):
        return False
    for source in node.inputs:
        origin = _spread_from(source)
        if origin.op == "parameter" and origin.spec.size > 1 and varies_with_both(source):
            return True
    return False


def _product(node: Node) -> Node:
    """The product itself, also where it is part of a kernel of the compiler's own."""
    alone: Node = node.attrs[0] if node.op == "online_softmax" else node
    return alone


def _products(mask: Node, masked: Node) -> Iterable[Node]:
    """The products that make or take what is connected, element by element, with what ``mask`` gives."""
    pending, seen = [mask, masked], {id(source) for source in mask.inputs if source is not masked}
    while pending:
        node = pending.pop()
        if id(node) in seen or node.spec.size != mask.spec.size:
            continue
        seen.add(id(node))
        if node.op in _PRODUCTS:
            yield _product(node)
            continue
        if node.op not in _THROUGH:
            continue
        pending += node.inputs
        for user in node.users:
            if user.op in _PRODUCTS:
                yield _product(user)
            else:
                pending.append(user)
