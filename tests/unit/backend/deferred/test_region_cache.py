"""Regions and the compile cache: what is in their keys, and its switches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from emutpu.backend.keys import Key
from emutpu.backend.options import Precision, override
from emutpu.backend.pjrt import Client, CompileOptions, Executable, InternalError
from emutpu.backend.runtime import runtime
from emutpu.backend.wrapped import WrappedClient

Program = Callable[[], object]

BASE = (3, 5)


def _x(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size or BASE, dtype=dtype).to("tpu")


PAIRS: dict[str, tuple[set[str], Program, Program]] = {
    "an extent": ({"dimensions"}, lambda: _x().sin().cos(), lambda: _x(3, 6).sin().cos()),
    "a rank": ({"dimensions"}, lambda: _x().sin().cos(), lambda: _x(15).sin().cos()),
    "a dtype": ({"shapeless"}, lambda: _x().sin().cos(), lambda: _x(dtype=torch.bfloat16).sin().cos()),
    "a stride": ({"dimensions"}, lambda: _x(4, 4)[:, :2].sin() + 1, lambda: _x(4, 4).t()[:, :2].sin() + 1),
    "an offset": ({"dimensions"}, lambda: _x(4, 4)[0].sin() + 1, lambda: _x(4, 4)[1].sin() + 1),
    "a parameter": ({"shapeless"}, lambda: _x(4, 4).sum(0) + 1, lambda: _x(4, 4).sum(1) + 1),
    "a number's type": ({"shapeless"}, lambda: _x(dtype=torch.int32) * 2 - 1, lambda: _x(dtype=torch.int32) * 2.0 - 1),
    "an edge": ({"shapeless"}, lambda: _of_two(lambda x, y: x * y + x), lambda: _of_two(lambda x, y: x * y + y)),
    "an input": (
        {"shapeless"},
        lambda: _of_two(lambda x, _: (x * x).sin()),
        lambda: _of_two(lambda x, y: (x * y).sin()),
    ),
    "the order": (
        {"shapeless"},
        lambda: _of_two(lambda x, _: (x.sin(), x.cos())),
        lambda: _of_two(lambda x, _: (x.cos(), x.sin())),
    ),
    "an output": ({"shapeless"}, lambda: _kept(_x().sin())[0], lambda: _kept(_x().sin())),
}


def _of_two(program: Callable[[torch.Tensor, torch.Tensor], object]) -> object:
    return program(_x(), _x())


def _kept(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.cos(), x


def _key(regions: Callable[[], list], program: Program) -> Key:
    regions()
    _held = program()
    torch.accelerator.synchronize()
    (region,) = regions()
    return region.key


def _changed(a: Key, b: Key) -> set[str]:
    return {part for part in ("shapeless", "dimensions", "options") if getattr(a, part) != getattr(b, part)}


@pytest.mark.parametrize("what", PAIRS)
def test_whatever_decides_a_region_is_in_its_key(regions, what: str) -> None:
    """One thing changes, and the key with it; the same program again has the same key."""
    parts, before, after = PAIRS[what]
    first = _key(regions, before)
    assert _key(regions, before) == first
    changed = _changed(first, _key(regions, after))
    assert changed & {"shapeless", "dimensions"}
    assert parts <= changed


def test_precision_and_options_are_in_a_regions_key(regions) -> None:
    """A matmul's precision is part of the graph; a compiler option of the third part, and of nothing else."""

    def program() -> torch.Tensor:
        return (_x(4, 4) @ _x(4, 4)).sin()

    first = _key(regions, program)
    with override(precision=Precision.HIGHEST):
        assert _changed(first, _key(regions, program)) == {"shapeless"}
    with override(excess_precision=True):
        assert _changed(first, _key(regions, program)) == {"options"}
    assert _key(regions, program) == first


def test_values_of_numbers_are_not(regions) -> None:
    """Also 0, 1 and -1."""
    first, *others = [_key(regions, lambda s=scale: (_x() * s + 0.25).sin()) for scale in (3, 0, 1, -1, 7)]
    assert others == [first] * 4


