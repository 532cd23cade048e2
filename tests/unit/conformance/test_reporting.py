"""What a report says of given answers: credit, tiers, changes, and the site."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
import zlib

import jsonschema
import pytest

from emutpu._report import header
from emutpu.conformance import documents, manifest, runner, site
from emutpu.conformance.history import Run
from tools.layout import ROOT

LLAMA, RESNET, BERT = "transformers/LlamaForCausalLM", "timm/resnet18", "transformers/BertForMaskedLM"
SPECIAL = {
    LLAMA: {"outcome": "mismatch", "error": "relative error </script> of the logits 0.2", "tier2": False},
    RESNET: {"outcome": "corpus bug", "error": "it fails", "tier1": None, "tier2": None, "stage": "cpu"},
    BERT: {"ops": {"aten.mm.default": 2, "aten.addbmm.default": 1}},
}


def answer_of(name, **changed):
    """A program that passed, but for what the test changes."""
    passed = {
        "program": name,
        "mode": "strict",
        "outcome": "pass",
        "stage": None,
        "error": None,
        "traceback": ["model.py:3 forward: return x\x00"],
        "op": None,
        "tier1": True,
        "tier2": True,
        "logit_error": 1e-7,
        "gradient_error": 1e-6,
        "tokens_equal": None,
        "ill_conditioned": [],
        "fingerprint": f"{zlib.crc32(name.encode()):016x}",
        "seconds": 1.5,
        "ops": {"aten.mm.default": 3},
        "compiles": 2,
        "fallbacks": 0,
    }
    return passed | changed


def document_of(special, left_out=()):
    """The document of a smoke run in which some programs did something special."""
    plan = runner.plan_of("smoke", ["strict"], "v5e", (1, 1), None)
    made = Run(7, plan, "2026-01-01T00:00:00+00:00", "2026-01-01T01:00:00+00:00", 12.0, runner.environment())
    names = [program.name for program in manifest.select("smoke") if program.name not in left_out]
    answers = [answer_of(name, **special.get(name, {})) for name in names]
    return header("conformance", "v5e") | documents.document(made, answers)


@pytest.fixture(scope="module")
def document():
    """One with an outcome of each kind that matters."""
    return document_of(SPECIAL, left_out=["timm/swin_tiny_patch4_window7_224"])


def models_of(*programs):
    """How many rows are such programs."""
    return sum(model.program in programs for model in manifest.models())


def test_document_follows_its_schema(document):
    """And is the same after JSON."""
    schema = json.loads((ROOT / "emutpu/schemas/conformance.v1.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(json.dumps(document)), schema, cls=jsonschema.Draft202012Validator)


def test_rows_are_credited(document):
    """An outcome counts for every model of its program; what was not attempted counts nowhere."""
    smoke = [program.name for program in manifest.select("smoke")]
    rows = models_of(*smoke)
    absent = models_of(RESNET, "timm/swin_tiny_patch4_window7_224")
    assert document["rows"] == len(document["models"]) == rows
    assert document["tier1"] == {"attempted": rows - absent, "passed": rows - absent, "failed": []}
    assert document["tier2"]["passed"] == rows - absent - models_of(LLAMA)
    assert len(document["tier2"]["failed"]) == models_of(LLAMA) == 80
    assert document["corpus_bugs"] == [RESNET]
    assert document["not_run"] == {"the run did not come to it": 3}
    assert document["distinct_programs"] == 39


def test_prediction_knows_the_missing_kernels(document):
    """A program that passes with an op that TorchTPU lacks would fail on the chip."""
    rows = [entry for entry in document["models"] if entry["program"] == BERT]
    assert all(entry["emulated"] and not entry["predicted_on_chip"] for entry in rows)
    assert rows[0]["missing_kernels"] == ["addbmm"]
    predicted = document["predicted_on_chip"]
    assert predicted["attempted"] - predicted["passed"] == models_of(BERT, LLAMA)


def test_changes():
    """Worse is what passed and does not, also what is not run any more; better is the reverse; each program once."""
    before, after = document_of({RESNET: {"outcome": "crash", "error": "boom"}}), document_of(SPECIAL)
    found = documents.changes(before, after)
    assert [(e["program"], e["before"], e["after"]) for e in found["worse"]] == [(LLAMA, "pass", "mismatch")]
    assert found["better"] == []
    gone = documents.changes(document_of({}), document_of({}, left_out=[BERT]))
    assert [(e["program"], e["after"]) for e in gone["worse"]] == [(BERT, "not run")]
    assert documents.changes(document_of(SPECIAL), document_of({}))["worse"] == []
    assert len(documents.changes(document_of(SPECIAL), document_of({}))["better"]) == 2


@pytest.fixture(scope="module")
def built(document, tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    assert site.write(document, folder) == 41
    return folder


def test_site_stands_alone(built):
    """No page loads anything or names a server, and no error text ends the element that holds the data."""
    pages = [built / "index.html", *(built / "programs").glob("*.html")]
    assert len(pages) == 41
    for page in pages:
        text = page.read_text()
        assert not re.search(r"https?://", text), page
        assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=", text), page
    assert (built / "index.html").read_text().count("</script>") == 2
    for link in re.findall(r'href="([^"#]+)"', (built / "index.html").read_text()):
        assert (built / link).is_file(), link


def test_site_for_machines(built, document):
    """JUnit counts, the document itself, and a table for a pull request."""
    suite = ET.parse(built / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("40", "1", "2")
    assert json.loads((built / "report.json").read_text()) == document
    summary = (built / "summary.md").read_text()
    assert f"| {LLAMA} | strict | mismatch |" in summary
    assert "%" in (built / "badge.svg").read_text()


def browse(page, fragment, *arguments):
    """The page after its scripts, in a headless browser."""
    chromium = next(
        (p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None
    )
    if chromium is None:
        pytest.skip("no chromium on PATH")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1300,1000", *arguments]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"file://{page}#{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)


def test_filters_in_the_address(built):
    """All programs without one; a search finds a model's id; an outcome leaves its programs."""
    page = built / "index.html"
    assert "40 of 40 programs" in browse(page, "", "--dump-dom")
    failing = browse(page, "status=mismatch", "--dump-dom")
    assert "1 of 40 programs" in failing
    assert "relative error &lt;/script&gt; of the logits" in failing
    model = next(model.id for model in manifest.models() if model.program == LLAMA)
    assert "1 of 40 programs" in browse(page, f"text={model}&mode=strict", "--dump-dom")


def test_a_programs_page(built):
    """Outcome, errors, and every model that it stands for."""
    text = (built / "programs" / "transformers-LlamaForCausalLM-strict.html").read_text()
    assert "mismatch" in text
    assert "Models that are this program (80)" in text
