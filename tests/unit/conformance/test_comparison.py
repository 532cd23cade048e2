"""Runs against each other and against a chip, the first bad commit, and trends over a history."""

from __future__ import annotations

import subprocess

import pytest

from emutpu._report import header
from emutpu.conformance import commits, documents, trends
from emutpu.conformance.comparison import changes, compared
from emutpu.conformance.history import History
from tests.support.conformance_runs import BERT, LLAMA, RESNET, SPECIAL, add_run, document_of

CRASH = {"outcome": "crash", "error": "boom", "tier1": False, "tier2": None}


def test_changes():
    """Worse is what passed and does not, also what is not run any more; better is the reverse; each program once."""
    before = document_of({RESNET: CRASH, BERT: SPECIAL[BERT]})
    found = changes(before, document_of(SPECIAL))
    assert [(e["program"], e["before"], e["after"]) for e in found["worse"]] == [(LLAMA, "pass", "mismatch")]
    assert found["better"] == []
    gone = changes(document_of({}), document_of({}, left_out=(BERT,)))
    assert [(e["program"], e["after"]) for e in gone["worse"]] == [(BERT, "not run")]
    assert changes(document_of(SPECIAL), document_of({}))["worse"] == []
    assert len(changes(document_of(SPECIAL), document_of({}))["better"]) == 3


def test_a_run_that_goes_on_lost_nothing():
    """What it has not come to is no regression; it is told to be in the other run alone."""
    partial = document_of({}, left_out=(BERT,)) | {"finished": None}
    found = compared(document_of({}), partial)
    assert found["worse"] == []
    assert found["only_before"] == [f"{BERT} strict"]


def test_a_prediction_that_is_lost_is_worse():
    """A program that still passes here, by an op that TorchTPU has no kernel of, is a regression of the headline."""
    found = changes(document_of({}), document_of({BERT: SPECIAL[BERT]}))
    (entry,) = found["worse"]
    assert (entry["program"], entry["before"], entry["after"], entry["what"]) == (
        BERT,
        "pass",
        "pass",
        "predicted_on_chip",
    )
    assert entry["error"] == "missing kernel: addbmm"


def test_against_a_chip():
    """There an emulated run counts by its prediction: right about a missing kernel, wrong about a crash."""
    chip = document_of({RESNET: CRASH, BERT: CRASH}) | {"hardware": "TPU v5 lite"}
    emulated = document_of({BERT: SPECIAL[BERT]})
    found = compared(emulated, chip)
    assert [(e["program"], e["what"]) for e in found["worse"]] == [(RESNET, "predicted_on_chip")]
    assert found["better"] == []
    assert found["agreement"] == {"both pass": 38, "both fail": 1, "before alone": 1, "after alone": 0}
    back = compared(chip, emulated)
    assert [entry["program"] for entry in back["better"]] == [RESNET]
    assert back["worse"] == []


def test_what_one_run_lacks_is_told():
    """Programs of one side are not compared, and not hidden."""
    part = documents.imported([{"program": BERT, "mode": "strict", "outcome": "pass"}], "v5e")
    found = compared(document_of({}), header("conformance", "v5e") | part)
    assert len(found["only_before"]) == 39
    assert found["only_after"] == []
    assert found["agreement"]["both pass"] == 1


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Commits of a checkout, the earliest first, which emutpu is taken to come from."""

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "conformance").mkdir()
    made = []
    for number in range(5):
        (tmp_path / "conformance" / "a.py").write_text(f"{number}")
        git("add", ".")
        git("commit", "-q", "-m", f"change {number}")
        made.append(git("rev-parse", "HEAD"))
    monkeypatch.setattr(commits, "__file__", str(tmp_path / "conformance" / "commits.py"))
    return made


def test_the_commit_of_a_run(repository, tmp_path):
    """The head, and whether sources differ from it; a file beside them is no difference."""
    assert commits.current() == {"commit": repository[-1], "changed": False}
    (tmp_path / "notes.txt").write_text("x")
    assert not commits.current()["changed"]
    (tmp_path / "conformance" / "a.py").write_text("other")
    assert commits.current()["changed"]


def test_no_checkout(tmp_path, monkeypatch):
    """An installed emutpu has the commit that the CI service names, or none."""
    monkeypatch.setattr(commits, "__file__", str(tmp_path / "conformance" / "commits.py"))
    for name in ("GITHUB_SHA", "CI_COMMIT_SHA"):
        monkeypatch.delenv(name, raising=False)
    assert commits.current() == {"commit": None, "changed": False}
    monkeypatch.setenv("GITHUB_SHA", "abc")
    assert commits.current()["commit"] == "abc"
    assert commits.between("a", "b") is None


def test_first_bad_commit(repository, tmp_path):
    """The first run after the last good one that is bad, and the commits between them, the newest first."""
    bad = {LLAMA: CRASH}
    with History(tmp_path / "history.sqlite") as history:
        numbers = [
            add_run(history, special, commit)
            for special, commit in zip(({}, bad, {}, bad, bad), (repository[n] for n in (0, 1, 2, 4, 4)), strict=True)
        ]
        runs = {run.id: run for run in history.runs()}
        whole = {n: header("conformance", "v5e") | documents.document(runs[n], history.answers(n)) for n in numbers}
        found = trends.added(whole[numbers[-1]], runs[numbers[-1]], history, whole[numbers[0]])["trends"]
    (worse,) = found["baseline"]["worse"]
    assert worse["program"] == LLAMA
    first = worse["first_bad"]
    assert (first["run"], first["commit"], first["last_good"]["run"]) == (numbers[3], repository[4], numbers[2])
    assert [(c["commit"], c["subject"]) for c in first["commits"]] == [
        (repository[4], "change 4"),
        (repository[3], "change 3"),
    ]


def test_trends(tmp_path):
    """Runs of the same suite in their order, with tiers; a letter of each program for each of them; the run before as baseline."""
    with History(tmp_path / "history.sqlite") as history:
        first = add_run(history, SPECIAL, "a")
        second = add_run(history, {}, "b", left_out=(RESNET,))
        last = add_run(history, {BERT: SPECIAL[BERT]}, "c")
        runs = {run.id: run for run in history.runs()}
        assert trends.baseline_of(runs[last], history) == runs[second]
        assert trends.baseline_of(runs[first], history) is None
        document = header("conformance", "v5e") | documents.document(runs[last], history.answers(last))
        assert "trends" in document["notes"]
        found = trends.added(document, runs[last], history, None)
    assert "trends" not in found["notes"]
    told = found["trends"]
    assert [(run["run"], run["commit"]) for run in told["runs"]] == [(first, "a"), (second, "b"), (last, "c")]
    lines = {line["program"]: line["outcomes"] for line in told["timelines"]}
    assert (lines[LLAMA], lines[RESNET], lines[BERT]) == ("MPP", "B.P", "PPP")
    predicted = [run["by_mode"]["strict"]["predicted_on_chip"]["programs"] for run in told["runs"]]
    assert predicted == [[37, 39], [39, 39], [39, 40]]
    assert told["baseline"] is None
