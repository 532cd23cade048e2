"""Points measured on real chips, as modules: they calibrate ``expected_seconds`` and its error bar.

``python -m tools.measured_cost`` fits the efficiency of products to all of them, then without each in turn, and says
whether the error bar covers the point that was left out; ``--write`` puts the figures into the constants and the page.
The points are one user's notes on a v6e (August 2026). Rates were noted without shapes for all but the square product and
the sort; the shapes here are assumptions within what the notes say.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence

from emutpu.simulator.chips import chip
from emutpu.simulator.cost.estimate import Model
from emutpu.simulator.cost.graph import read
from emutpu.simulator.cost.rates import DATA, Expected, expected, rates
from tools.fit_cost import write_page

__all__ = ["POINTS", "Point", "bar", "fit", "leave_one_out", "main", "predicted"]

FLOOR = 2.0  # an error bar is never narrower than this factor: nothing measured is known better
MARGIN = 1.25


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A module, and the seconds that a v6e took for it."""

    name: str
    module: str
    seconds: float
    product: bool


def _product(rows: int, depth: int, columns: int) -> str:
    a, b, c = (f"tensor<{x}x{y}xbf16>" for x, y in ((rows, depth), (depth, columns), (rows, columns)))
    return (
        f"func.func public @main(%a: {a}, %b: {b}) -> {c} {{ %0 = stablehlo.dot_general %a, %b, "
        f"contracting_dims = [1] x [0] : ({a}, {b}) -> {c} return %0 : {c} }}"
    )


def _attention(batch: int, tokens: int, width: int) -> str:
    value, score, row = (
        f"tensor<{batch}x{tokens}x{width}xbf16>",
        f"tensor<{batch}x{tokens}x{tokens}xf32>",
        f"tensor<{batch}x{tokens}xf32>",
    )
    half = f"tensor<{batch}x{tokens}x{tokens}xbf16>"
    return f"""func.func public @main(%q: {value}, %k: {value}, %v: {value}) -> {value} {{
      %low = stablehlo.constant dense<0xFF800000> : tensor<f32>
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %s = stablehlo.dot_general %q, %k, batching_dims = [0] x [0], contracting_dims = [2] x [2] : ({value}, {value}) -> {score}
      %m = stablehlo.reduce(%s init: %low) applies stablehlo.maximum across dimensions = [2] : ({score}, tensor<f32>) -> {row}
      %mb = stablehlo.broadcast_in_dim %m, dims = [0, 1] : ({row}) -> {score}
      %d = stablehlo.subtract %s, %mb : {score}
      %e = stablehlo.exponential %d : {score}
      %t = stablehlo.reduce(%e init: %zero) applies stablehlo.add across dimensions = [2] : ({score}, tensor<f32>) -> {row}
      %tb = stablehlo.broadcast_in_dim %t, dims = [0, 1] : ({row}) -> {score}
      %p = stablehlo.divide %e, %tb : {score}
      %h = stablehlo.convert %p : ({score}) -> {half}
      %o = stablehlo.dot_general %h, %v, batching_dims = [0] x [0], contracting_dims = [2] x [1] : ({half}, {value}) -> {value}
      return %o : {value}
    }}"""


def _sorts(count: int) -> str:
    """A sort, and an argsort of the same values."""
    kind, flag = f"tensor<{count}xi64>", "tensor<i1>"
    return f"""func.func public @main(%x: {kind}) -> ({kind}, {kind}) {{
      %i = stablehlo.iota dim = 0 : {kind}
      %s = "stablehlo.sort"(%x) <{{dimension = 0 : i64, is_stable = true}}> ({{
      ^bb0(%a: tensor<i64>, %b: tensor<i64>):
        %c = stablehlo.compare LT, %a, %b : (tensor<i64>, tensor<i64>) -> {flag}
        stablehlo.return %c : {flag}
      }}) : ({kind}) -> {kind}
      %t:2 = "stablehlo.sort"(%x, %i) <{{dimension = 0 : i64, is_stable = true}}> ({{
      ^bb0(%a: tensor<i64>, %b: tensor<i64>, %p: tensor<i64>, %q: tensor<i64>):
        %c = stablehlo.compare LT, %a, %b : (tensor<i64>, tensor<i64>) -> {flag}
        stablehlo.return %c : {flag}
      }}) : ({kind}, {kind}) -> ({kind}, {kind})
      return %s, %t#1 : {kind}, {kind}
    }}"""


