"""The rules that the recordings show, on other programs of the same kinds: expectations are worked out from the rules' text.

``_Rules`` is a second, plain implementation of how a read is cut; nothing of the engine is used in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from emutpu.backend.deferred.log import LOG, RegionRecord
from emutpu.backend.deferred.queue import Repeats, current_queue
from emutpu.backend.options import EagerMode, override
from emutpu.backend.runtime import runtime

UNARY = ("sin", "cos", "tanh", "exp", "abs", "neg", "sigmoid", "sqrt")
BINARY = ("add", "mul", "sub", "maximum", "minimum")


@pytest.fixture(autouse=True)
def _deferring() -> Iterator[None]:
    torch.ones(1, device="tpu").add_(1)
    runtime().materialize("synchronize()")
    queue = current_queue()
    before = queue.repeats
    with override(mode=EagerMode.DEFER_AND_FUSE):
        queue.detector.reset()
        yield
        runtime().materialize("synchronize()")
    queue.repeats = before
    queue.detector.reset()


def _since(start: int) -> list[RegionRecord]:
    return LOG.records(start)


def _ops(region: RegionRecord) -> list[str]:
    return [op.name.split(".")[1] for op in region.ops]


# ------------------------------------------------------------------------------------------- rules 1 and 2: reads


@dataclasses.dataclass(eq=False)
class _Op:
    name: str
    operands: tuple[_Op, ...]


@dataclasses.dataclass(eq=False)
class _Storage:
    """What views share: the op that wrote its value last."""

    op: _Op


class _Rules:
    """Pending ops in order of creation, and who holds what; ``read`` says which regions a read gives."""

    def __init__(self) -> None:
        self.pending: list[_Op] = []
        self.held: dict[int, _Storage] = {}

    def operands(self, slots: tuple[int, ...]) -> tuple[_Op, ...]:
        found = [self.held[slot].op for slot in slots if slot in self.held]
        return tuple(op for op in found if op in self.pending)

    def record(self, name: str, operands: tuple[_Op, ...]) -> _Op:
        op = _Op(name, operands)
        self.pending.append(op)
        return op

    def waits(self, slot: int) -> bool:
        return bool(self.operands((slot,)))

    def read(self) -> list[list[str]]:
        live = [op for op in self.pending if any(op is storage.op for storage in self.held.values())]
        wanted: list[_Op] = []
        for op in reversed(self.pending):
            if op in live or any(op in user.operands for user in wanted):
                wanted.append(op)
        cuts: list[_Op] = []
        dead_cut = False
        for op in wanted:  # the last first
            users = [user for user in wanted if op in user.operands]
            beyond = bool(cuts) and any(self.pending.index(u) > self.pending.index(cuts[-1]) for u in users)
            if op in live or beyond:
                dead_cut = dead_cut or op not in live
                cuts.append(op)
        self.pending = []
        order = wanted[::-1]
        if not dead_cut:
            return [[op.name for op in order]] if order else []
        regions: list[list[str]] = [[]]
        for op in order:
            regions[-1].append(op.name)
            if op in cuts:
                regions.append([])
        return [region for region in regions if region]


SLOT = st.integers(0, 4)
STEP = st.one_of(
    st.tuples(st.just("unary"), SLOT, st.tuples(SLOT), st.sampled_from(UNARY)),
    st.tuples(st.just("binary"), SLOT, st.tuples(SLOT, SLOT), st.sampled_from(BINARY)),
    st.tuples(st.just("pair"), SLOT, st.tuples(SLOT), st.integers(0, 1)),
    st.tuples(st.just("view"), SLOT, st.tuples(SLOT), st.none()),
    st.tuples(st.just("inplace"), SLOT, st.just(()), st.sampled_from(("add_", "mul_"))),
    st.tuples(st.just("drop"), SLOT, st.just(()), st.none()),
    st.tuples(st.just("read"), SLOT, st.just(()), st.none()),
)


class _Program:
    """Five variables of the device, and what the rules know of them."""

    def __init__(self) -> None:
        self.rules = _Rules()
        self.start = torch.full((3,), 0.5).to("tpu")
        self.values: dict[int, torch.Tensor] = dict.fromkeys(range(5), self.start)

    def make(self, target: int, sources: tuple[int, ...], name: str, value: torch.Tensor) -> None:
        """A value of its own from ``sources``."""
        self.rules.held[target] = _Storage(self.rules.record(name, self.rules.operands(sources)))
        self.values[target] = value

    def step(self, kind: str, target: int, sources: tuple[int, ...], what: str | int | None) -> None:
        given = [self.values[source] for source in sources]
        if kind in ("unary", "binary"):
            self.make(target, sources, str(what), getattr(torch, str(what))(*given))
        elif kind == "pair":  # one op of two results: it is live as a whole, whichever is held
            self.make(target, sources, "sort", torch.sort(*given)[int(what or 0)])
        elif kind == "view":
            self.values[target] = given[0].view(1, 3)[0]
            shared = self.rules.held.get(sources[0])
            self.rules.held.pop(target, None)
            if shared is not None:
                self.rules.held[target] = shared
        elif kind == "inplace" and target in self.rules.held:
            operands = self.rules.operands((target,))
            getattr(self.values[target], str(what))(2)
            self.rules.held[target].op = self.rules.record(str(what), operands)
        elif kind == "drop":
            self.values[target] = self.start
            self.rules.held.pop(target, None)
        elif kind == "read":
            seen = LOG.launched
            waits = self.rules.waits(target)
            self.values[target].cpu()
            expected = self.rules.read() if waits else []
            assert [_ops(region) for region in _since(seen)] == expected


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(STEP, min_size=3, max_size=14))
def test_reads_are_cut_as_the_rules_say(steps: list[tuple]) -> None:
    """Random programs of ops, views, writes in place, drops and reads, each read against the plain rules."""
    current_queue().repeats = Repeats.OFF
    program = _Program()
    for step in [*steps, *(("read", slot, (), None) for slot in range(5))]:
        program.step(*step)


# ------------------------------------------------------------------------------------------- rules 3, 4 and 6: repeats


def _loop(period: int, copies: int, keep: list[torch.Tensor] | None = None) -> torch.Tensor:
    x = torch.full((4,), 0.25).to("tpu")
    for _ in range(copies):
        for n in range(period):
            # Each op of a copy is another: its number of dimensions tells them apart, and views are not counted.
            x = torch.sin(x.view(*(1,) * n, 4)).view(4) if n % 2 else torch.cos(x.view(*(1,) * n, 4)).view(4)
        if keep is not None:
            keep.append(x)
    return x


@pytest.mark.parametrize(("period", "copies"), [(2, 7), (3, 5), (5, 4), (6, 3)])
@pytest.mark.parametrize("setting", [Repeats.SAFE, Repeats.AGGRESSIVE])
def test_loops_are_cut_at_the_end_of_the_third_copy(period: int, copies: int, setting: Repeats) -> None:
    """Then after each further copy; a cut gives the op's input out beside its result, and the read finds nothing left."""
    current_queue().repeats = setting
    seen = LOG.launched
    x = _loop(period, copies)
    found = _since(seen)
    assert [region.reason for region in found] == ["repeated_op_heuristic"] * (copies - 2)
    assert [len(region.ops) for region in found] == [3 * period] + [period] * (copies - 3)
    assert [len(region.outputs) for region in found] == [2] * (copies - 2)
    x.cpu()
    assert len(_since(seen)) == copies - 2


