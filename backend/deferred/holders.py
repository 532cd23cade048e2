"""Why a pending value is live: who holds the storage that holds it. For reports: it walks the whole heap.

Nothing here keeps an object alive or changes what the garbage collector would do. A tensor is seen by its Python object,
which every frame, attribute and container refers to; what autograd keeps in C++ is seen through the graph's nodes.
"""

from __future__ import annotations

import dataclasses
import gc
import heapq
import itertools
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from emutpu.backend.deferred.referrers import CLOSURE, KEYS, Holder, frame_names, heap, kind_of, root, saved_by, steps
from emutpu.backend.deferred.values import Pending
from emutpu.backend.location import is_library

__all__ = ["Holder", "explain"]

_DEPTH = 12
_FRONTIER = 64  # objects that are looked for at once: the walk costs that many comparisons for every reference there is
# The containers in which a torch.nn.Module keeps what `module.name` finds.
_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def explain(pendings: Mapping[int, Pending], issuing: frozenset[int] = frozenset()) -> dict[int, list[Holder]]:
    """Holders of each of ``pendings`` (by number). ``issuing`` are the results of the op that is being recorded."""
    search = _Search(pendings)
    search.find_saved()
    search.find_gradients()
    search.climb()
    found = {slot: search.holders(slot) for slot in pendings}
    for slot, holders in found.items():
        if slot in issuing and not holders:
            holders.append(Holder("issuing", "result of the op that is being issued"))
        elif not holders:
            holders.append(_anonymous(pendings[slot], visible=slot in search.mine))
    return found


def _anonymous(pending: Pending, *, visible: bool) -> Holder:
    from emutpu.backend.rng import TpuGenerator

    for referrer in gc.get_referrers(pending):
        if isinstance(referrer, tuple) and any(isinstance(r, TpuGenerator) for r in gc.get_referrers(referrer)):
            return Holder("generator", "state of a random generator")
        if isinstance(referrer, TpuGenerator):
            return Holder("generator", "state of a random generator")
    if visible:
        return Holder("native", "a temporary of the expression that is being evaluated: no variable holds it")
    return Holder("native", "no Python object: native code holds it")


def _pending_of(tensor: torch.Tensor) -> Pending | None:
    try:
        cell = getattr(tensor.untyped_storage(), "cell", None)
    except (NotImplementedError, RuntimeError):  # fake, functional and sparse tensors have no storage
        return None
    value = cell.value if cell is not None else None
    return value if value.__class__ is Pending else None