def _rate(rows: int, depth: int, columns: int, tera: float) -> float:
    return 2.0 * rows * depth * columns / (tera * 1e12)


POINTS = (
    Point("8192 x 8192 x 8192 at 361 TFLOP/s", _product(8192, 8192, 8192), _rate(8192, 8192, 8192, 361), True),
    Point("QKV product at 259 TFLOP/s", _product(48960, 1024, 3072), _rate(48960, 1024, 3072, 259), True),
    Point("feed-forward product at 212 TFLOP/s", _product(48960, 1024, 4096), _rate(48960, 1024, 4096, 212), True),
    Point("attention, 51 tokens, head 32, at 3.0 TFLOP/s", _attention(7680, 51, 32), 4.0 * 7680 * 51 * 51 * 32 / 3.0e12, False),
    Point("sort and argsort of 6.29 M int64 in 82 ms", _sorts(6_290_000), 0.082, False),
)  # fmt: skip


def predicted(point: Point, constants: Expected) -> float:
    """``expected_seconds`` of a point on a v6e."""
    table = chip("v6e")
    return Model(table, "compiled", rates(table), constants).run(read(point.module)).expected_seconds


def fit(points: Sequence[Point], constants: Expected) -> Expected:
    """The efficiency at which products run, by the geometric mean over ``points``."""
    logs = []
    for point in points:
        if point.product:
            perfect = predicted(point, dataclasses.replace(constants, matmul_efficiency=1.0))
            logs.append(math.log(perfect / point.seconds))
    return dataclasses.replace(constants, matmul_efficiency=math.exp(sum(logs) / len(logs)) if logs else 0.5)


def bar(points: Sequence[Point], constants: Expected) -> Expected:
    """The factors of the error bar: what the points used differ by, with a margin, and never less than the floor."""
    worst = max(abs(math.log(point.seconds / predicted(point, constants))) for point in points)
    factor = max(FLOOR, MARGIN * math.exp(worst))
    return dataclasses.replace(constants, low=1 / factor, high=factor)


def leave_one_out(points: Sequence[Point] = POINTS) -> list[tuple[Point, float, Expected]]:
    """For each point: measured over expected with constants that never saw it, and those constants."""
    found = []
    for point in points:
        others = [other for other in points if other is not point]
        constants = bar(others, fit(others, expected()))
        found.append((point, point.seconds / predicted(point, constants), constants))
    return found


def table(rows: Sequence[tuple[Point, float, Expected]]) -> str:
    """The Markdown table of the page."""
    lines = ["| measured on a v6e, left out | measured / expected | error bar | covered |", "|---|---|---|---|"]
    for point, ratio, constants in rows:
        covered = "yes" if constants.low <= ratio <= constants.high else "no"
        lines.append(f"| {point.name} | {ratio:.2f} | {constants.low:.2f} – {constants.high:.2f} | {covered} |")
    return "\n".join(lines)


def main() -> int:
    """Print the table; exit code 1 where the bar covers less than four points in five."""
    parser = argparse.ArgumentParser(prog="python -m tools.measured_cost", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the constants and the page")
    options = parser.parse_args()
    rows = leave_one_out()
    print(table(rows))
    if options.write:
        constants = bar(POINTS, fit(POINTS, expected()))
        document = json.loads(DATA.read_text(encoding="utf-8"))
        document["expected"] = {k: float(f"{v:.3g}") for k, v in dataclasses.asdict(constants).items()}
        DATA.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        write_page(table(rows), "measured")
    covered = sum(constants.low <= ratio <= constants.high for _, ratio, constants in rows)
    return 0 if covered >= 0.8 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
