"""The site of a report, looked at with a headless browser: every view, filters in the address, nothing from elsewhere."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re

import pytest

from emutpu._report import header
from emutpu.conformance import documents, manifest, site, trends
from emutpu.conformance.history import History
from tests.support.browser import Browser
from tests.support.conformance_runs import BERT, LLAMA, SIZES, SPECIAL, SWIN, add_run, document_of, whole_document

NAMESPACE = "http://www.w3.org/2000/svg"  # a name, not an address


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A run with an outcome of each kind, after one in which everything passed."""
    with History(tmp_path_factory.mktemp("history") / "history.sqlite") as history:
        numbers = add_run(history, {}, "a" * 40), add_run(history, SPECIAL, "b" * 40, left_out=(SWIN,))
        runs = {run.id: run for run in history.runs()}
        before, now = (
            header("conformance", "v5e")
            | documents.document(runs[n], history.answers(n), MUTATIONS, SIZES)
            | {"device_bytes": {"v5e": 8 * 2**30, "v7": 96 * 2**30}}
            for n in numbers
        )
        return trends.added(now, runs[numbers[1]], history, before, SIZES)


MUTATIONS = {
    "programs": 3,
    "injected": 7,
    "caught": 6,
    "by_fault": {"attention zeroed": {"injected": 7, "caught": 6}},
    "missed": ["timm/repvgg_a0: attention zeroed (1e-5)"],
    "failed": {},
    "suite": "smoke",
    "manifest": "0",
}


@pytest.fixture(scope="module")
def built(document, tmp_path_factory):
    """The folder of the site."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "data").mkdir()
    (folder / "data" / "77.js").write_text("of an earlier, larger report")
    assert site.write(document, folder) == sum(path.is_file() for path in folder.rglob("*"))
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One for all tests, which must have caught every exception and asked for nothing but files."""
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened
        assert opened.failures == []
        assert {request.partition(":")[0] for request in opened.requests} <= {"file", "about", "blob"}


@pytest.fixture
def view(browser, built):
    """What a reader sees of a view, by its address."""

    def look(fragment):
        browser.open(built / "index.html", fragment)
        return browser.text()

    return look


def text_of(page):
    """What a reader sees of HTML, without the elements."""
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


def test_site_stands_alone(built):
    """It loads nothing but its own shards, names no server, and no error text ends the element that holds the data."""
    text = (built / "index.html").read_text().replace(NAMESPACE, "")
    assert not re.search(r"https?://", text)
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=", text)
    assert text.count("</script>") == 2
    assert set(re.findall(r'href="([^#"][^"]*)"', text)) == set()
    assert sorted(path.name for path in (built / "data").iterdir()) == ["0.js", "ops.js"]


