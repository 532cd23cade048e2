"""The cost model on modules small enough to count by hand."""

import pytest

from emutpu.simulator.chips import chip
from emutpu.simulator.cost import estimate


def product(rows, depth, columns, dtype="bf16", precision="DEFAULT"):
    """A module of one matrix product."""
    a, b, c = (f"tensor<{x}x{y}x{dtype}>" for x, y in ((rows, depth), (depth, columns), (rows, columns)))
    return (
        f"func.func public @main(%a: {a}, %b: {b}) -> {c} {{ %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0], "
        f"precision = [{precision}, {precision}] : ({a}, {b}) -> {c} return %0 : {c} }}"
    )


def test_product_counts_a_multiply_add_twice():
    """Flops of a product are twice its multiply-adds, whatever the precision."""
    cost = estimate(product(256, 512, 384), chip("v5e"))
    assert cost.flops == 2 * 256 * 512 * 384
    assert estimate(product(256, 512, 384, "f32", "HIGHEST"), chip("v5e")).flops == cost.flops


def test_passes_multiply_the_time_on_the_matrix_unit():
    """An f32 product at HIGHEST takes six passes through the MXU, at HIGH three."""
    one, three, six = (
        estimate(product(1024, 1024, 1024, "f32", precision), chip("v5e")).mxu_seconds
        for precision in ("DEFAULT", "HIGH", "HIGHEST")
    )
    assert three == pytest.approx(3 * one)
    assert six == pytest.approx(6 * one)


def test_unknown_level():
    """A level that does not exist is refused with the ones that do."""
    with pytest.raises(ValueError, match="eager or compiled"):
        estimate(product(8, 8, 8), chip("v5e"), "fast")
