"""Views: random chains of them read and write as on the CPU; layouts that must be refused are."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

# One chain is one compile of its read and one of its write, 50 ms each.
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
SHAPES = st.sampled_from([(24,), (4, 6), (2, 3, 4), (3, 1, 5), (1,), (2, 2, 2, 3), (0, 3)])
RETYPED = {
    torch.float32: [torch.int32, torch.float16, torch.uint8],
    torch.int32: [torch.float32, torch.int16, torch.uint8],
    torch.int16: [torch.float16, torch.uint8],
    torch.float16: [torch.int16, torch.int32],
    torch.uint8: [torch.int16, torch.int32],
}


@dataclasses.dataclass(frozen=True)
class Step:
    """One view operation with its arguments."""

    name: str
    arguments: tuple[Any, ...]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.name == "slice":
            dim, start, stop, step = self.arguments
            return tensor[(slice(None),) * dim + (slice(start, stop, step),)]
        result: torch.Tensor = getattr(tensor, self.name)(*self.arguments)
        return result


def _anywhere(draw: st.DrawFn, name: str, tensor: torch.Tensor) -> Step:
    """An operation that also a 0-d tensor has."""
    if name == "unsqueeze":
        return Step(name, (draw(st.integers(0, tensor.dim())),))
    if name == "retype":
        return Step("view", (draw(st.sampled_from(RETYPED[tensor.dtype])),))
    size = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    stride = tuple(draw(st.lists(st.integers(0, 7), min_size=len(size), max_size=len(size))))
    return Step("as_strided", (size, stride, draw(st.sampled_from([None, 0, 1, 3]))))


# Arguments of an operation along dimension ``dim`` of extent ``n``.
ALONG: dict[str, Any] = {
    "transpose": lambda draw, rank, dim, n: (dim, draw(st.integers(0, rank - 1))),
    "select": lambda draw, rank, dim, n: (dim, draw(st.integers(-n, n - 1))),
    "narrow": lambda draw, rank, dim, n: (dim, (start := draw(st.integers(0, n))), draw(st.integers(0, n - start))),
    "slice": lambda draw, rank, dim, n: (
        dim,
        (start := draw(st.integers(0, n))),
        draw(st.integers(start, n)),
        draw(st.integers(1, 3)),
    ),
    "unfold": lambda draw, rank, dim, n: (dim, draw(st.integers(1, n)), draw(st.integers(1, 3))),
    "expand": lambda draw, rank, dim, n: ((draw(st.integers(1, 3)), *[-1] * rank),),
    "unflatten": lambda draw, rank, dim, n: (dim, (draw(st.sampled_from([2, 3, 1])), -1)),
    "view": lambda draw, rank, dim, n: ((-1,),),
}


@st.composite
def a_step(draw: st.DrawFn, tensor: torch.Tensor) -> Step:
    """A view operation on ``tensor`` (a CPU tensor of the same geometry)."""
    anywhere = ["unsqueeze", "as_strided", "retype"]
    name = draw(st.sampled_from([*anywhere, *ALONG] if tensor.dim() else anywhere))
    if name in anywhere:
        return _anywhere(draw, name, tensor)
    dim = draw(st.integers(0, tensor.dim() - 1))
    extent = tensor.shape[dim]
    assume(extent or name not in ("select", "unfold", "unflatten"))
    return Step(name, ALONG[name](draw, tensor.dim(), dim, extent))


def _base(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).view(shape)


@st.composite
def chains(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Step]]:
    """A shape and up to four view operations that PyTorch accepts on it."""
    shape = draw(SHAPES)
    tensor = _base(shape)
    steps = []
    for _ in range(draw(st.integers(1, 4))):
        step = draw(a_step(tensor))
        try:
            following = step(tensor)
        except RuntimeError:
            continue  # PyTorch refuses it; test_refused_views looks at those
        tensor = following
        steps.append(step)
    assume(steps)
    return shape, steps


def _bytes(tensor: torch.Tensor) -> list[int]:
    """The whole storage."""
    return tensor.untyped_storage().tolist()


def _equal(device: torch.Tensor, host: torch.Tensor) -> bool:
    """Same geometry and the same bits (views of other dtypes make NaNs)."""
    got = device.cpu()
    same = (got.shape, got.dtype, device.stride(), device.storage_offset()) == (
        host.shape,
        host.dtype,
        host.stride(),
        host.storage_offset(),
    )
    return same and _bits(got) == _bits(host)


def _bits(tensor: torch.Tensor) -> list[int]:
    dense = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    bits: list[int] = dense.view(torch.uint8).tolist()
    return bits


def _overlaps(tensor: torch.Tensor) -> bool:
    positions = torch.arange(1 + _last(tensor)).as_strided(tensor.shape, tensor.stride(), 0) if tensor.numel() else None
    return positions is not None and positions.unique().numel() != tensor.numel()


def _last(tensor: torch.Tensor) -> int:
    return sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


@EXAMPLES
@given(chains())
def test_reads_equal_the_cpus(chain: tuple[tuple[int, ...], list[Step]]) -> None:
    """Any chain has the CPU's geometry and bits, shares the storage, and leaves it as it was."""
    shape, steps = chain
    host, device = _base(shape), _base(shape).to("tpu")
    before = _bytes(host)
    view, base = host, device
    for step in steps:
        view, device = step(view), step(device)
    assert _equal(device, view)
    assert device.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert (device._base is None) == (view._base is None)
    assert _bytes(base) == before


