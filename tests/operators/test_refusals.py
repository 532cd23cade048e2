"""Writes that PyTorch refuses on the CPU are refused on the device, in the same words; empty results lie as the CPU's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

REFUSED: dict[str, Callable[[torch.Tensor], object]] = {
    "row": lambda x: x.mul_(x[0]),
    "element": lambda x: x.add_(x[0, 0]),
    "shifted": lambda x: x[:2].add_(x[1:]),
    "shifted copy": lambda x: x[:2].copy_(x[1:]),
    "transposed": lambda x: x.view(-1)[:9].view(3, 3).add_(x.view(-1)[:9].view(3, 3).t()),
    "second operand": lambda x: x.addcmul_(x, x[0]),
    "out": lambda x: torch.mul(x, x[0], out=x),
    "comparison": lambda x: x.eq_(x[0]),
    "bool by int": lambda x: (x > 3).mul_(2),
    "bool and float": lambda x: (x > 3).add_(x),
    "int by float": lambda x: x.long().mul_(0.5),
    "int quotient": lambda x: x.long().div_(2),
}
TAKEN: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda x: x.mul_(x),
    "same view": lambda x: x[1].add_(x[1]),
    "neighbours": lambda x: x[0].copy_(x[1]),
    "columns": lambda x: x[:, 0].add_(x[:, 1]),
    "int and bool": lambda x: x.long().add_(x > 3),
    "float and double": lambda x: x.add_(x.double()),
}


def _x(device: str) -> torch.Tensor:
    return torch.arange(12.0, device=device).reshape(3, 4)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """The CPU's RuntimeError; nothing is written."""
    with pytest.raises(RuntimeError) as cpu:
        REFUSED[name](_x("cpu"))
    x = _x("tpu")
    with pytest.raises(RuntimeError) as device:
        REFUSED[name](x)
    first = str(cpu.value).partition("\n")[0]
    assert str(device.value).startswith(first)
    assert torch.equal(x.cpu(), _x("cpu"))


def test_refused_on_a_hit() -> None:
    """Sharing memory is no part of the key: a loaded executable does not let it pass."""
    x = _x("tpu")
    x[:2].add_(_x("tpu")[1:])
    with pytest.raises(RuntimeError, match="single memory location"):
        x[:2].add_(x[1:])


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    """What the CPU takes gives what it gives."""
    results = []
    for device in ("cpu", "tpu"):
        x = _x(device)
        written = TAKEN[name](x)
        assert isinstance(written, torch.Tensor)
        results.append((x.cpu(), written.cpu()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("stride", [(3, 1, 1), (3, 6, 1), (1, 3, 3), (1, 2, 0), (0, 1, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool], ids=str)
def test_strides_without_elements(stride: tuple[int, ...], dtype: torch.dtype) -> None:
    """Ordered by the operands, as the CPU's kernels order them."""

    def results(device: str) -> list[torch.Tensor]:
        empty, row = (
            torch.empty_strided((2, 0, 3), stride, dtype=dtype, device=device),
            torch.ones(2, 1, 3, device=device),
        )
        return [empty * 1, empty + row, empty == 1, empty.clone(), torch.empty_like(empty), empty.logical_not()]

    assert [t.stride() for t in results("tpu")] == [t.stride() for t in results("cpu")]


@pytest.mark.parametrize("source", [torch.float32, torch.complex64], ids=str)
def test_complex128(source: torch.dtype) -> None:
    """Refused: the compiler of real chips aborts the process (docs/limits.md)."""
    x = torch.ones(2, dtype=source, device="tpu")
    with pytest.raises(NotImplementedError, match="complex128 dtype is not yet supported on TPU"):
        x.cdouble()
