"""Every failure is a Python exception that names the op, the user's line, and what to do."""

from __future__ import annotations

import contextlib
import linecache
import os
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from emutpu import FallbackMode, fallback_mode
from emutpu.backend.options import EagerMode
from emutpu.backend.pjrt import (
    Fault,
    FaultInjectingClient,
    FaultSite,
    InternalError,
    OutOfRange,
    PjrtError,
    ResourceExhausted,
    Unimplemented,
)
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of

HERE = os.path.basename(__file__)


@contextlib.contextmanager
def faults(*injected: Fault) -> Iterator[None]:
    """A client that fails where told; the real one comes back afterwards."""
    real = runtime().client
    runtime().replace_client(FaultInjectingClient(real, injected))
    try:
        yield
    finally:
        runtime().replace_client(real)


def line_with(mark: str) -> int:
    """The number of the one line of this file that carries a mark."""
    lines = linecache.getlines(__file__)
    (number,) = [n for n, line in enumerate(lines, 1) if line.rstrip().endswith(f"# {mark}")]
    return number


def whole(error: BaseException) -> str:
    """Message and notes, as a traceback shows them."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


# ------------------------------------------------------------------------------------------------ arguments


def test_mixed_devices() -> None:
    """PyTorch's own text, with argument, op and line; 0-d CPU tensors and numbers may mix."""
    x = torch.ones(3, device="tpu")
    with pytest.raises(RuntimeError) as caught:
        x + torch.ones(3)  # mixed
    assert "Expected all tensors to be on the same device, but found at least two devices, tpu:0 and cpu!" in str(
        caught.value
    )
    assert "(when checking argument other of add)" in str(caught.value)
    assert f"{HERE}:{line_with('mixed')}" in str(caught.value)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(RuntimeError, match="found at least two devices, tpu:0 and cpu"):
        torch.ones(3).to("tpu").add_(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"expected out to be on tpu, got cpu|tpu:0 and cpu|same device"):
        torch.add(x, x, out=torch.empty(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x + torch.ones(4, device=x.device),
        lambda x: x.view(4),
        lambda x: x.mul_(torch.ones(2, 3, device=x.device)),
        lambda x: x @ torch.ones(4, 2, device=x.device),
        lambda x: torch.cat([x, x[None]]),
        lambda x: x.sum(dim=2),
        lambda x: torch.relu_(x.expand(2, 3).t()[:, :1].expand(3, 5)),
    ],
)
def test_wrong_shapes(call: Callable[[torch.Tensor], object]) -> None:
    """The class that PyTorch raises on the CPU, and a text or note that names this line."""
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(torch.ones(3))
    with pytest.raises(expected.type) as caught:
        call(torch.ones(3, device="tpu"))
    assert str(caught.value)


def test_shape_errors_name_op_and_line() -> None:
    """PyTorch's own text comes first; the note tells which op, at which line."""
    with pytest.raises(RuntimeError) as caught:
        torch.ones(3, device="tpu") + torch.ones(4, device="tpu")  # shapes
    assert "aten.add.Tensor issued at" in whole(caught.value)
    assert f"{HERE}:{line_with('shapes')}" in whole(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(2, dtype=torch.complex128, device="tpu"),
        lambda: torch.ones(2, dtype=torch.complex128).to("tpu"),
        lambda: torch.ones(2, device="tpu").to(torch.complex128),
        lambda: torch.ones(2, device="tpu").to(torch.complex32),
    ],
)
def test_unsupported_dtypes(make: Callable[[], object]) -> None:
    """complex128 and complex32 are refused by name, with the dtypes that there are."""
    with pytest.raises(NotImplementedError, match=r"complex(128|32) dtype is not yet supported on TPU.*float32"):
        make()


@pytest.mark.parametrize("device", ["tpux", "tpu:", "tpu:-1", "tpu:x"])
def test_wrong_device_strings(device: str) -> None:
    """PyTorch refuses what is no device."""
    with pytest.raises(RuntimeError):
        torch.ones(2, device=device)


