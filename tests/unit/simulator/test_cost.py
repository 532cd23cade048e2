"""The cost model on modules small enough to count by hand."""

import itertools
import math

import pytest

from emutpu.backend.pjrt import InvalidArgument, Unimplemented
from emutpu.simulator.chips import CHIPS, UnknownFigure, chip
from emutpu.simulator.cost import estimate
from emutpu.simulator.cost.collectives import Ring, over_slice, transfer
from emutpu.simulator.cost.graph import Node, Spec
from emutpu.simulator.cost.kernels import Kernel, _schedule
from emutpu.simulator.topology import Slice, slice_named

V5E, V6E = chip("v5e"), chip("v6e")


def function(arguments, body, results):
    """A module with one function; ``arguments`` and ``results`` are types."""
    named = ", ".join(f"%{name}: tensor<{kind}>" for name, kind in zip("abcdefgh", arguments, strict=False))
    kinds = ", ".join(f"tensor<{kind}>" for kind in results)
    return f"func.func public @main({named}) -> ({kinds}) {{ {body} }}"


def product(rows, depth, columns, dtype="bf16", precision="DEFAULT"):
    """A module of one matrix product."""
    a, b, c = (f"{x}x{y}x{dtype}" for x, y in ((rows, depth), (depth, columns), (rows, columns)))
    body = (
        f"%0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0], precision = [{precision}, {precision}] : "
        f"(tensor<{a}>, tensor<{b}>) -> tensor<{c}> return %0 : tensor<{c}>"
    )
    return function((a, b), body, (c,))


def elementwise(op, kind, count=2):
    """A module of one elementwise operation."""
    operands = ", ".join(f"%{name}" for name in "ab"[:count])
    return function(
        [kind] * count, f"%0 = stablehlo.{op} {operands} : tensor<{kind}> return %0 : tensor<{kind}>", [kind]
    )


SOFTMAX = """
  %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %m = stablehlo.reduce(%a init: %low) applies stablehlo.maximum across dimensions = [1] : (tensor<1024x2048xf32>, tensor<f32>) -> tensor<1024xf32>
  %mb = stablehlo.broadcast_in_dim %m, dims = [0] : (tensor<1024xf32>) -> tensor<1024x2048xf32>
  %s = stablehlo.subtract %a, %mb : tensor<1024x2048xf32>
  %e = stablehlo.exponential %s : tensor<1024x2048xf32>
  %t = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<1024x2048xf32>, tensor<f32>) -> tensor<1024xf32>
  %tb = stablehlo.broadcast_in_dim %t, dims = [0] : (tensor<1024xf32>) -> tensor<1024x2048xf32>
  %o = stablehlo.divide %e, %tb : tensor<1024x2048xf32>
  return %o : tensor<1024x2048xf32>"""


def loop(limit, inner="%y = stablehlo.tanh %x : tensor<256x256xf32>"):
    """A while loop from 0 to ``limit``; a limit of None is an argument."""
    bound = "%b" if limit is None else "%n"
    constant = "" if limit is None else f"%n = stablehlo.constant dense<{limit}> : tensor<i32>"
    body = f"""
      %zero = stablehlo.constant dense<0> : tensor<i32> {constant}
      %r:2 = stablehlo.while(%i = %zero, %x = %a) : tensor<i32>, tensor<256x256xf32>
      cond {{ %c = stablehlo.compare LT, %i, {bound} : (tensor<i32>, tensor<i32>) -> tensor<i1> stablehlo.return %c : tensor<i1> }}
      do {{ %one = stablehlo.constant dense<1> : tensor<i32> %j = stablehlo.add %i, %one : tensor<i32> {inner}
           stablehlo.return %j, %y : tensor<i32>, tensor<256x256xf32> }}
      return %r#1 : tensor<256x256xf32>"""
    return function(("256x256xf32", "i32"), body, ("256x256xf32",))


