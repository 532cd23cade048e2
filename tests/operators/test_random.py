"""Random numbers: repeatable, never baked in, and of the right distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

DEVICE = torch.device("tpu")
N = 20_000
# The 0.1 % quantile of Kolmogorov's statistic, times sqrt(N).
KOLMOGOROV = 1.95

Draw = Callable[[], torch.Tensor]

DRAWS: dict[str, Draw] = {
    "rand": lambda: torch.rand(64, device=DEVICE),
    "randn": lambda: torch.randn(64, device=DEVICE),
    "randn bfloat16": lambda: torch.randn(64, device=DEVICE, dtype=torch.bfloat16),
    "randint": lambda: torch.randint(0, 1_000_000, (64,), device=DEVICE),
    "randperm": lambda: torch.randperm(64, device=DEVICE),
    "rand_like": lambda: torch.rand_like(torch.zeros(64, device=DEVICE)),
    "normal": lambda: torch.normal(torch.zeros(64, device=DEVICE), 2.0),
    "exponential": lambda: torch.empty(64, device=DEVICE).exponential_(),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device=DEVICE)),
    "bernoulli number": lambda: torch.empty(64, device=DEVICE).bernoulli_(0.5),
    "dropout": lambda: torch.nn.functional.dropout(torch.ones(64, device=DEVICE), 0.5),
    "multinomial": lambda: torch.multinomial(torch.ones(64, device=DEVICE), 20),
    "multinomial with replacement": lambda: torch.multinomial(torch.ones(64, device=DEVICE), 20, replacement=True),
}


@pytest.mark.parametrize("name", DRAWS)
def test_seed_repeats_and_calls_differ(name: str) -> None:
    """Equal seeds give equal numbers, the next call others."""
    draw = DRAWS[name]
    torch.manual_seed(11)
    first, second = draw().cpu(), draw().cpu()
    torch.manual_seed(11)
    again, after = draw().cpu(), draw().cpu()
    assert torch.equal(first, again)
    assert torch.equal(second, after)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("name", DRAWS)
def test_second_draw_compiles_nothing(name: str) -> None:
    """The seed and the offset are inputs of the module."""
    from emutpu.backend.runtime import runtime

    def drawn(seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(2):
            DRAWS[name]().cpu()

    drawn(1)
    drawn(2)  # DEFER_AND_FUSE computes the state that the last draw left only now
    before = runtime().cache.misses
    drawn(99)
    assert runtime().cache.misses == before


@pytest.mark.parametrize("name", DRAWS)
def test_state_round_trip(name: str) -> None:
    """A state that was taken and set again reproduces what followed it."""
    draw = DRAWS[name]
    state = torch.tpu.default_generators[0].get_state()
    first = draw().cpu()
    torch.tpu.default_generators[0].set_state(state)
    assert torch.equal(first, draw().cpu())


@pytest.mark.parametrize(
    ("name", "steps"),
    [("float32", 25), ("float64", 50), ("dropout", 50), ("randperm", 50)],
)
def test_offset_advances(name: str, steps: int) -> None:
    """A hundred numbers take 100·32/128 steps of Philox, those of 64 bits twice as many."""
    generator = torch.tpu.default_generators[0]
    start = generator.get_offset()
    match name:
        case "dropout":
            torch.nn.functional.dropout(torch.ones(100, device=DEVICE), 0.5)
        case "randperm":
            torch.randperm(100, device=DEVICE)
        case _:
            torch.rand(100, device=DEVICE, dtype=getattr(torch, name))
    assert generator.get_offset() - start == steps


def test_generator_argument() -> None:
    """A generator of the caller's is drawn from, and the default one left alone."""
    torch.manual_seed(0)
    state = torch.tpu.default_generators[0].get_state()
    generator = torch.Generator(device=DEVICE).manual_seed(5)
    first = torch.randn(8, device=DEVICE, generator=generator).cpu()
    generator.manual_seed(5)
    assert torch.equal(first, torch.randn(8, device=DEVICE, generator=generator).cpu())
    assert torch.equal(state, torch.tpu.default_generators[0].get_state())


def test_generator_of_another_device_is_refused() -> None:
    """A CPU generator is an error, in PyTorch's words."""
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator"):
        torch.empty(3, device=DEVICE).uniform_(generator=torch.Generator())


