"""Random programs of views, in-place ops, reads and a backward pass: at every step the device is where the CPU is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

settings.register_profile("programs", max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
settings.register_profile("programs-nightly", settings.get_profile("programs"), max_examples=2000)

SHAPES = ((6,), (2, 3), (3, 2), (2, 1, 3))
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool)
REFUSALS = (RuntimeError, IndexError, ValueError)


@dataclasses.dataclass
class Pair:
    """One tensor of the program on the CPU and on the device."""

    host: torch.Tensor
    device: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Operation:
    """``apply`` on the operands; ``writes`` ones change the first and give it back."""

    name: str
    apply: Callable[..., torch.Tensor]
    arguments: tuple[Any, ...] = ()
    operands: int = 1
    writes: bool = False

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return self.apply(*tensors, *self.arguments)

    def __repr__(self) -> str:
        return f"{self.name}{self.arguments}"


class _SeenStorages(TorchDispatchMode):
    """Every result's storage is a Python object, as on the device.

    The engine sums gradients in place only where a storage has one holder, and that object is another: without it the
    versions of the CPU's gradients would count sums that the device makes anew (docs/limits.md).
    """

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, torch.Tensor.untyped_storage, result)
        return result


Draw = Callable[[st.DataObject, torch.Tensor], tuple[Any, ...]]


def _dim(data: st.DataObject, x: torch.Tensor) -> int:
    return data.draw(st.integers(0, max(x.dim() - 1, 0)))


def _extent(data: st.DataObject, x: torch.Tensor) -> tuple[int, int, int]:
    """A dimension, a start and a length in it."""
    dim = _dim(data, x)
    n = x.shape[dim] if x.dim() else 1
    start = data.draw(st.integers(0, n))
    return dim, start, data.draw(st.integers(0, n - start))


def _slice(x: torch.Tensor, dim: int, start: int, step: int) -> torch.Tensor:
    return x[(slice(None),) * dim + (slice(start, None, step),)]


def _windows(x: torch.Tensor, n: int, stride: int, offset: int) -> torch.Tensor:
    return x.as_strided((n, 2), (stride, 1), offset)


VIEWS: dict[str, tuple[Callable[..., torch.Tensor], Draw]] = {
    "transpose": (torch.Tensor.transpose, lambda d, x: (_dim(d, x), _dim(d, x))),
    "select": (torch.Tensor.select, lambda d, x: (_dim(d, x), d.draw(st.integers(-3, 2)))),
    "narrow": (torch.Tensor.narrow, _extent),
    "slice": (_slice, lambda d, x: (_dim(d, x), d.draw(st.integers(-2, 2)), d.draw(st.integers(1, 2)))),
    "unsqueeze": (torch.Tensor.unsqueeze, lambda d, x: (d.draw(st.integers(0, x.dim())),)),
    "squeeze": (torch.Tensor.squeeze, lambda d, x: ()),
    "view": (torch.Tensor.view, lambda d, x: (-1,)),
    "expand": (lambda x, n: x.expand(n, *x.shape), lambda d, x: (d.draw(st.integers(1, 2)),)),
    "unfold": (torch.Tensor.unfold, lambda d, x: (_dim(d, x), d.draw(st.integers(1, 2)), d.draw(st.integers(1, 2)))),
    "diagonal": (torch.Tensor.diagonal, lambda d, x: (d.draw(st.integers(-1, 1)),)),
    "as_strided": (_windows, lambda d, x: tuple(d.draw(st.integers(a, b)) for a, b in ((1, 2), (0, 3), (0, 1)))),
    "detach": (torch.Tensor.detach, lambda d, x: ()),
}
SCALARS = st.sampled_from([0, 1, -1, 2])
WRITES: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "add_": (lambda x, s: x.add_(s), 0),
    "mul_": (lambda x, s: x.mul_(s), 0),
    "fill_": (lambda x, s: x.fill_(s), 0),
    "zero_": (lambda x, s: x.zero_(), 0),
    "copy_": (lambda x, y: x.copy_(y), 1),
    "add_ tensor": (lambda x, y: x.add_(y), 1),
    "mul_ tensor": (lambda x, y: x.mul_(y), 1),
    "setitem": (lambda x, s: x.__setitem__(..., s) or x, 0),
}
RESULTS: dict[str, tuple[Callable[..., torch.Tensor], int]] = {
    "mul": (torch.mul, 1),
    "add": (torch.add, 1),
    "sum": (torch.Tensor.sum, 0),
    "clone": (torch.Tensor.clone, 0),
    "contiguous": (torch.Tensor.contiguous, 0),
    "float": (torch.Tensor.float, 0),
}


def _operation(data: st.DataObject, x: torch.Tensor) -> Operation:
    kind = data.draw(st.sampled_from(["view", "view", "write", "write", "result"]))
    if kind == "view":
        name = data.draw(st.sampled_from(sorted(VIEWS)))
        function, arguments = VIEWS[name]
        return Operation(name, function, arguments(data, x))
    table = WRITES if kind == "write" else RESULTS
    name = data.draw(st.sampled_from(sorted(table)))
    function, others = table[name]
    scalar = (data.draw(SCALARS),) if kind == "write" and not others else ()
    return Operation(name, function, scalar, 1 + others, kind == "write")


def _leaf(data: st.DataObject) -> Pair:
    shape, dtype = data.draw(st.sampled_from(SHAPES)), data.draw(st.sampled_from(DTYPES))
    # A clone, for a view would be no true leaf: once a detached alias of it is written, PyTorch derives the gradient
    # function of its views anew from the view's base, which needs no gradient.
    host = (torch.arange(6) - (0 if dtype is torch.uint8 else 2)).to(dtype).view(shape).clone()
    device = host.to("tpu")
    if dtype in FLOATS and data.draw(st.booleans()):
        host.requires_grad_()
        device.requires_grad_()
    return Pair(host, device)


def _places(x: torch.Tensor) -> torch.Tensor:
    """Where in its storage the elements lie, each place once."""
    return torch.arange(x.untyped_storage().nbytes() // x.itemsize).as_strided(*_geometry(x)).unique()


def _geometry(x: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return x.shape, x.stride(), int(x.storage_offset())


def _overlaps(x: torch.Tensor) -> bool:
    """Several elements in one place: CPU and device differ in which such writes they refuse."""
    return _places(x).numel() != x.numel()


def _unspecified(target: torch.Tensor, operand: torch.Tensor) -> bool:
    """Whether a write reads what it has written. PyTorch refuses that of dense tensors only; of others it says nothing."""
    apart = target.untyped_storage().data_ptr() != operand.untyped_storage().data_ptr()
    if apart or _geometry(target) == _geometry(operand):
        return False
    places = [_places(x) for x in (target, operand)]
    dense = [
        p.numel() == x.numel() == p[-1] - p[0] + 1 for p, x in zip(places, (target, operand), strict=True) if len(p)
    ]
    return bool(torch.isin(*places).any()) and not all(dense)


def _strides(x: torch.Tensor) -> list[int]:
    """All of a tensor without elements; else of the dimensions where one is taken.

    PyTorch's Python meta kernels, which the device's results follow, and its CPU kernels differ in the strides of
    dimensions of size 1, which no layout depends on.
    """
    return [s for n, s in zip(x.shape, x.stride(), strict=True) if n != 1 or not x.numel()]


def _agree(pair: Pair, where: str) -> None:
    """Geometry, dtype, version, autograd's standing, and every bit of every value."""
    host, device = pair.host, pair.device
    for what in ("shape", "dtype", "requires_grad", "is_leaf", "_version"):
        assert getattr(device, what) == getattr(host, what), f"{what} after {where}"
    assert _strides(device) == _strides(host), f"stride after {where}"
    assert device.storage_offset() == host.storage_offset(), f"offset after {where}"
    torch.testing.assert_close(device.detach().cpu(), host.detach(), rtol=0, atol=0, equal_nan=True, msg=where)


