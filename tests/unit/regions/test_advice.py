"""Advice: each kind with a program that deserves it, and one that does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest_plugins = ["tests.support.region_programs"]

Kinds = Callable[[str], dict[str, dict[str, Any]]]

LOOP = """
import torch
def main():
    w = torch.ones(16, 16).to("tpu")
    for step in range(8):
        w = (w * 0.5).sin() + w
        loss = w.mean()
        if {condition}:
            print(loss.item())
main()
"""


def test_a_read_every_step(kinds: Kinds) -> None:
    """The line, how often, and the bytes that would not cross HBM."""
    found = kinds(LOOP.format(condition="True"))["read-every-step"]
    assert (
        "`print(loss.item())` at program.py:9 splits every step (8 times): merging 2 regions saves 2 KiB"
        in found["text"]
    )
    assert found["line"] == 9
    assert found["evidence"]["times"] == 8
    assert found["evidence"]["hbm_bytes_saved"] == 2 * 16 * 16 * 4


@pytest.mark.parametrize("condition", ["step % 2 == 1", "step == 7"])
def test_a_read_now_and_then(kinds: Kinds, condition: str) -> None:
    """Every second step, or once at the end: no advice."""
    assert "read-every-step" not in kinds(LOOP.format(condition=condition))


def test_a_read_of_independent_work(kinds: Kinds) -> None:
    """Steps that share nothing on the device cannot save traffic by being merged."""
    text = "import torch\nfor step in range(5):\n    x = torch.ones(8).to('tpu')\n    y = x.sin()\n    print(y.sum().item())\n"
    assert "read-every-step" not in kinds(text)


BATCHES = """
import torch
w = torch.ones(8, 4).to("tpu")
for rows in {rows}:
    x = torch.ones(rows, 8).to("tpu")
    print((x @ w).sum().item())
"""


def test_the_last_batch(kinds: Kinds) -> None:
    """One smaller batch at the end is compiled for itself."""
    found = kinds(BATCHES.format(rows=[32] * 4 + [7]))["last-batch"]
    assert "dimension 0 of mm at program.py:6 was 32 in 4 launches, then 7" in found["text"]
    assert found["evidence"]["usual"] == 32
    assert found["evidence"]["last"] == 7
    assert found["evidence"]["recompiled"] == 1


@pytest.mark.parametrize("rows", [[32] * 4, [32, 7] * 3, [7] + [32] * 4])
def test_no_last_batch(kinds: Kinds, rows: list[int]) -> None:
    """Equal batches; two sizes all along; a larger size from the second batch on."""
    assert "last-batch" not in kinds(BATCHES.format(rows=rows))


def test_a_growing_dimension(kinds: Kinds) -> None:
    """A cache that is concatenated every step: nothing is ever found again."""
    text = """
import torch
cache = torch.zeros(1, 8).to("tpu")
new = torch.ones(1, 8).to("tpu")
for step in range(4):
    cache = torch.cat([cache, new])
    print(cache.sum().item())
"""
    found = kinds(text)["growing-dimension"]
    assert "dimension 0 of cat at program.py:6 grows every step (1 to 4 in 3)" in found["text"]
    assert "0% hit rate" in found["text"]


def test_a_static_cache(kinds: Kinds) -> None:
    """The same with a cache of its final size compiles once."""
    text = """
import torch
cache = torch.zeros(8, 8).to("tpu")
new = torch.ones(8).to("tpu")
index = torch.arange(8).to("tpu")
for step in range(6):
    cache = torch.where((index == step)[:, None], new, cache)
    print(cache.sum().item())
"""
    assert "growing-dimension" not in kinds(text)


def test_sizes_that_come_and_go(kinds: Kinds) -> None:
    """Batches of other sizes, up and down, are not growth."""
    assert "growing-dimension" not in kinds(BATCHES.format(rows=[3, 9, 4, 8]))


CYCLE = """
import gc, torch
gc.disable()
class Holder:
    pass
def make(x):
    h = Holder()
    h.value = x * 3
    {link}
