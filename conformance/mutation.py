"""Whether the gate can fail: faults put into one call of a forward on the CPU, and whether tier 2 would catch them.

A fault changes one call of one op, in the middle of the model, as a wrong lowering or a wrong cache entry would in one
layer. It is caught when the relative error of the answer exceeds the limit of tier 2. A fault whose op the model does not
have is not counted.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from emutpu.conformance.building import Built, NoRecipe, build, results_of
from emutpu.conformance.gates import LOGITS, relative_error
from emutpu.conformance.manifest import Program, programs

__all__ = ["FAMILIES", "FAULTS", "MODE", "Injected", "answer", "families", "inject"]

MODE = "mutate"
FAMILIES = "families"  # the name of the choice that `families` makes
_OF_A_TASK = 2
_MORE_OF = {"causal-lm": 12, "image-classification": 6}  # the tasks with the most families


@dataclasses.dataclass(frozen=True, slots=True)
class Injected:
    """A fault in a program: the relative error of the answer, and whether the gate would have caught it."""

    fault: str
    error: float
    caught: bool


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
    built = build(program)
    expected = _results(built)
    found = [_judged(name, results, expected) for name, fault in FAULTS.items() for results in _with(fault, built)]
    found += [_judged(_STALE, results, expected) for results in _with_stale_entry(built)]
    with _without_one_rotation(built.model) as dropped:
        results = _results(built)
    return [*found, _judged(_ROTARY, results, expected)] if dropped else found


def _results(built: Built) -> list[Tensor]:
    with torch.no_grad():
        return results_of(built.model(**built.inputs))


def _judged(name: str, actual: list[Tensor], expected: list[Tensor]) -> Injected:
    error = max(map(relative_error, actual, expected), default=0.0)
    return Injected(name, error, not error <= LOGITS)


def _with(fault: _Fault, built: Built) -> Iterator[list[Tensor]]:
    """The answer with the middle one of the calls that qualify changed; nothing where none does."""
    calls, at = 0, -1

    def visit(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        if str(func).startswith(fault.ops) and fault.qualifies(args, kwargs):
            calls += 1
            if calls == at:
                return fault.change(func, args, kwargs)
        return func(*args, **kwargs)

    with _Calls(visit):
        _results(built)
        if calls:
            calls, at = 0, calls // 2 + 1
            yield _results(built)


def _with_stale_entry(built: Built) -> Iterator[list[Tensor]]:
    """The answer when a product or convolution gives what an earlier one with the same shapes gave."""
    first: dict[Any, Tensor] = {}
    repeats: list[int] = []
    calls, at = 0, -1

    def visit(func: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        nonlocal calls
        if not str(func).startswith(_STALE_OPS):
            return func(*args, **kwargs)
        key = func, tuple(tuple(arg.shape) for arg in args if isinstance(arg, Tensor))
        calls += 1
        if calls == at:
            return first[key].clone()
        result = func(*args, **kwargs)
        if at < 0 and first.setdefault(key, result) is not result:
            repeats.append(calls)
        return result

    with _Calls(visit):
        _results(built)
        if repeats:
            calls, at = 0, repeats[len(repeats) // 2]
            yield _results(built)


@contextlib.contextmanager
def _without_one_rotation(model: nn.Module) -> Iterator[list[str]]:
    """The first call of ``apply_rotary_pos_emb`` inside leaves queries and keys as they are; yields where it was dropped."""
    module = sys.modules[type(model).__module__]
    original: Any = getattr(module, "apply_rotary_pos_emb", None)
    dropped: list[str] = []
    if original is None:
        yield dropped
        return

    def once(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        if dropped:
            return original(query, key, *args, **kwargs)
        dropped.append(original.__module__)
        return query, key

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
