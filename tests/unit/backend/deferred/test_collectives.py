"""Collectives among recorded ops: always done, in order, each a region of its own. PyTorch's fake group stands in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from emutpu.backend.deferred.log import RegionRecord
from emutpu.backend.deferred.region import Region
from emutpu.backend.options import EagerMode, override
from emutpu.backend.runtime import runtime


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    dist.init_process_group("cpu:fake,tpu:fake", store=FakeStore(), rank=0, world_size=4)
    yield
    runtime().materialize("synchronize()")
    dist.destroy_process_group()


def names(found: list[RegionRecord]) -> list[list[str]]:
    """The ops of the regions."""
    return [[op.name.removeprefix("aten.").split(".default")[0].split(".Tensor")[0] for op in r.ops] for r in found]


def charged() -> dict[str, int]:
    """How often each collective took the modelled device's time."""
    return {t.name: t.calls for t in runtime().meter.tallies if t.name.startswith("c10d.")}


def test_a_collective_is_recorded_and_cut_around(regions) -> None:
    """Nothing is done until a read; then the ops before, the collective, and the ops after are three regions."""
    before = charged().get("c10d.allreduce_", 0)
    x = torch.arange(4.0).to("tpu")
    y = x * 2 + 1
    dist.all_reduce(y)
    z = y.sin() * 3
    assert regions() == []
    assert charged().get("c10d.allreduce_", 0) == before
    assert torch.allclose(z.cpu(), (torch.arange(4.0) * 2 + 1).sin() * 3)
    found = regions()
    assert names(found) == [["mul", "add"], ["c10d.allreduce_"], ["sin", "mul"]]
    assert {region.reason for region in found} == {".cpu()"}
    assert charged()["c10d.allreduce_"] == before + 1


def test_collectives_are_done_though_nobody_holds_their_results(regions) -> None:
    """A dead result drops an op, never a collective nor what it takes, and the order is that of the program."""
    x = torch.arange(4.0).to("tpu")
    (x * 5).cos()
    dead = x * 7
    dist.broadcast(dead, 0)
    del dead
    gathered = torch.zeros(16, device="tpu")
    dist.all_gather_into_tensor(gathered, x)
    del gathered
    dist.send(x + 3, 1)
    torch.accelerator.synchronize()
    found = names(regions())
    assert ["c10d.broadcast_"] in found
    assert [name for ops in found for name in ops if name.startswith("c10d")] == [
        "c10d.broadcast_",
        "c10d._allgather_base_",
        "c10d.send",
    ]
    assert not any("cos" in ops for ops in found)


def test_a_steady_loop_of_collectives_is_found_again(regions) -> None:
    """From the second step on nothing is compiled and the sequence of ops is known."""
    x = torch.arange(4.0).to("tpu")
    for _ in range(4):
        x = x * 0.5 + 1
        dist.all_reduce(x)
        x.sum().item()
    found = regions()
    per_step = len(found) // 4
    assert [r.hit for r in found[per_step:]] == [True] * (3 * per_step)


def test_functional_collectives(regions) -> None:
    """The functional forms copy, and reach the same ops."""
    x = torch.arange(4.0).to("tpu")
    y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
    z = functional.all_gather_tensor(x, 0, dist.group.WORLD)
    assert z.shape == (16,)
    assert (y + 1).tolist() == [1, 3, 5, 7]
    found = [name for ops in names(regions()) for name in ops]
    assert "c10d.allreduce_" in found
    assert "c10d.allgather_into_tensor_coalesced_" in found


def test_leaving_the_mode_keeps_the_order(regions) -> None:
    """The first collective after DEFER_AND_FUSE comes after what was pending."""
    x = torch.arange(4.0).to("tpu")
    y = x * 11
    with override(mode=EagerMode.DEFER_NEVER):
        dist.all_reduce(y)
        (region,) = regions()
        assert region.reason == "debug_mode"
    assert y.tolist() == [0, 11, 22, 33]


def test_a_failure_before_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a collective needs has failed: it is not done, and its result raises the failure."""
    x = torch.arange(4.0).to("tpu")
    before = charged().get("c10d.allreduce_", 0)

    def refused(*_: object) -> None:
        raise ValueError("no compiler today")

    y = x.atan().sinh() * 13
    dist.all_reduce(y)
    monkeypatch.setattr(Region, "acquire", refused)
    with pytest.raises(ValueError, match="no compiler today"):
        y.cpu()
    monkeypatch.undo()
    assert charged().get("c10d.allreduce_", 0) == before
