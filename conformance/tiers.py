"""What a run says of the tiers beside the first two: default precision, bounded dynamism, and the noise behind the limits."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from emutpu.conformance.manifest import Program

__all__ = ["BOUNDED", "LIMITS", "applies", "bounded", "default_precision", "distribution", "noise", "perplexity"]

BOUNDED = "bounded"  # the mode of the bounded-dynamism tier; its rows are in no other count
LIMITS = {"logits": 1e-4, "gradients": 1e-3, "default_precision": 0.5, "perplexity": 0.10}
"""What tiers 2 and 3 allow, as in ``gates``, which needs torch."""
_BOUNDED_TASK = "causal-lm"
_QUANTILES = (0.5, 0.9, 0.99, 1.0)
_MEASURED = {
    "cpu_logits": "logit_noise",
    "cpu_gradients": "gradient_noise",
    "device_logits": "logit_error",
    "device_gradients": "gradient_error",
    "device_default_precision": "default_error",
}
_NOT_ATTEMPTED = ("not run", "corpus bug")
Answer = Mapping[str, Any]


def applies(program: Program, mode: str) -> bool:
    """Whether a program is run in this mode: every one but in ``bounded``, which is for causal language models."""
    return mode != BOUNDED or program.task == _BOUNDED_TASK


def distribution(values: Iterable[float]) -> dict[str, Any]:
    """How many values, how many of them are not finite, and quantiles of the finite ones (nearest rank; None without any)."""
    given = list(values)
    finite = sorted(value for value in given if math.isfinite(value))
    ranks = [max(0, math.ceil(share * len(finite)) - 1) for share in _QUANTILES]
    return {
        "count": len(given),
        "infinite": len(given) - len(finite),
        "quantiles": {
            f"{share:g}": finite[rank] if finite else None for share, rank in zip(_QUANTILES, ranks, strict=True)
        },
    }


def noise(answers: Iterable[Answer]) -> dict[str, Any]:
    """How far float32 on the CPU is from float64 over the programs of a run, and the device from the CPU, beside the limits.

    Errors are relative norms. ``without_float64`` counts the programs by why they have no float64.
    """
    kept = [answer for answer in answers if answer["mode"] != BOUNDED and answer["outcome"] not in _NOT_ATTEMPTED]
    found: dict[str, Any] = {
        name: distribution(answer[field] for answer in kept if answer.get(field) is not None)
        for name, field in _MEASURED.items()
    }
    reasons = collections.Counter(
        str(answer["noise_error"]).partition("\n")[0][:120] for answer in kept if answer.get("noise_error")
    )
    return found | {"limits": dict(LIMITS), "without_float64": dict(reasons.most_common())}


def default_precision(answers: Iterable[Answer], rows: Mapping[str, int]) -> dict[str, Any]:
    """Tier 3 in rows and programs; ``rows`` says how many models a program stands for. ``failed`` gives each reason."""
    judged = [answer for answer in answers if answer.get("tier3") is not None]
    return _counts([(answer, bool(answer["tier3"]), str(answer.get("tier3_error"))) for answer in judged], rows)


def perplexity(answers: Iterable[Answer]) -> list[dict[str, Any]]:
    """Of trained language models: the CPU's, the device's at ``highest``, and by default (None where not measured)."""
    return [
        {
            "program": answer["program"],
            "mode": answer["mode"],
            "cpu": answer["cpu_perplexity"],
            "device": answer.get("perplexity"),
            "default": answer.get("default_perplexity"),
        }
        for answer in answers
        if answer.get("cpu_perplexity") is not None
    ]


def bounded(answers: Iterable[Answer], rows: Mapping[str, int]) -> dict[str, Any] | None:
    """The bounded-dynamism tier in rows and programs, or None where the run had no such mode."""
    here = [answer for answer in answers if answer["mode"] == BOUNDED]
    judged = [answer for answer in here if answer["outcome"] not in _NOT_ATTEMPTED]
    if not here:
        return None
    told = [(a, a["outcome"] == "pass", str(a.get("error"))) for a in judged]
    return _counts(told, rows) | {
        "executables": dict(
            sorted(
                collections.Counter(str(a["executables"]) for a in judged if a.get("executables") is not None).items()
            )
        )
    }


def _counts(judged: Sequence[tuple[Answer, bool, str]], rows: Mapping[str, int]) -> dict[str, Any]:
    def total(names: Iterable[str]) -> dict[str, int]:
        distinct = set(names)
        return {"rows": sum(rows.get(name, 0) for name in distinct), "programs": len(distinct)}

    return {
        "attempted": total(answer["program"] for answer, _, _ in judged),
        "passed": total(answer["program"] for answer, passed, _ in judged if passed),
        "failed": {
            answer["program"]: reason.partition("\n")[0][:300] for answer, passed, reason in judged if not passed
        },
    }
