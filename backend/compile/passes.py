"""What is changed in a graph before it is compiled: TorchTPU's passes of the same names.

``fold_gqa`` and ``detect_causal_mask`` work on Dynamo's graph, ``mark_activation_checkpoints`` on a backward one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from emutpu.backend.compile.graph import on_device
from emutpu.backend.compile.structured import barrier

__all__ = ["before_autograd", "detect_causal_mask", "fold_gqa", "mark_activation_checkpoints"]

_LARGEST_MASK = 1 << 22  # elements that are worth computing on the host to know a mask
_LONGEST = 64  # nodes that may make a mask
_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def before_autograd(module: fx.GraphModule) -> None:
    """The passes over a graph of Dynamo's, in place. None over a graph with symbolic sizes: they compare sizes, and each
    comparison would be a guard.
    """
    if any(_symbolic(_value(node)) for node in module.graph.find_nodes(op="placeholder")):
        return
    folded = fold_gqa(module.graph)
    if detect_causal_mask(module.graph) or folded:
        module.recompile()


def _symbolic(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(isinstance(extent, torch.SymInt) for extent in value.shape)
    return isinstance(value, torch.SymInt)


def _attentions(graph: fx.Graph) -> Iterator[tuple[fx.Node, dict[str, Any]]]:
    """Each call of ``scaled_dot_product_attention`` with its arguments by name."""
    for node in graph.find_nodes(op="call_function", target=torch.nn.functional.scaled_dot_product_attention):
        yield node, dict(zip(_NAMES, node.args, strict=False)) | dict(node.kwargs)


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


# Grouped queries -----------------------------------------------------------------------------------------


def fold_gqa(graph: fx.Graph) -> int:
    """Attention over keys and values that were repeated for every head of a group takes them unrepeated
    (``enable_gqa``). Gives the number of calls that were changed.
    """
    changed = 0
    for node, given in _attentions(graph):
        if given.get("enable_gqa"):
            continue
        key, value = (_unrepeated(given[name]) for name in ("key", "value"))
        if key is None or value is None or _value(key).shape[-3] != _value(value).shape[-3]:
            continue
        node.args = ()
        node.kwargs = given | {"key": key, "value": value, "enable_gqa": True}
        changed += 1
    return changed


def _unrepeated(node: Any) -> fx.Node | None:
    """What a 4-D tensor repeats along its heads, each head ``n`` times in a row; None where it is no such thing."""
    made = _value(node)
    if not isinstance(made, torch.Tensor) or made.dim() != 4:
        return None
    if _called(node, "repeat_interleave"):
        source, count, dim = (*node.args, None, None)[:3]
        dim = node.kwargs.get("dim", dim)
        whole = isinstance(count, int) and dim in (1, -3) and _value(source) is not None and _value(source).dim() == 4
        return source if whole and isinstance(source, fx.Node) else None
    if not _called(node, "reshape", "view", "flatten"):
        return None
    wide = node.args[0]
    if not (isinstance(wide, fx.Node) and _called(wide, "expand")):
        return None
    narrow = wide.args[0]
    expanded, single = _value(wide), _value(narrow)
    if expanded is None or single is None or not isinstance(narrow, fx.Node) or not narrow.args:
        return None
    source = narrow.args[0]
    start = _value(source)
    if not isinstance(start, torch.Tensor) or start.dim() != 4 or not _only_adds_a_dim(narrow):
        return None
    batch, heads, length, width = start.shape
    inserted = tuple(single.shape) == (batch, heads, 1, length, width)
    grown = expanded.dim() == 5 and tuple(expanded.shape[:2]) + tuple(expanded.shape[3:]) == (
        batch,
        heads,
        length,
        width,
    )
    merged = tuple(made.shape) == (batch, heads * expanded.shape[2], length, width)
    return source if inserted and grown and merged and isinstance(source, fx.Node) else None


def _called(node: fx.Node, *names: str) -> bool:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return node.op in ("call_method", "call_function") and name in names


def _only_adds_a_dim(node: fx.Node) -> bool:
    """``x[:, :, None]`` or ``x.unsqueeze(2)``: same elements in the same order."""
    if _called(node, "unsqueeze"):
        return True
    if not _called(node, "getitem") or not isinstance(node.args[1], tuple):
        return False
    return all(index is None or index == slice(None) for index in node.args[1])


# Causal masks --------------------------------------------------------------------------------------------


def detect_causal_mask(graph: fx.Graph) -> int:
    """Attention with a mask that is known and says no more than "not what comes later" becomes ``is_causal``. Gives the
    number of calls that were changed.
    """
    changed = 0
    known: dict[fx.Node, bool] = {}
    for node, given in _attentions(graph):
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal"):
            continue
        if mask not in known:
            known[mask] = _is_causal(mask, _value(given["query"]), _value(given["key"]))
        if known[mask]:
            node.args = ()
            node.kwargs = {name: value for name, value in given.items() if name != "attn_mask"} | {"is_causal": True}
            changed += 1
    return changed


def _is_causal(mask: fx.Node, query: Any, key: Any) -> bool:
    value = _value(mask)
    if not isinstance(value, torch.Tensor) or value.numel() > _LARGEST_MASK or value.requires_grad:
        return False
    made = _computed(mask)
    if made is None or made.dim() < 2 or made.shape[-2:] != (query.shape[-2], key.shape[-2]):
        return False
    allowed = torch.ones(made.shape[-2:], dtype=torch.bool).tril()
    if made.dtype == torch.bool:
        return bool((made == allowed).all())
    wanted = torch.where(allowed, 0.0, -math.inf).to(made.dtype)
    return bool((made == wanted).all())


def _computed(mask: fx.Node) -> torch.Tensor | None:
    """The mask's values, computed on the host; None where it depends on anything that is not in the graph."""
    needed = _ancestors(mask)
    if needed is None:
        return None
    values: dict[fx.Node, Any] = {}

    def here(given: Any) -> Any:
        return torch.device("cpu") if isinstance(given, torch.device) or given in ("tpu", "tpu:0") else given

    # Not traced: this is the compiler's own computation.
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        for node in needed:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            args, kwargs = pytree.tree_map(here, (args, kwargs))
            if node.op == "call_method":
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]  # call_function
    made = values[mask]
    return made if isinstance(made, torch.Tensor) else None