def _kolmogorov(sample: torch.Tensor, distribution: Callable[[np.ndarray], np.ndarray]) -> float:
    """Kolmogorov's statistic times sqrt(n)."""
    ordered = np.sort(sample.double().numpy().ravel())
    n = len(ordered)
    expected = distribution(ordered)
    return float(max((np.arange(1, n + 1) / n - expected).max(), (expected - np.arange(n) / n).max()) * math.sqrt(n))


def _normal(mean: float, std: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: 0.5 * (1 + np.vectorize(math.erf)((x - mean) / (std * math.sqrt(2))))


CONTINUOUS = {
    "uniform": (lambda x: x.uniform_(), lambda v: v),
    "uniform in bounds": (lambda x: x.uniform_(-3, 2), lambda v: (v + 3) / 5),
    "normal": (lambda x: x.normal_(), _normal(0, 1)),
    "normal elsewhere": (lambda x: x.normal_(4, 0.5), _normal(4, 0.5)),
    "exponential": (lambda x: x.exponential_(2.0), lambda v: 1 - np.exp(-2 * v)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CONTINUOUS)
def test_distribution(name: str, dtype: torch.dtype) -> None:
    """Kolmogorov and Smirnov find nothing at a level of 0.1 %, for a fixed seed."""
    fill, distribution = CONTINUOUS[name]
    torch.manual_seed(2026)
    sample = fill(torch.empty(N, device=DEVICE, dtype=dtype)).cpu()
    assert _kolmogorov(sample, distribution) < KOLMOGOROV


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_uniform_stays_below_its_end(dtype: torch.dtype) -> None:
    """No rounding reaches the open end, with default bounds or others."""
    torch.manual_seed(0)
    sample = torch.empty(N, device=DEVICE, dtype=dtype)
    unit = sample.uniform_().cpu()
    assert unit.min() >= 0
    assert unit.max() < 1
    shifted = sample.uniform_(10, 10.5).cpu()
    assert shifted.min() >= 10
    assert shifted.max() < 10.5


def test_normal_has_no_infinities_and_no_correlation() -> None:
    """Tails are finite, neighbours and successive draws uncorrelated."""
    torch.manual_seed(1)
    first, second = (torch.randn(N, device=DEVICE).cpu() for _ in range(2))
    assert first.isfinite().all()
    assert abs(float((first * second).mean())) < 4 / math.sqrt(N)
    assert abs(float((first[1:] * first[:-1]).mean())) < 4 / math.sqrt(N)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32])
def test_integers_are_even(dtype: torch.dtype) -> None:
    """Chi-squared over ten classes, and both ends occur."""
    torch.manual_seed(3)
    sample = torch.empty(N, device=DEVICE, dtype=dtype).random_(3, 13).cpu().long()
    counts = torch.bincount(sample, minlength=13)
    assert counts[:3].sum() == 0
    assert counts[3:].sum() == N
    chi = float(((counts[3:] - N / 10) ** 2 / (N / 10)).sum())
    assert chi < 27.9  # 0.1 % of a chi-squared with 9 degrees of freedom


def test_negative_and_wide_integers() -> None:
    """Ranges that start below zero or need more than 32 bits are covered."""
    torch.manual_seed(4)
    wide = torch.randint(-(2**40), 2**40, (N,), device=DEVICE).cpu()
    assert wide.min() < -(2**39) < 2**39 < wide.max()
    assert torch.empty(N, device=DEVICE, dtype=torch.int64).random_().cpu().min() >= 0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_bernoulli(p: float) -> None:
    """The share of ones, for numbers and tensors of probabilities."""
    torch.manual_seed(5)
    bound = 4 * math.sqrt(max(p * (1 - p), 1e-12) / N)
    for sample in (torch.empty(N, device=DEVICE).bernoulli_(p), torch.bernoulli(torch.full((N,), p, device=DEVICE))):
        assert abs(float(sample.cpu().mean()) - p) <= bound


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout(p: float) -> None:
    """Survivors are scaled, and the gradient passes through the same mask."""
    torch.manual_seed(6)
    x = torch.ones(N, device=DEVICE, requires_grad=True)
    y = torch.nn.functional.dropout(x, p)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    kept = y.detach().cpu() != 0
    assert abs(float(kept.float().mean()) - (1 - p)) <= 4 * math.sqrt(max(p * (1 - p), 1e-12) / N)
    assert torch.allclose(y.detach().cpu()[kept], torch.tensor(1 / max(1 - p, 1e-6)))


