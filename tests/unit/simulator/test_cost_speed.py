"""How long costing takes, in CPU seconds of this process."""

import time

import pytest

from emutpu._jaxlib import context, ir
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


CONVOLUTION = b"""
func.func public @main(%x: tensor<1x8x8x4xf32> {jax.buffer_donor = true}, %k: tensor<3x3x4x4xf32>) -> tensor<4x6xf32> {
  %0 = stablehlo.convolution(%x, %k) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f],
    window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64,
    precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]}
    : (tensor<1x8x8x4xf32>, tensor<3x3x4x4xf32>) -> tensor<1x8x8x4xf32>
  %1 = stablehlo.slice %0 [0:1, 0:1, 1:7, 0:4] : (tensor<1x8x8x4xf32>) -> tensor<1x1x6x4xf32>
  %2 = stablehlo.reshape %1 : (tensor<1x1x6x4xf32>) -> tensor<6x4xf32>
  %3 = stablehlo.transpose %2, dims = [1, 0] : (tensor<6x4xf32>) -> tensor<4x6xf32>
  return %3 : tensor<4x6xf32>
}"""


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


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ArrayAttr", "[1 : i64, 2 : i64]"),
        ("DenseI64ArrayAttr", "array<i64: 1, 2>"),
        ("DenseIntElementsAttr", "dense<[1, 2]> : tensor<2xi64>"),
    ],
)
def test_attributes_are_read_by_position(monkeypatch, kind, text):
    """An iterator of jaxlib's ends with a C++ exception, which takes longer the more executables are loaded."""

    def refuse(array):
        raise AssertionError(f"{array} is iterated over")

    monkeypatch.setattr(getattr(ir, kind), "__iter__", refuse, raising=False)
    with pytest.raises(AssertionError, match="iterated over"):
        list(getattr(ir, kind)(ir.Attribute.parse(text, context())))
    assert estimate(CONVOLUTION, chip("v5e")).flops > 0


@pytest.mark.nightly
def test_two_thousand_operations():
    """A module of 2,000 operations takes at most 60 ms."""
    assert cpu_seconds(network(2000), 20) <= 0.060
