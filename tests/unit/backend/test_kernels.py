"""The hot path: keys, donation, aliasing, origins, and what the table of lowerings refuses."""

from __future__ import annotations

import gc
import math
import threading

import numpy as np
import pytest
import torch

from emutpu.backend import registration
from emutpu.backend.cell import MEMORY
from emutpu.backend.kernels import Kernel
from emutpu.backend.location import locate
from emutpu.backend.lowering._registry import LOWERINGS, Lowering, lowering
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of


def _misses() -> int:
    return runtime().cache.misses


def _value(tensor: torch.Tensor) -> object:
    cell = cell_of(tensor)
    assert cell is not None
    return cell.value


def test_scalar_values_are_not_in_the_key() -> None:
    """Another value of the same type compiles nothing; another type does, and all results are right."""
    x = torch.arange(7.0).to("tpu")
    (x + 1.5).cpu()
    before = _misses()
    for value in (0.0, 1.0, -1.0, 2.5, math.inf):
        assert torch.equal((x + value).cpu(), torch.arange(7.0) + value)
    assert _misses() == before
    assert torch.equal((x + 3).cpu(), torch.arange(7.0) + 3)
    assert _misses() == before + 1


def test_signed_zero_and_nan_scalars() -> None:
    """0.0 and -0.0 are equal but not the same scalar; NaN never hits the scalar cache wrongly."""
    x = torch.zeros(3, device="tpu")
    assert torch.signbit((x * 0.0).cpu()).tolist() == [False] * 3
    assert torch.signbit((x * -0.0).cpu()).tolist() == [True] * 3
    assert torch.isnan((x + math.nan).cpu()).all()
    assert torch.equal((x + 0.0).cpu(), torch.zeros(3))


def test_inplace_donates_a_sole_holder() -> None:
    """The old buffer of ``x.mul_`` is gone after the launch, and the result is right."""
    x = torch.arange(5.0).to("tpu")
    old = _value(x.add_(0.0))
    del old
    kernel = registration.kernel("mul_.Tensor")
    x.mul_(3.0)
    assert any(entry.executable.donated for entry in kernel.entries.values())
    assert torch.equal(x.cpu(), torch.arange(5.0) * 3)


def test_inplace_does_not_donate_a_shared_buffer() -> None:
    """A buffer that something else holds survives an in-place op unchanged."""
    x = torch.arange(5.0).to("tpu")
    held = _value(x)
    x.mul_(3.0)
    assert np.asarray(held).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert torch.equal(x.cpu(), torch.arange(5.0) * 3)


def test_inplace_with_itself_and_with_its_own_views() -> None:
    """One storage on both sides of an in-place op."""
    x = torch.arange(6.0).reshape(2, 3)
    y = x.to("tpu")
    x.mul_(x)
    y.mul_(y)
    x[0].add_(x[1])
    y[0].add_(y[1])
    x[:, 1:].mul_(x[:, :-1].clone())
    y[:, 1:].mul_(y[:, :-1].clone())
    assert torch.equal(y.cpu(), x)


def test_copies_share_nothing() -> None:
    """Mutating either end of a copy leaves the other alone, both ways, for every alignment."""
    for offset in range(4):
        host = torch.arange(64.0)[offset:]
        device = host.to("tpu")
        back = device.cpu()
        host.fill_(-1.0)
        back.mul_(2.0)
        assert torch.equal(device.cpu(), torch.arange(64.0)[offset:])
        device.zero_()
        assert torch.equal(back, torch.arange(64.0)[offset:] * 2)


def test_a_host_copy_of_a_view_keeps_its_memory() -> None:
    """Reads of non-contiguous views own their value, however much is allocated and freed meanwhile."""
    x = torch.randn(50, 40)
    wide = x.to("tpu")
    for column in range(0, 40, 5):
        read = wide[:, column].cpu()
        junk = [torch.randn(50, device="cpu").to("tpu") for _ in range(5)]
        del junk
        assert torch.equal(read, x[:, column])


