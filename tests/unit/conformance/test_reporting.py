"""What a report says of given answers: credit, tiers, and what it tells other programs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import jsonschema
import pytest

from emutpu._report import header
from emutpu.conformance import documents, gates, manifest, summaries
from tests.support.conformance_runs import BERT, LLAMA, RESNET, SIZES, SPECIAL, SWIN, answer_of, document_of
from tools.layout import ROOT


@pytest.fixture(scope="module")
def document():
    """One with an outcome of each kind that matters."""
    return document_of(SPECIAL, left_out=(SWIN,))


def models_of(*programs):
    """How many rows are such programs."""
    return sum(model.program in programs for model in manifest.models())


def valid(document):
    """Check against the schema."""
    schema = json.loads((ROOT / "emutpu/schemas/conformance.v1.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(document)), schema, cls=jsonschema.Draft202012Validator)


def test_document_follows_its_schema(document):
    """And is the same after JSON."""
    valid(document)
    valid(document_of(SPECIAL, modes=("strict", "defer", "compile")))


def test_rows_are_credited(document):
    """An outcome counts for every model of its program; what was not attempted counts nowhere."""
    smoke = [program.name for program in manifest.select("smoke")]
    rows = models_of(*smoke)
    absent = models_of(RESNET, SWIN)
    assert document["rows"] == len(document["models"]) == rows
    assert document["programs"] == len(document["results"]) == len(smoke)
    assert document["tier1"] == {"attempted": rows - absent, "passed": rows - absent, "failed": []}
    assert document["tier2"]["passed"] == rows - absent - models_of(LLAMA)
    assert len(document["tier2"]["failed"]) == models_of(LLAMA) > 40
    assert document["corpus_bugs"] == [RESNET]
    assert document["not_run"] == {"the run did not come to it": models_of(SWIN)}
    assert document["distinct_programs"] == len(smoke) - 1


def test_tiers_by_mode():
    """Rows, programs and distinct programs of each mode; a fingerprint passes when every program with it does."""
    same = {"fingerprint": "f" * 16}
    document = document_of(
        SPECIAL | {LLAMA: SPECIAL[LLAMA] | same, BERT: same}, left_out=(SWIN,), modes=("strict", "defer")
    )
    attempted = len(manifest.select("smoke")) - 2
    for tiers in document["by_mode"].values():
        assert tiers["emulated"]["programs"] == [attempted - 1, attempted]
        assert tiers["emulated"]["distinct"] == [attempted - 2, attempted - 1]
        assert tiers["tier1"]["distinct"] == [attempted - 1, attempted - 1]
        assert tiers["tier2"]["rows"][1] - tiers["tier2"]["rows"][0] == models_of(LLAMA)
        assert "tier3" not in tiers
    assert document["predicted_distinct"] == {"attempted": attempted - 1, "passed": attempted - 2}
    assert (
        document["predicted_on_chip"]["attempted"] == 2 * document["by_mode"]["strict"]["predicted_on_chip"]["rows"][1]
    )


def test_prediction_knows_the_missing_kernels(document):
    """A program that passes with an op that TorchTPU lacks would fail on the chip."""
    rows = [entry for entry in document["models"] if entry["program"] == BERT]
    assert all(entry["emulated"] and not entry["predicted_on_chip"] for entry in rows)
    assert rows[0]["missing_kernels"] == ["addbmm"]
    assert rows[0]["ops"] == 3
    predicted = document["predicted_on_chip"]
    assert predicted["attempted"] - predicted["passed"] == models_of(BERT, LLAMA)


def test_memory_is_judged_row_by_row():
    """Of one program the models that name more parameters than fit are not predicted; the program is, while one of them is."""
    document = document_of({}, sizes=SIZES)
    valid(document)
    rows = [entry for entry in document["models"] if entry["program"] == LLAMA]
    large = [entry["id"] for entry in rows if not entry["predicted_on_chip"]]
    assert 0 < len(large) < len(rows)
    assert any("70b" in name.lower() for name in large)
    assert all(entry["prediction_limits"][0].startswith("memory") for entry in rows if entry["id"] in large)
    result = next(entry for entry in document["results"] if entry["program"] == LLAMA)
    assert result["predicted_on_chip"]
    assert result["predicted_rows"] == len(rows) - len(large)
    tier = document["by_mode"]["strict"]["predicted_on_chip"]
    assert tier["rows"] == [document["rows"] - len(large), document["rows"]]
    assert tier["programs"] == [40, 40]
    assert document["predicted_on_chip"]["passed"] == tier["rows"][0]


def test_limits_are_those_of_the_gates():
    """The report shows what the gates judged by."""
    assert documents.LIMITS == {
        "max_rel_error": gates.LOGITS,
        "gradient_error": gates.GRADIENTS,
        "default_error": gates.DEFAULT_PRECISION,
    }
    assert set(documents.OUTCOMES) == set(gates.Outcome)


def test_infinite_errors_are_json():
    """A browser reads no infinity; the error says what happened."""
    infinite = {"outcome": "mismatch", "error": "relative error inf", "logit_error": float("inf"), "tier2": False}
    document = document_of({BERT: infinite | {"default_error": float("nan")}})
    valid(json.loads(json.dumps(document, allow_nan=False)))


def test_answers_from_elsewhere():
    """JSON lines with no more than an outcome become a document; a program that nobody knows is named, not dropped."""
    lines = [answer_of(BERT), {"program": RESNET, "mode": "defer", "outcome": "crash", "hardware": "TPU v5 lite"}]
    document = documents.imported([*lines, {"program": "timm/none", "mode": "strict", "outcome": "pass"}], "v5e")
    assert document["hardware"] == "TPU v5 lite"
    assert document["modes"] == ["strict", "defer"]
    known = {(entry["program"], entry["mode"]): entry["status"] for entry in document["results"]}
    assert known[BERT, "strict"] == "pass"
    assert known[RESNET, "defer"] == "crash"
    assert set(known) == {(BERT, "strict"), (RESNET, "defer")}
    assert "timm/none" in document["notes"]["unknown_programs"]


def test_reports_of_parts_are_joined():
    """Modes, and programs that another machine ran, come together to what one run of all would have told."""
    parts = [
        document_of(SPECIAL, (SWIN,), ("strict",), SIZES),
        document_of(SPECIAL, (LLAMA, BERT), ("strict",), SIZES),
        document_of(SPECIAL, (), ("defer",), SIZES),
    ]
    found = header("conformance", "v5e") | documents.joined(parts, SIZES)
    valid(found)
    whole = document_of(SPECIAL, (), ("strict", "defer"), SIZES)
    told_of_the_run = {"run", "notes", "started", "finished", "seconds", "op_names", "results"}
    for field in set(whole) - told_of_the_run:
        assert found[field] == whole[field], field
    assert [(r["program"], r["mode"], r["status"]) for r in found["results"]] == [
        (r["program"], r["mode"], r["status"]) for r in whole["results"]
    ]
    assert "3 reports" in found["notes"]["joined"]
    with pytest.raises(ValueError, match="different chips: v5e, v6e"):
        documents.joined([parts[0], parts[1] | {"chip": "v6e"}])


@pytest.mark.parametrize(("second", "told"), [("native", "native"), ("passes", None)])
def test_joined_reports_tell_how_they_multiplied(second, told):
    """Where that differs it is told of none of them."""
    parts = [document_of(SPECIAL, names, ("strict",), SIZES) for names in ((SWIN,), (LLAMA, BERT))]
    for part, highest in zip(parts, ("native", second), strict=True):
        part["environment"]["highest"] = highest
    found = header("conformance", "v5e") | documents.joined(parts, SIZES)
    valid(found)
    assert found["environment"]["highest"] == told


@pytest.mark.parametrize(
    ("counts", "shown"),
    [((0, 0), "-"), ((1, 1), "100.0 %"), ((9999, 10000), "99.9 %"), ((1, 9999), "0.1 %"), ((0, 5), "0.0 %")],
)
def test_shares_are_never_rounded_to_all_or_nothing(counts, shown):
    """One miss in ten thousand is not 100 %."""
    assert summaries.share(*counts) == shown


def test_junit(document):
    """A case for each program and mode; control characters do not break it."""
    suite = ET.fromstring(summaries.junit(document))
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("40", "1", "2")
    failed = next(case for case in suite if case.get("name") == LLAMA)
    assert failed[0].get("message").startswith("mismatch: relative error </script>")
    assert failed[0].text == "model.py:3 forward: return x?"


def test_summary(document):
    """The headline, tiers by mode, and what fails, in a table that one line of an error cannot break."""
    text = summaries.summary(document)
    assert text.splitlines()[2].startswith("**")
    assert "predicted on the chip**" in text
    assert f"| {LLAMA} | strict | mismatch | relative error </script> of the logits 0.2 |\n" in text
    assert f"Rows not run: {models_of(SWIN)}." in text
    assert "| run and train | 100.0 %" in text


def test_badge_colours():
    """Green, amber, red, and grey for nothing."""
    colours = [summaries.badge_colour(*counts) for counts in ((99, 100), (96, 100), (90, 100), (0, 0))]
    assert len(set(colours)) == 4