x = torch.ones(32).to("tpu")
make(x)
print(x.sum().item())
"""


def test_a_cycle(kinds: Kinds) -> None:
    """What a cycle keeps alive is computed and stored for nobody."""
    found = kinds(CYCLE.format(link="h.me = h"))["cycle"]
    assert "the result of mul at program.py:8 is kept alive by a cycle (1 times, 128 B)" in found["text"]
    assert found["line"] == 8


def test_no_cycle(kinds: Kinds) -> None:
    """Without the cycle the value is gone; and an object of a cycle that a variable holds is no complaint."""
    assert "cycle" not in kinds(CYCLE.format(link="h.other = None"))


def test_a_held_cycle(kinds: Kinds) -> None:
    """An object with a reference to itself that a variable holds is no complaint."""
    assert "cycle" not in kinds(CYCLE.format(link="h.me = h; global KEEP; KEEP = h"))


DEAD = "import torch\nx = torch.ones(64).to('tpu')\nt = x * 3\na, b = t.sin(), t.cos()\n{drop}\nprint(b.sum().item(), a.shape)\n"


def test_dead_values(kinds: Kinds) -> None:
    """A dropped value that is read twice splits the list at everything that is given out."""
    found = kinds(DEAD.format(drop="del t"))["dead-values"]
    assert found["evidence"]["regions"] > 1
    assert "the result of mul at program.py:3" in found["text"]
    assert found["evidence"]["hbm_bytes_saved"] >= 2 * 64 * 4


def test_no_dead_values(kinds: Kinds) -> None:
    """With the value held the read is one region."""
    assert "dead-values" not in kinds(DEAD.format(drop=""))


RANKS = """
import os, torch
import torch.distributed as dist
def reduce(value):
    dist.all_reduce(value)
rank = int(os.environ.get("RANK", "0"))
x = torch.ones(4).to("tpu")
{body}
"""


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("if rank == 0:\n    print((x * 2).sum().item())", 9),
        ("if rank == 0: print((x * 2).sum().item())", 8),
        ("def log():\n    if rank != 0:\n        return\n    print((x * 2).sum().item())\nlog()", 11),
        ("print((x * 2).sum().item() if rank == 0 else 0)", 8),
    ],
)
def test_a_rank_conditional_read(kinds: Kinds, body: str, line: int) -> None:
    """A read inside a condition on the rank, or behind one that returns."""
    found = kinds(RANKS.format(body=body))["rank-conditional-read"]
    assert found["line"] == line
    assert f"rank-conditional read at line {line}" in found["text"]
    assert "will deadlock with collectives (all_reduce)" in found["text"]


@pytest.mark.parametrize(
    "body",
    [
        "total = (x * 2).sum().item()\nif rank == 0:\n    print(total)",
        "for step in range(2):\n    if step == 0:\n        print((x * 2).sum().item())",
    ],
)
def test_no_rank_conditional_read(kinds: Kinds, body: str) -> None:
    """A read on every rank of which one prints, and a condition on something else."""
    assert "rank-conditional-read" not in kinds(RANKS.format(body=body))


def test_ranks_without_collectives(kinds: Kinds) -> None:
    """Where nothing waits for other ranks, nothing can deadlock."""
    text = RANKS.replace("dist.all_reduce(value)", "pass").format(body="if rank == 0:\n    print((x * 2).sum().item())")
    assert "rank-conditional-read" not in kinds(text)


def test_collectives_are_regions(recorded: Callable[[str], dict[str, Any]]) -> None:
    """A program whose other ranks are not there: the collective is a region, and the read of one rank is advised against."""
    text = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("cpu:fake,tpu:fake", store=FakeStore(), rank=0, world_size=4)
x = torch.ones(4).to("tpu")
y = x * 2
dist.all_reduce(y)
if dist.get_rank() == 0:
    print((y + 1).sum().item())
dist.destroy_process_group()
"""
    document = recorded(text)
    (collective,) = [r for r in document["regions"] if [op["name"] for op in r["ops"]] == ["c10d.allreduce_"]]
    assert collective["ops"][0]["line"] == 7
    assert collective["inputs"][0]["made_by"] is not None
    assert [value["shape"] for value in collective["outputs"]] == [[4]]
    (advice,) = [item for item in document["advice"] if item["kind"] == "rank-conditional-read"]
    assert advice["line"] == 9


COLLECTIVE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("cpu:fake,tpu:fake", store=FakeStore(), rank=0, world_size=4)
x = torch.ones(4).to("tpu")
y = x * 2
dist.all_reduce(y)
t = y / 4
{rest}
del t, y
print(b.sum().item())
dist.destroy_process_group()
"""


def test_collectives_split_without_advice(kinds: Kinds) -> None:
    """The list is cut beside a collective whatever is held."""
    assert "dead-values" not in kinds(COLLECTIVE.format(rest="b = t + 1"))


def test_a_split_behind_a_collective(kinds: Kinds) -> None:
    """A value that is dropped between two other regions is advised on, and alone in the advice."""
    told = kinds(COLLECTIVE.format(rest="a = t.sin()\nb = t.cos()"))["dead-values"]
    assert (
        "one value that nobody holds any more, the result of div at program.py:8, is read beyond a cut" in told["text"]
    )
    assert told["evidence"]["dead_values"] == 1
