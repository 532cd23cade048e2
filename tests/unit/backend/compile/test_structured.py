"""Loops, attention and checkpoints in compiled graphs: what becomes of them in the module, and that results are CPU's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint


@pytest.fixture
def modules():
    """``modules(f)``: f compiled, and the list that gets the text of each of its modules."""

    def compiled(function, **settings):
        texts: list[str] = []
        options = {"debug_callback": lambda debug: texts.append(debug.mlir_text)}
        return torch.compile(function, backend="tpu", options=options, **settings), texts

    return compiled


# Loops ---------------------------------------------------------------------------------------------------


def recurrence(init, xs, w):
    """A scan with a carry of two tensors, one result more than carries, and a weight that the body closes over."""

    def step(carry, x):
        hidden, count = carry
        hidden = torch.tanh(hidden @ w + x)
        return (hidden, count + 1), (hidden * 2, x.sum())

    return scan(step, (init, torch.zeros((), device=init.device)), xs)


def test_scan_is_a_loop_with_gradients(same, modules) -> None:
    """One ``while`` however long the scan, forward and backward; results and gradients are CPU's."""
    args = torch.randn(3, 4), torch.randn(7, 3, 4), torch.randn(4, 4) * 0.3
    same(recurrence, *(t.requires_grad_() for t in args), tolerance=1e-4)
    lengths = []
    for steps in (5, 50):
        torch._dynamo.reset()
        compiled, texts = modules(lambda i, x, w: recurrence(i, x, w)[1][0].sum())
        given = [args[0], torch.randn(steps, 3, 4), args[2]]
        compiled(*(t.detach().to("tpu").requires_grad_() for t in given)).backward()
        assert [text.count("stablehlo.while") for text in texts] == [1, 1]
        lengths.append([len(text.splitlines()) for text in texts])
    assert lengths[0] == lengths[1]


def test_scan_backwards_and_nested(same) -> None:
    """``reverse=True``, and a scan in a scan's body."""

    def backwards(init, xs):
        return scan(lambda c, x: (c + x, c * x), init, xs, reverse=True)

    def nested(init, xs):
        def outer(carry, rows):
            last, all_ = scan(lambda c, x: (c * 0.5 + x, c + x), carry, rows)
            return last, all_

        return scan(outer, init, xs)

    same(backwards, torch.zeros(3), torch.randn(5, 3))
    same(nested, torch.zeros(3), torch.randn(2, 4, 3))


def test_a_scan_that_draws_is_unrolled() -> None:
    """Random numbers in a body are eager's, step by step."""

    def f(init, xs):
        return scan(lambda c, x: (c + x, x + torch.rand_like(x)), init, xs)

    init, xs = torch.zeros(3, device="tpu"), torch.zeros(4, 3, device="tpu")
    drawn = []
    for function in (lambda: [torch.rand(3, device="tpu") for _ in range(4)], lambda: torch.compile(f)(init, xs)[1]):
        torch.manual_seed(1)
        drawn.append(function())
    assert torch.equal(torch.stack(drawn[0]), drawn[1])


def test_associative_scan_has_logarithmic_depth(same, modules) -> None:
    """Results are CPU's; every doubling of the length adds one level."""

    def f(x, y):
        return associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (x, y), dim=0, combine_mode="generic")

    same(f, torch.rand(11, 3), torch.randn(11, 3))
    products = []
    for steps in (8, 16, 128):
        torch._dynamo.reset()
        compiled, texts = modules(f)
        compiled(torch.rand(steps, 3, device="tpu"), torch.rand(steps, 3, device="tpu"))
        products.append(texts[0].count("stablehlo.multiply"))
    level = products[1] - products[0]
    assert products[2] - products[1] == 3 * level


# Attention -----------------------------------------------------------------------------------------------


def repeated(x, count):
    """``x``'s heads, each ``count`` times, as model libraries write it."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, count, length, width).reshape(batch, heads * count, length, width)


GROUPED = {
    "expanded": lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k, 2), repeated(v, 2)),
    "interleaved": lambda q, k, v: F.scaled_dot_product_attention(
        q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, 1)
    ),
}
NOT_GROUPED = {
    "tiled": lambda q, k, v: F.scaled_dot_product_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)),
    "keys only": lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k, 2), torch.cat([v, v], 1)),
}


@pytest.mark.parametrize("name", [*GROUPED, *NOT_GROUPED])
def test_grouped_queries_are_folded(name, same, modules) -> None:
    """Keys and values that were repeated head by head make the program of ``enable_gqa``; others do not. Results are CPU's."""
    f = (GROUPED | NOT_GROUPED)[name]
    given = torch.randn(2, 4, 8, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 2, 8, 16)
    same(f, *(t.requires_grad_() for t in given), tolerance=1e-4)
    texts = []
    for function in (f, grouped):
        torch._dynamo.reset()
        compiled, found = modules(function)
        compiled(*(t.detach().to("tpu") for t in given))
        texts.append(found[0].partition("{")[2])
    assert (texts[0] == texts[1]) == (name in GROUPED)


