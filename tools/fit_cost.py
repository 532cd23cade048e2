"""Fit the cost model's constants and report how well they hold: ``python -m tools.fit_cost``.

Reads the recorded compiler estimates in ``tests/data/libtpu_aot``, fits ``simulator/cost/constants.json`` to all of them,
then fits again without each family in turn and scores the family that was left out. Starts from the same priors every
time, so a family's own figures never reach the constants it is scored with. ``--write`` writes the constants, and the
tables into ``docs/cost-model.md`` between its markers. ``--further`` only scores the constants that are there, on the modules
of ``further.json.xz``, which no fit sees; with ``--write`` that table is written instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import lzma
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emutpu.simulator.chips import chip
from emutpu.simulator.cost.estimate import Estimate, Model
from emutpu.simulator.cost.graph import Graph, read
from emutpu.simulator.cost.kernels import Kernel, fuse
from emutpu.simulator.cost.memory import is_bitcast
from emutpu.simulator.cost.rates import DATA, Rates, expected
from emutpu.simulator.cost.simplify import simplify
from tools.layout import ROOT

__all__ = ["FAMILIES", "Case", "Score", "cases", "fit", "leave_one_out", "main", "priors", "score"]

RECORDS = ROOT / "tests" / "data" / "libtpu_aot"
FURTHER = RECORDS / "further.json.xz"
UNSEEN = RECORDS / "unseen.json.xz"  # recorded when the model was done, and nothing changed since for their sake
PAGE = ROOT / "docs" / "cost-model.md"
# A case belongs to the first family whose prefix its name has.
FAMILIES: dict[str, tuple[str, ...]] = {
    "matrix products": ("matmul", "bmm"),
    "elementwise": ("add", "exp", "gelu", "silu"),
    "movement": ("transpose", "concat", "dus"),
    "reductions": ("sum", "argmax"),
    "normalisation": ("softmax", "layernorm", "rmsnorm", "bn"),
    "gather": ("embed",),
    "convolutions": ("conv",),
    "windows": ("maxpool", "cumsum"),
    "attention": ("attention", "block"),
    "perceptrons": ("mlp",),
    "optimizer": ("adam",),
    "cross entropy": ("ce",),
}
PER_CHIP = ("bandwidth", "peak", "stream", "launch", "mxu")
# Where a search starts: datasheet rates for the chip, and round multiples of the time that 4 KiB take.
PRIORS = {"reduce": 1.0, "plain": 2.0, "plain_read": 1.0, "plain_16": 0.5, "turn": 3.0, "result": 1.5, "kept": 0.5,
          "scan": 0.3, "operation": 0.05, "transcendental": 0.1}  # fmt: skip
STEPS = (0.7, 0.85, 0.93, 0.98, 1.02, 1.07, 1.18, 1.4)
ROUNDS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One recorded module on one chip, fused already (fusion depends on no constant that is fitted)."""

    name: str
    chip: str
    family: str
    graph: Graph
    kernels: list[Kernel]
    truth: Mapping[str, float | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """Model over truth of one case; None where the compiler gave no figure."""

    name: str
    chip: str
    family: str
    flops: float | None
    hbm_bytes: float | None
    seconds: float | None
    cycles: float | None
    modelled_cycles: float
    true_cycles: float


def _family(name: str) -> str:
    return next(family for family, prefixes in FAMILIES.items() if name.startswith(tuple(p for p in prefixes)))


def cases(document: Mapping[str, Any], folder: Path = RECORDS) -> list[Case]:
    """Every recorded case; of the constants in ``document`` only the chips' flags matter here."""
    rows = document["chips"]
    recorded = json.loads((folder / "estimates.json").read_text(encoding="utf-8"))["chips"]
    found = []
    for chip_name, records in recorded.items():
        constants = Rates.of(chip(chip_name), rows[chip_name], document["shared"])
        for name, truth in records.items():
            module = (folder / f"{name}.mlir").read_text(encoding="utf-8")
            graph = simplify(read(module), vector_products=constants.vector_products)
            kernels = [kernel for kernel in fuse(graph, constants) if not is_bitcast(kernel, graph.outputs)]
            found.append(Case(name, chip_name, _family(name), graph, kernels, truth))
    return found


def further(document: Mapping[str, Any], recordings: Path = FURTHER) -> list[Score]:
    """Scores of modules that no fit sees; what the compiler gave no figure for is None."""
    recorded = json.loads(lzma.decompress(recordings.read_bytes()))
    found = []
    for chip_name, records in recorded["chips"].items():
        constants = Rates.of(chip(chip_name), document["chips"][chip_name], document["shared"])
        for name, truth in records.items():
            cost = Model(chip(chip_name), "compiled", constants, expected()).run(read(recorded["modules"][name]))
            found.append(_scored(name, chip_name, "further", cost, truth))
    return found


def further_table(document: Mapping[str, Any]) -> str:
    """The Markdown table of them, chip by chip."""
    scores = further(document)
    what = [row for row, _, _ in summary(scores)]
    lines = [f"| chip | modules | {' | '.join(what)} |", "|---" * (len(what) + 2) + "|"]
    chips = dict.fromkeys(each.chip for each in scores)
    groups = {name: [each for each in scores if each.chip == name] for name in chips} | {"all": scores}
    groups["unseen"] = further(document, UNSEEN)
    for name, group in groups.items():
        lines.append(f"| {name} | {len(group)} | {' | '.join(value for _, _, value in summary(group))} |")
    return "\n".join(lines)


def _evaluate(case: Case, constants: Rates) -> Estimate:
    return Model(chip(case.chip), "compiled", constants, expected()).cost(case.graph, case.kernels)


def _loss(group: Sequence[Case], constants: Rates) -> float:
    """Mean absolute logarithm of cycles and seconds over truth, each case's part at most a factor of four."""
    total = 0.0
    for case in group:
        cost = _evaluate(case, constants)
        for modelled, truth in (
            (cost.cycles, case.truth["estimated_cycles"]),
            (cost.roofline_seconds, case.truth["optimal_seconds"]),
        ):
            if truth:
                total += min(math.log(4), abs(math.log(modelled / truth)))
    return total / max(1, len(group))


def priors(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Constants that no recording has touched: datasheet rates of the chips and round multiples."""
    made: dict[str, Any] = {"chips": {}, "shared": dict(PRIORS)}
    for name, row in rows.items():
        table = chip(name)
        bandwidth, peak = table.hbm_bandwidth / table.devices, table.bf16_flops / table.devices
        start = {
            "bandwidth": bandwidth,
            "peak": peak,
            "stream": 1.2 * 4096 / (bandwidth / table.figure("clock_hz")),
            "launch": 2000.0,
        }
        made["chips"][name] = {**row, **start, "mxu": 1.05}
    return made


def fit(rows: Mapping[str, Mapping[str, Any]], group: Sequence[Case]) -> dict[str, Any]:
    """Constants by coordinate descent from the priors: a chip's own on its cases, the shared ones on all."""
    constants = priors(rows)
    by_chip = {name: [case for case in group if case.chip == name] for name in rows}
    for _ in range(ROUNDS):
        for name, members in by_chip.items():
            for key in PER_CHIP:
                _descend(constants["chips"][name], key, lambda n=name, m=members: _chip_loss(constants, n, m))
        for key in PRIORS:
            _descend(constants["shared"], key, lambda: sum(_chip_loss(constants, n, m) for n, m in by_chip.items()))
    return constants


def _chip_loss(constants: Mapping[str, Any], name: str, members: Sequence[Case]) -> float:
    return _loss(members, Rates.of(chip(name), constants["chips"][name], constants["shared"]))


def _descend(table: dict[str, Any], key: str, loss: Any) -> None:
    best, start = loss(), table[key]
    chosen = start
    for step in STEPS:
        table[key] = start * step
        value = loss()
        if value < best - 1e-9:
            best, chosen = value, start * step
    table[key] = chosen


def score(case: Case, constants: Mapping[str, Any]) -> Score:
    """How the constants do on one case."""
    cost = _evaluate(case, Rates.of(chip(case.chip), constants["chips"][case.chip], constants["shared"]))

    return _scored(case.name, case.chip, case.family, cost, case.truth)


def _scored(name: str, chip_name: str, family: str, cost: Estimate, truth: Mapping[str, float | None]) -> Score:
    def ratio(modelled: float, figure: str) -> float | None:
        known = truth[figure]
        return modelled / known if known else None

    return Score(
        name,
        chip_name,
        family,
        ratio(cost.flops, "flops"),
        ratio(cost.hbm_bytes, "bytes_accessed"),
        ratio(cost.roofline_seconds, "optimal_seconds"),
        ratio(cost.cycles, "estimated_cycles"),
        cost.cycles,
        truth["estimated_cycles"] or 0.0,
    )


def leave_one_out(rows: Mapping[str, Mapping[str, Any]], group: Sequence[Case]) -> list[Score]:
    """Every case scored with constants that never saw its family."""
    found = []
    for family in FAMILIES:
        constants = fit(rows, [case for case in group if case.family != family])
        found += [score(case, constants) for case in group if case.family == family]
        print(f"  {family} left out", file=sys.stderr)
    return found


def errors(scores: Sequence[Score], field: str) -> list[float]:
    """Sorted relative errors of a field, where there is a truth."""
    return sorted(abs(value - 1) for s in scores if (value := getattr(s, field)) is not None)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the sorted ``values`` do not exceed."""
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def spearman(scores: Sequence[Score]) -> float:
    """Rank correlation of modelled and estimated cycles over all cases."""
    pairs = [(s.modelled_cycles, s.true_cycles) for s in scores if s.true_cycles]

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(values)
        return [(order.index(v) + len(order) - 1 - order[::-1].index(v)) / 2 for v in values]

    left, right = ranks([p[0] for p in pairs]), ranks([p[1] for p in pairs])
    mean = (len(pairs) - 1) / 2
    covariance = sum((a - mean) * (b - mean) for a, b in zip(left, right, strict=True))
    spread = math.sqrt(sum((a - mean) ** 2 for a in left) * sum((b - mean) ** 2 for b in right))
    return covariance / spread


def summary(scores: Sequence[Score]) -> list[tuple[str, str, str]]:
    """What must hold, the bound, and what is."""
    seconds, cycles = errors(scores, "seconds"), errors(scores, "cycles")
    flops, moved = errors(scores, "flops"), errors(scores, "hbm_bytes")
    return [
        ("`roofline_seconds`, median error", "≤ 12 %", f"{quantile(seconds, 0.5):.1%}"),
        ("`roofline_seconds`, 90th percentile", "≤ 35 %", f"{quantile(seconds, 0.9):.1%}"),
        ("`cycles`, median error", "≤ 25 %", f"{quantile(cycles, 0.5):.1%}"),
        ("`cycles`, Spearman", "≥ 0.95", f"{spearman(scores):.3f}"),
        ("`flops` within 3 %", "≥ 90 %", f"{sum(e <= 0.03 for e in flops) / len(flops):.1%}"),
        ("`hbm_bytes` within 20 %", "≥ 80 %", f"{sum(e <= 0.2 for e in moved) / len(moved):.1%}"),
    ]


def tables(scores: Sequence[Score]) -> str:
    """The Markdown tables of the page: what must hold, then each family."""
    lines = ["| | must hold | holds |", "|---|---|---|"]
    lines += [f"| {what} | {bound} | {value} |" for what, bound, value in summary(scores)]
    lines += ["", "| family left out | cases | seconds median | seconds worst | cycles median | cycles worst | flops worst | bytes worst |",
              "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for family in FAMILIES:
        members = [s for s in scores if s.family == family]
        cells = []
        for field, shares in (
            ("seconds", (0.5, 1.0)),
            ("cycles", (0.5, 1.0)),
            ("flops", (1.0,)),
            ("hbm_bytes", (1.0,)),
        ):
            found = errors(members, field)
            cells += [f"{quantile(found, share):.1%}" if found else "–" for share in shares]
        lines.append(f"| {family} | {len(members)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_page(text: str, name: str, page: Path = PAGE) -> None:
    """Replace what stands between the markers ``<!-- name -->`` and ``<!-- /name -->``."""
    old = page.read_text(encoding="utf-8")
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, _, rest = old.partition(start)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{start}\n{text}\n{end}{tail}", encoding="utf-8")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> int:
    """Fit, score and print; exit code 1 where something that must hold does not."""
    parser = argparse.ArgumentParser(prog="python -m tools.fit_cost", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the constants and the page")
    parser.add_argument("--further", action="store_true", help="score modules that no fit sees")
    options = parser.parse_args()
    document = json.loads(DATA.read_text(encoding="utf-8"))
    if options.further:
        found = further_table(document)
        print(found)
        if options.write:
            write_page(found, "further")
        return 0
    group = cases(document)
    if options.write:
        constants = fit(document["chips"], group)
        document["chips"] = {n: {k: _rounded(v) for k, v in row.items()} for n, row in constants["chips"].items()}
        document["shared"] = {k: _rounded(v) for k, v in constants["shared"].items()}
        DATA.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scores = leave_one_out(document["chips"], group)
    print(tables(scores))
    if options.write:
        write_page(tables(scores), "left-out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