class TestCounting:
    """Flops, bytes and transcendentals."""

    def test_a_multiply_add_is_two_flops(self):
        """A product's flops do not depend on its precision."""
        assert estimate(product(256, 512, 384), V5E).flops == 2 * 256 * 512 * 384
        assert estimate(product(256, 512, 384, "f32", "HIGHEST"), V5E).flops == 2 * 256 * 512 * 384

    def test_addition(self):
        """One flop per element; two operands and a result cross the bus."""
        cost = estimate(elementwise("add", "1024x1024xf32"), V5E)
        assert (cost.flops, cost.transcendentals, cost.hbm_bytes) == (2**20, 0, 3 * 2**22)

    def test_an_exponential_is_no_flop(self):
        """Transcendental functions are counted apart."""
        cost = estimate(elementwise("exponential", "1024x1024xf32", 1), V5E)
        assert (cost.flops, cost.transcendentals) == (0, 2**20)

    def test_softmax_is_three_kernels_over_the_operand(self):
        """Maximum, sum of exponentials, quotient: each reads the operand, the last two compute the exponential, and from
        the second on the operand has been fetched into VMEM, which the compiler counts four times.
        """
        elements, rows = 1024 * 2048, 1024
        cost = estimate(function(("1024x2048xf32",), SOFTMAX, ("1024x2048xf32",)), V5E)
        assert len(cost.fusions) == 3
        assert cost.transcendentals == 2 * elements
        assert cost.flops == 5 * elements - 2 * rows
        small = 4 * rows
        assert cost.hbm_bytes == (3 + 4 + 1) * 4 * elements + (1 + 2 + 2) * small

    @pytest.mark.parametrize(
        "body",
        [
            "return %a : tensor<4x8x128xf32>",
            "%0 = stablehlo.tanh %b : tensor<4x8x128xf32> return %a : tensor<4x8x128xf32>",
        ],
    )
    def test_returning_an_argument_copies_it(self, body):
        """A result is a buffer of its own: it is read and written once."""
        kind = "4x8x128xf32"
        assert estimate(function((kind, kind), body, (kind,)), V5E).hbm_bytes == 2 * 4 * 4 * 8 * 128

    def test_reshaping_an_argument_copies_it(self):
        """So does a reshape that is the result; one between two kernels is free."""
        body = "%0 = stablehlo.reshape %a : (tensor<8x128xf32>) -> tensor<1x8x128xf32> return %0 : tensor<1x8x128xf32>"
        assert estimate(function(("8x128xf32",), body, ("1x8x128xf32",)), V5E).hbm_bytes == 2 * 4 * 8 * 128

    def test_convolution_counts_positions_inside_the_base(self):
        """A 3x3 window over 8x8 with padding 1 misses one row or column at each edge."""
        body = (
            "%0 = stablehlo.convolution(%a, %b) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], "
            "window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} "
            ": (tensor<2x16x8x8xbf16>, tensor<32x16x3x3xbf16>) -> tensor<2x32x8x8xbf16> return %0 : tensor<2x32x8x8xbf16>"
        )
        cost = estimate(function(("2x16x8x8xbf16", "32x16x3x3xbf16"), body, ("2x32x8x8xbf16",)), V5E)
        assert cost.flops == 2 * 2 * 32 * 16 * (8 + 7 + 7) ** 2

    def test_an_epilogue_joins_its_product(self):
        """A bias and an activation after a product cost no kernel and no traffic of their own."""
        body = """
          %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<512x512xbf16>, tensor<512x512xbf16>) -> tensor<512x512xbf16>
          %1 = stablehlo.broadcast_in_dim %c, dims = [1] : (tensor<512xbf16>) -> tensor<512x512xbf16>
          %2 = stablehlo.add %0, %1 : tensor<512x512xbf16>
          %3 = stablehlo.tanh %2 : tensor<512x512xbf16>
          return %3 : tensor<512x512xbf16>"""
        cost = estimate(function(("512x512xbf16", "512x512xbf16", "512xbf16"), body, ("512x512xbf16",)), V5E)
        assert [kernel.ops for kernel in cost.fusions] == [("dot_general", "add", "tanh")]

    def test_dead_and_equal_code_costs_nothing(self):
        """What no result needs is dropped, what is computed twice is computed once."""
        body = """
          %0 = stablehlo.tanh %a : tensor<256x256xf32>
          %1 = stablehlo.tanh %a : tensor<256x256xf32>
          %2 = stablehlo.sine %a : tensor<256x256xf32>
          %3 = stablehlo.add %0, %1 : tensor<256x256xf32>
          return %3 : tensor<256x256xf32>"""
        assert estimate(function(("256x256xf32",), body, ("256x256xf32",)), V5E).transcendentals == 256 * 256

    @pytest.mark.parametrize(
        ("shape", "dtype", "padded"),
        [
            ((256, 384), "f32", 256 * 384 * 4),
            ((100, 128), "f32", 104 * 128 * 4),  # rows to 8, columns to 128
            ((100, 300), "f32", 128 * 304 * 4),  # the rows in the lanes lose less
            ((16, 512, 64), "bf16", 16 * 512 * 64 * 2),  # 512 goes into the lanes: nothing is lost
            ((8, 64, 56, 56), "bf16", 8 * 128 * 56 * 56 * 2),  # 64 features in 128 lanes lose less than a width of 56
            ((3, 1000), "f32", 4 * 1024 * 4),
            ((5000,), "f32", 5120 * 4),
            ((1, 4096), "bf16", 2 * 4096 * 2),  # rows of 16 bits come in pairs
            ((), "f32", 4),
            ((0, 128), "f32", 0),
        ],
    )
    def test_tiling(self, shape, dtype, padded):
        """Bytes in tiles of 8 x 128 over the two dimensions that pad least."""
        assert Spec.of(shape, dtype).padded == padded


