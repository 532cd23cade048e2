"""Contractions against CPU."""

from __future__ import annotations

import pytest
import torch
from harness import assert_same, check_backward, check_forward, check_inplace, highest

NAMES = ["mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "matmul", "inner", "nn.functional.linear"]
FLOATS = [torch.float32, torch.bfloat16, torch.complex64]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", NAMES)
def test_forward(name: str, dtype: torch.dtype) -> None:
    """Equals CPU, with beta and alpha; 16-bit inputs accumulate in float32."""
    check_forward(name, dtype)


@pytest.mark.parametrize("name", NAMES)
def test_backward(name: str) -> None:
    """Gradients equal CPU."""
    check_backward(name)


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addmv", "addr"])
def test_inplace(name: str) -> None:
    """In-place variants write through views."""
    check_inplace(name, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_addr(dtype: torch.dtype) -> None:
    """An outer product is elementwise, so integers and bools work."""
    check_forward("addr", dtype)


def test_zero_beta_ignores_the_bias() -> None:
    """``beta=0`` drops NaN in the bias, though beta is an input of the module."""
    bias = torch.full((3, 5), torch.nan)
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    with highest():
        actual = torch.addmm(bias.to("tpu"), x.to("tpu"), y.to("tpu"), beta=0)
    assert_same(actual, x @ y, what="addmm with beta 0")


@pytest.mark.parametrize("shape", [(33,), (2, 33), (2, 3, 33), (0, 33)])
def test_linear_with_a_single_row(shape: tuple[int, ...]) -> None:
    """A weight of one dimension takes the last dimension away; forward and gradients equal CPU."""
    x, w = torch.randn(shape), torch.randn(33)
    scale = torch.arange(1.0, 7).resize_(shape[:-1])

    def run(device: str) -> tuple[torch.Tensor, ...]:
        leaves = [t.to(device).requires_grad_() for t in (x, w)]
        with highest():
            result = torch.nn.functional.linear(*leaves)
            return result, *torch.autograd.grad((result * scale.to(device)).sum(), leaves)

    for what, expected, actual in zip(("linear", "input", "weight"), run("cpu"), run("tpu"), strict=True):
        assert_same(actual, expected, what=what)


def test_empty_contraction_is_zero() -> None:
    """[2, 0] @ [0, 3] is zeros, [0, 4] @ [4, 3] is empty."""
    for left, right in (((2, 0), (0, 3)), ((0, 4), (4, 3))):
        x, y = torch.randn(left), torch.randn(right)
        assert_same(x.to("tpu") @ y.to("tpu"), x @ y, what=f"{left} @ {right}")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_are_refused(dtype: torch.dtype) -> None:
    """The device's matrix unit takes floats: its NotImplementedError names the op."""
    x = torch.ones(2, 2, dtype=dtype, device="tpu")
    with pytest.raises(NotImplementedError, match=r"mm\(\): not implemented for"):
        torch.mm(x, x)


def test_transposed_weight_is_read_in_the_module() -> None:
    """``x @ w.t()`` is one launch: no copy of the transposed view."""
    x, w = torch.randn(3, 4).to("tpu"), torch.randn(5, 4).to("tpu")
    from emutpu.backend.kernels import op_counts

    before = op_counts()
    x @ w.t()
    after = op_counts()
    assert {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)} == {"aten.mm.default": 1}


@pytest.mark.parametrize("name", ["linalg.solve_triangular", "cdist"])
def test_systems_and_distances(name: str) -> None:
    """Triangular systems and pairwise distances, with gradients."""
    check_forward(name, torch.float32, limit=12, tolerance=(1e-4, 1e-4))
    check_backward(name, tolerance=(1e-3, 1e-3))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, torch.inf])
def test_distances_of_every_norm(p: float) -> None:
    """Coincident points included: they have no gradient."""
    x = torch.randn(2, 4, 3).requires_grad_()
    y = torch.randn(2, 5, 3)
    y[:, 0] = x.detach()[:, 0]
    device_x = x.detach().to("tpu").requires_grad_()
    expected, actual = torch.cdist(x, y, p=p), torch.cdist(device_x, y.to("tpu"), p=p)
    assert_same(actual, expected, what=f"cdist {p}", tolerance=(1e-4, 1e-4))
    cotangent = torch.randn_like(expected)
    (e,) = torch.autograd.grad(expected, x, cotangent)
    (a,) = torch.autograd.grad(actual, device_x, cotangent.to("tpu"))
    assert_same(a, e, what=f"gradient of cdist {p}", tolerance=(1e-3, 1e-3))


def test_result_dtype() -> None:
    """``mm`` of bfloat16 with a float32 result is not rounded in between."""
    x, y = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    actual = torch.ops.aten.mm.dtype(x.to("tpu"), y.to("tpu"), torch.float32)
    assert_same(actual, x.float() @ y.float(), what="mm.dtype")


@pytest.mark.parametrize("right", ["plain", "transposed"])
@pytest.mark.parametrize("left", ["plain", "transposed", "folded"])
@pytest.mark.parametrize("batch", [1, 2])
def test_batches_of_transposed_matrices(batch: int, left: str, right: str) -> None:
    """At the device's default precision too, and of one: the compiler then drops the batch, and turns the operand."""
    x, y = torch.randn(batch, 8, 16), torch.randn(batch, 16, 12)
    first = {"plain": x, "transposed": x.mT.contiguous(), "folded": x.mT.reshape(batch, 16, 4, 2)}[left].to("tpu")
    second = (y if right == "plain" else y.mT.contiguous()).to("tpu")
    first = first if left == "plain" else first.reshape(batch, 16, 8).mT
    product = first @ (second if right == "plain" else second.mT)
    torch.testing.assert_close(product.cpu(), x @ y, atol=0.1, rtol=0.02)


def test_batches_of_nine_dimensions() -> None:
    """More than XLA's matrix library has for an operand, which then refused the layout of the gradients' operands."""
    shape = (2, 2, 9, 4, 2, 2, 2)
    x, y = torch.randn(*shape, 4, 4), torch.randn(*shape, 4, 3)
    on = [[value.detach().to(device).requires_grad_() for value in (x, y)] for device in ("cpu", "tpu")]
    with highest():
        results = [left @ right for left, right in on]
        for result in results:
            result.square().sum().backward()
    assert_same(results[1], results[0], what="matmul")
    for found, expected in zip(on[1], on[0], strict=True):
        assert_same(found.grad, expected.grad, what="gradient of matmul")
