"""Bounded graphs as a whole: buckets, limits with TorchTPU's texts, mutations, and what varies without being marked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.utils.checkpoint
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from emutpu.backend.dynamism.buckets import Symbol, choose, sizes_of
from emutpu.backend.runtime import runtime

mark = torch._dynamo.mark_dynamic
S = sympy.Symbol("s0")


def vector(size: int, **bounds: int) -> torch.Tensor:
    """0, 1, … on the device, its dimension dynamic."""
    made = torch.arange(size, dtype=torch.float32).to("tpu")
    mark(made, 0, **bounds)
    return made


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function with small buckets."""
    return torch.compile(function, backend="tpu", options={"bucket_size": 8} | options)


def bag(x: torch.Tensor) -> torch.Tensor:
    """embedding_bag of as many indices."""
    table = torch.ones(12, 3, device=x.device)
    return torch.nn.functional.embedding_bag(x.long().unsqueeze(1), table)


class TestBuckets:
    """Which padded sizes there are."""

    @pytest.mark.parametrize(
        ("symbol", "count", "size", "expected"),
        [
            (Symbol(S, 2, 100), 1, 128, (128,)),
            (Symbol(S, 2, 129), 1, 128, (256,)),
            (Symbol(S, 2, 512), 4, 128, (256, 384, 512)),
            (Symbol(S, 2, 512), 2, 64, (320, 512)),
            (Symbol(S, 2, 100, offset=1), 1, 128, (127,)),
            (Symbol(S, 2, 3), 8, 1, (3,)),
        ],
    )
    def test_sizes(self, symbol: Symbol, count: int, size: int, expected: tuple[int, ...]) -> None:
        """Equal parts of the range, each rounded up, offset included."""
        assert sizes_of(symbol, count, size) == expected

    def test_the_least_that_fits(self) -> None:
        """A value takes the first bucket that holds it, and one beyond all raises with TorchTPU's text."""
        assert choose({S: 9}, {S: (8, 16)}) == ((S, 16),)
        with pytest.raises(
            RuntimeError, match=r"Runtime symbol values \{s0: 17\} exceed all compiled buckets: \[\{s0: 8\}, "
        ):
            choose({S: 17}, {S: (8, 16)})

    def test_each_bucket_is_compiled_when_it_is_needed(self) -> None:
        """Two buckets give two executables, however many sizes there are."""
        graphs: list[Any] = []
        function = compiled(lambda x: x.sum(), num_dynamic_buckets=2, debug_callback=graphs.append)
        counts = []
        for size in (3, 16, 17, 24, 4):
            assert function(vector(size, min=2, max=24)).item() == size * (size - 1) / 2
            counts.append(len(graphs))
        assert counts == [1, 1, 2, 2, 2]

    def test_without_a_bound_it_is_twice_the_first_size(self) -> None:
        """Up to 2 × 5, rounded up to a bucket, runs; more raises."""
        function = compiled(lambda x: x * 2)
        for size in (5, 16):
            assert function(vector(size)).tolist() == [2.0 * n for n in range(size)]
        with pytest.raises(RuntimeError, match="exceed all compiled buckets"):
            function(vector(17))