def test_origin_names_the_line_that_issued_the_op() -> None:
    """A cell remembers the user's line, not a line of PyTorch or emutpu."""
    x = torch.ones(3, device="tpu")
    y = torch.nn.functional.silu(x) if "silu" in LOWERINGS else x + x
    cell = cell_of(y)
    assert cell is not None
    assert cell.origin is not None
    location = locate(*cell.origin[1:])
    assert location is not None
    assert location.file == __file__
    assert location.code.startswith("y = torch")


def test_buffers_die_with_their_last_alias() -> None:
    """A view keeps the storage alive; the last one frees it."""
    gc.collect()
    before, count = MEMORY.live, MEMORY.buffers
    x = torch.zeros(256, device="tpu")
    view = x[3:].view(11, 23)
    del x
    assert MEMORY.live == before + 1024
    del view
    assert (MEMORY.live, MEMORY.buffers) == (before, count)


def test_saved_for_backward_keeps_memory_alive() -> None:
    """Tensors that autograd saved count as live until the graph goes."""
    gc.collect()
    before = MEMORY.live
    x = torch.ones(64, device="tpu", requires_grad=True)
    y = (x * 2).exp()
    assert MEMORY.live >= before + 2 * 256
    del y, x
    gc.collect()
    assert MEMORY.live == before


def test_threads_compile_one_key_once() -> None:
    """Eight threads that ask for one new op at once compile it once, and all get the right value."""
    x = torch.arange(91.0).to("tpu")
    (x.clone() * 1).cpu()
    results: list[torch.Tensor] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        results.append(torch.sin(x))

    before = _misses()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert _misses() == before + 1
    for result in results:
        torch.testing.assert_close(result.cpu(), torch.sin(torch.arange(91.0)), rtol=1e-6, atol=1e-6)


def test_a_second_lowering_for_an_op_is_an_error() -> None:
    """Duplicates in the table raise at import."""
    with pytest.raises(AssertionError, match=r"two lowerings for aten::add\.Tensor"):
        lowering("add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor")(lambda cx, *a: a[0])
    assert "add.Tensor" in LOWERINGS


def test_a_misspelt_schema_is_an_error() -> None:
    """A schema that is not PyTorch's own raises when the table is registered."""
    row = Lowering("floor_divide", "floor_divide(Tensor self, Tensor divisor) -> Tensor", lambda cx, *a: a[0])
    with pytest.raises(AssertionError, match="is not PyTorch's"):
        registration._register_row(row, frozenset())


def test_a_kernel_for_a_composite_op_is_an_error() -> None:
    """A composite op would lose its gradients."""
    with pytest.raises(AssertionError, match="would lose its gradients"):
        registration._register("square", torch.square, None)


def test_a_lowering_that_disagrees_with_pytorch_is_an_error() -> None:
    """Wrong shapes out of a lowering never reach a program."""
    op = registration.overload("erfinv")
    wrong = Kernel(op, Lowering("erfinv", "", lambda cx, x: x.reshape((1, *x.shape))))
    with pytest.raises(AssertionError, match="PyTorch says"):
        wrong.function(torch.ones(3, device="tpu"))


def test_an_unwritten_tensor_reads_as_zeros() -> None:
    """``empty`` launches nothing, and its content is defined here."""
    before = sum(runtime().statistics().ops.values())
    x = torch.empty(3, 4, device="tpu")
    y = torch.empty_strided((2, 3), (1, 2), device="tpu")
    assert sum(runtime().statistics().ops.values()) == before
    assert torch.equal((x + 1).cpu(), torch.ones(3, 4))
    assert torch.equal(y.cpu(), torch.zeros(2, 3))


def test_a_padded_matrix_of_doubles():
    """LLVM of jaxlib 0.8.3 ended the process over it where it compiled for AVX-512."""
    gradient = torch.ones(1, 3, dtype=torch.float64).to("tpu")
    found = torch.ops.aten.slice_backward(gradient, [2, 3], 0, 0, 2, 2)
    assert found.cpu().tolist() == [[1.0] * 3, [0.0] * 3]