@EXAMPLES
@given(chains(), st.sampled_from(["fill", "copy", "add"]))
def test_writes_equal_the_cpus(chain: tuple[tuple[int, ...], list[Step]], how: str) -> None:
    """A write through any chain changes exactly the bytes that it changes on the CPU; overlapping writes raise."""
    shape, steps = chain
    host, device = _base(shape), _base(shape).to("tpu")
    view, target = host, device
    for step in steps:
        view, target = step(view), step(target)
    source = torch.arange(view.numel()).view(view.shape).to(view.dtype)
    if how == "add" and view.dtype.is_floating_point and not view.isfinite().all():
        how = "copy"  # the payload of a NaN after arithmetic is nobody's promise

    def write(tensor: torch.Tensor) -> None:
        if how == "fill":
            tensor.fill_(3)
        elif how == "copy":
            tensor.copy_(source)
        else:
            tensor.add_(source.to(tensor.device))

    versions = device._version, target._version
    if _overlaps(view):
        with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
            write(target)
        assert _bytes(device) == _bytes(host)
        return
    write(view)
    write(target)
    assert _bytes(device) == _bytes(host)
    assert _equal(target, view)
    assert (device._version, target._version) == (versions[0] + 1, versions[1] + 1)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(5, 5),
        lambda x: x.t().view(24),
        lambda x: x.select(0, 4),
        lambda x: x.select(2, 0),
        lambda x: x.narrow(1, 4, 3),
        lambda x: x.as_strided((25,), (1,)),
        lambda x: x.as_strided((2, 2), (1,)),
        lambda x: x.as_strided((2,), (-1,)),
        lambda x: x.expand(3, 6),
        lambda x: x.unfold(0, 5, 1),
        lambda x: x.t().view(torch.float64),
    ],
)
def test_refused_views(view: Any) -> None:
    """What PyTorch refuses on the CPU raises the same error, word for word."""
    host = torch.arange(24.0).view(4, 6)
    with pytest.raises((RuntimeError, IndexError)) as expected:
        view(host)
    with pytest.raises(expected.type) as caught:
        view(host.to("tpu"))
    assert str(caught.value).splitlines()[0] == str(expected.value).splitlines()[0]


def test_slices_and_offsets() -> None:
    """``as_strided`` on a slice: no offset means the slice's own, 0 means the storage's start (a trap)."""
    x = torch.arange(1, 6).to("tpu")[2:]
    assert x.as_strided((2,), (1,)).tolist() == [3, 4]
    assert x.as_strided((4,), (1,), 0).tolist() == [1, 2, 3, 4]
    assert x.unsqueeze(0).tolist() == [[3, 4, 5]]
    assert torch.arange(1, 6).to("tpu").as_strided((2, 3), (2, 1), 0).tolist() == [[1, 2, 3], [3, 4, 5]]


def test_view_made_before_a_read_still_writes() -> None:
    """A view taken before its base was read or replaced by a whole write keeps writing into it (a trap)."""
    x = torch.zeros(1, 4, device="tpu")
    v = x.view(4, 1)
    v.cpu()
    v[0, 0] = 1
    assert x.tolist() == [[1, 0, 0, 0]]
    x.copy_(torch.full((1, 4), 2.0))
    v[3, 0] = 5
    assert x.tolist() == [[2, 2, 2, 5]]


def test_zero_sized_writes_do_nothing() -> None:
    """An empty view may be written; nothing changes but the version counter."""
    x = torch.ones(3, device="tpu")
    x[3:].fill_(7)
    x[:0].copy_(torch.empty(0))
    assert (x.tolist(), x._version) == ([1, 1, 1], 2)


def test_backward_through_in_place_views() -> None:
    """Gradients through writes into views, and the error for a saved tensor that was written."""
    host = torch.arange(1.0, 5.0, requires_grad=True)
    device = host.detach().to("tpu").requires_grad_()
    for x in (host, device):
        y = x * 1
        y.view(2, 2)[0].mul_(3)
        y[3:].add_(x[:1])
        (y * y).backward(torch.ones(4, device=x.device))
    assert device.grad is not None
    assert host.grad is not None
    assert device.grad.tolist() == host.grad.tolist()
    y = device.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(torch.ones(4, device="tpu"))