class TestLimits:
    """What TorchTPU 0.2.0 refuses is refused in its words."""

    def test_over_the_bound(self) -> None:
        """A marked tensor longer than its bound is refused where it is traced."""
        function = compiled(lambda x: x * 2)
        function(vector(5, min=2, max=12))
        with pytest.raises(ConstraintViolationError, match=r"20 not in range \[2, 12\]"):
            function(vector(20, min=2, max=12))

    def test_host_tensors(self) -> None:
        """Every input must be on the device."""
        function = compiled(lambda x, y: x * 2 + y)
        with pytest.raises(
            Exception, match="CPU tensors are not supported in dynamic shapes compilation, please move inputs"
        ):
            function(vector(5, min=2, max=12), torch.tensor(2.0))

    @pytest.mark.parametrize(
        ("function", "said"),
        [
            (lambda x: x[::2], r"aten\.slice\.Tensor: a slice of a dynamic dimension with a step other than 1"),
            (lambda x: torch.fft.fft(x) * 2, r"aten\._fft_r2c\.default: no rule for bounded dynamic dimensions, here \[s\d+ \(up to 16\)\]"),
            (lambda x: x.view(torch.int32), r"aten\.view\.dtype: no rule"),
            (bag, r"aten\._embedding_bag\w*\.default: no rule"),
            (lambda x: torch.linalg.qr(x.unsqueeze(0) * x.unsqueeze(1))[1], r"aten\.linalg_qr\.default: no rule"),
        ],
    )  # fmt: skip
    def test_without_a_rule(self, function: Callable[..., Any], said: str) -> None:
        """The op, the reason, the user's line and the remedy are in the message."""
        with pytest.raises(Exception, match=said) as raised:
            compiled(function)(vector(6, min=4, max=12))
        text = str(raised.value)
        assert "Failed to lower FX graph with dynamic shapes to MLIR with error: " in text
        assert "test_bounded_graphs.py:" in text
        assert "Please set torch.compile(..., dynamic=False, ...) and try again." in text

    @pytest.mark.parametrize(
        "function",
        [
            lambda x: (x * 2).chunk(2)[0],
            lambda x: torch.nn.functional.max_pool1d(x.view(1, -1) * 2, 2),
            lambda x: torch.rnn_tanh(x.view(-1, 1, 1), x.new_zeros(1, 1, 1), [x.new_ones(1, 1)] * 2, False, 1, 0.0, False, False, False)[0],
        ],
    )  # fmt: skip
    def test_what_tracing_makes_constant(self, function: Callable[..., Any]) -> None:
        """Dynamo names the dimension whose size PyTorch's own tracing fixes."""
        with pytest.raises(ConstraintViolationError, match=r"L\['x'\]\.size\(\)\[0\]"):
            compiled(function)(vector(6, min=4, max=12))

    def test_a_guard_that_the_bound_violates(self) -> None:
        """A branch on the size must go the same way at the bound."""
        function = compiled(lambda x: x * 2 if x.shape[0] != 12 else x)
        with pytest.raises(Exception, match=r"Upper bounds \{'s\d+': 12\} violate active shape guard: Ne\(s\d+, 12\)"):
            function(vector(6, min=4, max=12))

    def test_options(self) -> None:
        """Numbers out of range are refused when the function is compiled."""
        with pytest.raises(ValueError, match="`num_dynamic_buckets` must be an integer between 1 and 8, got 9"):
            compiled(lambda x: x, num_dynamic_buckets=9)
        with pytest.raises(ValueError, match="`bucket_size` must be a positive integer, got 0"):
            compiled(lambda x: x, bucket_size=0)


def test_mutated_arguments() -> None:
    """An argument that the graph writes holds the new values, all of them."""
    function = compiled(lambda x: x.mul_(2).sum())
    for size in (5, 7, 12):
        given = vector(size, min=4, max=12)
        assert function(given).item() == size * (size - 1)
        assert given.tolist() == [2.0 * n for n in range(size)]


def test_arguments_that_are_views() -> None:
    """Strided arguments are read as they lie."""
    function = compiled(lambda x: x.cumsum(1))
    for size in (5, 7):
        base = torch.arange(3.0 * (size + 1)).reshape(size + 1, 3)
        device = base.to("tpu")[1:].T
        mark(device, 1, min=4, max=12)
        torch.testing.assert_close(function(device).cpu(), base[1:].T.cumsum(1))


