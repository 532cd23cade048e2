"""``emutpu regions`` as a user runs it, and its page in a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Write = Callable[[str], str]
Valid = Callable[[Any, str], dict[str, Any]]

TRAIN = """
import sys, torch
torch.manual_seed(0)
def main(arguments):
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to("tpu")
    half = torch.ones(8).to("tpu", torch.bfloat16)
    for rows in (32, 32, 32, 17):
        x = torch.ones(rows, 8).to("tpu")
        loss = (model(x) ** 2).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        half = half * 2
        print(round(loss.item(), 3), arguments)
main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """One run with every kind of report, in a folder."""
    folder = tmp_path_factory.mktemp("regions")
    (folder / "train.py").write_text(TRAIN)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMUTPU_", "TORCH_TPU_"))}
    written = ["--html", "page.html", "--trace", "trace.json", "--stablehlo", "0"]
    behind = ["--json", "report.json", "--export", "replay", "--mine", "--", "--json", "theirs"]
    result = subprocess.run(
        [sys.executable, "-m", "emutpu", "regions", *written, "train.py", *behind],
        cwd=folder,
        env=kept | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return folder, result


def test_terminal(reported: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Steps under what triggered them, totals, advice, and the module that was asked for."""
    output = reported[1].stdout
    assert "step 0: .cpu() at train.py:16" in output
    assert "print(round(loss.item(), 3), arguments)" in output
    assert "last-batch: the last batch recompiles" in output
    assert "stablehlo.dot_general" in output
    assert "['--mine', '--json', 'theirs']" in output  # what is not ours, and all behind --, is the program's


def test_document(reported: tuple[Path, subprocess.CompletedProcess[str]], valid: Valid) -> None:
    """The document follows the schema; lines, keys, sources of inputs and modelled costs are filled in."""
    document = valid((reported[0] / "report.json").read_text(), "regions")
    regions = document["regions"]
    assert document["summary"]["regions"] == len(regions)
    assert document["summary"]["steps"] == 4
    assert {region["trigger"]["line"] for region in regions} == {16}
    assert all(op["code"] for region in regions for op in region["ops"])
    assert all(region["modelled"]["seconds"] > 0 for region in regions)
    made = [value["made_by"] for region in regions for value in region["inputs"] if value["made_by"]]
    assert made
    assert all(m["output"] < len(regions[m["region"]]["outputs"]) for m in made)
    changed = [region["changed"] for region in regions if region["changed"]]
    assert {(c["before"], c["after"]) for change in changed for c in change["dimensions"]} == {(32, 17)}
    held = {h["text"] for region in regions for value in region["outputs"] for h in value["held_by"]}
    assert "`model.2.weight`, in main()" in held


def test_replay_needs_jax_alone(reported: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """In a process that can import neither emutpu nor torch, every exported region gives what was recorded."""
    folder = reported[0]
    block = (
        "import sys, runpy; sys.modules['emutpu'] = sys.modules['torch'] = None; sys.argv = ['replay.py', *sys.argv[1:]]; "
        "runpy.run_path('replay/replay.py', run_name='__main__')"
    )
    environment = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"} | {"JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, "-c", block]
    result = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    manifest = json.loads((folder / "replay" / "manifest.json").read_text())
    assert result.stdout.count(" ok: ") == len(manifest["regions"])
    assert any(value["dtype"] == "bfloat16" for region in manifest["regions"] for value in region["inputs"])
    strict = subprocess.run(
        [*arguments, "--rtol", "-1"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert strict.returncode == 1
    assert "DIFFERS" in strict.stdout


def test_trace(reported: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Spans of every track lie one after the other, and each region is on the host's and the modelled track."""
    trace = json.loads((reported[0] / "trace.json").read_text())
    count = json.loads((reported[0] / "report.json").read_text())["summary"]["regions"]
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for track, expected in ((2, count), (3, count)):
        mine = [event for event in spans if event["tid"] == track]
        assert len(mine) == expected
        ends = [event["ts"] + event["dur"] for event in mine]
        assert all(end <= after["ts"] + 1e-3 for end, after in zip(ends, mine[1:], strict=False))
        assert all(event["dur"] >= 0 for event in mine)


def _body(browser: Browser, page: Path, fragment: str) -> str:
    """What the page's scripts made of it."""
    browser.open(page, fragment)
    body: str = browser.evaluate("document.body.outerHTML")
    return re.sub(r"<script.*?</script>", "", body, flags=re.DOTALL)


def test_page_in_a_browser(reported: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """Scripts run: blocks are there, the chosen region shows holders and source, the search dims what does not match."""
    page = reported[0] / "page.html"
    count = json.loads((reported[0] / "report.json").read_text())["summary"]["regions"]
    with Browser(tmp_path / "profile") as browser:
        body = _body(browser, page, "region=1&search=arguments")
        assert body.count('class="region') == count
        assert 'class="trigger"' in body
        assert "Outputs, and why they are live" in body
        assert f"{count} of {count} regions" in body
        assert body.count(" away") == 0
        assert _body(browser, page, "search=nowhere").count(" away") == count
        assert browser.failures == []


def test_page_stands_alone(reported: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """It loads nothing, and nothing in the program can end the element that holds the data."""
    page = (reported[0] / "page.html").read_text()
    assert not re.search(r"(src|href)=", page)
    assert page.count("</script>") == 2


def test_compare_modes(emutpu: Command, program: Write, valid: Valid, tmp_path: Path) -> None:
    """Strict launches every op; DeferAndFuse launches less and leaves less in HBM; Debug is Strict that waits."""
    text = "import torch\nx = torch.ones(64, 64).to('tpu')\nfor _ in range(2):\n    x = (x * 0.5 + 1).sin().cos()\nprint(x.sum().item())\n"
    result = emutpu("regions", "--compare-modes", "--json", "modes.json", program(text))
    assert result.returncode == 0, result.stderr
    assert "DeferAndFuse" in result.stdout
    document = valid((tmp_path / "modes.json").read_text(), "regions-modes")
    strict, debug, defer = document["modes"]
    assert strict["launches"] == debug["launches"] == 9
    assert strict["regions"] == 0
    assert defer["launches"] == defer["regions"] == 1
    assert defer["hbm_bytes"] < strict["hbm_bytes"]
    assert defer["compiles"] == 1


def test_diff(
    reported: tuple[Path, subprocess.CompletedProcess[str]], emutpu: Command, tmp_path: Path, valid: Valid
) -> None:
    """A report equals itself; a removed region, another reason and another shape are found, each with its line."""
    source = reported[0] / "report.json"
    same = emutpu("regions", "--diff", str(source), str(source), "--json", "-")
    assert same.returncode == 0
    assert valid(same.stdout, "regions-diff")["equal"]
    document = json.loads(source.read_text())
    gone = document["regions"].pop(1)
    reason, document["regions"][0]["reason"] = document["regions"][0]["reason"], "backward_pass"
    document["regions"][-1]["ops"][0]["results"][0]["shape"] = [99]
    (tmp_path / "other.json").write_text(json.dumps(document))
    other = emutpu("regions", "--diff", str(source), "other.json", "--json", "-")
    assert other.returncode == 1
    rows = [row for row in valid(other.stdout, "regions-diff")["rows"] if row["change"] != "same"]
    assert rows[0]["change"] == "changed"
    assert f"; was {reason} at " in rows[0]["text"]
    assert (rows[1]["change"], rows[1]["a"]) == ("removed", gone["id"])
    assert rows[-1]["change"] == "changed"
    assert "-> [99]" in rows[-1]["text"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["regions"], "nothing to run"),
        (["regions", "missing.py"], "there is no file"),
        (["regions", "--show", "x", "program.py"], "the number of a region"),
        (["regions", "--diff", "program.py", "program.py"], "cannot be read as a report"),
        (["regions", "--html", "/nowhere/page.html", "program.py"], "there is no directory"),
        (["regions", "--htm", "x", "program.py"], "No such option"),
    ],
)
def test_wrong_usage(emutpu: Command, program: Write, arguments: list[str], message: str) -> None:
    """Found before anything runs, in one line."""
    program("open('ran', 'w')")
    result = emutpu(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_program_that_fails_is_still_reported(emutpu: Command, program: Write) -> None:
    """Its regions up to the failure are shown, and the exit code is 1."""
    result = emutpu(
        "regions",
        program("import torch\nx = torch.ones(2).to('tpu') * 3\nprint(x.sum().item())\nraise SystemExit(3)\n"),
    )
    assert result.returncode == 1
    assert ".cpu() at program.py:3" in result.stdout


def test_a_program_without_the_device(emutpu: Command, program: Write) -> None:
    """A program that never uses the device has no regions; one that ends without exit handlers is a clear error."""
    assert emutpu("regions", program("import torch\nprint(1)\n")).returncode == 0
    killed = emutpu("regions", program("import os, torch\nos._exit(0)\n"))
    assert killed.returncode == 70
    assert "wrote no recording" in killed.stderr
    assert "Traceback" not in killed.stderr