class _Search:
    """One walk.

    ``mine`` are the tensors whose storage holds a pending value, ``gradients`` the owners of those that are a gradient;
    ``parents`` says what refers to an object, and how; ``names`` what a variable refers to.
    """

    def __init__(self, pendings: Mapping[int, Pending]) -> None:
        self.slots = {id(pending): slot for slot, pending in pendings.items()}
        self.tensors, self.modules, self.optimizers = heap()
        self.mine: dict[int, list[torch.Tensor]] = {}
        self.saved: dict[int, list[Holder]] = {}
        self.gradients: dict[int, list[torch.Tensor]] = {}
        self.parents: dict[int, list[tuple[Any, str]]] = {}
        self.names: dict[int, Holder] = {}
        self.ignored: set[int] = set()
        for tensor in self.tensors:
            slot = self._slot(tensor)
            if slot is not None:
                self.mine.setdefault(slot, []).append(tensor)

    def _slot(self, tensor: torch.Tensor) -> int | None:
        pending = _pending_of(tensor)
        return None if pending is None else self.slots.get(id(pending))

    # Autograd --------------------------------------------------------------------------------------------

    def find_saved(self) -> None:
        """What the nodes of the autograd graphs keep, without running anybody's unpack hook."""
        seen: set[Any] = set()
        pending = [tensor.grad_fn for tensor in self.tensors if tensor.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            pending += [following for following, _ in node.next_functions if following is not None]
            for attribute, tensor in saved_by(node):
                slot = self._slot(tensor)
                if slot is not None:
                    text = f"saved by {node.name()} as {attribute} for backward"
                    holder = Holder("saved", text)
                    if holder not in self.saved.setdefault(slot, []):
                        self.saved[slot].append(holder)

    def find_gradients(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # non-leaf tensors are asked only when they retain their gradient
            for tensor in self.tensors:
                gradient = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
                slot = None if gradient is None else self._slot(gradient)
                if slot is not None:
                    self.gradients.setdefault(slot, []).append(tensor)

    # Python ----------------------------------------------------------------------------------------------

    def climb(self) -> None:
        """From the targets to what refers to them, until there is a name for each.

        What refers to a target itself is always looked for; what refers to that, only for want of a name. Models and
        optimizers say what is theirs, at whatever depth.
        """
        self.names = frame_names()
        groups = [*self.mine.values(), *self.gradients.values()]
        targets = {id(tensor): tensor for group in groups for tensor in group}
        roots = self._model_edges(targets)
        owned = set(self.parents)
        self.ignored |= {id(own) for own in (self, self.__dict__, *self.__dict__.values(), groups, targets, roots)}
        self.ignored |= {id(group) for group in groups}
        frontier = [*(tensor for key, tensor in targets.items() if key not in owned), *roots][:_FRONTIER]
        serves = {id(thing): {id(thing)} for thing in frontier}
        visited = set(serves)
        for _ in range(_DEPTH):
            if not frontier:
                return
            frontier = self._level(frontier, visited, serves)
            unnamed = {key for key in visited if key in serves and not self._named(key)}
            frontier = [thing for thing in frontier if serves[id(thing)] & unnamed][:_FRONTIER]

    def _model_edges(self, targets: dict[int, torch.Tensor]) -> list[Any]:
        """Edges from parameters, buffers, submodules and states of optimizers to their owners; gives what owns the rest."""
        children = {id(child) for module in self.modules for child in (module.__dict__.get("_modules") or {}).values()}
        for module in self.modules:
            for table in _MODULE_TABLES:
                for name, value in (module.__dict__.get(table) or {}).items():
                    self.parents.setdefault(id(value), []).append((module, f".{name}"))
        self.parents.pop(id(None), None)
        owners = self._optimizer_edges(targets)
        wanted = [thing for key, thing in targets.items() if key in self.parents]
        while wanted:
            for parent, _ in self.parents.get(id(wanted.pop()), []):
                if id(parent) in children:
                    wanted.append(parent)
                else:
                    owners[id(parent)] = parent
        return list(owners.values())

    def _optimizer_edges(self, targets: dict[int, torch.Tensor]) -> dict[int, Any]:
        owners: dict[int, Any] = {}
        for optimizer in self.optimizers:
            for parameter, state in list(getattr(optimizer, "state", {}).items()):
                for name, value in state.items() if isinstance(state, dict) else ():
                    if id(value) in targets:
                        step = f".state[{self._within(parameter)}][{name!r}]"
                        self.parents.setdefault(id(value), []).append((optimizer, step))
                        owners[id(optimizer)] = optimizer
        return owners

    def _within(self, parameter: Any) -> str:
        """A parameter's name inside its outermost module."""
        steps: list[str] = []
        while True:
            edges = self.parents.get(id(parameter), [])
            if not edges or len(steps) > _DEPTH:
                return "".join(steps).lstrip(".") or "a parameter"
            parameter, step = edges[0]
            steps.insert(0, step)

    def _named(self, target: int) -> bool:
        seen = {target}
        pending = [target]
        while pending:
            current = pending.pop()
            if current in self.names:
                return True
            for parent, _ in self.parents.get(current, []):
                if root(parent) is not None:
                    return True
                if id(parent) not in seen:
                    seen.add(id(parent))
                    pending.append(id(parent))
        return False

    def _level(self, frontier: list[Any], visited: set[int], serves: dict[int, set[int]]) -> list[Any]:
        wanted = {id(thing) for thing in frontier}
        following: list[Any] = []
        ignored = self.ignored | {id(following), id(wanted), id(frontier)}
        for referrer in gc.get_referrers(*frontier):
            if id(referrer) in ignored or isinstance(referrer, types.FrameType):  # frames: see frame_names
                continue
            served = serves.setdefault(id(referrer), set())
            for child, step in steps(referrer, wanted):
                served |= serves[child]
                edges = self.parents.setdefault(child, [])
                if len(edges) < _FRONTIER:
                    edges.append((referrer, step))
            if id(referrer) not in visited:
                visited.add(id(referrer))
                if root(referrer) is None and id(referrer) not in self.names:
                    following.append(referrer)
        return following

    # Answers ---------------------------------------------------------------------------------------------

    def holders(self, slot: int) -> list[Holder]:
        """Who holds the value, names first."""
        found: dict[Holder, None] = {}
        orphans = []
        for tensor in self.mine.get(slot, []):
            name = self._name(tensor)
            if name is not None:
                found[name] = None
            else:
                orphans.append(tensor)
        for owner in self.gradients.get(slot, []):
            name = self._name(owner)
            text = f"gradient of {name.text if name else 'a tensor without a name'}"
            found[Holder("gradient", text)] = None
        found |= dict.fromkeys(self.saved.get(slot, []))
        for tensor in orphans:
            cycle = self._cycle(tensor)
            if cycle is not None:
                found[cycle] = None
        return list(found)

    def _name(self, thing: Any) -> Holder | None:
        """The best way from a name to ``thing``: few steps, and none through the keys of a dict or PyTorch's own variables."""
        order = itertools.count()
        queue: list[tuple[int, int, Any, tuple[str, ...]]] = [(0, next(order), thing, ())]
        best: tuple[int, Holder] | None = None
        seen: set[int] = set()
        while queue:
            cost, _, current, path = heapq.heappop(queue)
            if best is not None and cost >= best[0]:
                break
            if id(current) in seen:
                continue
            seen.add(id(current))
            name = self.names.get(id(current)) or root(current)
            if name is not None:
                total = cost + (0 if name.line is None or name.file is None or not is_library(name.file) else 4)
                whole = (".__dict__", *path) if isinstance(current, dict) and id(current) not in self.names else path
                if best is None or total < best[0]:
                    best = total, _extended(name, whole)
            for parent, step in self.parents.get(id(current), []):
                queue_cost = cost + (5 if step == KEYS else 1)
                heapq.heappush(queue, (queue_cost, next(order), parent, (step, *path)))
        return None if best is None else best[1]

    def _cycle(self, thing: Any) -> Holder | None:
        """The reference cycle above ``thing``, which has no name."""
        trail: list[Any] = []
        on_trail: set[int] = set()
        done: set[int] = set()

        def visit(current: Any) -> list[Any] | None:
            if len(trail) > _DEPTH:
                return None
            trail.append(current)
            on_trail.add(id(current))
            for parent, _ in self.parents.get(id(current), []):
                if id(parent) in on_trail:
                    return trail[next(i for i, t in enumerate(trail) if t is parent) :]
                if id(parent) not in done:
                    found = visit(parent)
                    if found is not None:
                        return found
            done.add(id(current))
            on_trail.discard(id(current))
            trail.pop()
            return None

        cycle = visit(thing)
        if cycle is None:
            return None
        shown = " -> ".join(kind_of(member) for member in reversed(cycle))
        text = f"only by a reference cycle ({shown} -> ...): freed when the garbage collector runs"
        return Holder("cycle", text)


def _extended(name: Holder, path: Sequence[str]) -> Holder:
    text, kind = name.text, name.kind
    quoted, _, rest = text.partition("`, ")
    if CLOSURE in path:
        function = _extended(name, path[: path.index(CLOSURE)])
        return dataclasses.replace(function, kind="closure", text=f"in the closure of {function.text}")
    steps = "".join(_merged(path))
    if not steps:
        return name
    kind = "attribute" if path[-1].startswith(".") or "".join(path).count("__dict__") else "element"
    return dataclasses.replace(name, kind=kind, text=f"{quoted}{steps}`, {rest}")


def _merged(path: Sequence[str]) -> list[str]:
    """Steps as a user writes them: ``.__dict__['x']`` is ``.x``, and a module's tables are not seen."""
    steps: list[str] = []
    attribute = False
    for step in path:
        if step == ".__dict__" or (step.startswith(".") and step[1:] in _MODULE_TABLES):
            attribute = True
        elif attribute and step.startswith("['") and step.endswith("']"):
            name = step[2:-2]
            attribute = name in _MODULE_TABLES
            steps += [] if attribute else [f".{name}"]
        else:
            attribute = False
            steps.append(step)
    return steps
