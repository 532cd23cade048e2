"""Bounds of expressions of sizes."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, PythonMod

from emutpu.backend.dynamism.extents import Bounds

S = sympy.Symbol("s", integer=True, positive=True)
BOUNDS = Bounds({S: 9}, {S: 16})


@pytest.mark.parametrize(
    ("expression", "lower", "upper"),
    [
        (2 * S + 1, 19, 33),
        (FloorDiv(64, PythonMod(S, 8) + 1 - PythonMod(S, 8)), 64, 64),
        (FloorDiv(16 * S, S), 16, 16),
    ],
)
def test_bounds(expression, lower, upper):
    """Also where intervals cannot tell that a divisor is not zero."""
    assert (BOUNDS.lower(expression), BOUNDS.upper(expression)) == (lower, upper)


def test_what_has_no_bound():
    """A division that is by zero for a size, and too many sizes to try."""
    with pytest.raises(NotImplementedError, match="has no bound"):
        BOUNDS.upper(FloorDiv(64, PythonMod(S, 4)))
    many = Bounds({S: 2}, {S: 10_000})
    with pytest.raises(NotImplementedError, match="has no bound"):
        many.upper(FloorDiv(64, PythonMod(S, 4)))