def grouped(q, k, v):
    """What a folded call is."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


CAUSAL = {
    "tril": lambda n, d: torch.ones(n, n, dtype=torch.bool, device=d).tril(),
    "triu of -inf": lambda n, d: torch.triu(torch.full((n, n), -math.inf, device=d), 1)[None, None],
    "positions": lambda n, d: torch.arange(n, device=d)[:, None] >= torch.arange(n, device=d)[None],
}
NOT_CAUSAL = {
    "window": lambda n, d: torch.ones(n, n, dtype=torch.bool, device=d).tril().triu(-3),
    "one more": lambda n, d: torch.ones(n, n, dtype=torch.bool, device=d).tril(1),
    "finite": lambda n, d: torch.triu(torch.full((n, n), -1.0, device=d), 1),
}


@pytest.mark.parametrize("name", [*CAUSAL, *NOT_CAUSAL])
def test_causal_masks_are_detected(name, same, modules) -> None:
    """A known mask that is causal makes the same program as ``is_causal``; any other is kept, and results are CPU's."""
    mask = (CAUSAL | NOT_CAUSAL)[name]

    def masked(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[-2], q.device))

    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    given = [torch.randn(2, 2, 8, 16) for _ in range(3)]
    same(masked, *given, tolerance=1e-4)
    texts = []
    for f in (masked, causal):
        torch._dynamo.reset()
        compiled, found = modules(f)
        compiled(*(t.to("tpu") for t in given))
        texts.append(found[0].partition("{")[2])
    assert (texts[0] == texts[1]) == (name in CAUSAL)


def test_a_mask_that_is_an_argument_is_no_constant(same) -> None:
    """What the caller gives is never taken for causal."""
    q = torch.randn(1, 1, 4, 8)
    same(lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m), q, torch.ones(4, 4).tril().bool())


FLEX = {
    "plain": {},
    "score_mod": {"score_mod": lambda score, b, h, q, k: score + (q - k) * 0.01},
    "lse": {"return_lse": True},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", FLEX)
def test_flex_attention(name, compiled) -> None:
    """With a block mask, eager and in one graph, equal to the CPU's composition; with gradients on the device."""

    def f(q, k, v, mask):
        return flex_attention(q, k, v, block_mask=mask, **FLEX[name])

    def masks(device):
        return create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 40), None, None, 128, 128, device=device)

    given = [torch.randn(1, 2, 128, 16) for _ in range(3)]
    mine = [t.to("tpu").requires_grad_() for t in given]
    run = torch.compile(f, backend="tpu", fullgraph=True) if compiled else f
    actual, expected = run(*mine, masks("tpu")), f(*given, masks("cpu"))
    for a, e in zip(*((r if isinstance(r, tuple) else (r,)) for r in (actual, expected)), strict=True):
        torch.testing.assert_close(a.detach().cpu(), e, rtol=1e-4, atol=1e-5)
    (actual[0] if isinstance(actual, tuple) else actual).sum().backward()
    assert all(t.grad is not None and t.grad.isfinite().all() for t in mine)


def test_flex_attention_keeps_its_mask() -> None:
    """Eagerly a block mask's additive mask is made once, under TorchTPU's name for it."""
    q = torch.randn(1, 1, 128, 16, device="tpu")
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="tpu")
    flex_attention(q, q, q, block_mask=mask)
    kept = mask._tpu_sdpa_mask_cache
    flex_attention(q, q, q, block_mask=mask)
    assert mask._tpu_sdpa_mask_cache is kept


# Checkpoints ---------------------------------------------------------------------------------------------


def test_checkpoints_are_kept_by_barriers(modules) -> None:
    """The backward module recomputes from values behind a barrier; a network without checkpoints has none."""
    linear = nn.Linear(8, 8).to("tpu")

    def block(x):
        return torch.sin(linear(torch.sin(linear(x))))

    found = {}
    for kept in (True, False):
        torch._dynamo.reset()
        compiled, texts = modules(
            (lambda x: checkpoint(block, x, use_reentrant=False).sum()) if kept else (lambda x: block(x).sum())
        )
        x = torch.randn(4, 8, device="tpu", requires_grad=True)
        compiled(x).backward()
        found[kept] = texts[1]
        gradient = x.grad.clone()
        x.grad = None
        block(x).sum().backward()
        torch.testing.assert_close(gradient, x.grad)
    assert "stablehlo.optimization_barrier" not in found[False]
    lines = found[True].splitlines()
    barrier = next(n for n, line in enumerate(lines) if "stablehlo.optimization_barrier" in line)
    recomputed = [line for line in lines[barrier:] if "stablehlo.dot_general %0#" in line]
    assert recomputed, "what is recomputed does not come from behind the barrier"


def test_flex_attention_after_dynamo_made_its_table_anew() -> None:
    """Dynamo traces into it still."""
    from torch._dynamo import trace_rules

    trace_rules.clear_lru_cache()
    q = torch.randn(1, 2, 16, 8, device="tpu")
    compiled = torch.compile(lambda q: flex_attention(q, q, q), backend="tpu", fullgraph=True)
    torch.testing.assert_close(compiled(q).cpu(), F.scaled_dot_product_attention(q, q, q).cpu())