def test_dump_on_a_miss(caplog: pytest.LogCaptureFixture) -> None:
    """With the switch on, the module of a region that must be compiled is logged, with all its ops; a hit says nothing."""

    def program() -> list[list[float]]:
        values: list[list[float]] = (_x(7, 11).tanh() * _x(7, 11)).tolist()
        return values

    torch.tpu._set_dump_on_cache_miss(True)
    try:
        program()
        program()
    finally:
        torch.tpu._set_dump_on_cache_miss(False)
    dumps = [text for text in caplog.messages if "Dumping StableHLO module due to cache miss for key: " in text]
    assert len(dumps) == 1
    for text in ("stablehlo.tanh", "stablehlo.multiply", "tensor<7x11xf32>"):
        assert text in dumps[0]


def test_cache_only(regions) -> None:
    """A region that is known runs, another raises, names its key and the line; switched off it is compiled."""
    known = _x(7, 13).sin() + 1
    known.cpu()
    torch.tpu._set_cache_only(True)
    try:
        again = _x(7, 13).sin() + 1
        assert torch.equal(again.cpu(), known.cpu())
        other = _x(7, 13).cos() - 1
        with pytest.raises(RuntimeError, match=r"(?s)no more compilation should happen.*key: .*test_region_cache"):
            other.cpu()
    finally:
        torch.tpu._set_cache_only(False)
    assert torch.allclose((_x(7, 13).cos() - 1).cpu(), torch.ones(7, 13).cos() - 1)


def test_nothing_is_kept_where_that_is_forbidden(regions) -> None:
    """With ``_set_allow_cache(False)`` every region is compiled, every time."""
    torch.tpu._set_allow_cache(False)
    try:
        for _ in range(3):
            (_x(7, 17).sin() + 1).cpu()
        assert [region.hit for region in regions()] == [False] * 3
    finally:
        torch.tpu._set_allow_cache(True)


def test_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A miss and a hit of a region, in TorchTPU's words."""
    with caplog.at_level(logging.DEBUG, "emutpu.cache"):
        (_x(7, 19).sin() + 1).cpu()
        torch.tpu._clear_cache()
        (_x(7, 19).sin() + 1).cpu()
    misses = [text for text in caplog.messages if text.startswith("Compilation cache STATIC MISS #")]
    assert len(misses) == 2
    assert misses[0].split("for key: ")[1] == misses[1].split("for key: ")[1]
    assert "Compilation cache evicted." in caplog.messages


class _Meeting(WrappedClient):
    """Compilations meet: the first waits until a second is under way."""

    def __init__(self, inner: Client) -> None:
        super().__init__(inner)
        self.gate = threading.Barrier(2)
        self.met: list[bool] = []
        self.refused = ""

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        made = super().compile(module, options)
        if len(self.met) < 2:
            try:
                self.gate.wait(20)
            except threading.BrokenBarrierError:
                self.met.append(False)
            else:
                self.met.append(True)
        if self.refused and self.refused in made.name:
            raise InternalError("no such luck")
        return made


@contextmanager
def _meeting() -> Iterator[_Meeting]:
    real = runtime().client
    meeting = _Meeting(real)
    runtime().replace_client(meeting)
    try:
        yield meeting
    finally:
        runtime().replace_client(real)


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Three regions at its read: what both need is dead."""
    t = x * 3
    return t.sin(), t.cos()


def test_a_split_read_compiles_its_regions_beside_each_other(regions) -> None:
    """Each is a miss that is compiled once, in order for whoever reads the log, and found the next time."""
    x = torch.arange(11.0)
    with _meeting() as meeting:
        device = x.to("tpu")
        regions()
        misses = runtime().cache.misses
        found = [value.cpu() for value in _split(device)]
        records = regions()
        assert meeting.met == [True, True]
        assert [(len(record.ops), record.hit) for record in records] == [(1, False)] * 3
        assert runtime().cache.misses - misses == 3
        assert all(torch.allclose(a, b) for a, b in zip(found, _split(x), strict=True))
        [value.cpu() for value in _split(device)]
        assert [record.hit for record in regions()] == [True] * 3


def test_a_region_that_fails_beside_others() -> None:
    """The one that does not compile names its op; the others are computed."""
    with _meeting() as meeting:
        meeting.refused = "cos"
        a, b = _split(torch.arange(13.0).to("tpu"))
        with pytest.raises(RuntimeError, match=r"(?s)^cos\(\): .*no such luck.*return t\.sin\(\), t\.cos\(\)"):
            b.cpu()
        assert torch.allclose(a.cpu(), (torch.arange(13.0) * 3).sin(), atol=1e-6)
        with pytest.raises(RuntimeError, match="no such luck"):
            b.cpu()
