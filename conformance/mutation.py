"""Whether the gate can fail: faults put into one call of a forward on the CPU, and whether tier 2 would catch them.

A fault changes one call of one op, in the middle of the model, as a wrong lowering or a wrong cache entry would in one
layer. It is caught when the relative error of the answer, or that of the gradients of a training step, exceeds the limit of
tier 2. A fault whose op the model does not have is not counted.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from emutpu.conformance.agreement import gradient_error, worst
from emutpu.conformance.building import Built, NoRecipe, build, results_of
from emutpu.conformance.gates import GRADIENTS, LOGITS, gradients_of
from emutpu.conformance.manifest import Program, programs

__all__ = ["FAMILIES", "FAULTS", "MODE", "Injected", "answer", "families", "inject"]

MODE = "mutate"
FAMILIES = "families"  # the name of the choice that `families` makes
_OF_A_TASK = 2
_MORE_OF = {"causal-lm": 12, "image-classification": 6}  # the tasks with the most families


@dataclasses.dataclass(frozen=True, slots=True)
class Injected:
    """A fault in a program: the relative error of the answer, where that shows nothing that of the gradients, and whether
    the gate would have caught it.
    """

    fault: str
    error: float
    caught: bool
    gradient_error: float | None = None


Call = Callable[..., Any]
Change = Callable[[Call, Sequence[Any], dict[str, Any]], Any]


def _first_zero(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return torch.zeros_like(result)
    return (torch.zeros_like(result[0]), *result[1:])


def _five_percent(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    result = func(*args, **kwargs)
    if isinstance(result, Tensor):
        return result * 1.05
    return (result[0] * 1.05, *result[1:])


def _looks_ahead(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Causal attention in which every position also sees the next one."""
    query, key, value = args[:3]
    ahead = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril(diagonal=1)
    mask = torch.zeros(ahead.shape, dtype=query.dtype).masked_fill(~ahead, float("-inf"))
    kwargs = {name: value for name, value in kwargs.items() if name != "attn_mask"} | {"attn_mask": mask}
    return func(query, key, value, 0.0, False, **kwargs)


