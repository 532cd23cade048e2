"""A process that runs programs of the suite, one at a time: ``python -m emutpu.conformance.worker``.

Every line of standard input is a task, ``{"program": …, "mode": …}``; every answer is a line of JSON on standard output: the
fields of :class:`gates.Report` and what the device counted. A process of its own, so that a program that takes its process
down, or never ends, is a finding about that program.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import gc
import json
import os
import signal
import sys
import warnings
from typing import Any

from emutpu._workers import resident_of

__all__ = ["CHIPS", "main"]

_PR_SET_PDEATHSIG = 1
_COMPILED = ("compile", "bounded")  # the modes in which a program must not run eagerly
_COMPILED_REGION = "compile_mode_execution"
CHIPS = ("v5e", "v5p", "v6e", "v7")
"""The chips whose modelled time of a program is reported, whatever chip is emulated."""


def main() -> int:
    """Answer until standard input ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody would read the answers
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a program prints is no answer
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    # Tracing makes objects by the million: looking for cycles among them was a seventh of a compiled program's time.
    gc.set_threshold(100_000)
    for line in sys.stdin:
        task = json.loads(line)
        answer = _answer(task["program"], task["mode"])
        _tidy(libc)
        answer["resident_bytes"] = resident_of(os.getpid())
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _tidy(libc: ctypes.CDLL) -> None:
    """Give back the program's memory: what is free is no reason for another process (a quarter of 2 GiB after 15 image networks)."""
    gc.collect()
    gc.freeze()  # libraries and executables stay for good: looking through them again and again was a tenth of a run's time
    libc.malloc_trim(0)


def _answer(name: str, mode: str) -> dict[str, Any]:
    import torch

    from emutpu import is_emulated
    from emutpu._report import costs_on, fallbacks, launches, this_process
    from emutpu.conformance import bounded, estimates, full_size, mutation, tiers
    from emutpu.conformance.gates import Outcome, examine
    from emutpu.conformance.manifest import programs

    if mode == mutation.MODE:
        return mutation.answer(programs()[name])
    if mode == estimates.MODE:
        return full_size.answer(programs()[name], _peak)
    counted = functools.partial(this_process, modelled=False)
    tpu: Any = torch.get_device_module("tpu")
    tpu.eager_mode = tpu.EagerMode.DEFER_AND_FUSE if mode == "defer" else tpu.EagerMode.DEFER_NEVER
    torch.accelerator.reset_peak_memory_stats()
    before, launched = counted(), launches()
    program = programs()[name]
    if mode in _COMPILED:
        # All modules share the frame that a compiled module enters: what earlier programs left there counts against its
        # limit of recompilations, beyond which everything runs eagerly.
        torch._dynamo.reset()
    if mode == tiers.BOUNDED:
        report = bounded.examine(program, fallbacks=fallbacks, launched=lambda: _executables(counted()))
    else:
        report = examine(program, mode, fallbacks=fallbacks)
    after = counted()
    ops = collections.Counter(after["ops"]["by_name"]) - collections.Counter(before["ops"]["by_name"])
    reasons = _by_reason(after) - _by_reason(before)
    if mode in _COMPILED and report.outcome == "pass" and not reasons[_COMPILED_REGION]:
        report.outcome, report.tier1, report.tier2, report.stage = Outcome.CRASH, False, None, "compile"
        report.error = "nothing of the program ran compiled: torch.compile left all of it to eager execution"
    return dataclasses.asdict(report) | {
        "ops": dict(sorted(ops.items())),
        "compiles": after["compiles"]["misses"] - before["compiles"]["misses"],
        "compile_seconds": after["compiles"]["seconds"] - before["compiles"]["seconds"],
        "fallbacks": _fallbacks(after) - _fallbacks(before),
        "regions": sum(row["count"] for row in after["regions"]) - sum(row["count"] for row in before["regions"]),
        "region_reasons": dict(reasons),
        "fallback_ops": [f"{op} at {line}" for op, line in _fallback_lines(after) - _fallback_lines(before)],
        "peak_hbm_bytes": torch.accelerator.max_memory_allocated(),
        "modelled": costs_on(CHIPS, launched),
        "hardware": None if is_emulated() else tpu.get_device_name(),
    }


def _fallbacks(document: dict[str, Any]) -> int:
    return sum(entry["count"] for entry in document["fallbacks"])


def _executables(document: dict[str, Any]) -> int:
    """How many executables this process compiled or loaded."""
    compiles = document["compiles"]
    nearest = compiles["by_tier"].get("1", {"hits": 0})
    return int(compiles["requests"] - nearest["hits"])


def _peak() -> int:
    """Bytes of device memory that were alive at most since the last call."""
    import torch

    found = torch.accelerator.max_memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    return found


def _fallback_lines(document: dict[str, Any]) -> collections.Counter[tuple[str, str]]:
    return collections.Counter({(entry["op"], entry["location"]): entry["count"] for entry in document["fallbacks"]})


def _by_reason(document: dict[str, Any]) -> collections.Counter[str]:
    return collections.Counter({row["reason"]: row["count"] for row in document["regions"]})


if __name__ == "__main__":
    sys.exit(main())