def test_two_sizes() -> None:
    """Two dynamic dimensions of one tensor, and of several."""
    function = compiled(lambda x, y: (x.softmax(0) @ y).sum(1))
    before = runtime().cache.misses
    for rows, columns in ((3, 5), (9, 4), (12, 12), (4, 7)):
        x, y = torch.randn(rows, columns), torch.randn(columns, 6)
        given = x.to("tpu"), y.to("tpu")
        mark(given[0], 0, min=3, max=12)
        mark(given[0], 1, min=4, max=13)
        mark(given[1], 0, min=4, max=13)
        torch.testing.assert_close(function(*given).cpu(), (x.softmax(0) @ y).sum(1))
    assert runtime().cache.misses - before == 1


def test_statistics_that_the_module_keeps() -> None:
    """Batch norm over a dynamic batch updates its running statistics as on the CPU."""
    theirs, mine = torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).to("tpu")
    function = compiled(mine)
    for size in (5, 9, 12):
        x = torch.randn(size, 4)
        given = x.to("tpu")
        mark(given, 0, min=3, max=12)
        torch.testing.assert_close(function(given).detach().cpu(), theirs(x).detach(), rtol=1e-5, atol=1e-5)
    for ours, reference in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(ours.cpu(), reference)


def test_dropout_keeps_its_share() -> None:
    """Random ops draw for the padded shape: another mask than a static graph's, the same share, zeros where it drops."""
    function = compiled(lambda x: torch.nn.functional.dropout(x, 0.25), bucket_size=4096)
    for size in (3000, 4000):
        given = torch.ones(size).to("tpu")
        mark(given, 0, min=2000, max=4096)
        kept = function(given).cpu()
        assert kept.shape == (size,)
        assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert abs((kept == 0).float().mean().item() - 0.25) < 0.03


def test_checkpointed_dropout() -> None:
    """What a checkpoint computes again in the backward drops what the forward dropped."""
    weight = torch.full((1,), 3.0).to("tpu")

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x.sin() * weight, 0.5).square()

    function = compiled(lambda x: torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))
    for size in (50, 64):
        given = torch.rand(size).add(0.1).to("tpu").requires_grad_()
        mark(given, 0, min=40, max=64)
        result = function(given)
        result.sum().backward()
        assert 0 < (result == 0).sum().item() < size
        host = given.detach().cpu()
        expected = 2 * 36 * host.sin() * host.cos() * (result.detach().cpu() != 0)
        torch.testing.assert_close(given.grad.cpu(), expected, rtol=1e-4, atol=1e-4)


class TestAssumed:
    """EMUTPU_BOUNDED_DYNAMISM=assume."""

    def test_dimensions_that_vary(self, passes: Callable[..., str]) -> None:
        """From the second size on one executable serves, numbers included; a size over the bound takes a larger bucket."""
        program = """
            import torch
            graphs = []
            function = torch.compile(
                lambda x, k: (x * k).softmax(0).sum() + x.mean(),
                backend="tpu", options={"bucket_size": 8, "debug_callback": lambda g: graphs.append(g.name)},
            )
            for size, k in ((5, 1), (6, 2), (7, 3), (9, 0), (16, -5), (50, 7), (20, 1)):
                x = torch.randn(size)
                expected = (x * k).softmax(0).sum() + x.mean()
                torch.testing.assert_close(function(x.to("tpu"), k).cpu(), expected)
            print(len(graphs))
        """
        assert passes(program, EMUTPU_BOUNDED_DYNAMISM="assume").split()[-1] == "3"
        assert int(passes(program).split()[-1]) == 7

    def test_a_dry_run(self, passes: Callable[..., str]) -> None:
        """A client that computes nothing gives the shapes."""
        program = """
            import torch
            function = torch.compile(lambda x: x.softmax(0), backend="tpu")
            for size in (5, 7):
                x = torch.empty(size, 3, device="tpu")
                torch._dynamo.mark_dynamic(x, 0, min=2, max=12)
                print(tuple(function(x).shape))
        """
        assert passes(program, EMUTPU_CLIENT="dry_run").split("\n")[-3:-1] == ["(5, 3)", "(7, 3)"]
