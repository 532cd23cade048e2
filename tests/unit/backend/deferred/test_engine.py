"""Recording, reading, liveness, cuts, leaving the mode."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref

import pytest
import torch

from emutpu.backend.deferred.values import Pending
from emutpu.backend.options import EagerMode, override
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of


def names(region) -> list[str]:
    """Op names without namespace and overload."""
    return [op.name.split(".")[1] if "." in op.name else op.name for op in region.ops]


def host(*values: float) -> torch.Tensor:
    """A device tensor whose value is there already."""
    return torch.tensor(values).to("tpu")


def test_nothing_runs_until_a_read(regions) -> None:
    """Ops leave pending values; the read launches all of them as one region, with the reason and the line."""
    x = host(1, 2, 3)
    y = (x * 2 + 1).sin()
    assert isinstance(cell_of(y).value, Pending)
    assert regions() == []
    assert torch.allclose(y.cpu(), (torch.tensor([1.0, 2, 3]) * 2 + 1).sin())
    (region,) = regions()
    assert region.reason == ".cpu()"
    assert names(region) == ["mul", "add", "sin"]
    assert "y.cpu()" in region.trigger.code
    assert not regions()
    assert y.sum().item() == pytest.approx(y.cpu().sum().item())


def test_a_read_takes_everything_live_and_nothing_dead(regions) -> None:
    """Also what was created after the value that is read; dead ops are never computed."""
    x = host(1, 2)
    read = x * 2
    later = x.cos()
    dead = x.exp()
    del dead
    assert read.tolist() == [2, 4]
    (region,) = regions()
    assert names(region) == ["mul", "cos"]
    assert cell_of(later).value.buffer is not None


def test_a_dead_value_read_beyond_a_cut_cuts_everywhere(regions) -> None:
    """The recorded pair: one region while ``t`` is alive, three after ``del t``."""
    x = host(1, 2)
    t = x * 3
    a, b = t.sin(), t.cos()
    b.cpu()
    assert [names(r) for r in regions()] == [["mul", "sin", "cos"]]
    t = x * 3
    a, b = t.sin(), t.cos()
    del t
    b.cpu()
    assert [names(r) for r in regions()] == [["mul"], ["sin"], ["cos"]]
    assert a.shape == b.shape


def test_reference_cycles_keep_values_alive_until_collected(regions) -> None:
    """Liveness is the storage's, whatever holds the tensor."""
    gc.disable()
    holder: dict[str, object] = {"t": host(1) * 3}
    holder["me"] = holder
    del holder
    host(2).add(1).item()
    assert ["mul", "add"] in [names(r) for r in regions()]
    holder = {"t": host(1) * 3}
    holder["me"] = holder
    del holder
    gc.enable()
    gc.collect()
    host(2).add(1).item()
    assert [names(r) for r in regions()] == [["add"]]


def test_leaving_the_mode_flushes_with_the_next_op(regions) -> None:
    """The first op after it joins the pending list, and all of it is one region."""
    x = host(1, 2)
    t = x * 3
    a, b = t.sin(), t.cos()
    del t
    with override(mode=EagerMode.DEFER_NEVER):
        assert regions() == []
        c = x + 1
        (region,) = regions()
        assert region.reason == "debug_mode"
        assert names(region) == ["mul", "sin", "cos", "add"]
        d = c + a
        assert regions() == []
        assert not isinstance(cell_of(d).value, Pending)
    assert torch.allclose((d + b).cpu(), x.cpu() + 1 + (x.cpu() * 3).sin() + (x.cpu() * 3).cos())


def test_another_threads_strict_op_sees_pending_values() -> None:
    """A thread that does not defer reads what another thread has pending."""
    y = host(1, 2) * 5
    found: list[list[float]] = []

    def work() -> None:
        assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER
        found.append((y + 1).tolist())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [[6, 11]]


def test_in_place_and_views_are_functional() -> None:
    """Earlier values keep what they were, views see what was written, and nothing was launched for it."""
    x = torch.zeros(4, 4, device="tpu")
    before = x + 0
    x[1] = 5
    x[:, 0].add_(1)
    v = x.view(-1)
    v[3:7] *= 2
    cpu = torch.zeros(4, 4)
    cpu[1] = 5
    cpu[:, 0].add_(1)
    cpu.view(-1)[3:7] *= 2
    assert torch.equal(x.cpu(), cpu)
    assert torch.equal(before.cpu(), torch.zeros(4, 4))
    assert torch.equal(v.cpu(), cpu.view(-1))


