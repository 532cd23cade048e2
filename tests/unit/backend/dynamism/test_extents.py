"""Bounds of expressions of sizes."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Min, PythonMod

from emutpu.backend.dynamism.extents import Bounds, Factor

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


CHUNKS = FloorDiv(S + PythonMod(-S, 16), 16)


@pytest.mark.parametrize(
    ("expression", "settled"),
    [(CHUNKS, 1), (FloorDiv(S + PythonMod(-S, 16), CHUNKS), 16), (Min(4, S), 4), (FloorDiv(S, 2), None), (2 * S, None)],
)
def test_settled(expression, settled):
    """A number where every size gives it; otherwise what was asked, also where too many sizes would have to be tried."""
    assert BOUNDS.settled(expression) == (expression if settled is None else settled)
    many = Bounds({S: 2}, {S: 10_000})
    assert many.settled(expression) == expression


def test_settled_by_a_guard():
    """What the graph was traced for counts: without the guard a size of 11 gives 5."""
    expression = FloorDiv(S, FloorDiv(S, 4))
    assert BOUNDS.settled(expression) == expression
    assert Bounds({S: 9}, {S: 16}, [sympy.Eq(expression, 4)]).settled(expression) == 4
    only = Bounds({S: 9}, {S: 16}, [sympy.Eq(PythonMod(-S, 16), 0)])
    assert only.settled(S) == 16
    assert only.same(2 * S, sympy.Integer(32))


def test_a_number_is_no_dynamic_dimension():
    """What does not depend on the size has no padding."""
    assert BOUNDS.prefix(CHUNKS) == ()
    assert BOUNDS.prefix(16 * CHUNKS) == (Factor(16, sympy.Integer(16)),)


def test_same():
    """By algebra, and by values where divisions hide it; never where a size tells two apart."""
    assert BOUNDS.same(S * (S + 1), S**2 + S)
    assert BOUNDS.same(16 * CHUNKS, S + PythonMod(-S, 16))
    assert not BOUNDS.same(FloorDiv(S, 2), FloorDiv(S + 1, 2))
