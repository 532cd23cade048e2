"""Whether two runs of a program came to the same."""

from __future__ import annotations

import math
import re
from typing import Any

__all__ = ["difference"]

_NUMBER = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?|\b(?:nan|inf)\b")


def difference(expected: Any, found: Any, rtol: float, atol: float, where: str = "the output") -> str | None:
    """How two outputs (texts, or results as plain values) differ, None if they do not.

    Numbers with a point or an exponent may differ by ``atol + rtol * |expected|``; all else must be equal.
    """
    if isinstance(expected, str) and isinstance(found, str):
        return _texts(expected, found, rtol, atol, where)
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return f"{where} has {len(found)} elements instead of {len(expected)}"
        pairs = enumerate(zip(expected, found, strict=True))
        return next((d for n, (a, b) in pairs if (d := difference(a, b, rtol, atol, f"{where}[{n}]"))), None)
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return f"{where} has the keys {sorted(found)} instead of {sorted(expected)}"
        return next(
            (d for k, a in expected.items() if (d := difference(a, found[k], rtol, atol, f"{where}.{k}"))), None
        )
    if isinstance(expected, float) and isinstance(found, float):
        return None if _close(expected, found, rtol, atol) else f"{where} is {found!r} instead of {expected!r}"
    same = type(expected) is type(found) and expected == found
    return None if same else f"{where} is {found!r} instead of {expected!r}"


def _texts(expected: str, found: str, rtol: float, atol: float, where: str) -> str | None:
    if expected == found:
        return None
    old, new = expected.splitlines(), found.splitlines()
    for number, (a, b) in enumerate(zip(old, new, strict=False), 1):
        if not _lines_agree(a, b, rtol, atol):
            return f"line {number} of {where} is {b!r} instead of {a!r}"
    if len(old) != len(new):
        return f"{where} has {len(new)} lines instead of {len(old)}"
    return None


def _lines_agree(a: str, b: str, rtol: float, atol: float) -> bool:
    if _NUMBER.split(a) != _NUMBER.split(b):
        return False
    numbers = zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True)
    return all(_close(float(x), float(y), rtol, atol) for x, y in numbers)


def _close(a: float, b: float, rtol: float, atol: float) -> bool:
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    return a == b or abs(a - b) <= atol + rtol * abs(a)
