"""Decompositions against CPU: real and complex, batches, shapes without elements, singular matrices, gradients."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import assert_same, check_backward, check_forward, highest

L = torch.linalg
SHAPES = [(4, 4), (2, 3, 5, 5), (1, 1), (6, 4), (2, 4, 7), (0, 3, 3), (3, 0), (17, 17)]
SQUARE = [shape for shape in SHAPES if shape[-1] == shape[-2]]
DTYPES = [torch.float32, torch.complex64]
LOOSE = (1e-4, 1e-4)


def _matrix(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def _both(function: Callable[..., Any], *tensors: torch.Tensor, tolerance: tuple[float, float] | None = None) -> None:
    with highest():
        actual = function(*(t.to("tpu") for t in tensors))
    assert_same(actual, function(*tensors), what=str(list(tensors[0].shape)), tolerance=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The packed form with its pivots, the three factors, and unpacking."""
    x = _matrix(shape, dtype)
    _both(L.lu_factor_ex, x)
    _both(L.lu, x)
    factors = L.lu_factor(x)
    _both(torch.lu_unpack, *factors)
    _both(lambda lu, pivots: torch.lu_unpack(lu, pivots, unpack_pivots=False), *factors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_qr(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """LAPACK's signs: each mode, and the packed reflectors."""
    x = _matrix(shape, dtype)
    _both(torch.geqrf, x)
    for mode in ("reduced", "complete", "r"):
        _both(lambda t, mode=mode: L.qr(t, mode), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("full", [True, False], ids=["full", "thin"])
def test_svd(shape: tuple[int, ...], dtype: torch.dtype, full: bool) -> None:
    """Singular values equal CPU's; the vectors are orthonormal and give the matrix back."""
    x = _matrix(shape, dtype)
    u, s, vh = (t.cpu() for t in L.svd(x.to("tpu"), full_matrices=full))
    expected = L.svd(x, full_matrices=full)
    assert (u.shape, vh.shape) == (expected.U.shape, expected.Vh.shape)
    torch.testing.assert_close(s, expected.S, rtol=2e-5, atol=2e-5)
    _check_vectors(x, u, s, vh)
    _both(L.svdvals, x)


def _check_vectors(x: torch.Tensor, u: torch.Tensor, s: torch.Tensor, vh: torch.Tensor) -> None:
    count = s.shape[-1]
    torch.testing.assert_close((u[..., :count] * s[..., None, :]) @ vh[..., :count, :], x, rtol=2e-5, atol=2e-5)
    for product in (u.mH @ u, vh @ vh.mH):
        eye = torch.eye(product.shape[-1], dtype=product.dtype).expand_as(product)
        torch.testing.assert_close(product, eye, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rank", [0, 2])
def test_svd_of_low_rank(rank: int) -> None:
    """Where singular values are zero the vectors are orthonormal all the same."""
    x = _matrix((5, rank)) @ _matrix((rank, 5))
    _check_vectors(x, *(t.cpu() for t in L.svd(x.to("tpu"))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SQUARE, ids=str)
def test_solving(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Systems from both sides, transposed, from factors and their adjoints; vectors; inverses."""
    x = _matrix(shape, dtype)
    b = _matrix((*shape[:-1], 3), dtype)
    _both(L.inv, x, tolerance=LOOSE)
    _both(L.solve, x, b, tolerance=LOOSE)
    _both(lambda x, b: L.solve(x.mT, b), x, b, tolerance=LOOSE)
    _both(lambda x, b: L.solve(x, b.mT, left=False), x, b, tolerance=LOOSE)
    _both(lambda x, b: L.solve(x, b[..., 0]), x, b, tolerance=LOOSE)
    factors = L.lu_factor(x)
    for adjoint in (True, False):
        _both(lambda lu, p, b, adjoint=adjoint: L.lu_solve(lu, p, b, adjoint=adjoint), *factors, b, tolerance=LOOSE)
        _both(
            lambda lu, p, b, adjoint=adjoint: L.lu_solve(lu, p, b.mT, left=False, adjoint=adjoint),
            *factors,
            b,
            tolerance=LOOSE,
        )


DIFFERENTIABLE = """linalg.solve linalg.solve_ex linalg.inv linalg.lu linalg.lu_factor linalg.lu_solve linalg.qr linalg.svd
linalg.svdvals linalg.pinv linalg.cond linalg.tensorsolve linalg.matrix_power lu_unpack"""


@pytest.mark.parametrize("name", DIFFERENTIABLE.split())
def test_gradients(name: str) -> None:
    """Of what the decompositions are made for; PyTorch's formulas read the saved factors."""
    if name != "linalg.svd":  # its vectors have free signs
        check_forward(name, torch.float32, limit=2, tolerance=LOOSE)
    check_backward(name, limit=2, tolerance=(1e-3, 1e-3))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (L.inv, L.LinAlgError, "diagonal element 1 is zero"),
        (lambda x: L.solve(x, x), L.LinAlgError, "input matrix is singular"),
        (L.lu_factor, RuntimeError, r"U\[1,1\] is zero"),
    ],
    ids=["inv", "solve", "lu_factor"],
)
def test_singular(function: Callable[..., Any], error: type[Exception], message: str) -> None:
    """PyTorch's errors, and ``info`` where they are not asked for."""
    x = torch.zeros(3, 3)
    with pytest.raises(error, match=message):
        function(x.to("tpu"))
    _both(lambda t: L.inv_ex(t).info, x)
    _both(lambda t: L.lu_factor_ex(t).info, torch.diag(torch.tensor([1.0, 0.0, 2.0])))


def test_not_numbers() -> None:
    """A matrix with NaN ends, and its factors are not numbers either."""
    x = torch.full((3, 3), float("nan")).to("tpu")
    assert L.svdvals(x).isnan().all()
    assert L.inv_ex(x).inverse.isnan().any()
    assert L.qr(x).R.isnan().any()


@pytest.mark.parametrize(
    "function",
    [L.cholesky, L.det, L.slogdet, L.eigh, L.eigvalsh, L.eig, torch.cholesky_inverse, L.matrix_exp],
    ids=lambda f: f.__name__,
)
def test_what_the_device_lacks(function: Callable[[torch.Tensor], Any]) -> None:
    """Refused, as there."""
    with pytest.raises(NotImplementedError, match="is not implemented for TPU"):
        function(torch.eye(3, device="tpu"))


_BEYOND = """
import torch
L, D = torch.linalg, "tpu"
torch.manual_seed(0)
torch.set_float32_matmul_precision("highest")

def same(actual, expected, tolerance=1e-4):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, check_device=False)

for dtype in (torch.float32, torch.complex64):
    for shape in ((4, 4), (2, 3, 5, 5), (1, 1), (0, 3, 3), (0, 0), (9, 9)):
        x, b = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 3, dtype=dtype)
        same(L.det(x.to(D)), L.det(x))
        same(tuple(L.slogdet(x.mT.to(D))), tuple(L.slogdet(x.mT)))
        positive = x @ x.mH + torch.eye(shape[-1], dtype=dtype)
        for upper in (False, True):
            factor = L.cholesky(positive, upper=upper)
            same(L.cholesky(positive.to(D), upper=upper), factor)
            same(torch.cholesky_inverse(factor.to(D), upper=upper), torch.cholesky_inverse(factor, upper=upper))
            same(torch.cholesky_solve(b.to(D), factor.to(D), upper), torch.cholesky_solve(b, factor, upper))
            for transpose in (False, True):
                options = {"upper": upper, "transpose": transpose}
                triangle = factor + torch.eye(shape[-1], dtype=dtype)
                same(
                    tuple(torch.triangular_solve(b.to(D), triangle.to(D), **options)),
                    tuple(torch.triangular_solve(b, triangle, **options)),
                )
        hermitian = x + x.mH
        for uplo in "LU":
            values, vectors = (t.cpu() for t in L.eigh(hermitian.to(D), UPLO=uplo))
            same(values, L.eigvalsh(hermitian))
            same((vectors * values[..., None, :].to(dtype)) @ vectors.mH, hermitian)
    tall = torch.geqrf(torch.randn(2, 6, 4, dtype=dtype))
    there = [t.to(D) for t in tall]
    same(L.householder_product(*there), L.householder_product(*tall))
    for left in (True, False):
        other = torch.randn(2, 6, 3, dtype=dtype) if left else torch.randn(2, 3, 6, dtype=dtype)
        for transpose in (True, False):
            same(torch.ormqr(*there, other.to(D), left, transpose), torch.ormqr(*tall, other, left, transpose))
indefinite = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 3.0], [0.0, 3.0, 1.0]])
assert L.cholesky_ex(indefinite.to(D)).info.item() == L.cholesky_ex(indefinite).info.item() == 3
try:
    L.cholesky(indefinite.to(D))
except L.LinAlgError as error:
    assert "not positive-definite" in str(error)
else:
    raise AssertionError("an indefinite matrix has no Cholesky factor")
for function in (L.det, lambda m: L.slogdet(m)[1], lambda m: L.cholesky(m @ m.mT + torch.eye(4, device=m.device)),
                 lambda m: L.eigvalsh(m + m.mT)):
    grads = []
    for device in ("cpu", D):
        leaf = (torch.arange(16.0).sin().reshape(4, 4) + 2 * torch.eye(4)).to(device).requires_grad_()
        function(leaf).sum().backward()
        grads.append(leaf.grad.cpu())
    same(grads[1], grads[0], 1e-3)
"""


def test_beyond_the_device() -> None:
    """With EMUTPU_BEYOND=1 the missing ones equal CPU."""
    environment = os.environ | {"EMUTPU_BEYOND": "1"}
    done = subprocess.run([sys.executable, "-c", _BEYOND], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