class TestTime:
    """Seconds and units."""

    def test_roofline_of_a_large_product_is_its_flops(self):
        """On a v6e, 8192 x 8192 x 8192 in bf16 takes 2 x 8192^3 / 918 TFLOP/s and is bound by the MXU."""
        cost = estimate(product(8192, 8192, 8192), V6E)
        assert cost.roofline_seconds == pytest.approx(2 * 8192**3 / 918e12, rel=0.05)
        assert (cost.bound, cost.peak) == ("mxu", "bf16 flops")

    def test_roofline_of_an_addition_is_its_bytes(self):
        """A large addition on a v6e is bound by HBM at about 1,638 GB/s."""
        cost = estimate(elementwise("add", "8192x8192xf32"), V6E)
        assert cost.roofline_seconds == pytest.approx(3 * 4 * 8192**2 / 1638e9, rel=0.05)
        assert (cost.bound, cost.peak) == ("hbm", "hbm bandwidth")

    def test_passes(self):
        """An f32 product at HIGH takes three passes through the MXU, at HIGHEST six; bf16 takes one at any precision."""
        one, three, six = (
            estimate(product(1024, 1024, 1024, "f32", precision), V5E).mxu_seconds
            for precision in ("DEFAULT", "HIGH", "HIGHEST")
        )
        assert (three / one, six / one) == (pytest.approx(3), pytest.approx(6))
        bf16 = [estimate(product(1024, 1024, 1024, "bf16", p), V5E).mxu_seconds for p in ("DEFAULT", "HIGHEST")]
        assert bf16[0] == bf16[1] == one

    def test_a_product_pays_for_whole_tiles(self):
        """A depth of 129 costs as much as 256 on a 128-wide array, and 200 as much as 256 on a 256-wide one."""
        assert estimate(product(512, 129, 512), V5E).mxu_seconds == estimate(product(512, 256, 512), V5E).mxu_seconds
        assert estimate(product(512, 200, 512), V6E).mxu_seconds == estimate(product(512, 256, 512), V6E).mxu_seconds

    def test_eager_level_is_slower(self):
        """An op compiled on its own: 3,571,318 cycles for 4096^3 on a v5e, where compiled graphs take 1,083,068."""
        eager, compiled = (estimate(product(4096, 4096, 4096), V5E, level) for level in ("eager", "compiled"))
        assert eager.cycles == pytest.approx(3_571_318, rel=0.25)
        assert compiled.cycles == pytest.approx(1_083_068, rel=0.25)
        assert eager.expected_seconds > compiled.expected_seconds
        assert eager.expected_seconds == pytest.approx(eager.cycles / V5E.clock_hz, rel=0.05)
        assert eager.flops == compiled.flops

    def test_error_bar_holds_the_expectation(self):
        """The factors lie on both sides of one."""
        low, high = estimate(product(64, 64, 64), V5E).error_bar
        assert 0 < low < 1 < high

    def test_deterministic(self):
        """The same to the last digit, from text and however often."""
        module = function(("1024x2048xf32",), SOFTMAX, ("1024x2048xf32",))
        assert estimate(module, V5E) == estimate(module.encode(), V5E)

    def test_every_chip_that_has_figures(self):
        """A chip the compiler's estimates do not cover says whose habits it takes; one without figures is refused."""
        for row in CHIPS.values():
            if row.name == "v8t":
                with pytest.raises(UnknownFigure, match="v8t"):
                    estimate(product(512, 512, 512), row)
                continue
            cost = estimate(product(512, 512, 512), row)
            assert cost.roofline_seconds > 0
            assert bool(cost.assumptions) == (row.name in ("v4", "v8i"))