def test_randperm_is_a_permutation() -> None:
    """Every number once, in any dtype, and none in its place more often than by chance."""
    torch.manual_seed(7)
    for dtype in (torch.int64, torch.int32, torch.float32):
        drawn = torch.randperm(1000, device=DEVICE, dtype=dtype).cpu()
        assert torch.equal(drawn.sort().values, torch.arange(1000, dtype=dtype))
        assert int((drawn == torch.arange(1000)).sum()) < 8


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_follows_its_weights(replacement: bool) -> None:
    """Shares equal the weights; what weighs nothing is never drawn; without replacement nothing comes twice."""
    torch.manual_seed(8)
    weights = torch.tensor([0.0, 1.0, 2.0, 0.0, 5.0], device=DEVICE)
    rows = weights.expand(2000, 5).contiguous()
    drawn = torch.multinomial(rows, 3, replacement=replacement).cpu()
    assert not (drawn == 0).any()
    assert not (drawn == 3).any()
    if not replacement:
        assert torch.equal(drawn.sort(1).values, torch.tensor([1, 2, 4]).expand(2000, 3))
    share = float((drawn[:, 0] == 4).float().mean())
    assert abs(share - 5 / 8) < 4 * math.sqrt(5 / 8 * 3 / 8 / 2000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.normal_(0, -1), "normal expects std >= 0"),
        (lambda x: x.uniform_(2, 1), "uniform_ expects to return a"),
        (lambda x: x.bernoulli_(1.5), "bernoulli_ expects p to be in"),
        (lambda x: torch.multinomial(x, 9), "cannot sample n_sample"),
    ],
)
def test_wrong_numbers_raise_on_every_call(call: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    """Bounds are not part of the key, but they are checked each time."""
    x = torch.ones(4, device=DEVICE)
    x.normal_(0, 1)
    x.uniform_(1, 2)
    x.bernoulli_(0.5)
    with pytest.raises(RuntimeError, match=message):
        call(x)


def test_multinomial_with_a_generator_is_refused() -> None:
    """As on the device."""
    with pytest.raises(NotImplementedError, match=r"multinomial\(\)"):
        torch.multinomial(torch.ones(3, device=DEVICE), 1, generator=torch.Generator(device=DEVICE))


def test_what_the_device_lacks_is_missing() -> None:
    """No kernels beyond the device's."""
    x = torch.ones(3, device=DEVICE)
    for call in (x.log_normal_, x.cauchy_, lambda: x.geometric_(0.5)):
        with pytest.raises(NotImplementedError):
            call()


def test_every_client_draws_the_same_numbers() -> None:
    """Uniform numbers, integers, masks and permutations are equal bit for bit on XLA's CPU and on the interpreter."""
    from emutpu.backend.runtime import runtime
    from emutpu.simulator.clients import make_client

    def drawn() -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [
            torch.rand(33, device=DEVICE).cpu(),
            torch.rand(7, device=DEVICE, dtype=torch.bfloat16).cpu(),
            torch.rand(7, device=DEVICE, dtype=torch.float64).cpu(),
            torch.randint(-9, 1000, (31,), device=DEVICE).cpu(),
            torch.empty(31, device=DEVICE, dtype=torch.int32).random_(0, 7).cpu(),
            torch.bernoulli(torch.full((31,), 0.5, device=DEVICE)).cpu(),
            torch.nn.functional.dropout(torch.ones(31, device=DEVICE), 0.3).cpu(),
            torch.randperm(31, device=DEVICE).cpu(),
        ]

    torch.ones(1, device=DEVICE)
    results = {}
    original = runtime().client
    try:
        for name in ("cpu", "interpreter"):
            runtime().replace_client(make_client(name))
            results[name] = drawn()
    finally:
        runtime().replace_client(original)
    for on_cpu, interpreted in zip(results["cpu"], results["interpreter"], strict=True):
        assert torch.equal(on_cpu, interpreted)


def test_complex_uniform():
    """Both parts are uniform on their own; integers are refused."""
    drawn = torch.rand(4000, dtype=torch.complex64, device="tpu").cpu()
    for part in (drawn.real, drawn.imag):
        assert 0 <= part.min() < 0.01
        assert 0.99 < part.max() < 1
        assert abs(part.mean() - 0.5) < 0.03
    assert abs(torch.corrcoef(torch.stack([drawn.real, drawn.imag]))[0, 1]) < 0.1
    stretched = torch.zeros(50, dtype=torch.complex64, device="tpu").uniform_(2, 3).cpu()
    assert all(((part >= 2) & (part < 3)).all() for part in (stretched.real, stretched.imag))
    with pytest.raises(NotImplementedError, match="not implemented for int64"):
        torch.rand(4, dtype=torch.int64, device="tpu")
