"""What DeferAndFuse and Strict do with the recorded programs equals the recordings of TorchTPU 0.2.0 (docs/regions.md)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from programs import Launch, run
from torch import _tensor_str

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "regions"
RECORDINGS = sorted(path.stem for path in (DATA / "goldens").glob("*.json"))
DEFERRED = [name for name in RECORDINGS if not name.endswith(".strict")]
STRICT = [name.removesuffix(".strict") for name in RECORDINGS if name.endswith(".strict")]
# What moves data and computes nothing.
VIEWS = frozenset({"as_strided", "as_strided_inverse", "empty"})

# What the program prints depends on the device's random numbers, which are not emulated bit for bit.
DRAWS = frozenset({"16_dropout"})
# Counters that differ in Strict, ours in the second place, for the reasons in docs/regions.md.
COUNTERS = {
    "13_inplace_views": ((9, 0, 9), (11, 0, 11)),
    "16_dropout": ((19, 6, 13), (15, 4, 11)),
    "17_checkpoint": ((34, 13, 21), (34, 14, 20)),
    "27_views_period": ((25, 21, 4), (37, 32, 5)),
}
# The sum of two gradients misses on the device after a forward sum whose printed graph is the same (docs/regions.md).
SUMS = frozenset({("17_checkpoint", 20)})


@cache
def golden(recording: str) -> dict[str, Any]:
    """What the device did."""
    found: dict[str, Any] = json.loads((DATA / "goldens" / f"{recording}.json").read_text())
    return found


def test_all_recordings_are_here() -> None:
    """22 programs in DEFER_AND_FUSE and in Strict, ten of them with the other settings of the repeated-op rule."""
    assert len(STRICT) == 22
    assert len(DEFERRED) == 42
    assert {name.partition(".")[0] for name in DEFERRED} == set(STRICT)


@pytest.mark.parametrize("recording", DEFERRED)
def test_deferred(recording: str) -> None:
    """Number of regions, reasons, hits and misses, ops in order, outputs, counters, and what was printed."""
    program, _, setting = recording.partition(".")
    expected = golden(recording)
    found = run(DATA / "programs" / f"{program}.py", setting or "safe")
    assert program in DRAWS or found.printed == expected["result"]
    assert found.counters == expected["cache"]
    assert len(found.launches) == len(expected["regions"])
    for number, (ours, theirs) in enumerate(zip(found.launches, expected["regions"], strict=True)):
        assert ours.reason == theirs["reason"], number
        assert ours.cache_hit == theirs["cache_hit"], number
        if not theirs["graph_from"].startswith("unknown"):
            assert list(ours.ops) == theirs["ops"], number
            if theirs["n_outputs"] is not None and "inferred" not in theirs["graph_from"]:
                assert ours.outputs == theirs["n_outputs"], number


class _Launches:
    """Our launches of Strict in the device's form: views that only move data join the next launch, or a read's."""

    def __init__(self, launches: tuple[Launch, ...]) -> None:
        self._rest = list(launches)
        self._moves: list[str] = []

    def take(self) -> tuple[list[str], bool | None]:
        """The ops up to and including the next that computes, and whether that was a hit; None where views joined it."""
        joined = False
        while self._rest:
            launch = self._rest.pop(0)
            computing = [n for n, op in enumerate(launch.ops) if op not in VIEWS]
            if not computing:
                self._moves += launch.ops
                continue
            joined = bool(self._moves)
            last = computing[-1] + 1
            ops, self._moves = [*self._moves, *launch.ops[:last]], list(launch.ops[last:])
            return ops, None if joined or self._moves else launch.cache_hit
        raise AssertionError("there are fewer launches here")

    def take_moves(self) -> list[str]:
        """What a read finds not yet launched."""
        while not self._moves:
            self._moves += self._rest.pop(0).ops
        moves, self._moves = self._moves, []
        return moves

    @property
    def rest(self) -> list[Launch]:
        return self._rest


@pytest.mark.parametrize("program", STRICT)
def test_strict(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches in order with reason, ops and hits, and counters; moves of data are where the device has them.

    Printing from the host, a choice for Strict, is off: what is left of it is the device's.
    """
    monkeypatch.setattr(_tensor_str, "_tensor_str", _tensor_str._tensor_str.__wrapped__)
    expected = golden(f"{program}.strict")
    found = run(DATA / "programs" / f"{program}.py", "strict")
    assert program in DRAWS or found.printed == expected["result"]
    counters = [
        tuple(counted[name] for name in ("requests", "hits", "misses"))
        for counted in (expected["cache"], found.counters)
    ]
    assert tuple(counters) == COUNTERS.get(program, (counters[0], counters[0]))
    ours = _Launches(found.launches)
    # A draw's update of the generator's state is computed on the host here.
    theirs = [launch for launch in expected["regions"] if launch["ops"] != ["rng_state_update"]]
    for launch in theirs:
        if launch["reason"] == ".cpu()":
            assert ours.take_moves() == launch["ops"], launch["index"]
            continue
        assert launch["reason"] == "debug_mode"
        ops, hit = ours.take()
        if launch["graph_from"] is None:  # only its first op is known
            ops = ops[:1]
        assert ops == launch["ops"], launch["index"]
        if (program, launch["index"]) not in SUMS:
            assert hit is None or hit == launch["cache_hit"], launch["index"]
    assert ours.rest == []


def test_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The environment variables choose the mode and the setting, and nothing of this process is needed."""
    program, setting = "24_period2", "aggressive"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EMUTPU_", "TORCH_TPU_"))}
    kept |= {
        "PYTHONPATH": str(ROOT),
        "EMUTPU_PRECISION": "highest",
        "TORCH_TPU_DEFER_AND_FUSE": "1",
        "TORCH_TPU_INTERNAL_DETECT_REPEATED_OPS": setting,
    }
    report = (
        "import runpy, sys, torch\n"
        "from emutpu.backend.deferred.log import LOG\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "print([(r.reason, r.hit) for r in LOG.records()], file=sys.stderr)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", report, str(DATA / "programs" / f"{program}.py")],
        env=kept,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    expected = golden(f"{program}.{setting}")
    assert result.stdout == expected["result"]
    assert str([(r["reason"], r["cache_hit"]) for r in expected["regions"]]) in result.stderr
