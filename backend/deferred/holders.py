"""Why a pending value is live: who holds the storage that holds it. For reports: it walks the whole heap.

Nothing here keeps an object alive or changes what the garbage collector would do. A tensor is seen by its Python object,
which every frame, attribute and container refers to; what autograd keeps in C++ is seen through the graph's nodes.
"""

from __future__ import annotations

import dataclasses
import gc
import heapq
import inspect
import itertools
import os
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from emutpu.backend.deferred.values import Pending
from emutpu.backend.location import is_library
from emutpu.backend.storage import DEVICE

__all__ = ["Holder", "explain"]

_DEPTH = 12
_FRONTIER = 64  # objects that are looked for at once: the walk costs that many comparisons for every reference there is
# The containers in which a torch.nn.Module keeps what `module.name` finds.
_MODULE_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
# Values that hold nothing, and modules and functions, which say where something is only if nothing nearer does.
_PLAIN = (types.ModuleType, type, types.FunctionType, str, int, float, bool, type(None))
# Our own frames, and the kernels that we generate.
_OWN = (str(Path(__file__).resolve().parents[1]) + os.sep, "<emutpu ")


@dataclasses.dataclass(frozen=True, slots=True)
class Holder:
    """Somebody who keeps a value alive.

    ``kind`` is variable (a local or global name), attribute, element (of a container), gradient, saved (for backward),
    closure, cycle (nothing but a reference cycle), generator (random state), issuing (the op that is being recorded), or
    native (C++, or a temporary of an expression). ``text`` says it in words, ``file`` and ``line`` where, if anywhere.
    """

    kind: str
    text: str
    file: str | None = None
    line: int | None = None


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
            holders.append(_anonymous(pendings[slot]))
    return found


def _anonymous(pending: Pending) -> Holder:
    from emutpu.backend.rng import TpuGenerator

    for referrer in gc.get_referrers(pending):
        if isinstance(referrer, tuple) and any(isinstance(r, TpuGenerator) for r in gc.get_referrers(referrer)):
            return Holder("generator", "state of a random generator")
        if isinstance(referrer, TpuGenerator):
            return Holder("generator", "state of a random generator")
    return Holder("native", "no Python object: native code, or a temporary of the expression that is being evaluated")


