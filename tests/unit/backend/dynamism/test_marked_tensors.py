"""Eager bounded dynamism: marks, their limits with TorchTPU's texts, and executables that sizes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from emutpu.backend.runtime import runtime
from emutpu.dynamism import BoundedDynamicDimension, get_dynamism_info, mark_dynamic


def marked(size: int, *, upper: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, size, 4] on the CPU, and marked on the device."""
    host = torch.randn(2, size, 4, generator=torch.Generator().manual_seed(size))
    return host, mark_dynamic(host.to("tpu"), 1, 2, upper)


class TestMarks:
    """What is marked, and what is refused."""

    def test_information(self) -> None:
        """A mark is seen, negative dimensions count from the end, and the same mark again gives the same tensor."""
        tensor = torch.zeros(3, 10).to("tpu")
        assert get_dynamism_info(tensor) == []
        made = mark_dynamic(tensor, -1, 2, 20)
        assert get_dynamism_info(made) == [BoundedDynamicDimension(dimension=1, lower_bound=2, upper_bound=20)]
        assert mark_dynamic(made, 1, 2, 20) is made
        assert made.shape == (3, 10)
        assert made.device.type == "tpu"

    def test_the_memory_is_shared(self) -> None:
        """The mark is of an alias: writes are seen on both sides."""
        tensor = torch.zeros(10).to("tpu")
        made = mark_dynamic(tensor, 0, 2, 20)
        assert made.add_(1) is made
        assert tensor.tolist() == [1.0] * 10

    @pytest.mark.parametrize(
        ("make", "dim", "bounds", "error", "said"),
        [
            (lambda: torch.zeros(5), 0, (2, 8), RuntimeError, r"mark_dynamic\(\): tensor is not on the PrivateUse1 device"),
            (lambda: torch.zeros(5, device="tpu"), 0, (1, 8), RuntimeError, "expected lower_bound to be >= 2 as 0/1-sized dimensions are processed with particular assumptions .*, got 1"),
            (lambda: torch.zeros(9, device="tpu"), 0, (2, 8), RuntimeError, "Dynamic shape lower/upper bound check failed"),
            (lambda: torch.zeros(5, device="tpu"), 1, (2, 8), IndexError, "Dimension out of range"),
            (lambda: mark_dynamic(torch.zeros(5, 5, device="tpu"), 1, 2, 8), 0, (2, 8), RuntimeError, "cannot mark dimension 0 as dynamic, because dimension 1 is already marked as dynamic"),
        ],
    )  # fmt: skip
    def test_refused(
        self, make: Callable[[], torch.Tensor], dim: int, bounds: tuple[int, int], error: type[Exception], said: str
    ) -> None:
        """TorchTPU's errors."""
        with pytest.raises(error, match=said):
            mark_dynamic(make(), dim, *bounds)

    @pytest.mark.parametrize(
        "function", [lambda x: x[:, 1:], lambda x: x.view(torch.int16), lambda x: torch.fft.fft(x, dim=1)]
    )
    def test_static_dimensions_wanted(self, function: Callable[[torch.Tensor], Any]) -> None:
        """Slices of the dimension, bit casts and FFTs say what they were given, where, and the remedy."""
        with pytest.raises(NotImplementedError, match=r"got \[2, 5 \(up to 16\), 4\]") as raised:
            function(marked(5)[1])
        assert "test_marked_tensors.py" in str(raised.value)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "pointwise": lambda x, w: (x * 2 + x).sigmoid(),
    "over the dimension": lambda x, w: (x.softmax(1), x.sum(1), x.mean(1), (x - 9).amax(1), x.cumsum(1)),
    "products": lambda x, w: (x @ w).relu(),
    "views": lambda x, w: (x.transpose(1, 2).softmax(-1), x.unsqueeze(0).sum(2), x[:, :, 0] * 2, x[0].sum(0)),
    "layer norm": lambda x, w: torch.nn.functional.layer_norm(x, (4,)),
    "cat": lambda x, w: torch.cat([x, x], 1).sum(1),
    "sort": lambda x, w: x.sort(1)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_from_shared_executables(name: str) -> None:
    """Results equal the CPU's, and after the first size nothing is compiled."""
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    device = weight.to("tpu")
    compiled = []
    for size in (5, 9, 16, 2):
        before = runtime().cache.misses
        host, tensor = marked(size)
        found, expected = FUNCTIONS[name](tensor, device), FUNCTIONS[name](host, weight)
        pairs = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
        for ours, theirs in pairs:
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)
        compiled.append(runtime().cache.misses - before)
    assert compiled[0] > 0
    assert compiled[1:] == [0, 0, 0]