@pytest.mark.parametrize("period", [2, 5])
def test_off_never_cuts(period: int) -> None:
    """The read is one region of everything."""
    current_queue().repeats = Repeats.OFF
    seen = LOG.launched
    _loop(period, 8).cpu()
    (region,) = _since(seen)
    assert (region.reason, len(region.ops)) == (".cpu()", 8 * period)


def test_period_one_counts_as_two() -> None:
    """The same op over and over: the first cut at op 6, then every two."""
    current_queue().repeats = Repeats.SAFE
    seen = LOG.launched
    x = torch.full((4,), 0.25).to("tpu")
    for _ in range(11):
        x = torch.tanh(x)
    assert [len(region.ops) for region in _since(seen)] == [6, 2, 2]
    assert x.cpu().shape == (4,)
    assert [len(region.ops) for region in _since(seen)] == [6, 2, 2, 1]


@pytest.mark.parametrize(("period", "cuts"), [(128, [384]), (129, [])])
def test_the_longest_sequence(period: int, cuts: list[int]) -> None:
    """128 ops are the longest sequence that is found; nothing is cut for a longer one."""
    current_queue().repeats = Repeats.AGGRESSIVE  # safe would cut beside every value that its next write reads
    values = [torch.full((n + 1,), 0.25).to("tpu") for n in range(period)]
    seen = LOG.launched
    for _ in range(3):
        for value in values:
            value.tanh_()
    assert [len(region.ops) for region in _since(seen)] == cuts


