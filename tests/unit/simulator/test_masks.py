"""FLOPs that masks of attention discard, found in the module, counted against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from emutpu.simulator.chips import chip
from emutpu.simulator.cost import estimate
from emutpu.simulator.cost.causal import UNSEEN

T, D = 96, 16
SCORES, HEADS, ROWS = f"tensor<4x{T}x{T}xf32>", f"tensor<4x{T}x{D}xf32>", f"tensor<4x{T}xf32>"
MASK, PLACES = f"tensor<{T}x{T}xi1>", f"tensor<{T}x{T}xi32>"
PRODUCTS = 2 * 2 * 4 * T * T * D


def attention(masking: str, arguments: str = "") -> str:
    """Scores %s, masked by the text as %m, softmax and the second product."""
    return f"""
func.func public @main(%q: {HEADS}, %k: {HEADS}, %v: {HEADS}{arguments}) -> {HEADS} {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %hidden = stablehlo.constant dense<-1.0e30> : {SCORES}
  %i = stablehlo.iota dim = 0 : {PLACES}
  %j = stablehlo.iota dim = 1 : {PLACES}
  %s = stablehlo.dot_general %q, %k, batching_dims = [0] x [0], contracting_dims = [2] x [2] : ({HEADS}, {HEADS}) -> {SCORES}
  {masking}
  %max = stablehlo.reduce(%m init: %low) applies stablehlo.maximum across dimensions = [2] : ({SCORES}, tensor<f32>) -> {ROWS}
  %bmax = stablehlo.broadcast_in_dim %max, dims = [0, 1] : ({ROWS}) -> {SCORES}
  %d = stablehlo.subtract %m, %bmax : {SCORES}
  %e = stablehlo.exponential %d : {SCORES}
  %sum = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [2] : ({SCORES}, tensor<f32>) -> {ROWS}
  %bsum = stablehlo.broadcast_in_dim %sum, dims = [0, 1] : ({ROWS}) -> {SCORES}
  %p = stablehlo.divide %e, %bsum : {SCORES}
  %o = stablehlo.dot_general %p, %v, batching_dims = [0] x [0], contracting_dims = [2] x [1] : ({SCORES}, {HEADS}) -> {HEADS}
  return %o : {HEADS} }}"""


def select(predicate: str) -> str:
    """Masks by a predicate over pairs of positions, true where a score is seen."""
    return (
        f"{predicate} %wide = stablehlo.broadcast_in_dim %c, dims = [1, 2] : ({MASK}) -> tensor<4x{T}x{T}xi1> "
        f"%m = stablehlo.select %wide, %s, %hidden : tensor<4x{T}x{T}xi1>, {SCORES}"
    )


CAUSAL = f"%c = stablehlo.compare GE, %i, %j : ({PLACES}, {PLACES}) -> {MASK}"
WINDOW = f"""
  %a = stablehlo.compare GE, %i, %j : ({PLACES}, {PLACES}) -> {MASK}
  %back = stablehlo.subtract %i, %j : {PLACES}
  %w = stablehlo.constant dense<24> : {PLACES}
  %near = stablehlo.compare LT, %back, %w : ({PLACES}, {PLACES}) -> {MASK}
  %c = stablehlo.and %a, %near : {MASK}"""


def discarded(module: str) -> float:
    """The share of attention's two products that its mask discards on a v5e."""
    return estimate(module, chip("v5e")).masked_flops / PRODUCTS


def test_causal_is_half() -> None:
    """One comparison of positions is a causal mask, of which half is seen."""
    assert discarded(attention(select(CAUSAL))) == 0.5


def test_a_sliding_window_is_counted() -> None:
    """The pairs outside a window of 24, as numpy counts them."""
    i, j = np.mgrid[:T, :T]
    seen = ((i >= j) & (i - j < 24)).mean()
    assert discarded(attention(select(WINDOW))) == pytest.approx(1 - seen)


def test_a_selection_the_other_way_round() -> None:
    """Scores replaced where the predicate holds: what the window hides is now what it shows."""
    swapped = attention(select(WINDOW)).replace("%wide, %s, %hidden", "%wide, %hidden, %s")
    assert discarded(swapped) == pytest.approx(1 - discarded(attention(select(WINDOW))))


def test_an_added_mask() -> None:
    """A very negative number added where keys come later."""
    text = f"""{CAUSAL}
  %keep = stablehlo.constant dense<0.0> : tensor<{T}x{T}xf32>
  %drop = stablehlo.constant dense<-3.4e38> : tensor<{T}x{T}xf32>
  %bias = stablehlo.select %c, %keep, %drop : {MASK}, tensor<{T}x{T}xf32>
  %spread = stablehlo.broadcast_in_dim %bias, dims = [1, 2] : (tensor<{T}x{T}xf32>) -> {SCORES}
  %m = stablehlo.add %s, %spread : {SCORES}"""
    assert discarded(attention(text)) == 0.5


@pytest.mark.parametrize(
    ("argument", "masking"),
    [
        pytest.param(MASK, select("%c = stablehlo.not %x : " + MASK), id="boolean"),
        pytest.param(
            f"tensor<{T}x{T}xf32>",
            f"%y = stablehlo.broadcast_in_dim %x, dims = [1, 2] : (tensor<{T}x{T}xf32>) -> {SCORES} "
            f"%m = stablehlo.add %s, %y : {SCORES}",
            id="added",
        ),
    ],
)
def test_a_mask_that_is_an_argument_is_not_known(argument: str, masking: str) -> None:
    """Queries by keys from elsewhere may be causal or not: not a number, and said."""
    cost = estimate(attention(masking, f", %x: {argument}"), chip("v5e"))
    assert math.isnan(cost.masked_flops)
    assert UNSEEN in cost.assumptions
    assert cost.flops > 0


@pytest.mark.parametrize("operation", ["add", "select"])
def test_a_mask_of_keys_is_padding(operation: str) -> None:
    """What hides keys from every query alike discards nothing that a causal mask would."""
    if operation == "add":
        text = (
            f"%y = stablehlo.broadcast_in_dim %x, dims = [2] : (tensor<{T}xf32>) -> {SCORES} "
            f"%m = stablehlo.add %s, %y : {SCORES}"
        )
        module = attention(text, f", %x: tensor<{T}xf32>")
    else:
        module = attention(
            select(f"%c = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<{T}xi1>) -> {MASK}"),
            f", %x: tensor<{T}xi1>",
        )
    assert discarded(module) == 0


def test_no_mask() -> None:
    """Nothing is discarded of full attention, nor of a product with an added matrix."""
    assert discarded(attention(f"%m = stablehlo.add %s, %s : {SCORES}")) == 0