def test_marks_follow() -> None:
    """Results whose size varies are marked, with their own bounds; others are plain tensors."""
    _, tensor = marked(5)
    assert get_dynamism_info(tensor * 2) == [BoundedDynamicDimension(1, 2, 16)]
    assert get_dynamism_info(tensor.transpose(0, 1)) == [BoundedDynamicDimension(0, 2, 16)]
    assert get_dynamism_info(torch.cat([tensor, tensor], 1)) == [BoundedDynamicDimension(1, 4, 32)]
    assert type(tensor.sum(1)) is torch.Tensor


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "pointwise": lambda x, w: (x * 3 + 1).sigmoid().exp().sum(),
    "means": lambda x, w: x.exp().mean() + (x.sin().mean(1) * 2).sum(),
    "softmax": lambda x, w: (x * 3).softmax(1).square().sum(),
    "products": lambda x, w: (x @ w).relu().square().sum(),
    "linear": lambda x, w: F.linear(x, w.t()).tanh().mean(),
    "layer norm": lambda x, w: F.layer_norm(x, (4,)).exp().sum(),
    "views": lambda x, w: x.transpose(1, 2).softmax(-1).square().sum() + (x[:, :, 0] * 2).sin().sum() + x[0].cos().sum(),
    "select": lambda x, w: (x * 2)[:, 1].sum(),
    "cat": lambda x, w: torch.cat([x, x * 2], 1).exp().sum(),
    "variance": lambda x, w: x.var(1).sum(),
    "scan": lambda x, w: x.cumsum(1).sin().sum(),
    "attention": lambda x, w: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None]).square().sum(),
    "loss": lambda x, w: F.cross_entropy(x.flatten(0, 1), _targets(x)),
}  # fmt: skip


def _targets(x: torch.Tensor) -> torch.Tensor:
    """A class for each row, marked as the rows of ``x`` are."""
    classes = torch.arange(2 * x.shape[1]).remainder(4).to(x.device)
    return mark_dynamic(classes, 0, 4, 32) if x.device.type == "tpu" else classes


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_from_shared_executables(name: str) -> None:
    """Gradients equal the CPU's, and after the first size a backward compiles nothing."""
    compiled = []
    for size in (5, 9, 16, 7):
        host, _ = marked(size)
        weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
        device = [tensor.to("tpu").requires_grad_() for tensor in (host, weight)]
        theirs = [tensor.clone().requires_grad_() for tensor in (host, weight)]
        loss = LOSSES[name](mark_dynamic(device[0], 1, 2, 16), device[1])
        before = runtime().cache.misses
        loss.backward()
        compiled.append(runtime().cache.misses - before)
        LOSSES[name](*theirs).backward()
        for ours, reference in zip(device, theirs, strict=True):
            if reference.grad is not None:
                torch.testing.assert_close(ours.grad.cpu(), reference.grad, rtol=1e-5, atol=1e-5)
    assert compiled[1:] == [0, 0, 0]


def test_other_backwards_are_as_they_were() -> None:
    """A compiled graph's backward, one of unmarked tensors, and a second one through the same marked tensors."""
    host, _ = marked(6)
    leaf, theirs = host.to("tpu").requires_grad_(), host.clone().requires_grad_()
    function = torch.compile(lambda x: x.sin().exp().sum())
    for x, f in ((leaf, function), (theirs, lambda x: x.sin().exp().sum())):
        bounded = mark_dynamic(x, 1, 2, 16) if x is leaf else x
        loss = (bounded * bounded).mean(1).sum()
        loss.backward(retain_graph=True)
        (loss + f(x) + (x * 2).square().sum()).backward()
    torch.testing.assert_close(leaf.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-5)
    assert get_dynamism_info(leaf.grad) == []


def test_gradients() -> None:
    """Autograd goes through marks: the tensor that was marked gets the CPU's gradient."""
    host, _ = marked(7)
    leaf, theirs = host.to("tpu").requires_grad_(), host.clone().requires_grad_()
    for x in (mark_dynamic(leaf, 1, 2, 16), theirs):
        ((x * 3).softmax(1).square().sum() + (x.exp().mean(1) * 2).sum()).backward()
    torch.testing.assert_close(leaf.grad.cpu(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_random_ops_and_reads_are_ordinary() -> None:
    """Dropout draws what it draws for any tensor; printing, item and copies to the host work."""
    torch.manual_seed(0)
    first = torch.nn.functional.dropout(torch.ones(2, 5).to("tpu"), 0.5).cpu()
    torch.manual_seed(0)
    tensor = mark_dynamic(torch.ones(2, 5).to("tpu"), 1, 2, 16)
    assert torch.equal(torch.nn.functional.dropout(tensor, 0.5).cpu(), first)
    assert "1." in repr(tensor)
    assert tensor.sum().item() == 10
    assert tensor.tolist() == [[1.0] * 5] * 2


def test_a_backward_without_marks_is_as_before() -> None:
    """Once something was marked, other graphs still run under no mode: PyTorch's formulas would differ under one."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    modes: list[object] = []

    def backward(x: torch.Tensor) -> None:
        y = (x * 2).sum()
        y.grad_fn.register_prehook(lambda _grads: modes.append(_get_current_dispatch_mode()))
        y.backward()

    x = torch.ones(4, 3, device="tpu", requires_grad=True)
    backward(mark_dynamic(x, 0, 2, 8))
    backward(torch.ones(4, 3, device="tpu", requires_grad=True))
    assert modes[0] is not None
    assert modes[1] is None
