"""Entries of PyTorch's op database whose calls on the device go through ``torch.compile``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.testing._internal import common_methods_invocations
from torch.utils._pytree import tree_leaves

from emutpu.backend.compile import dynamo
from emutpu.cli import _sweep

KINDS = ("forward", "backward")

_SIZE = "its result's size depends on values, and Dynamo captures no such op by default: it runs eagerly"
_BOOL = "it gives a Python value, which Dynamo does not trace into a graph: it runs eagerly"
_WARNS = "Dynamo does not trace the check of values, or the warning, that it begins with: it runs eagerly"

# What passes like eager, but without any graph: Dynamo breaks at the op.
WITHOUT_GRAPH = {
    "allclose": _BOOL,
    "equal": _BOOL,
    "item": _BOOL,
    "argwhere": _SIZE,
    "combinations": _SIZE,
    "masked_select": _SIZE,
    "nonzero": _SIZE,
    "tensor_split": "its sections are values of a CPU tensor: it runs eagerly",
    "unique_consecutive": _SIZE,
    "resize_": "Dynamo does not trace a change of a storage's size: it runs eagerly",
    "resize_as_": "Dynamo does not trace a change of a storage's size: it runs eagerly",
    "corrcoef": _WARNS,
    "cov": _WARNS,
    "nn.functional.ctc_loss": "lengths are read on the host: it runs eagerly",
    "nn.functional.gaussian_nll_loss": _WARNS,
}


class CompiledEntry:
    """An OpInfo that stands for its compiled self wherever an argument or the default device is the device's."""

    def __init__(self, entry: Any) -> None:
        self._entry = entry

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        here = torch.get_default_device().type == _sweep.DEVICE or any(
            isinstance(leaf, torch.Tensor) and leaf.device.type == _sweep.DEVICE for leaf in tree_leaves((args, kwargs))
        )
        if not here:
            return self._entry(*args, **kwargs)
        torch._dynamo.reset()
        function = self._entry.op

        def call(args: Any, kwargs: Any) -> Any:
            return function(*args, **kwargs)

        # What sets a seed around the call would keep it out of every graph.
        with mock.patch.object(common_methods_invocations, "wrapper_set_seed", _without_seed):
            return torch.compile(call, backend="tpu")(args, kwargs)


def _without_seed(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What eager and compiled say of one kind: an outcome of the sweep each (compiled "" where eager fails), a message, how
    many device graphs were compiled, and how often Dynamo broke.
    """

    eager: str
    compiled: str
    message: str
    graphs: int
    breaks: int


def judge(entry: Any) -> dict[str, Verdict]:
    """Eager and compiled outcomes of float32's first sample, for each kind that the entry has."""
    verdicts = {}
    for kind in KINDS:
        if kind == "backward" and not entry.supports_autograd:
            continue
        eager = _outcome(entry, kind)
        if eager is None:
            continue
        torch._dynamo.utils.counters.clear()
        with _counted() as graphs:
            compiled = _outcome(CompiledEntry(entry), kind) if eager[0] == _sweep.OK else ("", "")
        assert compiled is not None
        breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        verdicts[kind] = Verdict(eager[0], compiled[0], compiled[1] or eager[1], len(graphs), breaks)
    torch._dynamo.reset()
    return verdicts


@contextlib.contextmanager
def _counted() -> Iterator[list[str]]:
    """The names of the graphs that are compiled inside and do anything on the device."""
    names: list[str] = []
    original = dynamo.compile_graph

    def compile_graph(module: Any, name: str) -> Any:
        compiled = original(module, name)
        if compiled.device_pieces:
            names.append(name)
        return compiled

    with mock.patch.object(dynamo, "compile_graph", compile_graph):
        yield names


def _outcome(entry: Any, kind: str) -> tuple[str, str] | None:
    check = getattr(_sweep, f"_{kind}")
    outcome, message = _sweep._outcome(lambda sample: check(entry, sample), entry, torch.float32, kind == "backward", 1)
    return None if outcome is None else (outcome, message)
