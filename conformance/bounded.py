"""The bounded-dynamism tier: a causal language model, compiled once under a bound, answers sequences of several lengths.

The sequence dimension is marked with ``torch._dynamo.mark_dynamic(tensor, 1, min, max)`` and the model is compiled with
``torch.compile``. It passes when all lengths together take at most two executables and each answer is, within the limit of
tier 2, that of the CPU, which runs every length as a static shape. A model that PyTorch refuses under such a bound on the CPU
too, because its code or the limits of PyTorch's proofs tie it to one length, says nothing about the device.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from emutpu.conformance.agreement import worst
from emutpu.conformance.building import Built, build, results_of
from emutpu.conformance.fingerprints import fingerprint
from emutpu.conformance.gates import (
    DEVICE,
    LOGITS,
    Mismatch,
    Outcome,
    Report,
    filed,
    found_here_too,
    highest,
    seed,
)
from emutpu.conformance.inputs import LENGTH
from emutpu.conformance.manifest import Program
from emutpu.conformance.tiers import BOUNDED

__all__ = ["EXECUTABLES", "LENGTHS", "examine"]

EXECUTABLES = 2
# Beyond the small window of 8: a model that asks whether the sequence is longer than its window has two programs.
LENGTHS = (LENGTH, 13, 9, 11)
_LEAST, _MOST = 9, LENGTH


def examine(program: Program, *, fallbacks: Callable[[], int], launched: Callable[[], int]) -> Report:
    """Run one program over all lengths. Raises nothing of a program's making.

    ``launched`` counts the executables that were made or loaded so far, ``fallbacks`` the ops that ran on the CPU instead.
    """
    report = Report(program.name, BOUNDED)
    started = time.perf_counter()
    try:
        _examine(program, report, fallbacks, launched)
    except Exception as error:  # noqa: BLE001  # whatever a program raises is the finding
        refused = report.stage == "forward"
        filed(report, found_here_too(error, functools.partial(_compiled_here, program)) if refused else error)
    report.seconds = time.perf_counter() - started
    return report


def _examine(program: Program, report: Report, fallbacks: Callable[[], int], launched: Callable[[], int]) -> None:
    report.stage = "cpu"
    built = build(program)
    report.fingerprint = fingerprint(built.model, built.inputs)
    expected = {length: _answers(built.model, _cut(built, length)) for length in LENGTHS}
    report.stage = "move"
    before = fallbacks()
    model: Any = built.model.to(DEVICE)
    torch._dynamo.reset()
    report.stage = "forward"
    with highest():
        given = {length: _marked(_cut(built, length), DEVICE) for length in LENGTHS}
        made = launched()  # the weights' own modules are no part of what the lengths take
        first: list[int] = []

        def compiles(_: object) -> None:
            """Nor are those of constants, which PyTorch makes on the device while it traces the first graph."""
            first.append(launched() - 1)

        options: dict[str, Any] = {"bucket_size": _MOST, "debug_callback": compiles}
        compiled = torch.compile(model, backend=DEVICE, options=options)
        actual = {length: _answers(compiled, given[length]) for length in LENGTHS}
    report.executables = launched() - (first or [made])[0]
    if fallbacks() > before:
        raise RuntimeError("an op ran on the CPU instead of the device")
    report.tier1, report.tier2, report.stage = True, False, "compare"
    errors = {length: _error(actual[length], expected[length]) for length in LENGTHS}
    report.logit_error = max(errors.values())
    if not report.logit_error <= LOGITS:
        worst = max(errors, key=lambda length: errors[length])
        raise Mismatch(f"relative error {errors[worst]:.2g} at length {worst}, allowed {LOGITS:.0e}")
    if report.executables > EXECUTABLES:
        raise Mismatch(f"{len(LENGTHS)} lengths took {report.executables} executables, allowed {EXECUTABLES}")
    report.tier2, report.outcome, report.stage = True, Outcome.PASS, None


def _cut(built: Built, length: int) -> dict[str, Any]:
    """The inputs with the first ``length`` of every sequence."""

    def cut(value: Any) -> Any:
        long = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == LENGTH
        return value[:, :length].contiguous() if long else value

    return {name: cut(value) for name, value in built.inputs.items()}


def _compiled_here(program: Program) -> None:
    """The first length as PyTorch's own compilation traces it on the CPU, under the same bound."""
    torch._dynamo.reset()
    built = build(program)
    _answers(torch.compile(built.model, backend="aot_eager"), _marked(_cut(built, LENGTHS[0]), "cpu"))


def _marked(inputs: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Copies on a device, with the sequence dimension bounded."""
    moved = {
        name: value.to(device, copy=True) if isinstance(value, Tensor) else value for name, value in inputs.items()
    }
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.dim() > 1 and _LEAST <= value.shape[1] <= _MOST:
            torch._dynamo.mark_dynamic(moved[name], 1, min=_LEAST, max=_MOST)
    return moved


def _answers(model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
    seed()
    model.eval()
    with torch.no_grad():
        return [result.cpu() for result in results_of(model(**inputs))]


def _error(actual: list[Tensor], expected: list[Tensor]) -> float:
    if len(actual) != len(expected):
        raise Mismatch(f"{len(actual)} results, the CPU gives {len(expected)}")
    return worst(actual, expected) or 0.0
