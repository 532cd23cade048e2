"""The first launch of a new shape, beside XLA's share of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tools.bench.case import Case, Measurement, Plan, alternate, seconds_of

__all__ = ["CASES", "Recorder"]


class Recorder:
    """A client that remembers the last module it compiled, and can compile it again with nothing around."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._last: tuple[bytes, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compile(self, module: bytes, options: Any) -> Any:
        self._last = (module, options)
        return self._inner.compile(module, options)

    def bare(self) -> Callable[[], Any]:
        """``compile_and_load`` of the last module with its flags; reading and legalising are already done."""
        from emutpu import _jaxlib
        from emutpu.simulator._modules import inspect, parse
        from emutpu.simulator._xla_flags import prepare

        assert self._last is not None
        module, options = self._last
        parsed = parse(module)
        device = self._inner.device
        settings = _jaxlib.compile_options([device.id], prepare(parsed, inspect(parsed), options))
        devices = _jaxlib.device_list([device])
        return lambda: _jaxlib.compile_module(self._inner.backend, parsed, devices, settings)


def _fresh() -> Iterator[torch.Tensor]:
    """Device tensors of shapes that no launch has seen."""
    for extent in itertools.count(1001):
        yield torch.ones(3, extent).to("tpu")


def _miss(plan: Plan) -> Measurement:
    from emutpu.backend.runtime import runtime

    recorder = Recorder(runtime().client)
    runtime().replace_client(recorder)
    operands = _fresh()
    operand = next(operands)
    operand + operand

    def subject() -> float:
        operand = next(operands)
        return seconds_of(lambda: operand + operand, 1)

    return Measurement(alternate(subject, lambda: seconds_of(recorder.bare(), 1), plan.rounds(40), 1e3))


def _miss_subject() -> Callable[[], Any]:
    operands = _fresh()

    def subject() -> torch.Tensor:
        operand = next(operands)
        return operand + operand

    return subject


CASES = (
    Case(
        "compile_miss",
        "first add of a new shape",
        "compile_and_load of the same module",
        "ms",
        1.3,
        _miss,
        _miss_subject,
        calls=50,
    ),
)