def test_sparse() -> None:
    """Sparse layouts are refused as the device refuses them, whichever way they come."""
    x = torch.eye(2, device="tpu")
    for make in (
        x.to_sparse,
        x.to_sparse_csr,
        lambda: torch.sparse_coo_tensor(
            torch.zeros(1, 1, dtype=torch.int64, device="tpu"), torch.ones(1, device="tpu"), (2,)
        ),
        lambda: torch.eye(2).to_sparse().to("tpu"),
    ):
        with pytest.raises(NotImplementedError, match=r"^\w+\(\): sparse operators are not supported on TPU yet"):
            make()


def test_missing_op_and_fallback() -> None:
    """NotImplementedError names operator, line and remedy; with fallback allowed it warns, runs on the CPU, and is counted."""
    x = torch.tensor([[4.0, 0.0], [0.0, 9.0]], device="tpu")
    with pytest.raises(NotImplementedError) as caught:
        torch.linalg.eigvals(x)  # missing
    assert str(caught.value).startswith("operator 'aten::")
    assert "is not implemented for TPU. Please file a feature request" in str(caught.value)
    assert f"{HERE}:{line_with('missing')}" in str(caught.value)
    before = runtime().fallbacks.total()
    with (
        fallback_mode(FallbackMode.ALLOW_FALLBACK),
        pytest.warns(UserWarning, match="operator 'aten::.*' is not implemented for TPU. Falling back to CPU"),
    ):
        values = torch.linalg.eigvals(x)  # allowed
    assert values.device.type == "tpu"
    assert sorted(v.real for v in values.tolist()) == [4, 9]
    assert runtime().fallbacks.total() > before
    assert any(where.endswith(f"{HERE}:{line_with('allowed')}") for _, where in runtime().fallbacks)
    with pytest.raises(NotImplementedError):
        torch.linalg.eigvals(x)
    with pytest.raises(TypeError, match="FallbackMode"), fallback_mode(True):  # type: ignore[arg-type]  # the point
        pass


def test_deleted_buffer() -> None:
    """A buffer that somebody deleted is an error at the read, not a crash."""
    x = torch.ones(3, device="tpu") + 1
    cell = cell_of(x)
    assert cell is not None
    assert cell.value is not None
    cell.value.delete()
    with pytest.raises(RuntimeError, match="delete") as caught:
        x.tolist()
    assert "aten.add.Tensor issued at" in str(caught.value)


# ------------------------------------------------------------------------------------------------ faults of the device

READS: dict[str, Callable[[torch.Tensor], object]] = {
    "cpu": lambda x: x.cpu(),
    "item": lambda x: x[0].item(),
    "print": str,
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool((x > 0)[0]),
}


@pytest.mark.parametrize("name", READS)
def test_execution_fault_surfaces_at_the_read(name: str) -> None:
    """The second multiplication fails on the device: the read names it, its line, and the reading line."""
    x = torch.ones(3, device="tpu")
    with faults(Fault(FaultSite.EXECUTE, InternalError("core halted"), op="aten.mul*", nth=2)):
        y = x * 2
        z = y * 3  # issued
        w = z + 1
        assert y.tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError) as caught:
            READS[name](w)  # read
    text = str(caught.value)
    assert "core halted" in text
    assert f"aten.mul.Tensor issued at {__file__}:{line_with('issued')}: z = y * 3" in text
    assert "TORCH_TPU_LAUNCH_BLOCKING=1" in text
    assert isinstance(caught.value.__cause__, PjrtError)
    if name in ("cpu", "item", "tolist", "bool"):
        assert f"read at {__file__}:" in text
    # PyTorch's printing switches functorch off until its frame ends, and an exception that is kept keeps the frame.
    traceback.clear_frames(caught.tb)


def test_the_reading_line() -> None:
    """The line that reads is named beside the line that failed."""
    with faults(Fault(FaultSite.EXECUTE, InternalError("core halted"), op="aten.mul*")):
        y = torch.ones(3, device="tpu") * 2
        with pytest.raises(RuntimeError) as caught:
            y.cpu()  # reading
    assert f"read at {__file__}:{line_with('reading')}" in str(caught.value)