def _flat(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The elements in memory order under the new shape: strides of the shape instead of those of the view."""
    result = func(*args, **kwargs)
    return args[0].reshape(result.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class _Fault:
    """Ops by the beginning of their names, whether a call qualifies, and what becomes of it."""

    ops: tuple[str, ...]
    change: Change
    qualifies: Callable[[Sequence[Any], dict[str, Any]], bool] = lambda args, kwargs: True


def _is_causal(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    square = args[0].shape[-2] == args[1].shape[-2] > 1
    return square and (bool(len(args) > 4 and args[4]) or kwargs.get("attn_mask") is not None)


def _moves(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a transposition of these dimensions changes the order of elements."""
    shape = args[0].shape
    dims = args[1:3] if len(args) >= 3 else (0, 1)
    return args[0].dim() >= 2 and all(shape[dim] > 1 for dim in dims)


_ATTENTION = ("aten._scaled_dot_product", "aten._safe_softmax", "aten._softmax")
FAULTS: dict[str, _Fault] = {
    "attention zeroed": _Fault(_ATTENTION, _first_zero),
    "normalisation times 1.05": _Fault(
        ("aten.rsqrt.", "aten.native_layer_norm", "aten.native_batch_norm", "aten._native_batch_norm", "aten.native_group_norm"),
        _five_percent,
    ),
    "mask off by one": _Fault(("aten._scaled_dot_product_flash_attention_for_cpu.",), _looks_ahead, _is_causal),
    "wrong stride": _Fault(("aten.transpose.int",), _flat, _moves),
}  # fmt: skip
_STALE = "stale cache hit"
_ROTARY = "rotary embedding dropped"
_STALE_OPS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.convolution.")


class _Calls(TorchDispatchMode):
    """Hands every call of an op to ``visit``, which gives its result."""

    def __init__(self, visit: Change) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's
        self._visit = visit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._visit(func, args, kwargs or {})


def families() -> list[Program]:
    """Programs across families: those of ``smoke``, and of each package and task the representatives of a few more families."""
    chosen = [program for program in programs().values() if program.smoke]
    taken = {program.group for program in chosen}
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    for program in programs().values():
        kind = program.builder, program.task
        if (
            program.representative
            and program.group not in taken
            and counts[kind] < _MORE_OF.get(program.task, _OF_A_TASK)
        ):
            counts[kind] += 1
            chosen.append(program)
    return chosen


def inject(program: Program) -> list[Injected]:
    """Every fault that the program has a place for. Raises NoRecipe, or what the library raises, where there is no program."""
    sound = _Sound(build(program))
    return [sound.judged(name, faulty) for name, faulty in _places(sound.built)]


Faulty = Callable[[], AbstractContextManager[Any]]
"""Makes a context in which one forward, and what follows it, has the fault."""


class _Sound:
    """A program without a fault, to judge those with one by."""

    def __init__(self, built: Built) -> None:
        self.built = built
        self._results = _results(built)

    def judged(self, name: str, faulty: Faulty) -> Injected:
        """What tier 2 would say of it."""
        with faulty():
            error = worst(_results(self.built), self._results) or 0.0
        if not error <= LOGITS:
            return Injected(name, error, True)
        strays = self._gradient_error(faulty)
        return Injected(name, error, strays is not None and not strays <= GRADIENTS, strays)

    def _gradient_error(self, faulty: Faulty) -> float | None:
        """None where nothing can be trained."""
        expected = self._gradients
        if not expected:
            return None
        with faulty():
            found = self._trained()
        return gradient_error(found, {name: expected[name] for name in found})

    @functools.cached_property
    def _gradients(self) -> dict[str, Tensor]:
        return self._trained()

    def _trained(self) -> dict[str, Tensor]:
        return gradients_of(copy.deepcopy(self.built.model), {**self.built.inputs, **self.built.labels})


def _results(built: Built) -> list[Tensor]:
    with torch.no_grad():
        return results_of(built.model(**built.inputs))


def _places(built: Built) -> Iterator[tuple[str, Faulty]]:
    """The faults that the model has a place for."""
    for name, fault in FAULTS.items():
        calls = _count(fault, built)
        if calls:
            yield name, functools.partial(_middle, fault, calls // 2 + 1)
    repeats = _repeats(built)
    if repeats:
        yield _STALE, functools.partial(_stale, repeats[len(repeats) // 2])
    with _without_one_rotation(built.model) as dropped:
        _results(built)
    if dropped:
        yield _ROTARY, functools.partial(_without_one_rotation, built.model)


def _count(fault: _Fault, built: Built) -> int:
    """How many calls of a forward qualify."""
    calls = 0

    def visit(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        calls += str(func).startswith(fault.ops) and fault.qualifies(args, kwargs)
        return func(*args, **kwargs)

    with _Calls(visit):
        _results(built)
    return calls


def _middle(fault: _Fault, at: int) -> _Calls:
    """The fault in the call of that number."""
    calls = 0

    def visit(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        if str(func).startswith(fault.ops) and fault.qualifies(args, kwargs):
            calls += 1
            if calls == at:
                return fault.change(func, args, kwargs)
        return func(*args, **kwargs)

    return _Calls(visit)


def _key(func: Call, args: Sequence[Any]) -> Any:
    return func, tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))


def _repeats(built: Built) -> list[int]:
    """The numbers of the products and convolutions that have the shapes of an earlier one."""
    seen: set[Any] = set()
    repeats: list[int] = []
    calls = 0

    def visit(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        if str(func).startswith(_STALE_OPS):
            calls += 1
            if _key(func, args) in seen:
                repeats.append(calls)
            seen.add(_key(func, args))
        return func(*args, **kwargs)

    with _Calls(visit):
        _results(built)
    return repeats


def _stale(at: int) -> _Calls:
    """The product or convolution of that number gives what the first one with its shapes gave."""
    first: dict[Any, Tensor] = {}
    calls = 0

    def visit(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        if not str(func).startswith(_STALE_OPS):
            return func(*args, **kwargs)
        calls += 1
        key = _key(func, args)
        if calls == at and key in first:  # in training there may be others before it
            return first[key].clone()
        result = func(*args, **kwargs)
        first.setdefault(key, result)
        return result

    return _Calls(visit)


@contextlib.contextmanager
def _without_one_rotation(model: nn.Module) -> Iterator[list[str]]:
    """The first call of ``apply_rotary_pos_emb`` inside leaves queries and keys as they are; yields where it was dropped."""
    module = sys.modules[type(model).__module__]
    original: Any = getattr(module, "apply_rotary_pos_emb", None)
    dropped: list[str] = []
    if original is None:
        yield dropped
        return

    def once(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        rotated = original(query, *args, **kwargs)
        if dropped:
            return rotated
        dropped.append(original.__module__)
        return (query, args[0]) if isinstance(rotated, tuple) else query  # of queries and keys, or of one at a time

    vars(module)["apply_rotary_pos_emb"] = once
    try:
        yield dropped
    finally:
        vars(module)["apply_rotary_pos_emb"] = original


def answer(program: Program) -> dict[str, Any]:
    """What a worker answers: outcome ``pass`` when every fault was caught, and the faults."""
    try:
        faults = inject(program)
    except NoRecipe as error:
        return _without(program, "not run", str(error))
    except Exception as error:  # noqa: BLE001  # a defect of the suite, which its own outcome tells of
        return _without(program, "corpus bug", f"{type(error).__name__}: {error}")
    outcome = "pass" if all(fault.caught for fault in faults) else "missed"
    return {
        "program": program.name,
        "mode": MODE,
        "outcome": outcome,
        "error": None,
        "faults": [dataclasses.asdict(fault) for fault in faults],
    }


def _without(program: Program, outcome: str, error: str) -> dict[str, Any]:
    return {"program": program.name, "mode": MODE, "outcome": outcome, "error": error, "faults": []}