def test_shards_are_reproducible_and_small(document, tmp_path):
    """The same report gives the same bytes; a shard is gzip in base64 of JSON."""
    site.write(document, tmp_path / "a")
    site.write(document, tmp_path / "b")
    for name in ("data/0.js", "data/ops.js", "index.html", "junit.xml", "summary.md", "badge.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    name, packed = re.fullmatch(r'shard\("(\w+)","(.*)"\)\n', (tmp_path / "a" / "data" / "ops.js").read_text()).groups()
    ops = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert name == "ops"
    assert dict(zip(ops["names"], ops["missing"], strict=True)) == {"aten.mm.default": 0, "aten.addbmm.default": 1}


def test_site_for_machines(built, document):
    """The document itself, the change since the run before in Markdown, and a badge with the headline."""
    assert json.loads((built / "report.json").read_text()) == document
    summary = (built / "summary.md").read_text()
    assert "Against run 1 (aaaaaaaaaa): 4 worse, 0 better." in summary
    assert f"| {LLAMA} | strict | pass | mismatch | run 2, bbbbbbbbbb |" in summary
    told = document["predicted_on_chip"]
    assert f"{100 * told['passed'] / told['attempted']:.1f} %" in (built / "badge.svg").read_text()


def test_overview(view, built, document):
    """Headline, tiers, what is not run and why, and what the figures mean; also without scripts."""
    told = document["predicted_on_chip"]
    for shown in (text_of((built / "index.html").read_text()).replace(" :", ":"), view("/")):
        assert f"predicted on the chip: {told['passed']:,} of {told['attempted']:,} rows" in shown
        assert "the run did not come to it" in shown
        assert "85.7 % of 7 injected faults caught" in shown
        assert "4 worse" in shown


def test_filters_in_the_address(view):
    """All programs without one; an outcome leaves its programs; a search finds a model's id."""
    assert "40 of 40 programs" in view("/programs")
    failing = view("/programs?status=mismatch&mode=strict")
    assert "1 of 40 programs" in failing
    assert LLAMA in failing
    assert "relative error </script> of the logits" in failing
    model = next(model.id for model in manifest.models() if model.program == LLAMA)
    assert "1 of 40 programs" in view(f"/programs?text={model}")
    assert "1 of 40 programs" in view("/programs?op=addbmm&fails=predicted_on_chip")
    assert "4 of 40 programs" in view("/programs?changed=worse&sort=-program")


def test_the_address_follows_the_filters(view, browser):
    """What a user types and chooses is in the address, and the address alone brings it back."""
    view("/programs")
    browser.evaluate(
        "(() => { const search = document.querySelector('input[type=search]'); search.value = 'Llama';"
        "search.dispatchEvent(new Event('input'));"
        "const chosen = document.querySelector('select[aria-label=status]'); chosen.value = 'mismatch';"
        "chosen.dispatchEvent(new Event('change')); })()"
    )
    assert "1 of 40 programs" in browser.text()
    address = browser.evaluate("location.hash")
    assert address == "#/programs?text=Llama&status=mismatch"
    assert "1 of 40 programs" in view(address.removeprefix("#"))
    assert browser.evaluate("document.querySelector('select[aria-label=status]').value") == "mismatch"


def test_pages_count_as_the_report_does(view, browser, document):
    """The counts that the page makes of all programs are those of the report."""
    view("/packages")
    counted = browser.evaluate("tiersOf(programs, 0)")
    for tier, counts in document["by_mode"]["strict"].items():
        assert counted[tier] == counts, tier
    assert {tier for tier, counts in counted.items() if counts["rows"][1]} == set(document["by_mode"]["strict"])


def test_sorting(view, browser):
    """By a column's head, down and up; what has no value is last in both."""
    view("/programs?sort=models")
    counts = (
        "[...document.querySelectorAll('tbody tr:not(.gap) td:nth-child(5)')].map((cell) => Number(cell.textContent))"
    )
    down = browser.evaluate(counts)
    assert down == sorted(down, reverse=True)
    browser.evaluate(
        "[...document.querySelectorAll('th button')].find((b) => b.textContent.startsWith('models')).click()"
    )
    assert browser.evaluate("location.hash") == "#/programs?sort=-models"
    up = browser.evaluate(counts)
    assert up == sorted(up)
    assert up != down


def test_a_long_table_is_not_in_the_document(view, browser, document):
    """Rows of models: all are counted, those in sight are there, and scrolling brings the others."""
    shown = view("/programs?by=models&sort=-id")
    names = sorted({entry["id"] for entry in document["models"]}, key=str.lower)
    assert f"{len(names):,} of {len(names):,} models" in shown
    count = "document.querySelectorAll('[aria-rowindex]').length"
    assert 20 < browser.evaluate(count) < 90 < len(names)
    last = "[...document.querySelectorAll('[aria-rowindex]')].at(-1)"
    browser.evaluate("document.querySelector('.scroll.tall').scrollTop = 1e9")
    browser.wait(f"{last}.getAttribute('aria-rowindex') == {len(names) + 1}")
    assert browser.evaluate(count) < 90


def test_a_programs_page(view):
    """Outcome, error, the model's lines, ops with those that TorchTPU lacks, regions, cost by chip, runs, and models."""
    shown = view(f"/program/{LLAMA}")
    assert "14 GiB of the default configuration; a device has 16 GiB" in shown
    assert re.search(r"-70[bB]\S* hub, [\w-]+ memory: \d+", shown)
    assert "Error in strict relative error </script> of the logits 0.2 and a second line" in shown
    assert "model.py:3 forward: return x" in shown
    assert f"Models that are this program ({sum(m.program == LLAMA for m in manifest.models())})" in shown
    assert "v5e 14 GiB of 8 GiB 2.00 ms ±50 % 3.00 MB hbm" in shown
    assert "v7 14 GiB of 96 GiB 500 µs" in shown
    assert "4: 4 .cpu()" in shown
    assert "2 MiB" in shown
    assert "run 2 bbbbbbbbbb mismatch run 1 aaaaaaaaaa pass" in shown
    model = next(model.id for model in manifest.models() if model.program == BERT)
    other = view(f"/model/{model}")
    assert "kernels that TorchTPU lacks addbmm" in other
    assert "Ops (2)" in other


@pytest.mark.parametrize(
    ("fragment", "says"),
    [
        ("/architectures?sort=models", "39 of 39 architecture programs models ▾"),
        ("/package/timm", "predicted on the chip"),
        ("/tasks", "causal-lm"),
        ("/ops", "2 ops against 40 programs"),
        ("/changes", "4 worse"),
        ("/changes", "predicted to fail on the chip"),
        ("/trends", "Runs of this suite"),
        ("/gates", "6 of 7 85.7 %"),
        ("/gates", f"{BERT} strict 12.5000 12.5004 -"),
        (f"/program/{BERT}", "12.500 on the CPU, 12.500 here"),
        ("/program/none", "No program is called none"),
    ],
)
def test_every_view(view, fragment, says):
    """Each is drawn and says what it is for."""
    assert says in view(fragment)


def test_a_missing_shard_is_said(browser, built, tmp_path):
    """A page that was copied without its data names the file."""
    (tmp_path / "index.html").write_bytes((built / "index.html").read_bytes())
    browser.open(tmp_path / "index.html", f"/program/{LLAMA}")
    assert "data/0.js does not lie beside this page" in browser.text()


def test_the_full_suite_stays_small_and_quick(browser, tmp_path):
    """7,000 rows: the size of the files, and that no view waits for more than what is in sight."""
    document = whole_document()
    assert document["rows"] > 7_000
    site.write(document, tmp_path)
    assert (tmp_path / "index.html").stat().st_size < 1_500_000
    assert sum(path.stat().st_size for path in (tmp_path / "data").iterdir()) < 2_500_000
    browser.open(tmp_path / "index.html", "/programs?by=models")
    assert "of 7," in browser.text()
    typed = browser.evaluate(
        "(() => { const search = document.querySelector('input[type=search]'), started = performance.now();"
        "search.value = 'llama'; search.dispatchEvent(new Event('input')); return performance.now() - started; })()"
    )
    assert typed < 1000  # 13 ms where nothing else runs
    assert browser.evaluate("document.querySelectorAll('*').length") < 6000
    last = list(manifest.programs())[-1]
    browser.open(tmp_path / "index.html", f"/program/{last}")
    assert f"{last.partition('/')[0]} / " in browser.text()
    assert "Modelled device time" in browser.text()


def test_a_report_of_rows_alone(browser, tmp_path):
    """A document that somebody wrote of a chip, with no more than the rows, has a site too."""
    given = document_of(SPECIAL)
    bare = {name: value for name, value in given.items() if name not in ("results", "op_names", "trends", "by_mode")}
    site.write(bare, tmp_path)
    assert f"| {LLAMA} | strict | mismatch |" in (tmp_path / "summary.md").read_text()
    browser.open(tmp_path / "index.html", "/programs")
    assert "40 of 40 programs" in browser.text()
    browser.open(tmp_path / "index.html", f"/program/{LLAMA}")
    assert "Error in strict" in browser.text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_matrix_is_drawn_in_light_and_dark(view, browser, scheme):
    """Squares of the ops of programs that pass, that fail, and of the op that TorchTPU lacks, in the scheme's colours."""
    browser.look(700, 700, scheme)
    try:
        view("/ops")
        browser.wait("document.querySelector('#matrix canvas').width > 300")
        wanted = {"--pass", "--mismatch", "--unsupported", "--card"}
        found = browser.evaluate(
            "(() => { const canvas = document.querySelector('#matrix canvas'), style = getComputedStyle(document.documentElement);"
            "const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();"
            "for (let at = 0; at < pixels.length; at += 4) seen.add('#' + [...pixels.slice(at, at + 3)].map((v) => v.toString(16).padStart(2, '0')).join(''));"
            f"return {sorted(wanted)}.filter((name) => seen.has(style.getPropertyValue(name).trim().replace(/^#fff$/, '#ffffff'))); }})()"
        )
        assert set(found) == wanted
        assert browser.evaluate("matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    finally:
        browser.look()


@pytest.mark.parametrize("fragment", ["/", "/programs", f"/program/{LLAMA}", "/gates", "/trends", "/changes", "/ops"])
def test_a_narrow_window_does_not_scroll_sideways(view, browser, fragment):
    """Tables scroll within themselves; the page does not."""
    browser.look(400, 800)
    try:
        view(fragment)
        assert browser.evaluate("document.documentElement.scrollWidth") <= 400
    finally:
        browser.look()