@pytest.mark.parametrize("materialised", [False, True])
def test_only_a_read_that_does_something_resets(materialised: bool) -> None:
    """After four ops a read of something pending starts the count anew; one of something done does not."""
    current_queue().repeats = Repeats.SAFE
    done = torch.full((4,), 0.5).to("tpu")
    seen = LOG.launched
    x = torch.full((4,), 0.25).to("tpu")
    for turn in range(8):
        x = torch.tanh(x)
        if turn == 3:
            (done if materialised else x).cpu()
    reasons = [(region.reason, len(region.ops)) for region in _since(seen)]
    if materialised:
        assert reasons == [("repeated_op_heuristic", 6), ("repeated_op_heuristic", 2)]
    else:
        assert reasons == [(".cpu()", 4)]


def test_side_results_split_a_safe_cut_alone() -> None:
    """A dropped value that is read beyond a cut splits a heuristic cut under safe; aggressive launches the list whole."""
    counts = {}
    for setting in (Repeats.SAFE, Repeats.AGGRESSIVE):
        queue = current_queue()
        queue.repeats = setting
        queue.detector.reset()
        seen = LOG.launched
        x = torch.full((4,), 0.25).to("tpu")
        keep = []
        for _ in range(3):
            t = torch.tanh(x)
            keep.append(torch.sin(t))
            x = torch.cos(t)
            del t
        counts[setting] = [len(region.ops) for region in _since(seen)]
        keep.clear()
        runtime().materialize("synchronize()")
    assert counts[Repeats.AGGRESSIVE] == [9]
    assert sum(counts[Repeats.SAFE]) == 9
    assert len(counts[Repeats.SAFE]) > 1


# ------------------------------------------------------------------------------------------- rules 5 and 7: numbers


def test_alternating_kinds_of_numbers_double_the_period() -> None:
    """The hash sees a number's dtype, not its value."""
    current_queue().repeats = Repeats.SAFE
    for numbers, first in (([1, 2, 3, 4, 5, 6, 7, 8], 6), ([1, 2.5] * 7, 12)):
        current_queue().detector.reset()
        seen = LOG.launched
        x = torch.full((4,), 0.25).to("tpu")
        for number in numbers:
            x = (x * number).tanh()
        assert len(_since(seen)[0].ops) == first
        x.cpu()


def test_each_kind_of_number_is_compiled_once() -> None:
    """Values are in no key; ``alpha=1`` is left out, all other alphas are one key."""
    runtime().forget_executables()
    x = torch.full((5, 2), 0.25).to("tpu")

    def hits(programs: list[Callable[[], torch.Tensor]]) -> list[bool]:
        seen = LOG.launched
        for program in programs:
            program().cpu()
        return [region.hit for region in _since(seen)]

    assert hits([lambda n=n: x * n for n in (3, 0, 1, -1)]) == [False, True, True, True]
    assert hits([lambda n=n: x * n for n in (2.5, 0.0, 1.0)]) == [False, True, True]
    assert hits([lambda n=n: x * n for n in (True, False)]) == [False, True]
    assert hits([lambda: x**2, lambda: x**0.5, lambda: x**3]) == [False, True, True]
    assert hits([lambda a=a: torch.add(x, x, alpha=a) for a in (1, 1, 2, 3, 1)]) == [False, True, False, True, True]