def _ancestors(mask: fx.Node) -> list[fx.Node] | None:
    found: dict[fx.Node, None] = {}
    waiting = [mask]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        value = _value(node)
        sized = not isinstance(value, torch.Tensor) or value.numel() <= _LARGEST_MASK
        if node.op not in ("call_function", "call_method") or not sized or len(found) == _LONGEST or not _alone(node):
            return None
        found[node] = None
        waiting += node.all_input_nodes
    order = {node: number for number, node in enumerate(mask.graph.nodes)}
    return sorted(found, key=order.__getitem__)


def _alone(node: fx.Node) -> bool:
    """Whether the node computes the same alone as in its graph: it draws nothing, and is no part of a transformation."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if any(word in name for word in ("rand", "bernoulli", "normal", "uniform", "dropout", "multinomial", "empty")):
        return False
    return "functorch" not in str(getattr(node.target, "__module__", "")) and "batch_dim" not in name


# Checkpoints ---------------------------------------------------------------------------------------------


def mark_activation_checkpoints(graph: fx.Graph) -> int:
    """Put a barrier between what a backward graph recomputes and what it is recomputed from, so that the compiler does not
    take it for what was computed before. Gives the number of values that pass it.
    """
    from torch._functorch.partitioners import must_recompute

    recomputed = {node for node in graph.nodes if node.op == "call_function" and must_recompute(node)}
    leaves = dict.fromkeys(
        leaf
        for node in graph.nodes
        if node in recomputed
        for leaf in node.all_input_nodes
        if leaf not in recomputed and leaf.op == "placeholder" and on_device(leaf)
    )
    if not leaves:
        return 0
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_after(placeholders[-1]):
        passed = graph.call_function(barrier, tuple(leaves))
    passed.meta["val"] = tuple(leaf.meta["val"] for leaf in leaves)
    previous = passed
    for number, leaf in enumerate(leaves):
        with graph.inserting_after(previous):
            item = graph.call_function(operator.getitem, (passed, number))
        item.meta["val"] = leaf.meta["val"]
        previous = item
        for user in list(leaf.users):
            if user in recomputed:
                user.replace_input_with(leaf, item)
    return len(leaves)
