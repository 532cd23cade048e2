"""The cost model against what the real compiler estimated, and against what was measured."""

import json

import pytest

from emutpu.simulator.chips import chip
from emutpu.simulator.cost.estimate import Model, estimate
from emutpu.simulator.cost.rates import expected, rates
from tools import fit_cost, measured_cost

ROWS = json.loads(fit_cost.DATA.read_text(encoding="utf-8"))
BOUNDS = {"seconds": (0.12, 0.35), "cycles": (0.25, None)}


def holds(scores):
    """Assert the bounds of the model's contract."""
    for field, (median, ninetieth) in BOUNDS.items():
        found = fit_cost.errors(scores, field)
        assert fit_cost.quantile(found, 0.5) <= median, field
        assert ninetieth is None or fit_cost.quantile(found, 0.9) <= ninetieth, field
    assert fit_cost.spearman(scores) >= 0.95
    flops, moved = fit_cost.errors(scores, "flops"), fit_cost.errors(scores, "hbm_bytes")
    assert sum(error <= 0.03 for error in flops) >= 0.9 * len(flops)
    assert sum(error <= 0.2 for error in moved) >= 0.8 * len(moved)


@pytest.fixture(scope="module")
def group():
    """Every recorded case, read and fused once."""
    return fit_cost.cases(ROWS)


def test_committed_constants_hold(group):
    """Seconds, cycles, flops and bytes of the recorded modules are as close as promised."""
    holds([fit_cost.score(case, ROWS) for case in group])


def test_modules_that_no_fit_sees():
    """The same bounds hold on 337 further modules, compiled for up to four chips each."""
    scores = fit_cost.further(ROWS)
    assert len(scores) > 900
    holds(scores)


def test_modules_that_nobody_looked_at():
    """And on 72 modules that were recorded when the model was done."""
    holds(fit_cost.further(ROWS, fit_cost.UNSEEN))


def test_memory_of_the_recordings(group):
    """Bytes of arguments and results, tiled, are the compiler's within its padding of scalars; temporaries in HBM are for
    nine modules in ten.
    """
    close = 0
    for case in group:
        cost = Model(chip(case.chip), "compiled", rates(chip(case.chip)), expected()).cost(case.graph, case.kernels)
        assert cost.argument_bytes == pytest.approx(case.truth["argument_bytes"], abs=1024), case.name
        assert cost.output_bytes == pytest.approx(case.truth["output_bytes"], abs=1024), case.name
        close += abs(cost.temp_bytes - case.truth["temp_bytes"]) <= 0.1 * case.truth["temp_bytes"] + 2**20
    assert close >= 0.9 * len(group)


def test_every_recording_has_a_family(group):
    """No case escapes the leave-one-family-out evaluation, and every family has cases."""
    assert {case.family for case in group} == set(fit_cost.FAMILIES)


def test_eager_level_of_the_recordings():
    """Ops compiled on their own, at the compiler's lower level: cycles and seconds of 64 recordings."""
    recorded = json.loads((fit_cost.RECORDS / "eager.json").read_text(encoding="utf-8"))["chips"]
    cycles, seconds = [], []
    for name, rows in recorded.items():
        for case, truth in rows.items():
            module = (fit_cost.RECORDS / f"{case}.mlir").read_text(encoding="utf-8")
            cost = estimate(module, chip(name), "eager")
            cycles.append(abs(cost.cycles / truth["estimated_cycles"] - 1))
            seconds.append(abs(cost.roofline_seconds / truth["optimal_seconds"] - 1))
    assert len(cycles) == 64
    assert fit_cost.quantile(sorted(cycles), 0.5) <= 0.2
    assert fit_cost.quantile(sorted(cycles), 0.9) <= 0.35
    assert max(seconds) <= 0.02


def test_eager_level_against_measured_products():
    """Whoever measured the products did not say at which level: the error bar covers them at the eager one, too."""
    for point in (point for point in measured_cost.POINTS if point.product):
        cost = estimate(point.module, chip("v6e"), "eager")
        low, high = cost.error_bar
        assert low <= point.seconds / cost.expected_seconds <= high, point.name


def test_priors_hold_without_any_fit(group):
    """Datasheet rates and round multiples alone, which no recording has touched, rank the modules and meet the bounds of
    flops and bytes.
    """
    scores = [fit_cost.score(case, fit_cost.priors(ROWS["chips"])) for case in group]
    moved = fit_cost.errors(scores, "hbm_bytes")
    assert fit_cost.spearman(scores) >= 0.95
    assert sum(error <= 0.2 for error in moved) >= 0.8 * len(moved)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_every_family_left_out(group):
    """The same bounds with constants that never saw the family that is scored."""
    holds(fit_cost.leave_one_out(ROWS["chips"], group))


def test_error_bar_covers_what_was_measured():
    """At least four of five measured points lie in the error bar of a model that never saw them."""
    rows = measured_cost.leave_one_out()
    covered = [constants.low <= ratio <= constants.high for _, ratio, constants in rows]
    assert sum(covered) >= 0.8 * len(covered)


def test_page_shows_what_the_command_prints():
    """The table of measured points in the documentation is the one the command makes."""
    page = fit_cost.PAGE.read_text(encoding="utf-8")
    assert measured_cost.table(measured_cost.leave_one_out()) in page
