"""How far two answers are from each other, so that nothing large hides a fault in something small.

A tensor's error is the norm of the difference over the norm of what is expected. Huge numbers in the places of what may not be
chosen (the logits of tokens that are never said) are judged apart from the rest, and in gradients every parameter counts alike: one of
a scale that multiplies all logits can be ten thousand times as large as the others together.
"""

from __future__ import annotations

import cmath
import math
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["finite", "gradient_error", "relative_error", "strays", "worst"]

# What fills places is at least so large, and so many times as large as all else.
_FILL = 1e3
_LARGEST = torch.finfo(torch.float32).max  # what fills is the least number of its type: in float64 it is another
# Gradients below this share of the middle parameter's, element by element, are zero but for rounding (a bias before a
# normalisation): their differences count as if they were this large. Chosen by measured noise: docs/conformance.md.
_LEAST = 0.01


def finite(value: Tensor) -> bool:
    """Whether all of it is. A finite sum tells at a tenth of the cost; another may have overflowed."""
    return cmath.isfinite(value.sum().item()) or bool(value.isfinite().all())


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``, in float64; infinite for other shapes, types or other non-finites.

    What is equally infinite or NaN in both counts as equal. Of a tensor that should be zero the norm itself is the error.
    Of the places that huge numbers fill, and of the rest, the larger error.
    """
    return strays(actual, expected) if actual.dtype == expected.dtype else math.inf


def strays(actual: Tensor, expected: Tensor) -> float:
    """The relative error of tensors of whatever dtypes."""
    pair = _comparable(actual, expected)
    if pair is None:
        return math.inf
    actual, expected = pair
    filled = _filled(expected)
    if filled is None:
        return _norms(actual, expected).error
    fills = (value[filled].clamp(-_LARGEST, _LARGEST) for value in (actual, expected))
    return max(_norms(*fills).error, _norms(actual[~filled], expected[~filled]).error)


def worst(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> float | None:
    """The largest relative error of a tensor, None where there is none."""
    return max(map(relative_error, actual, expected), default=None)


def gradient_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The root of the mean, over the parameters, of their gradients' squared relative errors; infinite where a parameter
    has another shape, or is not finite at the same places. The parameters of ``expected`` count.
    """
    norms = {name: _norms_where_finite(actual[name], value) for name, value in expected.items() if value.numel()}
    sizes = {name: math.sqrt(expected[name].numel()) for name in norms}
    found = [size.expected / sizes[name] for name, size in norms.items() if size.expected]
    least = _LEAST * statistics.median(found) if found else 0.0
    errors = [norm.against(least * sizes[name]) for name, norm in norms.items()]
    return math.hypot(*errors) / math.sqrt(len(errors)) if errors else 0.0


class _Norms(NamedTuple):
    """Of a difference, and of what was expected."""

    difference: float
    expected: float

    @property
    def error(self) -> float:
        return self.against(0.0)

    def against(self, least: float) -> float:
        """The error, where what was expected counts as at least so large."""
        size = max(self.expected, least)
        return self.difference / size if size else self.difference


def _norms(actual: Tensor, expected: Tensor) -> _Norms:
    a, e = (value.to(torch.promote_types(value.dtype, torch.float32)) for value in (actual, expected))
    wide = torch.complex128 if e.is_complex() else torch.float64
    return _Norms(*(float(torch.linalg.vector_norm(value, dtype=wide)) for value in (a - e, e)))


def _comparable(actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both where they are finite; None for other shapes, and where they are not finite at the same places."""
    if actual.shape != expected.shape:
        return None
    if finite(actual) and finite(expected):
        return actual, expected
    usable = expected.isfinite()
    return (actual[usable], expected[usable]) if bool((actual.isfinite() == usable).all()) else None


def _norms_where_finite(actual: Tensor, expected: Tensor) -> _Norms:
    pair = _comparable(actual, expected)
    return _Norms(math.inf, 0.0) if pair is None else _norms(*pair)


def _filled(expected: Tensor) -> Tensor | None:
    """Where the largest numbers stand, if several of one size are huge beside all others; else None."""
    if expected.numel() < 3 or not expected.is_floating_point():
        return None
    sizes = expected.abs()
    largest = float(sizes.max())
    if largest < _FILL:
        return None
    filled = sizes > largest / 2
    rest = sizes[~filled]
    apart = rest.numel() and largest >= _FILL * float(rest.max()) and int(filled.sum()) > 1
    return filled if apart else None