def _step(operation: Operation, operands: list[Pair]) -> Pair | None:
    """Both devices run it, or both refuse it with the same kind of error."""
    try:
        host = operation(*(pair.host for pair in operands))
    except REFUSALS as refusal:
        with pytest.raises(type(refusal)):
            operation(*(pair.device for pair in operands))
        return None
    return Pair(host, operation(*(pair.device for pair in operands)))


def _run(data: st.DataObject) -> None:
    leaves = [_leaf(data) for _ in range(data.draw(st.integers(1, 2)))]
    pairs = [*leaves, *(Pair(leaf.host * 1, leaf.device * 1) for leaf in leaves)]
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(st.sampled_from(pairs))
        operation = _operation(data, chosen.host)
        if operation.writes and _overlaps(chosen.host):
            continue
        others = [data.draw(st.sampled_from(pairs)) for _ in range(operation.operands - 1)]
        if operation.writes and any(_unspecified(chosen.host, other.host) for other in others):
            continue
        made = _step(operation, [chosen, *others])
        if made is not None and not operation.writes:
            pairs.append(made)
        for pair in pairs if data.draw(st.booleans()) else [made or chosen]:
            _agree(pair, repr(operation))
    for pair in pairs:
        _agree(pair, "the program")
    _backward(leaves, [pair for pair in pairs if pair.host.requires_grad and pair.host.grad_fn is not None])


def _backward(leaves: list[Pair], results: list[Pair]) -> None:
    """The gradients of everything, or the same refusal (a value that backward needs was written over)."""
    if not results:
        return

    def run(tensors: list[torch.Tensor]) -> None:
        with _SeenStorages():
            torch.autograd.backward(tensors, [torch.ones_like(t) for t in tensors])

    try:
        run([pair.host for pair in results])
    except RuntimeError:
        with pytest.raises(RuntimeError):
            run([pair.device for pair in results])
        return
    run([pair.device for pair in results])
    for leaf in leaves:
        if not leaf.host.is_leaf:
            continue  # written in place since
        assert (leaf.host.grad is None) == (leaf.device.grad is None)
        if leaf.host.grad is not None:
            _agree(Pair(leaf.host.grad, leaf.device.grad), "backward")


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(settings.get_profile("programs"))
@given(st.data())
def test_programs(data: st.DataObject) -> None:
    """Two hundred programs with every change."""
    _run(data)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@settings(settings.get_profile("programs-nightly"))
@given(st.data())
def test_many_programs(data: st.DataObject) -> None:
    """Two thousand at night."""
    _run(data)