def test_gradients_and_an_optimizer_step() -> None:
    """A training step equals CPU's."""

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        x = torch.randn(6, 4).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]

    with override(precision=torch.tpu.Precision.HIGHEST):
        for ours, theirs in zip(train("tpu"), train("cpu"), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_draws_equal_strict(regions) -> None:
    """The state is a value of the device, and the numbers are those of Strict."""

    def draw() -> tuple[list[float], int]:
        torch.manual_seed(3)
        made = [torch.rand(5, device="tpu"), torch.randn(3, device="tpu"), torch.rand(2, device="tpu")]
        return torch.cat(made).tolist(), torch.tpu.default_generators[0].get_offset()

    deferred = draw()
    assert any("rng_state_update" in names(r) for r in regions())
    with override(mode=EagerMode.DEFER_NEVER):
        strict = draw()
    assert deferred == strict


def test_a_refusal_of_a_lowering_arises_at_the_op() -> None:
    """Shapes that do not fit, and options that are refused, raise where they are written."""
    with pytest.raises(RuntimeError, match="broadcast"):
        host(1, 2) + host(1, 2, 3)


def test_exceptions_leave_the_list_consistent() -> None:
    """An op that raises adds nothing; what is pending stays readable."""
    y = host(1, 2) * 3
    with pytest.raises(RuntimeError):
        y + host(1, 2, 3)
    assert (y + 1).tolist() == [4, 7]


def test_copies_of_pending_tensors() -> None:
    """deepcopy, torch.save and state dicts of pending values."""
    y = host(1, 2) * 3
    assert copy.deepcopy(y).tolist() == [3, 6]
    buffer = io.BytesIO()
    torch.save(host(1, 2) * 4, buffer)
    buffer.seek(0)
    assert torch.load(buffer).tolist() == [4, 8]


def test_known_sequences_are_found_again(regions) -> None:
    """The second time is a hit, also with other values and with the cache's tables shared by several orders of death."""
    for turn in range(3):
        x = host(1.0 + turn, 2)
        (x * 2.0).sin().sum().item()
        (region,) = regions()
        assert region.hit is (turn > 0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, n: x**n,
        lambda x, n: n**x,
        lambda x, n: x > n,
        lambda x, n: x.eq(n),
        lambda x, n: x.clone().fill_(n),
        lambda x, n: torch.full((2,), n, dtype=torch.float32, device=x.device) + x,
    ],
    ids=["pow", "rpow", "gt", "eq", "fill_", "full"],
)
def test_numbers_of_the_tensors_dtype(regions, compute) -> None:
    """An int and a float are one program where the device takes the number in the tensor's dtype, and both are right."""
    x = host(1.0, 2)
    runtime().forget_executables()
    for number in (2, 3.5, True):
        compute(x, number).cpu()
    assert [r.hit for r in regions()] == [False, True, True]
    for number in (2, 3.5, True, -1):
        assert torch.allclose(compute(x, number).float().cpu(), compute(x.cpu(), number).float().cpu())


def test_large_integers_keep_their_value() -> None:
    """What no float is equal to is not made one: 2**63 - 1 equals itself."""
    x = torch.tensor([2**63 - 1, 1]).to("tpu")
    assert (x == 2**63 - 1).tolist() == [True, False]
    assert (host(1.0, 2) < 2**53 + 1).tolist() == [True, True]


def test_clearing_the_cache_compiles_anew(regions) -> None:
    """Also for sequences that are being recorded."""
    x = host(1, 2)
    (x * 2).sin().cpu()
    y = (x * 2).sin()
    runtime().forget_executables()
    y.cpu()
    (x * 2).sin().cpu()
    assert [r.hit for r in regions()] == [False, False, True]


def test_a_pending_tensor_dies_with_its_last_holder() -> None:
    """Nothing of the engine keeps a tensor or a storage alive."""
    y = host(1, 2) * 3
    reference = weakref.ref(y.untyped_storage())
    tensor = weakref.ref(y)
    del y
    assert tensor() is None
    assert reference() is None
