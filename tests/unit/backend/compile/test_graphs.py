"""Compiled functions equal CPU PyTorch: values, gradients, mutations, aliases, constants, pieces."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

N = torch.nn


def test_one_region_a_direction(same, compiles, launches) -> None:
    """A forward pass is one module, its backward another, and nothing else is compiled or launched for it."""
    x = torch.randn(4, 3, requires_grad=True)
    w = torch.randn(3, 5, requires_grad=True)
    compiled = torch.compile(lambda x, w: (x @ w).relu().sum(), backend="tpu")
    mine = [t.detach().to("tpu").requires_grad_() for t in (x, w)]
    compiles(), launches()
    loss = compiled(*mine)
    assert launches() == 1
    loss.backward()
    assert launches() == 1
    (x @ w).relu().sum().backward()
    torch.testing.assert_close(mine[0].grad.cpu(), x.grad)
    compiles()
    compiled(*mine).backward()
    compiles()
    compiled(*mine).backward()
    assert compiles() == 0


def test_convolution_batch_norm_and_gradients(same) -> None:
    """Running statistics are written, gradients agree."""
    weight, running = torch.randn(4, 3, 3, 3, requires_grad=True), (torch.zeros(4), torch.ones(4))

    def f(x, weight, mean, var):
        return F.batch_norm(F.conv2d(x, weight), mean, var, training=True).relu()

    same(f, torch.randn(2, 3, 8, 8), weight, *running, tolerance=1e-4)


def test_mutations_are_written_back(same) -> None:
    """In-place ops on arguments and on views of arguments, data that only is written, and the mutated argument returned."""

    def f(x, y, z):
        x.add_(1)
        y[1:].mul_(x[1:])
        z.zero_()
        return x.sum(), y.t(), x

    x, y, z = torch.randn(4, 4), torch.randn(4, 4), torch.randn(3)
    same(f, x, y, z)
    a, b, c = (t.to("tpu") for t in (x, y, z))
    _, transposed, returned = torch.compile(f, backend="tpu")(a, b, c)
    assert returned is a
    assert transposed.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    assert transposed.stride() == (1, 4)
    b.fill_(3)
    assert transposed.cpu().eq(3).all()


def test_a_mutated_part_of_a_storage() -> None:
    """An argument that is a slice of a larger tensor is written in place, and the rest stays."""

    def f(x):
        x.mul_(2)
        return x + 1

    base = torch.arange(12.0).reshape(3, 4)
    mine = base.to("tpu")
    result = torch.compile(f, backend="tpu")(mine[1:])
    expected = base.clone()
    assert torch.equal(result.cpu(), f(expected[1:]))
    assert torch.equal(mine.cpu(), expected)


def test_an_offset_does_not_recompile(compiles) -> None:
    """The same shapes at another storage offset run the same executable; only reading the slice is new."""
    base = torch.arange(40.0, device="tpu")
    compiled = torch.compile(lambda x: x.sin() * 2, backend="tpu")
    for offset in (0, 8, 16):
        part = base[offset : offset + 8]
        assert torch.allclose(compiled(part).cpu(), part.cpu().sin() * 2)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_an_offset_recompiles_where_the_release_is_reproduced(passes) -> None:
    """``EMUTPU_QUIRKS=0.2.0`` guards storage offsets: another one is another graph, and the cause is said."""
    passes(
        """
        import torch
        from emutpu.backend.compile.observe import recompilations
        base = torch.arange(40.0, device="tpu")
        compiled = torch.compile(lambda x: x.sin() * 2)
        for start in (0, 10, 0):
            found = compiled(base[start : start + 10])
            assert torch.equal(found, base[start : start + 10].sin() * 2)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        assert len(recompilations()) == 1 and "storage_offset" in recompilations()[0], recompilations()
        """,
        EMUTPU_QUIRKS="0.2.0",
    )


def test_donation_spares_other_holders() -> None:
    """A mutated argument's buffer is given up only if nobody else holds it."""

    def f(x):
        x.add_(1)

    x = torch.ones(5, device="tpu")
    y = x.clone()
    other = torch.empty(5, device="tpu")
    from emutpu.backend.storage import cell_of

    cell_of(other).value = cell_of(y).value
    compiled = torch.compile(f, backend="tpu")
    compiled(y)
    compiled(y)
    assert y.tolist() == [3] * 5
    assert other.tolist() == [1] * 5


def test_aliases_of_outputs_and_inputs(same) -> None:
    """Outputs that are views of arguments or of each other stay so, with their strides."""

    def f(x):
        y = x * 2
        return x.t(), y, y[1:], y.t(), x

    results = same(f, torch.randn(3, 4))
    pointers = {t.untyped_storage().data_ptr() for t in results}
    assert len(pointers) == 2


def test_constants_tied_weights_and_scalars(same) -> None:
    """Tensors made inside, a weight used twice, and numbers."""
    w = torch.randn(4, 4, requires_grad=True)
    same(
        lambda x, w: F.linear(F.linear(x, w), w) * torch.tensor(3.0) + torch.arange(4.0, device=x.device),
        torch.randn(2, 4),
        w,
    )


@pytest.mark.parametrize("number", [True, 3, -0.0, 2.5, float("inf"), 1e30, 1 + 2j])
def test_numbers_are_constants(number) -> None:
    """Python numbers of every type, special values among them, are in the module as they are."""
    compiled = torch.compile(lambda x: torch.full_like(x, 0).fill_(number) + x * number, backend="tpu")
    dtype = torch.complex64 if isinstance(number, complex) else torch.float32
    x = torch.tensor([1.0, 2.0], dtype=dtype)
    expected = torch.full_like(x, 0).fill_(number) + x * number
    assert torch.equal(compiled(x.to("tpu")).cpu(), expected)
    assert torch.equal(compiled(x.to("tpu")).cpu().real.signbit(), expected.real.signbit())


