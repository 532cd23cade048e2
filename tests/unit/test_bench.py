"""The benchmark's frame: pairs, bounds, table, document. Measurements themselves are no tests."""

import json

import jsonschema
import pytest

from tools.bench import command
from tools.bench.case import Bounded, Case, Measurement, Plan, alternate
from tools.bench.report import Outcome, document, measurement_from, table
from tools.layout import ROOT


def case(bound, bounded=Bounded.RATIO):
    """A case that measures nothing."""
    return Case("x", "one thing", "another", "us", bound, lambda plan: Measurement(()), lambda: lambda: None, bounded)


@pytest.fixture
def schema():
    """The document's schema."""
    return json.loads((ROOT / "emutpu" / "schemas" / "bench.v1.json").read_text(encoding="utf-8"))


def test_the_ratio_is_taken_round_by_round():
    """One slow round moves neither median; the ratio is no quotient of medians."""
    measured = Measurement(((2.0, 1.0), (20.0, 10.0), (9.0, 1.0)))
    assert (measured.value, measured.baseline, measured.ratio) == (9.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("bounded", "bound", "holds"), [("ratio", 2.0, True), ("ratio", 1.9, False), ("value", 5.0, False)]
)
def test_bounds(bounded, bound, holds):
    """A bound is for the median ratio or for the median value, and equality is allowed."""
    assert case(bound, Bounded(bounded)).holds(Measurement(((6.0, 3.0),))) is holds


def test_rounds_alternate_and_the_first_is_dropped():
    """Subject and baseline take turns in going first; the warm-up round leaves no sample."""
    order = []

    def timed(name, seconds):
        return lambda: order.append(name) or seconds

    pairs = alternate(timed("a", 0.5), timed("b", 0.25), rounds=3, scale=2.0)
    assert "".join(order) == "abbaabba"
    assert pairs == ((1.0, 0.5),) * 3


def test_document_follows_its_schema(schema):
    """A measured case and a failed one both make valid rows; the failure's reason is in the notes."""
    measured = Measurement(((3.0, 1.0), (4.0, 2.0)), {"launches": 7.0})
    made = document([Outcome(case(2.5), measured), Outcome(case(1.0), None, "no such op")], quick=True)
    jsonschema.validate(made, schema)
    assert [row["ok"] for row in made["results"]] == [True, None]
    assert made["results"][0]["ratio"] == 2.5
    assert made["results"][0]["samples"][1] == {"value": 4.0, "baseline": 2.0, "ratio": 2.0}
    assert made["notes"] == {"results.x": "no such op"}


def test_table_has_a_line_per_case():
    """The table takes measured and failed cases."""
    assert table([Outcome(case(1.0), Measurement(((1.0, 1.0),))), Outcome(case(1.0), None, "why")]).row_count == 2


def test_a_measurement_survives_the_way_from_its_process():
    """What the child writes is what the parent reads."""
    measured = Measurement(((3.0, 1.0),), {"ops": 2.0})
    record = json.loads(json.dumps({"pairs": measured.pairs, "extra": dict(measured.extra)}))
    assert measurement_from(record) == measured


def test_list_names_every_case(capsys):
    """``--list`` measures nothing."""
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith(name) for line, name in zip(lines, command.cases(), strict=True)] == [True] * len(lines)


def test_an_unknown_case_is_wrong_usage():
    """Exit code 2, as of every command."""
    with pytest.raises(SystemExit) as stopped:
        command.main(["--only", "nothing"])
    assert stopped.value.code == 2


def test_a_quick_run_has_few_rounds():
    """At least three, so that a median means something."""
    assert (Plan().rounds(60), Plan(quick=True).rounds(60), Plan(quick=True).rounds(5)) == (60, 10, 3)


@pytest.mark.parametrize(
    ("code", "said", "told"),
    [
        (1, "a warning\nValueError: no\n", "exit code 1: ValueError: no"),
        (-11, "a warning\n", "signal SIGSEGV: a warning"),
    ],
)
def test_a_crash_is_told_from_an_error(code, said, told):
    """The last line may be a mere warning, so how the process ended comes first."""
    assert command._ended(code, said) == told


def test_one_case_end_to_end(tmp_path, schema, monkeypatch):
    """The smallest case runs in its own process; a bound that fails is an exit code with ``--check`` only."""
    path = tmp_path / "bench.json"
    assert command.main(["--only", "add_1", "--quick", "--json", str(path)]) == 0
    made = json.loads(path.read_text(encoding="utf-8"))
    jsonschema.validate(made, schema)
    (row,) = made["results"]
    assert row["name"] == "add_1"
    assert row["value"] > row["baseline"] > 0