def test_execution_fault_surfaces_at_synchronize() -> None:
    """``torch.accelerator.synchronize`` raises what nobody has read, once."""
    with faults(Fault(FaultSite.EXECUTE, InternalError("core halted"), op="aten.mul*")):
        y = torch.ones(3, device="tpu") * 2
        with pytest.raises(RuntimeError, match=r"synchronize\(\): materialization failed with: core halted"):
            torch.accelerator.synchronize()
        torch.accelerator.synchronize()
        with pytest.raises(RuntimeError, match="core halted"):
            y.cpu()


def test_failed_values_spread_and_do_not_stick() -> None:
    """What is computed from a failed value fails too; everything else goes on, and in-place targets may be rewritten."""
    x = torch.ones(3, device="tpu")
    with faults(Fault(FaultSite.EXECUTE, InternalError("core halted"), op="aten.mul_*")):
        x.mul_(2)
        assert (torch.ones(3, device="tpu") + 1).tolist() == [2, 2, 2]
        with pytest.raises(RuntimeError, match="core halted"):
            (x + 1).cpu()
        x.fill_(4)
        assert x.tolist() == [4, 4, 4]


def test_out_of_memory_at_the_read() -> None:
    """Out of memory comes at the read, in the device's words, as torch.OutOfMemoryError."""
    with faults(Fault(FaultSite.EXECUTE, ResourceExhausted("17.2 GiB of 16.0 GiB"), op="aten.mm*")):
        y = torch.ones(4, 4, device="tpu") @ torch.ones(4, 4, device="tpu")  # large
        with pytest.raises(torch.OutOfMemoryError) as caught:
            y.cpu()
    assert "the TPU ran out of memory while awaiting the materialization" in str(caught.value)
    assert f"aten.mm.default issued at {__file__}:{line_with('large')}" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InternalError("XLA gave up"), RuntimeError),
        (Unimplemented("no such op"), NotImplementedError),
        (ResourceExhausted("program too large"), torch.OutOfMemoryError),
        (OutOfRange("index"), IndexError),
    ],
)
def test_compilation_faults_at_the_op(error: PjrtError, expected: type[Exception]) -> None:
    """A failed compilation raises at the op; the same op works once the compiler does."""
    x = torch.ones(3, device="tpu")
    with faults(Fault(FaultSite.COMPILE, error, op="aten.mul*")):
        with pytest.raises(expected) as caught:
            x * 2  # compiled
        assert "mul(): the XLA compiler failed with: " in str(caught.value)
        assert f"{__file__}:{line_with('compiled')}" in str(caught.value)
        assert (x * 2).tolist() == [2, 2, 2]


@pytest.mark.parametrize("site", [FaultSite.FROM_HOST, FaultSite.TO_HOST])
def test_transfer_faults(site: FaultSite) -> None:
    """A failed transfer is an exception with the client's message."""
    with faults(Fault(site, InternalError("link down"), nth=0)), pytest.raises(RuntimeError, match="link down"):
        torch.arange(3.0).to("tpu").cpu()


def test_blocking_mode_raises_at_the_op() -> None:
    """DEFER_NEVER_AND_LAUNCH_BLOCKING (TORCH_TPU_LAUNCH_BLOCKING=1) waits for every op, so the op itself raises."""
    with (
        faults(Fault(FaultSite.EXECUTE, InternalError("core halted"), op="aten.mul*")),
        torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING),
    ):
        x = torch.ones(3, device="tpu")
        with pytest.raises(RuntimeError) as caught:
            x * 2  # blocking
    assert "core halted" in str(caught.value)
    assert f"{__file__}:{line_with('blocking')}" in str(caught.value)
    assert "aten.mul.Tensor" in str(caught.value)


def test_launch_blocking_variable(passes: Callable[..., Any]) -> None:
    """TORCH_TPU_LAUNCH_BLOCKING=1 starts in that mode."""
    text = "import torch\nprint((torch.ones(2, device='tpu') + 1).tolist(), torch.tpu.eager_mode.name)\n"
    assert passes(text, TORCH_TPU_LAUNCH_BLOCKING="1") == "[2.0, 2.0] DEFER_NEVER_AND_LAUNCH_BLOCKING\n"
