"""Training and PyTorch's own transformations through compiled graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops import scan, while_loop
from torch.utils.checkpoint import checkpoint


def step_of(device: str, optimizer: str, **settings):
    """A network, and a function that does a whole training step with it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, **settings)

    def step(x, y):
        loss = (model(x) - y).square().mean()
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        return loss.detach()

    return model, step


@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop"])
def test_whole_training_steps(optimizer, compiles, launches) -> None:
    """Forward, backward and a capturable optimizer: CPU's parameters; from the second step on a handful of launches."""
    capturable = {} if optimizer == "SGD" else {"capturable": True}
    mine, step = step_of("tpu", optimizer, **capturable)
    theirs, expected = step_of("cpu", optimizer)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    compiled = torch.compile(step)
    given = x.to("tpu"), y.to("tpu")
    for turn in range(4):
        compiles(), launches()
        torch.testing.assert_close(compiled(*given).cpu(), expected(x, y), rtol=1e-4, atol=1e-5)
        if turn > 1:
            assert compiles() == 0
            assert launches() <= 3
    for a, e in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), e.detach(), rtol=1e-4, atol=1e-5)


DRAWS = {
    "rand_like": lambda x: x + torch.rand_like(x),
    "dropout": lambda x: nn.functional.dropout(x, 0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "randint": lambda x: torch.randint(0, 9, (5,), device=x.device),
    "two": lambda x: (x.clone().uniform_(), torch.rand(2, device=x.device)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_eagers(name) -> None:
    """The same seed gives the same numbers compiled and eager, call after call, and leaves the same offset."""
    f, x = DRAWS[name], torch.zeros(3, 4, device="tpu")
    generator = torch.tpu.default_generators[0]

    def run(function):
        torch.manual_seed(5)
        drawn = [torch.utils._pytree.tree_map(lambda t: t.cpu(), function(x)) for _ in range(2)]
        return drawn, generator.get_offset()

    (eager, offset), (compiled, reached) = run(f), run(torch.compile(f))
    assert offset == reached
    for a, e in zip(*map(torch.utils._pytree.tree_leaves, (compiled, eager)), strict=True):
        assert torch.equal(a, e)


CHECKPOINTED = {
    "dropout": lambda linear, v: nn.functional.dropout(linear(v), 0.5).sin(),
    "two draws": lambda linear, v: nn.functional.dropout(linear(nn.functional.dropout(v, 0.2)).sin(), 0.5).sin(),
    "uniform": lambda linear, v: (linear(v) * torch.rand_like(v)).sin(),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_checkpointed_draws_are_recomputed_with_their_own_numbers(name) -> None:
    """Losses and gradients equal eager's, also when other draws and other forward passes come before the backward."""
    linear, body = nn.Linear(10, 10).to("tpu"), CHECKPOINTED[name]

    def f(x):
        return checkpoint(lambda v: body(linear, v), x, use_reentrant=False).sum()

    def run(function):
        torch.manual_seed(2)
        x = torch.ones(5, 10, device="tpu", requires_grad=True)
        losses = [function(x), function(x * 2)]
        torch.rand(7, device="tpu")
        for loss in losses:
            loss.backward()
        return torch.stack([loss.detach().cpu() for loss in losses]), x.grad.cpu(), torch.rand(3, device="tpu").cpu()

    compiled, eager = torch.compile(f), run(f)
    for _ in range(2):
        for a, e in zip(run(compiled), eager, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def test_generators_in_graphs() -> None:
    """A generator that a function closes over or is given draws eager's numbers, and its offset moves as eagerly."""
    mine = torch.Generator("tpu")

    def given(x, generator):
        return x + torch.rand(4, device="tpu", generator=generator)

    def closed(x, _):
        return torch.bernoulli(x + 0.5, generator=mine)

    x = torch.zeros(4, device="tpu")
    for function in (given, closed):
        results = []
        for run in (function, torch.compile(function)):
            mine.manual_seed(3)
            results.append((torch.cat([run(x, mine).cpu() for _ in range(3)]), mine.get_offset()))
        assert torch.equal(results[0][0], results[1][0])
        assert results[0][1] == results[1][1] > 0


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks(cell, launches) -> None:
    """One region for all layers and steps, with gradients of all parameters."""
    torch.manual_seed(0)
    host = cell(4, 6, num_layers=2, batch_first=True)
    device = copy.deepcopy(host).to("tpu")
    x = torch.randn(2, 5, 4)
    compiled = torch.compile(device)
    actual, expected = compiled(x.to("tpu"))[0], host(x)[0]
    torch.testing.assert_close(actual.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    for result in (actual, expected):
        result.square().sum().backward()
    for a, e in zip(device.parameters(), host.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), e.grad, rtol=1e-3, atol=1e-4)
    launches()
    compiled(x.to("tpu"))
    assert launches() == 1


def test_autocast_inside_and_around() -> None:
    """Autocast in the function, and around a function that was compiled without it."""
    x = torch.ones(4, 4, device="tpu")

    def inside(x):
        with torch.autocast("tpu", dtype=torch.bfloat16):
            return x @ x

    assert torch.compile(inside)(x).dtype == torch.bfloat16
    plain = torch.compile(lambda x: x @ x)
    assert plain(x).dtype == torch.float32
    with torch.autocast("tpu", dtype=torch.bfloat16):
        assert plain(x).dtype == torch.bfloat16


def test_inference_mode() -> None:
    """Results and mutated arguments under inference_mode."""
    with torch.inference_mode():
        x = torch.ones(3, device="tpu")
        add = torch.compile(lambda x: x.add_(1))
        add(x)
        assert add(x).tolist() == [3, 3, 3]
        assert torch.compile(lambda x: x * 2)(x).is_inference()


FUNCTIONS = {
    "grad": lambda x: torch.func.grad(lambda v: v.sin().sum())(x),  # noqa: PLW0108  # a function that calls the transformation
    "vmap": lambda x: torch.vmap(lambda row: row.softmax(0))(x),  # noqa: PLW0108  # a function that calls the transformation
    "jvp": lambda x: torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: torch.func.jacrev(lambda v: v.sum(0) ** 2)(x),  # noqa: PLW0108  # a function that calls the transformation
    "dtype view": lambda x: x.view(torch.int32) + 1,
    "conjugate": lambda x: torch.complex(x, x).conj() * 2,
    "read value": lambda x: x * x.sum().item(),
    "selection": lambda x: x[x > 0] * 2,
    "sort": lambda x: (x.sort(1), x.topk(2), x.cumsum(0), x.argmax()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, same) -> None:
    """torch.func, complex numbers, sizes that depend on data."""
    same(FUNCTIONS[name], torch.randn(4, 3), tolerance=1e-4)


FORMATS = {
    "convolution": lambda x, w: torch.cat([x, nn.functional.conv2d(x, w, padding=1, groups=6)], 1),
    "transposed convolution": lambda x, w: nn.functional.conv_transpose2d(x, w, padding=1, groups=6) * x,
    "two in a row": lambda x, w: nn.functional.conv2d(nn.functional.conv2d(x, w, groups=6).relu(), w, groups=6),
}


@pytest.mark.parametrize("name", FORMATS)
def test_reshapes_after_channels_last(name) -> None:
    """PyTorch traces the results as contiguous, and a reshape of them as a view; eager kernels keep the format."""

    def program(x, w):
        y = FORMATS[name](x, w)
        y = y.reshape(2, 3, -1, y.shape[-1])
        return (y @ y.mT).square().sum(1)

    torch.manual_seed(0)
    x, w = torch.randn(2, 6, 8, 8), torch.randn(6, 1, 3, 3, requires_grad=True)
    expected = program(x.to(memory_format=torch.channels_last), w)
    (slope,) = torch.autograd.grad(expected.sum(), w)
    weight = w.detach().to("tpu").requires_grad_()
    actual = torch.compile(program)(x.to("tpu").to(memory_format=torch.channels_last), weight)
    actual.sum().backward()
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.grad.cpu(), slope, rtol=1e-4, atol=1e-2)


BRANCHES = {
    "cond": lambda x: torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)),
    "while_loop": lambda x: while_loop(lambda v: v.sum() < 9, lambda v: (v * 2,), (x,)),
    "scan": lambda x: scan(
        lambda c, v: (torch.cond(v.sum() > 0, lambda a: a.sin(), lambda a: a.cos(), (c,)), v * 2), x[0] * 1, x * 1
    ),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branches_on_values_of_the_device(name) -> None:
    """Refused in a graph with the device's text, the line and the remedy, also inside of a scan; eagerly they run."""
    x = torch.ones(4, 3)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="cannot Materialize") as raised:
        torch.compile(BRANCHES[name])(x.to("tpu"))
    assert "test_features.py" in str(raised.value)
    assert "EMUTPU_BEYOND=1" in str(raised.value)
    expected, found = BRANCHES[name](x), BRANCHES[name](x.to("tpu"))
    for a, e in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        torch.testing.assert_close(a.cpu(), e)


def test_branches_beyond_the_device(passes) -> None:
    """With EMUTPU_BEYOND=1 the host decides between regions, and gradients go through."""
    program = """
        import torch
        function = torch.compile(lambda x: torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,)))
        for sign in (1.0, -1.0):
            host = torch.full((3,), sign).requires_grad_()
            mine = host.detach().to("tpu").requires_grad_()
            expected = host.sin() if sign > 0 else host.cos()
            expected.sum().backward()
            found = function(mine)
            found.sum().backward()
            torch.testing.assert_close(found.cpu(), expected)
            torch.testing.assert_close(mine.grad.cpu(), host.grad)
    """
    passes(program, EMUTPU_BEYOND="1")


def test_mutated_arguments_that_share_memory() -> None:
    """Two arguments over one storage, one of them written."""

    def f(x, y):
        x.add_(1)
        return y * 2

    base, host = torch.arange(6.0, device="tpu"), torch.arange(6.0)
    actual = torch.compile(f)(base, base[2:])
    expected = f(host, host[2:])
    assert torch.equal(actual.cpu(), expected)
    assert torch.equal(base.cpu(), host)


def test_custom_ops() -> None:
    """A Python custom op is part of the region."""

    @torch.library.custom_op("emutpu_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x):
        return torch.empty_like(x)

    assert torch.compile(lambda x: twice(x) + 1)(torch.ones(2, device="tpu")).tolist() == [3, 3]


def test_deferred_arguments() -> None:
    """In DEFER_AND_FUSE a compiled call computes what its arguments wait for."""
    with torch.tpu.set_eager_mode(torch.tpu.EagerMode.DEFER_AND_FUSE):
        x = torch.ones(3, device="tpu") * 2
        assert (torch.compile(lambda v: v + 1)(x) * 2).tolist() == [6, 6, 6]
