"""What refers to what: the primitives of the search for the holders of a value. For reports: they walk the whole heap."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import os
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from emutpu.backend.location import is_library
from emutpu.backend.storage import DEVICE

__all__ = ["CLOSURE", "KEYS", "Holder", "frame_names", "heap", "kind_of", "root", "saved_by", "steps"]

KEYS = ".keys()"
CLOSURE = ".__closure__"
# Values that hold nothing, and modules and classes, which hold too much to say where something is.
_PLAIN = (types.ModuleType, type, str, int, float, bool, type(None))
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


def heap() -> tuple[list[torch.Tensor], list[torch.nn.Module], list[torch.optim.Optimizer]]:
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


def kind_of(thing: Any) -> str:
    """The name of an object's type."""
    return type(thing).__qualname__


def root(thing: Any) -> Holder | None:
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


def steps(parent: Any, wanted: set[int]) -> Iterator[tuple[int, str]]:
    """How ``parent`` refers to the wanted objects: their identity, and the step from it in Python's spelling."""
    if isinstance(parent, dict):
        yield from _items(parent, wanted)
    elif isinstance(parent, list | tuple):
        yield from ((id(value), f"[{index}]") for index, value in enumerate(parent) if id(value) in wanted)
    elif isinstance(parent, types.FunctionType):
        yield from ((id(value), CLOSURE) for value in gc.get_referents(parent) if id(value) in wanted)
    elif isinstance(parent, types.CellType | types.MethodType):
        yield from ((id(value), "") for value in gc.get_referents(parent) if id(value) in wanted)
    else:
        yield from _attributes(parent, wanted)


def _items(parent: dict[Any, Any], wanted: set[int]) -> Iterator[tuple[int, str]]:
    for key, value in list(parent.items()):
        if id(value) in wanted:
            yield id(value), f"[{key!r}]" if isinstance(key, str | int | float | bool) else f"[{kind_of(key)}]"
        if id(key) in wanted:
            yield id(key), KEYS


def _attributes(parent: Any, wanted: set[int]) -> Iterator[tuple[int, str]]:
    named: set[int] = set()
    table = getattr(parent, "__dict__", None) if hasattr(type(parent), "__dict__") else None
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


def frame_names() -> dict[int, Holder]:
    """Objects that variables of the running frames hold, by identity; the user's frames win over PyTorch's."""
    names: dict[int, Holder] = {}
    frames = [frame for frame in _frames() if not frame.f_code.co_filename.startswith(_OWN)]
    for frame in sorted(frames, key=lambda frame: is_library(frame.f_code.co_filename)):
        code = frame.f_code
        optimized = bool(code.co_flags & inspect.CO_OPTIMIZED)
        where = f"in {code.co_qualname}()" if optimized else "at module level"
        variables: Any = frame.f_locals
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


def saved_by(node: Any) -> Iterable[tuple[str, torch.Tensor]]:
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