def attention_f32(rows):
    """Softmax of a batched product, straight into another one, in f32."""
    scores, heads, sums = f"tensor<8x{rows}x{rows}xf32>", f"tensor<8x{rows}x64xf32>", f"tensor<8x{rows}xf32>"
    body = f"""
      %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %s = stablehlo.dot_general %a, %b, batching_dims = [0] x [0], contracting_dims = [2] x [2] : ({heads}, {heads}) -> {scores}
      %m = stablehlo.reduce(%s init: %low) applies stablehlo.maximum across dimensions = [2] : ({scores}, tensor<f32>) -> {sums}
      %mb = stablehlo.broadcast_in_dim %m, dims = [0, 1] : ({sums}) -> {scores}
      %d = stablehlo.subtract %s, %mb : {scores}
      %e = stablehlo.exponential %d : {scores}
      %t = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [2] : ({scores}, tensor<f32>) -> {sums}
      %tb = stablehlo.broadcast_in_dim %t, dims = [0, 1] : ({sums}) -> {scores}
      %p = stablehlo.divide %e, %tb : {scores}
      %o = stablehlo.dot_general %p, %c, batching_dims = [0] x [0], contracting_dims = [2] x [1] : ({scores}, {heads}) -> {heads}
      return %o : {heads}"""
    kind = f"8x{rows}x64xf32"
    return function((kind, kind, kind), body, (kind,))