def test_cpu_scalars_are_inputs(same, compiles) -> None:
    """A 0-d CPU tensor is an argument of the executable: another value does not compile."""
    compiled = torch.compile(lambda x, s: x * s + 1, backend="tpu")
    x = torch.ones(3, device="tpu")
    assert compiled(x, torch.tensor(2.0)).tolist() == [3, 3, 3]
    compiles()
    assert compiled(x, torch.tensor(5.0)).tolist() == [6, 6, 6]
    assert compiles() == 0


def test_host_work_between_device_work(same) -> None:
    """CPU tensors in and out, a copy to the host and back in one graph."""

    def f(x, host):
        moved = (host + 1).to(x.device)
        y = (x * moved).cpu()
        z = y.sin() + host
        return z, z.to(x.device) * x

    x, host = torch.randn(4), torch.randn(4)
    ours = torch.compile(f, backend="tpu", fullgraph=True)(x.to("tpu"), host)
    for a, e in zip(ours, f(x, host), strict=True):
        torch.testing.assert_close(a.cpu(), e)
    assert [t.device.type for t in ours] == ["cpu", "tpu"]


def test_random_host_work_is_not_frozen() -> None:
    """A CPU random op in a device graph draws anew on every call."""
    compiled = torch.compile(lambda x: x + torch.rand(3).to(x.device), backend="tpu")
    x = torch.zeros(3, device="tpu")
    assert not torch.equal(compiled(x).cpu(), compiled(x).cpu())


def test_kernels_that_read_values_run_between_regions() -> None:
    """``randperm`` is made on the host: the graph is cut around it, and stays correct."""
    compiled = torch.compile(lambda x: x[torch.randperm(8, device=x.device)].sort().values * 2, backend="tpu")
    x = torch.arange(8.0, device="tpu")
    assert compiled(x).tolist() == [2.0 * n for n in range(8)]


def test_empty_graphs() -> None:
    """Nothing to do, and nothing to do on the device."""
    x = torch.ones(2, device="tpu")
    assert torch.compile(lambda x: x, backend="tpu")(x) is x
    assert torch.compile(lambda x: (x, 3, None), backend="tpu")(x)[1:] == (3, None)
    assert torch.compile(lambda x: torch.empty(0, 3, device=x.device) + 1, backend="tpu")(x).shape == (0, 3)


def test_graph_breaks_and_fullgraph(same) -> None:
    """A break gives several graphs; ``fullgraph=True`` refuses it."""

    def f(x):
        y = x + 1
        torch._dynamo.graph_break()
        return y * 2

    same(f, torch.randn(3))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(f, backend="tpu", fullgraph=True)(torch.ones(3, device="tpu"))


def test_shapes_are_static(compiles) -> None:
    """Another size is another graph, never a dynamic one."""
    compiled = torch.compile(lambda x: x * 2, backend="tpu")
    for size in (3, 4, 5):
        assert compiled(torch.ones(size, device="tpu")).tolist() == [2] * size
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


def test_strides_are_the_graphs(same) -> None:
    """Non-contiguous arguments and results."""
    same(
        lambda x: (x.t() + 1, x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x * 1),
        torch.randn(3, 4).t(),
    )
    same(lambda x: x.relu(), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    same(lambda x: x + 1, torch.randn(3, 1).expand(3, 4))


def test_precision_changes_apply_to_compiled_graphs(compiles) -> None:
    """A changed matmul precision compiles again, and an earlier one is found again."""
    x = torch.randn(64, 64)
    mine = x.to("tpu")
    compiled = torch.compile(lambda a: a @ a, backend="tpu")
    exact = x.double() @ x.double()

    def error() -> float:
        return (compiled(mine).cpu().double() - exact).abs().max().item()

    assert error() < 1e-4
    with torch.tpu.precision(torch.tpu.Precision.DEFAULT):
        assert error() > 1e-3
    compiles()
    assert error() < 1e-4
    assert compiles() == 0


def test_errors_name_the_op_and_the_line() -> None:
    """A missing kernel is NotImplementedError's text with the user's line in it."""

    def f(x):
        return torch.linalg.cholesky(x)

    with pytest.raises(Exception, match="not implemented for TPU") as caught:
        torch.compile(f, backend="tpu")(torch.eye(3, device="tpu"))
    chain = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    inner = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(inner, NotImplementedError)
    assert "test_graphs.py" in chain + "".join(getattr(inner, "__notes__", []))


@pytest.mark.parametrize("safe", [False, True])
def test_collectives_split_the_graph(safe, passes) -> None:
    """A functional collective of one rank cuts the graph in two modules; where it is declared safe it is part of one."""
    passes(
        f"""
        import contextlib
        import torch
        import torch.distributed as dist
        from torch.distributed import _functional_collectives as collectives
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("cpu:fake,tpu:fake", store=FakeStore(), rank=0, world_size=1)

        def f(x):
            with torch.fx.traceback.annotate({{"spmd_safe": {safe}}}):
                y = collectives.all_reduce(x * 2, "sum", dist.group.WORLD)
                z = collectives.all_gather_tensor(y, 0, dist.group.WORLD)
            return z + 1

        seen = []
        compiled = torch.compile(f, options={{"debug_callback": seen.append, "name": "mine"}})
        assert compiled(torch.arange(3.0, device="tpu")).tolist() == [1, 3, 5]
        assert [len(debug.mlir_texts) for debug in seen] == [{1 if safe else 2}]
        assert ("@mine_split1_fwd" in seen[0].mlir_text) == {not safe}
        dist.destroy_process_group()
        """
    )