# ------------------------------------------------------------------------------------------- rules 8 to 11


READS: dict[str, tuple[Callable[[torch.Tensor], object], list[str]]] = {
    "item": (lambda x: x.sum().item(), [".cpu()"]),
    "tolist": (lambda x: x.tolist(), [".cpu()"]),
    "numpy": (lambda x: x.cpu().numpy(), [".cpu()"]),
    "float": (lambda x: float(x[0]), [".cpu()"]),
    "if": (lambda x: 1 if x.sum() > 0 else 2, [".cpu()"]),
    "allclose": (lambda x: torch.allclose(x, x), [".cpu()"]),
    "equal": (lambda x: torch.equal(x, x + 0), ["item()"]),
    "synchronize": (lambda x: torch.accelerator.synchronize(), ["synchronize()"]),
    "shape": (lambda x: (x.shape, x.stride(), x.dtype, x.numel(), x.is_contiguous()), []),
    "data_ptr": (lambda x: x.data_ptr(), []),
    "len": (len, []),
}


@pytest.mark.parametrize("read", READS)
def test_reasons(read: str) -> None:
    """What each read is called; looking at a shape or an address is none."""
    function, expected = READS[read]
    x = torch.full((4,), 0.25).to("tpu")
    y = x.tanh()
    seen = LOG.launched
    function(y)
    assert sorted({region.reason for region in _since(seen)}) == expected


def test_backward_is_no_read() -> None:
    """Gradients are pending until somebody looks."""
    x = torch.full((4,), 0.25).to("tpu").requires_grad_()
    seen = LOG.launched
    (x.tanh() * 3).sum().backward()
    assert _since(seen) == []
    assert x.grad is not None
    assert x.grad.cpu().shape == (4,)


def test_each_offset_of_a_view_is_compiled_for_itself() -> None:
    """Nested views are one read; the second time round all are known."""
    runtime().forget_executables()
    x = torch.arange(24.0).reshape(2, 3, 4).to("tpu")
    seen = LOG.launched
    for _ in range(2):
        assert [x[1].t()[n][2].item() for n in range(4)] == [20, 21, 22, 23]
    found = _since(seen)
    assert [region.hit for region in found] == [False] * 4 + [True] * 4
    assert {part for region in found for op in region.ops for part in op.parts} == {"as_strided"}


def test_leaving_for_strict_takes_the_first_op_along() -> None:
    """The whole list and the op are one region, also where a read would have been cut; views in between flush nothing."""
    x = torch.full((4,), 0.25).to("tpu")
    t = torch.tanh(x)
    a, b = torch.sin(t), torch.cos(t)
    del t
    seen = LOG.launched
    with override(mode=EagerMode.DEFER_NEVER):
        view = a.view(2, 2)
        assert _since(seen) == []
        c = b + 1
        (region,) = _since(seen)
        assert (region.reason, _ops(region)) == ("debug_mode", ["tanh", "sin", "cos", "add"])
        c + 1
    assert len(_since(seen)) == 1
    assert view.cpu().shape == (2, 2)


def test_draws_end_up_one_a_region() -> None:
    """Each leaves a state, which, dead but read by the next draw, is a cut. Three updates are another matter."""
    generator = torch.Generator(device="tpu")
    seen = LOG.launched
    made = [torch.rand(3, device="tpu", generator=generator) for _ in range(2)]
    torch.stack(made).cpu()
    assert [[op.name.split(".")[-2:][0] for op in region.ops] for region in _since(seen)] == [
        ["uniform_"],
        ["rng_state_update"],
        ["uniform_"],
        ["rng_state_update"],
        ["stack"],
    ]