class TestWhatTheCompilerRewrites:
    """Mechanisms found in its programs; counts are what it reports for modules of this form."""

    def test_equal_reductions_are_one(self):
        """A mean that two functions compute is reduced once, also where one of them is called."""
        total = (
            "%z = stablehlo.constant dense<0.0> : tensor<f32> "
            "%r = stablehlo.reduce(%x init: %z) applies stablehlo.add across dimensions = [1] : "
            "(tensor<64x256xf32>, tensor<f32>) -> tensor<64xf32> "
        )
        called = (
            f"func.func private @sum(%x: tensor<64x256xf32>) -> tensor<64xf32> {{ {total} return %r : tensor<64xf32> }}"
        )
        main = function(
            ("64x256xf32",),
            total.replace("%x", "%a") + "%s = func.call @sum(%a) : (tensor<64x256xf32>) -> tensor<64xf32> "
            "%p = stablehlo.multiply %r, %s : tensor<64xf32> return %p : tensor<64xf32>",
            ("64xf32",),
        )
        assert estimate(f"module {{ {called} {main} }}", V5E).flops == 64 * 255 + 64

    def test_two_bounds_are_one_clamp(self):
        """min(max(x, 0), 6) is one operation."""
        body = (
            "%l = stablehlo.constant dense<0.0> : tensor<64x256xf32> %h = stablehlo.constant dense<6.0> : tensor<64x256xf32> "
            "%0 = stablehlo.maximum %a, %l : tensor<64x256xf32> %1 = stablehlo.minimum %0, %h : tensor<64x256xf32> "
            "return %1 : tensor<64x256xf32>"
        )
        assert estimate(function(("64x256xf32",), body, ("64x256xf32",)), V5E).flops == 64 * 256

    def test_scalars_are_multiplied_first(self):
        """(x * 0.5) * s takes one operation per element and one for the scalar."""
        body = (
            "%h = stablehlo.constant dense<0.5> : tensor<64x256xf32> "
            "%s = stablehlo.broadcast_in_dim %b, dims = [] : (tensor<f32>) -> tensor<64x256xf32> "
            "%0 = stablehlo.multiply %a, %h : tensor<64x256xf32> %1 = stablehlo.multiply %0, %s : tensor<64x256xf32> "
            "return %1 : tensor<64x256xf32>"
        )
        assert estimate(function(("64x256xf32", "f32"), body, ("64x256xf32",)), V5E).flops == 64 * 256 + 1

    def test_its_own_softmax_call(self):
        """Long rows in f32 go to a call whose flops and bytes the compiler does not count; they are executed all the same."""
        cost = estimate(attention_f32(512), V5E)
        product = 2 * 8 * 512 * 512 * 64
        assert cost.flops == product
        assert cost.executed_flops == 2 * product + 5 * 8 * 512 * 512
        assert cost.mxu_seconds > 0
        assert any("online_softmax" in text for text in cost.assumptions)

    def test_short_rows_stay_in_their_products(self):
        """Rows shorter than the side of the MXU are normalised in the product's kernel."""
        cost = estimate(attention_f32(64), V5E)
        assert cost.flops >= 2 * 2 * 8 * 64 * 64 * 64

    def test_a_small_batch_is_split(self):
        """A convolution over fewer than eight images divides its width into eight parts, each with one position more."""
        body = (
            "%0 = stablehlo.convolution(%a, %b) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], "
            "window = {stride = [1, 1], pad = [[1, 1], [1, 1]]} {batch_group_count = 1 : i64, feature_group_count = 1 : i64} : "
            "(tensor<NxCxHxHxbf16>, tensor<CxCx3x3xbf16>) -> tensor<NxCxHxHxbf16> return %0 : tensor<NxCxHxHxbf16>"
        )
        few, many = (
            estimate(
                function((f"{n}x64x32x32xbf16", "64x64x3x3xbf16"), body.replace("N", n).replace("C", "64").replace("H", "32"),
                         (f"{n}x64x32x32xbf16",)),
                V5E,
            )
            for n in ("4", "8")
        )  # fmt: skip
        rows = 3 * 32 - 2  # window positions inside the image
        assert few.flops == 2 * 4 * 64 * 64 * rows * (8 * (32 // 8 + 1) * 3)
        assert many.flops == 2 * 8 * 64 * 64 * rows * rows
        assert few.hbm_bytes > many.hbm_bytes  # of half the images

    def test_two_cores_share_no_vmem(self):
        """On a v5p the result of a product goes through HBM to the next kernel, on a v5e it stays."""
        body = (
            "%0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0] : (tensor<512x512xbf16>, tensor<512x512xbf16>) -> "
            "tensor<512x512xbf16> %1 = stablehlo.transpose %0, dims = [1, 0] : (tensor<512x512xbf16>) -> tensor<512x512xbf16> "
            "%2 = stablehlo.dot_general %1, %1, contracting_dims = [1] x [0] : (tensor<512x512xbf16>, tensor<512x512xbf16>) -> "
            "tensor<512x512xbf16> return %2 : tensor<512x512xbf16>"
        )
        module = function(("512x512xbf16",) * 2, body, ("512x512xbf16",))
        assert estimate(module, chip("v5p")).executed_bytes > estimate(module, V5E).executed_bytes


class TestControl:
    """Loops, branches and collectives."""

    def test_a_counted_loop_runs_its_body_as_often(self):
        """Ten iterations take ten bodies; the compiler's accounting has one; the estimate says both."""
        one, ten = estimate(loop(1), V5E), estimate(loop(10), V5E)
        assert ten.transcendentals == one.transcendentals == 256 * 256
        assert ten.hbm_bytes == one.hbm_bytes
        assert ten.executed_bytes - one.executed_bytes >= 8 * 2 * 256 * 256 * 4
        assert ten.expected_seconds > 5 * one.expected_seconds
        assert any("10 iterations" in text for text in ten.assumptions)

    def test_an_unknown_count_is_stated(self):
        """A loop to a bound that is an argument is counted once, and the estimate says so."""
        cost = estimate(loop(None), V5E)
        assert cost.transcendentals == 256 * 256
        assert any("iterations is not known" in text for text in cost.assumptions)

    def test_all_reduce_over_a_ring(self):
        """2 (n-1)/n of the operand over both directions of a 50 GB/s link, and a hop each way around half the ring."""
        kind, size, devices = "1024x1024xf32", 4 * 2**20, 8
        groups = "dense<[[0,1,2,3,4,5,6,7]]> : tensor<1x8xi64>"
        body = f"""%0 = "stablehlo.all_reduce"(%a) <{{replica_groups = {groups}}}> ({{
          ^bb0(%x: tensor<f32>, %y: tensor<f32>): %s = stablehlo.add %x, %y : tensor<f32> stablehlo.return %s : tensor<f32>
          }}) : (tensor<{kind}>) -> tensor<{kind}> return %0 : tensor<{kind}>"""
        cost = estimate(function((kind,), body, (kind,)), V5E)
        assert cost.collectives[0].seconds == pytest.approx(2 * size * 7 / 8 / 100e9 + devices * 1e-6)
        assert cost.ici_seconds == cost.collectives[0].seconds
        assert cost.roofline_seconds > cost.ici_seconds
        assert any("ring" in text for text in cost.assumptions)

    def test_collectives_by_hand(self):
        """Bytes and hops over rings and lines; all axes of a torus share the work; the data-centre network gets the rest."""
        v5p, size = chip("v5p"), 1e9  # links of 100 GB/s one way, a hop of 1 us
        ring, line = (
            transfer("all_gather", size, [Ring(4)], v5p),
            transfer("all_gather", size, [Ring(4, closed=False)], v5p),
        )
        assert (ring.ici, line.ici) == (pytest.approx(3e9 / 200e9 + 2e-6), pytest.approx(3e9 / 100e9 + 3e-6))
        torus = [Ring(4), Ring(4), Ring(8)]
        assert transfer("all_reduce", size, torus, v5p).ici == pytest.approx(2e9 * 127 / 128 / 600e9 + 16e-6)
        assert transfer("reduce_scatter", size, torus, v5p).ici == pytest.approx(1e9 * 127 / 128 / 600e9 + 8e-6)
        # 4 x 4 chips hold 1 GB each beside every cut of the long axis; a quarter of 128 GB crosses 32 links.
        assert transfer("all_to_all", size, torus, v5p).ici == pytest.approx(32e9 / (32 * 100e9) + 8e-6)
        far = transfer("all_reduce", size, torus, v5p, slices=2)
        assert far.dcn == pytest.approx(2e9 / 128 / 2 / v5p.dcn_bandwidth + 20e-6)
        assert transfer("all_reduce", size, [Ring(1)], v5p).seconds == 0

    def test_collectives_of_a_slice(self):
        """A group of every device uses every axis, another one is a ring; the assumption says which; unknown links say so."""
        whole, said = over_slice("all_gather", 1e9, 64, 64, slice_named("v5p-4x4x4"))
        assert whole is not None
        assert whole.ici == pytest.approx(63e9 / 600e9 + 6e-6)
        assert "every axis of its closed 4x4x4 torus" in said
        part, said = over_slice("all_gather", 1e9, 4, 64, slice_named("v5p-4x4x4"))
        assert part is not None
        assert part.ici == pytest.approx(3e9 / 200e9 + 2e-6)
        assert "ring along one torus axis" in said
        small, said = over_slice("all_gather", 1e9, 16, 16, slice_named("v5p-1x1x1"))
        assert small is not None
        assert small.ici == pytest.approx(15e9 / 300e9 + 5e-6)
        assert "open 2x2x4 torus" in said
        assert over_slice("all_gather", 1e9, 2, 2, Slice(chip("v8i"), (1, 1, 1)))[0] is None


class TestRefusals:
    """What cannot be costed is an error or a stated assumption, never a silent zero."""

    def test_unknown_level(self):
        """A level that does not exist is refused with the ones that do."""
        with pytest.raises(ValueError, match="eager or compiled"):
            estimate(product(8, 8, 8), V5E, "fast")

    def test_custom_calls_are_assumed(self):
        """A custom call counts the bytes of its operands and results, and the estimate names it."""
        body = (
            "%0 = stablehlo.custom_call @mystery(%a) : (tensor<1024x1024xf32>) -> tensor<1024x1024xf32> "
            "return %0 : tensor<1024x1024xf32>"
        )
        cost = estimate(function(("1024x1024xf32",), body, ("1024x1024xf32",)), V5E)
        assert cost.hbm_bytes >= 2 * 2**22
        assert cost.roofline_seconds > 0
        assert any("mystery" in text for text in cost.assumptions)

    @pytest.mark.parametrize(
        ("module", "error", "words"),
        [
            ("func.func public @main(", InvalidArgument, "malformed"),
            ("func.func public @other() { return }", InvalidArgument, "main"),
            (elementwise("add", "?x4xf32"), InvalidArgument, "dynamic"),
            (elementwise("add", "4x!quant.uniform<i8:f32, 1.0>"), (InvalidArgument, Unimplemented), "quant|malformed"),
        ],
    )
    def test_modules_that_cannot_be_costed(self, module, error, words):
        """Malformed and dynamic modules raise the protocol's errors."""
        with pytest.raises(error, match=words):
            estimate(module, V5E)


def test_growth_is_monotone():
    """More of the same is never cheaper."""
    sizes = [estimate(elementwise("add", f"{2**n}x128xf32"), V5E).expected_seconds for n in range(4, 16)]
    assert all(small <= large for small, large in itertools.pairwise(sizes))
    assert all(math.isfinite(size) for size in sizes)


def test_joined_kernels_never_wait_for_each_other():
    """A row sum of ``y`` is needed beside exp(x), whose product is needed beside that sum: joining both would be a circle."""
    whole, row, scalar = "512x512xf32", "512xf32", "f32"
    body = f"""%h = stablehlo.exponential %a : tensor<{whole}>
      %z = stablehlo.constant dense<0.0> : tensor<{scalar}>
      %s = stablehlo.reduce(%b init: %z) applies stablehlo.add across dimensions = [1]
        : (tensor<{whole}>, tensor<{scalar}>) -> tensor<{row}>
      %sb = stablehlo.broadcast_in_dim %s, dims = [0] : (tensor<{row}>) -> tensor<{whole}>
      %i = stablehlo.multiply %a, %sb : tensor<{whole}>
      %d = stablehlo.dot_general %h, %c, contracting_dims = [1] x [0] : (tensor<{whole}>, tensor<{whole}>) -> tensor<{whole}>
      %m = stablehlo.reduce(%d init: %z) applies stablehlo.add across dimensions = [0]
        : (tensor<{whole}>, tensor<{scalar}>) -> tensor<{row}>
      %mb = stablehlo.broadcast_in_dim %m, dims = [1] : (tensor<{row}>) -> tensor<{whole}>
      %k = stablehlo.multiply %b, %mb : tensor<{whole}>
      return %h, %i, %k : tensor<{whole}>, tensor<{whole}>, tensor<{whole}>"""
    found = estimate(function([whole] * 3, body, [whole] * 3), V5E)
    assert found.flops >= 2 * 512**3
    assert found.hbm_bytes >= 6 * 4 * 512**2  # each argument once, and each result


def test_a_circle_of_kernels_is_refused():
    """Never an endless loop: whoever asks charges the launch with its traffic, and says why."""
    nodes = [Node("add", [], Spec.of((2,), "f32")) for _ in range(2)]
    circle = [Kernel([node], {}, "loop", node, order) for order, node in enumerate(nodes)]
    circle[0].reads, circle[1].reads = [nodes[1]], [nodes[0]]
    with pytest.raises(Unimplemented, match="wait for each other"):
        _schedule(circle)
    circle[1].reads = []
    assert _schedule(circle) == [circle[1], circle[0]]