def _heap() -> tuple[list[torch.Tensor], list[torch.nn.Module], list[torch.optim.Optimizer]]:
    """Tensors of the device, modules and optimizers that exist, by one pass over the heap."""
    found: dict[type, list[Any]] = {torch.Tensor: [], torch.nn.Module: [], torch.optim.Optimizer: []}
    kinds: dict[type, list[Any] | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = next((found[base] for base in found if issubclass(kind, base)), None)
        into = kinds[kind]
        if into is not None:
            into.append(thing)
    tensors, modules, optimizers = found.values()
    return [tensor for tensor in tensors if tensor.device.type == DEVICE.type], modules, optimizers


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
        self.tensors, self.modules, self.optimizers = _heap()
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
            for attribute, tensor in _saved_by(node):
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
        self.names = _frame_names()
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
        children = set()
        for module in self.modules:
            tables = module.__dict__
            for kind in _MODULE_TABLES:
                for name, value in (tables.get(kind) or {}).items():
                    if value is not None:
                        self.parents.setdefault(id(value), []).append((module, f".{name}"))
                    if kind == "_modules":
                        children.add(id(value))
        owners: dict[int, Any] = {}
        for optimizer in self.optimizers:
            for parameter, state in list(getattr(optimizer, "state", {}).items()):
                for name, value in state.items() if isinstance(state, dict) else ():
                    if id(value) in targets:
                        step = f".state[{self._within(parameter)}][{name!r}]"
                        self.parents.setdefault(id(value), []).append((optimizer, step))
                        owners[id(optimizer)] = optimizer
        wanted = [thing for key, thing in targets.items() if key in self.parents]
        while wanted:
            thing = wanted.pop()
            for parent, _ in self.parents.get(id(thing), []):
                if id(parent) not in owners and id(parent) not in children:
                    owners[id(parent)] = parent
                elif id(parent) in children:
                    wanted.append(parent)
        return list(owners.values())

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
                if _root(parent) is not None:
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
            if id(referrer) in ignored or isinstance(referrer, types.FrameType):  # frames: see _frame_names
                continue
            served = serves.setdefault(id(referrer), set())
            for child, step in _steps(referrer, wanted):
                served |= serves[child]
                edges = self.parents.setdefault(child, [])
                if len(edges) < _FRONTIER:
                    edges.append((referrer, step))
            if id(referrer) not in visited:
                visited.add(id(referrer))
                if _root(referrer) is None and id(referrer) not in self.names:
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
            name = self.names.get(id(current)) or _root(current)
            if name is not None:
                total = cost + (0 if name.line is None or name.file is None or not is_library(name.file) else 4)
                whole = (".__dict__", *path) if isinstance(current, dict) and id(current) not in self.names else path
                if best is None or total < best[0]:
                    best = total, _extended(name, whole)
            for parent, step in self.parents.get(id(current), []):
                queue_cost = cost + (5 if step == ".keys()" else 1)
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
        shown = " -> ".join(_kind(member) for member in reversed(cycle))
        text = f"only by a reference cycle ({shown} -> ...): freed when the garbage collector runs"
        return Holder("cycle", text)


def _kind(thing: Any) -> str:
    return type(thing).__qualname__


def _extended(name: Holder, path: Sequence[str]) -> Holder:
    text, kind = name.text, name.kind
    quoted, _, rest = text.partition("`, ")
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


def _root(thing: Any) -> Holder | None:
    """What needs no further owner: a module, a class, the names of a module."""
    if isinstance(thing, types.ModuleType):
        return Holder("variable", f"`{thing.__name__}`, a module")
    if type(thing) is dict and "__name__" in thing and "__builtins__" in thing:
        module = sys.modules.get(str(thing["__name__"]))
        if module is not None and module.__dict__ is thing:
            return Holder("variable", f"`{thing['__name__']}`, a module")
    if isinstance(thing, type):
        return Holder("variable", f"`{thing.__module__}.{thing.__qualname__}`, a class")
    if isinstance(thing, types.GeneratorType | types.CoroutineType):
        return Holder("variable", f"`{thing.__qualname__}`, a generator")
    return None


def _steps(parent: Any, wanted: set[int]) -> Iterator[tuple[int, str]]:
    """How ``parent`` refers to the wanted objects."""
    if isinstance(parent, dict):
        for key, value in list(parent.items()):
            if id(value) in wanted:
                yield id(value), f"[{key!r}]" if isinstance(key, str | int | float | bool) else f"[{_kind(key)}]"
            if id(key) in wanted:
                yield id(key), ".keys()"
    elif isinstance(parent, list | tuple):
        for index, value in enumerate(parent):
            if id(value) in wanted:
                yield id(value), f"[{index}]"
    elif isinstance(parent, types.CellType | types.FunctionType | types.MethodType):
        for value in gc.get_referents(parent):
            if id(value) in wanted:
                yield id(value), ""
    else:
        yield from _attributes(parent, wanted)


def _attributes(parent: Any, wanted: set[int]) -> Iterator[tuple[int, str]]:
    named: set[int] = set()
    table = inspect.getattr_static(parent, "__dict__", None) and getattr(parent, "__dict__", None)
    if isinstance(table, dict):
        if id(table) in wanted:
            named.add(id(table))
            yield id(table), ".__dict__"
        for name, value in list(table.items()):
            if id(value) in wanted:
                named.add(id(value))
                yield id(value), f".{name}"
    for kind in type(parent).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            value = getattr(parent, name, None) if name not in ("__dict__", "__weakref__") else None
            if value is not None and id(value) in wanted:
                named.add(id(value))
                yield id(value), f".{name}"
    for value in gc.get_referents(parent):
        if id(value) in wanted - named:
            named.add(id(value))
            yield id(value), ""


def _frame_names() -> dict[int, Holder]:
    """Objects that variables of the running frames hold, by identity; the user's frames win over PyTorch's."""
    names: dict[int, Holder] = {}
    frames = [frame for frame in _frames() if not frame.f_code.co_filename.startswith(_OWN)]
    for frame in sorted(frames, key=lambda frame: is_library(frame.f_code.co_filename)):
        code = frame.f_code
        optimized = bool(code.co_flags & inspect.CO_OPTIMIZED)
        where = f"in {code.co_qualname}()" if optimized else "at module level"
        variables = frame.f_locals
        for name, value in list(variables.items()):
            if isinstance(value, _PLAIN):
                continue
            holder = Holder("variable", f"`{name}`, {where}", code.co_filename, frame.f_lineno)
            names.setdefault(id(value), holder)
        # Before 3.13 asking for a function's locals leaves a copy in its frame, which would keep them alive. Somebody
        # who holds that dict has called locals() and keeps them alive himself.
        if optimized and isinstance(variables, dict) and sys.getrefcount(variables) <= 3:
            variables.clear()
        del variables
    return names


def _frames() -> Iterator[types.FrameType]:
    for top in sys._current_frames().values():
        frame: types.FrameType | None = top
        while frame is not None:
            yield frame
            frame = frame.f_back


_saved_names: dict[str, tuple[str, ...]] = {}


def _saved_by(node: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """(argument, tensor) of everything a node of the graph saved and has not released."""
    kind = type(node).__name__
    names = _saved_names.get(kind)
    if names is None:
        names = _saved_names[kind] = tuple(n for n in dir(type(node)) if n.startswith("_raw_saved_"))
    for name in names:
        try:
            saved = getattr(node, name)
        except RuntimeError:  # released by a backward pass that has run
            continue
        for one in saved if isinstance(saved, list | tuple) else (saved,):
            try:
                value = one.data if one is not None else None
            except RuntimeError:  # as above
                continue
            if isinstance(value, torch.Tensor):
                yield name.removeprefix("_raw_saved_"), value
