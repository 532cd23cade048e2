"""How long costing takes, in CPU seconds of this process."""

import time

import pytest

from emutpu.simulator.chips import chip
from emutpu.simulator.cost import estimate

WIDE, ROW = "tensor<2048x1024xf32>", "tensor<2048xf32>"
HALF = "tensor<2048x1024xbf16>"
LAYER = """
  %c{i} = stablehlo.convert {x} : ({half}) -> {wide}
  %s{i} = stablehlo.multiply %c{i}, %c{i} : {wide}
  %r{i} = stablehlo.reduce(%s{i} init: %zero) applies stablehlo.add across dimensions = [1] : ({wide}, tensor<f32>) -> {row}
  %d{i} = stablehlo.divide %r{i}, %n : {row}
  %q{i} = stablehlo.rsqrt %d{i} : {row}
  %b{i} = stablehlo.broadcast_in_dim %q{i}, dims = [0] : ({row}) -> {wide}
  %m{i} = stablehlo.multiply %c{i}, %b{i} : {wide}
  %h{i} = stablehlo.convert %m{i} : ({wide}) -> {half}
  %o{i} = stablehlo.dot_general %h{i}, %w, contracting_dims = [1] x [0] : ({half}, tensor<1024x1024xbf16>) -> {half}
  %t{i} = stablehlo.tanh %o{i} : {half}
  %y{i} = stablehlo.add {x}, %t{i} : {half}
"""


def network(operations):
    """A residual network of about that many operations: normalisation, product, activation."""
    layers, x = [], "%x"
    for index in range(operations // 11):
        layers.append(LAYER.format(i=index, x=x, wide=WIDE, half=HALF, row=ROW))
        x = f"%y{index}"
    return (
        f"func.func public @main(%x: {HALF}, %w: tensor<1024x1024xbf16>) -> {HALF} {{ "
        "%zero = stablehlo.constant dense<0.0> : tensor<f32> %n = stablehlo.constant dense<1024.0> : tensor<2048xf32>"
        f"{''.join(layers)} return {x} : {HALF} }}"
    ).encode()


def cpu_seconds(module, runs):
    """The least CPU time of several runs."""
    best = float("inf")
    for _ in range(runs):
        begin = time.process_time()
        estimate(module, chip("v5e"))
        best = min(best, time.process_time() - begin)
    return best


def test_grows_with_the_module():
    """Eight times the operations cost at most twelve times the CPU time: nothing is quadratic."""
    small, large = network(500), network(4000)
    estimate(small, chip("v5e"))
    assert cpu_seconds(large, 3) <= 12 * cpu_seconds(small, 5)


@pytest.mark.nightly
def test_two_thousand_operations():
    """A module of 2,000 operations takes at most 60 ms."""
    assert cpu_seconds(network(2000), 20) <= 0.060
