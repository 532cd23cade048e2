"""Attention and the transformer modules against CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import assert_same, highest, to_device
from torch.nn.attention import SDPBackend, sdpa_kernel

FUSED = "aten._scaled_dot_product_fused_attention_overrideable.default"


def _launches(name: str) -> int:
    from emutpu.backend.kernels import op_counts

    return op_counts().get(name, 0)


def _inputs(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def _compare(
    leaves: list[torch.Tensor], call: Callable[..., torch.Tensor], tolerance: tuple[float, float] = (2e-5, 2e-5)
) -> None:
    device = to_device(leaves)
    with highest():
        expected, actual = call(*leaves), call(*device)
        assert_same(actual, expected, what="attention", tolerance=tolerance)
        cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.dtype)
        e = torch.autograd.grad(expected, leaves, cotangent)
        a = torch.autograd.grad(actual, device, cotangent.to("tpu"))
    assert_same(list(a), list(e), what="gradients of attention", tolerance=tolerance)


SHAPES = ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6))
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "causal": {"is_causal": True}, "scale": {"scale": 0.3}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_fused_attention(options: dict[str, Any]) -> None:
    """One fused launch forward; results and gradients equal CPU."""
    before = _launches(FUSED)
    _compare(_inputs(*SHAPES), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options))
    assert _launches(FUSED) == before + 1


def test_bfloat16() -> None:
    """16-bit inputs, softmax in float32."""
    leaves = _inputs(*SHAPES, dtype=torch.bfloat16)
    _compare(leaves, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (2e-2, 2e-2))


@pytest.mark.parametrize("fused", [True, False])
def test_fully_masked_row_is_zero(fused: bool) -> None:
    """A boolean mask row that forbids everything gives exactly 0, with finite gradients, on either route."""
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[2] = False
    with sdpa_kernel(SDPBackend.OVERRIDEABLE if fused else SDPBackend.MATH):
        q, k, v = to_device(_inputs(*SHAPES))
        actual = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to("tpu"))
        assert (actual[:, :, 2].cpu() == 0).all()
        actual.sum().backward()
        assert q.grad is not None
        assert q.grad.isfinite().all()
        assert (q.grad[:, :, 2].cpu() == 0).all()
    _compare(_inputs(*SHAPES), lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.device)))


@pytest.mark.parametrize("shape", [(5, 7), (1, 4, 5, 7), (2, 1, 1, 7)])
def test_gradient_of_the_mask(shape: tuple[int, ...]) -> None:
    """A float mask that broadcasts gets its gradient (relative position biases)."""
    _compare(_inputs(*SHAPES, shape), lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def test_grouped_queries() -> None:
    """Two key heads serve four query heads."""
    leaves = _inputs((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    before = _launches(FUSED)
    _compare(leaves, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    assert _launches(FUSED) == before + 1


def test_other_ranks_take_the_decomposition() -> None:
    """Three dimensions."""
    _compare(_inputs((4, 5, 8), (4, 7, 8), (4, 7, 8)), F.scaled_dot_product_attention)


def test_dropout_differs_between_calls_and_repeats_with_the_seed() -> None:
    """Dropout draws anew each call."""
    q, k, v = to_device(_inputs(*SHAPES))
    results = []
    for seed in (0, None, 0):
        if seed is not None:
            torch.manual_seed(seed)
        results.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).detach().cpu())
    assert not torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_no_backend_left() -> None:
    """With every backend but flash disabled there is nothing to run."""
    q, k, v = to_device(_inputs(*SHAPES))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="no viable SDPBackend found"):
        F.scaled_dot_product_attention(q, k, v)


def _both_modes(module: torch.nn.Module, inputs: list[torch.Tensor], **options: Any) -> None:
    """Training with gradients, then the evaluation fast path."""
    twin = copy.deepcopy(module).to("tpu")
    device_options = to_device(options)
    with highest():
        expected, actual = module(*inputs, **options), twin(*to_device(inputs), **device_options)
        assert_same(actual, expected, what="training", tolerance=(1e-4, 1e-4))
        first = expected[0] if isinstance(expected, tuple) else expected
        device_first = actual[0] if isinstance(actual, tuple) else actual
        first.square().sum().backward()
        device_first.square().sum().backward()
        for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
            assert_same(q.grad, p.grad, what=f"gradient of {name}", tolerance=(1e-3, 1e-4))
        module.eval()
        twin.eval()
        with torch.no_grad():
            assert_same(
                twin(*to_device(inputs), **device_options),
                module(*inputs, **options),
                what="evaluation",
                tolerance=(1e-4, 1e-4),
            )


@pytest.mark.parametrize("need_weights", [True, False])
def test_multi_head_attention(need_weights: bool) -> None:
    """nn.MultiheadAttention, trained and evaluated, with a padding mask."""
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    _both_modes(module, [x, x, x], key_padding_mask=padding, need_weights=need_weights)


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(norm_first: bool) -> None:
    """nn.TransformerEncoderLayer, trained and evaluated."""
    torch.manual_seed(0)
    module = torch.nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first
    )
    _both_modes(module, [torch.randn(2, 5, 16)])


def test_evaluation_is_one_launch() -> None:
    """The fast path reaches the fused layer."""
    name = "aten._transformer_encoder_layer_fwd.default"
    module = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).to("tpu").eval()
    before = _launches(name)
    with torch.no_grad():
        module(torch.randn(2, 5, 16).to("tpu"))
    assert _launches(name) == before + 1


@pytest.mark.parametrize("masked", [False, True])
def test_large_scores(masked: bool) -> None:
    """Scores of which a rounding error is larger than one: the largest takes it all, forward and backward stay finite."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 8, 8, generator=generator) for _ in range(3))
    mask = torch.ones(8, 8, dtype=torch.bool).tril() if masked else None

    def run(device: str) -> list[torch.Tensor]:
        leaves = [t.to(device).requires_grad_() for t in (q, k, v)]
        placed = None if mask is None else mask.to(device)
        result = torch.nn.functional.scaled_dot_product_attention(
            leaves[0], leaves[1] * 2.0**50, leaves[2], attn_mask=placed
        )
        return [result, torch.autograd.grad(result.sum(), leaves[2])[0]]

    with highest():
        actual = run("tpu")
    for expected, found in zip(run("cpu"), actual, strict=True):
        assert_same(found, expected, what="attention of large scores")
