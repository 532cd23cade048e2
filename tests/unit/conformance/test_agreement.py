"""How far answers are from each other, where something large could hide what is small."""

import math

import pytest
import torch

from emutpu.conformance.agreement import gradient_error, relative_error, strays, worst

LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.1, 0.0], [1.0, 0.0], 0.1),
        ([0.5], [0.0], 0.5),
        ([float("-inf"), 1.0], [float("-inf"), 1.0], 0.0),
        ([float("nan"), 1.0], [1.0, 1.0], float("inf")),
    ],
)
def test_relative_error(actual, expected, error):
    """Norms; infinities in the same places are equal, in others nothing is."""
    found = relative_error(torch.tensor(actual), torch.tensor(expected))
    assert found == pytest.approx(error, rel=1e-5)


def test_another_shape_or_type_is_infinitely_wrong():
    """No broadcasting and no promotion hides a wrong shape."""
    assert relative_error(torch.ones(2), torch.ones(2, 1)) == float("inf")
    assert relative_error(torch.ones(2).double(), torch.ones(2)) == float("inf")


@pytest.mark.parametrize("fill", [LEAST, -1e4])
def test_what_is_filled_hides_nothing(fill):
    """Logits of tokens that may not come are one huge number; the others are compared with each other."""
    expected = torch.tensor([fill, 1.0, fill, 2.0])
    assert relative_error(expected.clone(), expected) == 0
    assert relative_error(torch.tensor([fill, 1.1, fill, 2.0]), expected) == pytest.approx(0.1 / math.sqrt(5), rel=1e-4)
    assert relative_error(torch.tensor([fill, 1.0, 0.0, 2.0]), expected) > 0.5
    assert relative_error(torch.tensor([fill, fill, fill, 2.0]), expected) > 1e3


def test_fills_that_were_added():
    """As the logits of cells in columns that are not chosen: ten thousand less each."""
    expected = torch.tensor([-9999.7, 1.0, -10001.2, 2.0])
    assert relative_error(expected + torch.tensor([0.0, 0.1, 0.0, 0.0]), expected) == pytest.approx(
        0.1 / math.sqrt(5), rel=1e-4
    )


def test_a_fill_is_another_number_in_float64():
    """The least of its type is as far as float32 tells."""
    wide = torch.tensor([torch.finfo(torch.float64).min, 1.0, torch.finfo(torch.float64).min], dtype=torch.float64)
    assert strays(torch.tensor([LEAST, 1.0, LEAST]), wide) == 0


@pytest.mark.parametrize("expected", [[1.0, 1.0, 1e-9], [2000.0, 1.0, 0.5], [2000.0, 2000.0, 3.0], [5e6, 5e6]])
def test_what_is_no_fill(expected):
    """Small numbers, one that stands alone, one that is not huge beside the others, and where nothing else is."""
    values = torch.tensor(expected)
    assert relative_error(values * 1.01, values) == pytest.approx(0.01, rel=1e-3)


def test_worst():
    """Of several tensors, each by its own size."""
    large, small = torch.full((4,), 1e6), torch.full((4,), 1e-6)
    assert worst([large, small * 1.5], [large, small]) == pytest.approx(0.5)
    assert worst([], []) is None


def test_every_parameter_counts_alike():
    """However large another one is."""
    expected = {"scale": torch.tensor(1e4), "first": torch.full((8,), 1e-3), "second": torch.full((4,), 1e-3)}
    assert gradient_error(expected, expected) == 0
    found = gradient_error(expected | {"second": expected["second"] * 1.1}, expected)
    assert found == pytest.approx(0.1 / math.sqrt(3), rel=1e-4)


def test_gradients_that_are_rounding():
    """What is zero but for rounding counts as if it were a hundredth of the others, element by element."""
    expected = {"a": torch.ones(4), "b": torch.ones(9), "bias": torch.full((4,), 1e-8)}
    found = gradient_error(expected | {"bias": torch.full((4,), -1e-8)}, expected)
    assert found == pytest.approx(2e-6 / math.sqrt(3), rel=1e-4)
    assert gradient_error(expected | {"bias": torch.full((4,), 0.1)}, expected) > 1


@pytest.mark.parametrize(
    "found", [torch.ones(3), torch.tensor([1.0, math.inf]), torch.tensor([1.0, math.nan])], ids=["shape", "inf", "nan"]
)
def test_gradients_that_cannot_be_compared(found):
    """Another shape, or not finite where they should be: infinitely wrong."""
    expected = {"a": torch.ones(2), "b": torch.ones(2)}
    assert gradient_error(expected | {"b": found}, expected) == math.inf


def test_no_gradients():
    """Nothing, zeros, and zeros that should be: the difference itself is the error."""
    assert gradient_error({}, {}) == 0
    zeros = {"a": torch.zeros(4), "b": torch.zeros(0)}
    assert gradient_error(zeros, zeros) == 0
    assert gradient_error(zeros | {"a": torch.full((4,), 0.5)}, zeros) == 1
