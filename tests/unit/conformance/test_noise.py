"""Measured noise is kept for as long as the CPU's float32 gives the same answer."""

import math

import pytest
import torch

from emutpu.conformance import noise
from emutpu.conformance.noise import Noise
from emutpu.conformance.trained import FOLDER

ANSWER = [
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(True),
    torch.ones(2, dtype=torch.complex64).conj(),
    torch.ones(0),
]


class Measure:
    """Counts how often it is asked."""

    def __init__(self, found: Noise) -> None:
        self.found, self.asked = found, 0

    def __call__(self) -> Noise:
        """What it was made with."""
        self.asked += 1
        return self.found


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a run."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("found", [Noise(1e-7, 3e-7), Noise(0.1, None), Noise(math.inf, 2.5)], ids=repr)
def test_the_same_answer_is_measured_once(folder, found):
    """Every figure comes back as it was."""
    measure = Measure(found)
    assert [noise.recall("a", ANSWER, measure) for _ in range(3)] == [found] * 3
    assert measure.asked == 1
    assert [file.suffix for file in (folder / "noise").iterdir()] == [".json"]


@pytest.mark.parametrize(
    ("program", "answer"),
    [
        ("b", ANSWER),
        ("a", ANSWER[:3]),
        ("a", [torch.arange(6.0).view(3, 2), *ANSWER[1:]]),
        ("a", [torch.nextafter(ANSWER[0], torch.tensor(9.0)), *ANSWER[1:]]),
        ("a", [*ANSWER[:3], torch.ones(0, dtype=torch.float64)]),
    ],
    ids=["program", "fewer", "order", "last bit", "dtype"],
)
def test_another_answer_is_measured_anew(folder, program, answer):
    """Another program's, or one that differs in a bit."""
    noise.recall("a", ANSWER, Measure(Noise(1e-7)))
    assert noise.recall(program, answer, Measure(Noise(2e-7))) == Noise(2e-7)


def test_other_sources_and_releases_measure_anew(folder, monkeypatch):
    """What measures has changed."""
    noise.recall("a", ANSWER, Measure(Noise(1e-7)))
    with monkeypatch.context() as patch:
        patch.setattr(noise, "_suite", lambda: "changed")
        assert noise.recall("a", ANSWER, Measure(Noise(2e-7))) == Noise(2e-7)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert noise.recall("a", ANSWER, Measure(Noise(3e-7))) == Noise(3e-7)


def test_a_failure_is_not_kept(folder):
    """The next run tries again."""
    failed = Noise(error="RuntimeError: no Double")
    assert noise.recall("a", ANSWER, Measure(failed)) == failed
    assert noise.recall("a", ANSWER, Measure(Noise(1e-7))) == Noise(1e-7)


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"logits": 1, "other": 2}'])
def test_what_cannot_be_read_is_measured_anew(folder, damage):
    """And mended."""
    noise.recall("a", ANSWER, Measure(Noise(1e-7)))
    (kept,) = (folder / "noise").iterdir()
    kept.write_text(damage, encoding="utf-8")
    measure = Measure(Noise(2e-7))
    assert [noise.recall("a", ANSWER, measure) for _ in range(2)] == [Noise(2e-7)] * 2
    assert measure.asked == 1


def test_a_folder_that_cannot_be_written(folder):
    """Costs the time of measuring, and nothing else."""
    (folder / "noise").write_text("no folder", encoding="utf-8")
    measure = Measure(Noise(1e-7))
    assert [noise.recall("a", ANSWER, measure) for _ in range(2)] == [Noise(1e-7)] * 2
    assert measure.asked == 2


def test_without_a_folder_it_is_measured(monkeypatch):
    """Each time."""
    monkeypatch.delenv(FOLDER, raising=False)
    measure = Measure(Noise(1e-7))
    for _ in range(2):
        noise.recall("a", ANSWER, measure)
    assert measure.asked == 2
