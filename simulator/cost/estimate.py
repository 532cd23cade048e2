"""The cost of a canonical module on a chip: a pure function, the same to the last digit wherever it runs."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Literal, get_args

from emutpu.simulator.chips import Chip

from . import collectives, memory, work
from .causal import UNSEEN, masked_flops
from .control import trips
from .graph import Graph, Node, read
from .kernels import PRODUCTS, Kernel, fuse
from .rates import Expected, Rates, expected, rates
from .relayout import copies
from .schedule import Placement, place
from .simplify import simplify
from .tables import COLLECTIVES, ELEMENTWISE, FREE, MOVEMENT
from .units import Cycles, cycles

__all__ = ["Collective", "Estimate", "FusionCost", "Level", "estimate", "estimate_graph"]

Level = Literal["eager", "compiled"]
_CONTROL = frozenset({"while", "case", "if"})
# Kernels without a figure in the compiler's estimated_cycles.
_UNTIMED = frozenset(
    {
        "gather",
        "scatter",
        "sort",
        "top_k",
        "select_and_scatter",
        "cholesky",
        "triangular_solve",
        "custom_call",
        "online_softmax",
        *_CONTROL,
    }
)
_BY_INDEX = operator.attrgetter("index")
_SMALL = 1024  # elements of a result that never bounds anything
_STREAMED = (
    4  # the compiler counts a copy between HBM and VMEM as four transfers: both ends of its start and of its end
)


@dataclasses.dataclass(frozen=True, slots=True)
class FusionCost:
    """One kernel. ``ops`` in program order, ``bytes`` as the compiler counts, ``unit`` is the busiest one."""

    ops: tuple[str, ...]
    flops: float
    bytes: float
    seconds: float
    unit: str
    cycles: float


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective: bytes of its operand, devices of a group, and the seconds its transfers take, ``dcn`` of them
    between slices; ``received`` are bytes per device.
    """

    op: str
    bytes: int
    devices: int
    seconds: float
    dcn: float = 0.0
    received: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What the model says of one launch; seconds and bytes are of one device. All figures are modelled, none measured.

    ``flops``, ``transcendentals``, ``hbm_bytes``, ``cycles`` and ``roofline_seconds`` follow the compiler's accounting: every
    operand and result of every kernel, fetches into VMEM four times, the body of a loop once, no flops of its own calls.
    ``executed_flops`` are all that run, ``executed_bytes`` those that cross the HBM bus, loops as often as they turn;
    ``masked_flops`` are those of ``executed_flops`` that masks of attention discard, NaN where a mask is not in the module;
    ``expected_seconds`` applies measured efficiencies, and ``error_bar`` holds the
    factors between which the truth is expected. ``peak`` names the rate that bounds, ``bound`` the unit.
    """

    flops: float
    transcendentals: float
    hbm_bytes: float
    cycles: float
    roofline_seconds: float
    expected_seconds: float
    peak: str
    bound: str
    peak_hbm_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    mxu_seconds: float
    vpu_seconds: float
    hbm_seconds: float
    ici_seconds: float
    fusions: tuple[FusionCost, ...]
    collectives: tuple[Collective, ...]
    assumptions: tuple[str, ...]
    error_bar: tuple[float, float]
    masked_flops: float = 0.0
    executed_flops: float = 0.0
    executed_bytes: float = 0.0


def estimate(module: bytes | str, chip: Chip, level: Level = "compiled") -> Estimate:
    """Cost of a StableHLO module (bytecode or text) on one device of ``chip``.

    ``compiled`` is what torch.compile gets; ``eager`` compiles at the lower level of single ops: no fetching ahead and a
    slower MXU schedule. Raises InvalidArgument for a malformed module, Unimplemented for an operation nobody can cost,
    ValueError for a chip or level without constants.
    """
    return estimate_graph(read(module), chip, level)


def estimate_graph(graph: Graph, chip: Chip, level: Level = "compiled") -> Estimate:
    """:func:`estimate` of a module that has been read, which is two fifths of the work. ``graph`` is rewritten."""
    if level not in get_args(Level):
        raise ValueError(f"unknown level {level!r}: choose eager or compiled")
    return Model(chip, level, rates(chip), expected()).run(graph)


class Model:
    def __init__(self, chip: Chip, level: Level, constants: Rates, measured: Expected) -> None:
        self.chip = chip
        self.level = level
        self.rates = constants
        self.expected = measured
        self.assumptions: dict[str, None] = {}
        if self.rates.derived:
            self.assume(self.rates.derived)

    def assume(self, text: str) -> None:
        self.assumptions[text] = None

    def run(self, graph: Graph, *, inner: bool = False) -> Estimate:
        graph = simplify(graph, vector_products=self.rates.vector_products, result_copies=not inner)
        return self.cost(
            graph,
            [kernel for kernel in fuse(graph, self.rates) if not memory.is_bitcast(kernel, graph.outputs)],
        )

    def cost(self, graph: Graph, kernels: list[Kernel]) -> Estimate:
        """The estimate of a fused graph."""
        outputs = {id(node) for node in graph.outputs}
        traffic = [self._traffic(kernel, outputs) for kernel in kernels]
        spent = [cycles(kernel, moved, self.rates) for kernel, moved in zip(kernels, traffic, strict=True)]
        placement = self._place(graph, kernels, outputs, spent)
        parts = [self._part(*each, placement) for each in zip(kernels, traffic, spent, strict=True)]
        return self._sum(graph, kernels, parts, placement)

    def _control(self, node: Node) -> tuple[Estimate, int]:
        """The estimate of what a loop repeats or a branch takes at most, and how often it runs."""
        if node.op == "while":
            count = trips(node)
            if count is None:
                self.assume("while: the number of iterations is not known here; counted once")
                count = 1
            else:
                self.assume(
                    f"while: {count} iterations expected and executed; flops, hbm_bytes, cycles and roofline_seconds count "
                    f"its body once, as the compiler does"
                )
            return self._inner().run(node.bodies[1], inner=True), count
        branches = [self._inner().run(body, inner=True) for body in node.bodies]
        self.assume(f"{node.op}: its most expensive branch is counted")
        return max(branches, key=lambda branch: branch.roofline_seconds), 1

    def _inner(self) -> Model:
        return Model(self.chip, self.level, self.rates, self.expected)

    def _place(self, graph: Graph, kernels: list[Kernel], outputs: set[int], spent: list[Cycles]) -> Placement:
        if self.level == "eager":
            return place(kernels, [], outputs, 0, [0.0] * len(kernels), [])
        seconds = [each.total / self.rates.clock for each in spent]
        capacity = int(self.rates.vmem * self.rates.vmem_share)
        return place(
            kernels,
            graph.arguments,
            outputs,
            capacity,
            seconds,
            [self.rates.bandwidth],
            shared=not self.rates.megacore,
        )

    def _traffic(self, kernel: Kernel, outputs: set[int]) -> memory.Traffic:
        around = copies(kernel, outputs, self.rates)
        read_bytes = sum(memory.read_bytes(kernel, value) for value in kernel.reads)
        read_bytes += sum(value.spec.padded for value in kernel.repeated)
        return memory.Traffic(
            read_bytes + around.grown, memory.result_bytes(kernel), around.copied, around.kernels, around.timed
        )

    def _part(self, kernel: Kernel, moved: memory.Traffic, spent: Cycles, placement: Placement) -> _Part:
        members = kernel.members.values()
        extra = executed = transcendentals = 0.0
        for member in members:
            op = member.op
            if op not in _MODELLED:
                self._unknown(member)
            executed += work.flops(member)
            if op in work.WITH_TRANSCENDENTALS:
                transcendentals += work.transcendentals(member)
        if not self.rates.native_bf16 and kernel.kind in ("loop", "reduce"):
            extra += work.conversions(members, kernel.roots)
            extra += sum(value.spec.size for value in kernel.repeated if value.spec.dtype == "bf16")
        if kernel.again is not None and id(kernel.again) in kernel.members:
            extra += work.flops(kernel.again)
        if kernel.softmax and self.rates.recomputes_scores:
            extra += sum(work.flops(m) for m in members if m.op == "dot_general")
        own_way = kernel.rows or kernel.kind == "online_softmax"
        flops = extra + (work.counted_flops(members) if own_way else executed)
        inside = sum(v.spec.padded for v in kernel.reads if id(v) in placement.resident)
        kept = sum(v.spec.padded for v in kernel.roots if id(v) in placement.resident)
        moved.hbm = max(0, moved.counted - inside - kept)
        moved.to_hbm = any(v.spec.size > _SMALL and id(v) not in placement.resident for v in kernel.roots)
        if kernel.kind in PRODUCTS:  # their results take less time to VMEM
            spent = cycles(kernel, moved, self.rates)
        if kernel.kind == "online_softmax":
            moved.read = moved.written = 0  # the compiler counts nothing of its own calls
        own = (moved.counted - moved.copied) / self.rates.bandwidth
        seconds = max(flops / self.rates.peak, own) + moved.copied / self.rates.bandwidth
        return _Part(flops, executed + extra, transcendentals, moved, spent, seconds)

    def _unknown(self, node: Node) -> None:
        name = f"{node.op} {node.attrs[0]}" if node.op == "custom_call" else node.op
        self.assume(f"{name}: not modelled; counted as reading its operands and writing its results once")

    def _sum(self, graph: Graph, kernels: list[Kernel], parts: list[_Part], placement: Placement) -> Estimate:
        found = []
        for kernel in kernels:
            if kernel.kind in COLLECTIVES:
                taken = collectives.seconds(kernel.key, self.chip)
                size, devices = kernel.key.inputs[0].spec.bytes, kernel.key.attrs[1]
                found.append(Collective(kernel.key.op, size, devices, taken.seconds, taken.dcn, taken.received))
                self.assume(collectives.ASSUMPTION)
        fusions, hbm_bytes, roofline, mxu, vpu, hbm, total_cycles = [], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        crossed = 0.0
        expected_seconds = self.expected.launch_seconds
        inner = [self._control(kernel.key) for kernel in kernels if kernel.kind in _CONTROL]
        for kernel, part, fetched, stored in zip(kernels, parts, placement.fetched, placement.stored, strict=True):
            if kernel.kind in _CONTROL:
                continue
            if kernel.kind in _UNTIMED:
                self.assume(f"cycles: the compiler's count has none for {kernel.kind}; expected_seconds has its time")
            streamed = _STREAMED * (fetched + stored)
            counted = part.moved.counted + streamed
            seconds = part.roofline + streamed / self.rates.bandwidth
            matrix = part.cycles.mxu / self.rates.clock
            scheduled = matrix * (self.rates.eager if self.level == "eager" else 1.0)
            traffic = part.moved.hbm + fetched + stored
            mxu += scheduled
            vpu += part.cycles.vpu / self.rates.clock
            hbm += traffic / self.rates.bandwidth
            crossed += traffic
            hbm_bytes += counted
            roofline += seconds
            total_cycles += (part.cycles.copies if kernel.kind in _UNTIMED else part.cycles.total) + (
                part.cycles.mxu * (self.rates.eager - 1) if self.level == "eager" else 0.0
            )
            expected_seconds += max(
                # Measured inefficiency and the eager schedule are two views of one loss, so they do not multiply.
                matrix / self.expected.matmul_efficiency,
                scheduled,
                traffic / self.rates.bandwidth / self.expected.bandwidth_efficiency,
                part.cycles.vpu / self.rates.clock,
            )
            ordered = sorted([m for m in kernel.members.values() if m.op not in FREE], key=_BY_INDEX)
            ops = tuple([member.name for member in ordered]) or (kernel.key.name,)
            fusions.append(
                FusionCost(ops, part.flops, counted, seconds, _unit(kernel, part, self.rates), part.cycles.total)
            )
        masked = masked_flops(graph)
        if math.isnan(masked):
            self.assume(UNSEEN)
        own = _Totals(
            sum(part.flops for part in parts),
            sum(part.transcendentals for part in parts),
            hbm_bytes,
            total_cycles,
            roofline,
            expected_seconds,
            mxu,
            vpu,
            hbm,
            sum(c.seconds for c in found),
            masked,
            sum(part.executed for part in parts),
            crossed,
        )
        for estimate_, count in inner:
            own = own.plus(estimate_, count)
            fusions += list(estimate_.fusions)
            found += list(estimate_.collectives)
            for text in estimate_.assumptions:
                self.assume(text)
        temporaries = placement.temporaries + max((e.temp_bytes for e, _ in inner), default=0)
        return self._report(graph, own, temporaries, fusions, found)

    def _report(
        self, graph: Graph, own: _Totals, temporaries: int, fusions: list[FusionCost], found: list[Collective]
    ) -> Estimate:
        units = {"mxu": own.mxu, "vpu": own.vpu, "hbm": own.hbm, "ici": own.ici}
        bound = max(units, key=lambda name: units[name])
        arguments = sum(node.spec.padded for node in graph.arguments)
        results = sum(spec.padded for node in graph.outputs for spec in (node.spec,))
        donated = sum(graph.arguments[index].spec.padded for index in graph.donated)
        compute = own.flops / self.rates.peak > own.roofline / 2
        return Estimate(
            flops=own.flops,
            transcendentals=own.transcendentals,
            hbm_bytes=own.hbm_bytes,
            cycles=own.cycles,
            roofline_seconds=own.roofline + own.ici,
            expected_seconds=own.expected + own.ici,
            peak="ici bandwidth" if bound == "ici" else ("bf16 flops" if compute else "hbm bandwidth"),
            bound=bound,
            peak_hbm_bytes=arguments + max(0, results - min(donated, results)) + temporaries,
            argument_bytes=arguments,
            output_bytes=results,
            temp_bytes=temporaries,
            mxu_seconds=own.mxu,
            vpu_seconds=own.vpu,
            hbm_seconds=own.hbm,
            ici_seconds=own.ici,
            fusions=tuple(fusions),
            collectives=tuple(found),
            assumptions=tuple(self.assumptions),
            error_bar=(self.expected.low, self.expected.high),
            masked_flops=own.masked,
            executed_flops=own.executed,
            executed_bytes=own.crossed,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Totals:
    flops: float
    transcendentals: float
    hbm_bytes: float
    cycles: float
    roofline: float
    expected: float
    mxu: float
    vpu: float
    hbm: float
    ici: float
    masked: float
    executed: float
    crossed: float

    def plus(self, inner: Estimate, count: int) -> _Totals:
        """With what ``count`` runs of ``inner`` add; its collectives are in its seconds already.

        The compiler's accounting has a body once, whatever the count, and none of its cycles.
        """
        once = min(count, 1)
        return _Totals(
            self.flops + once * inner.flops,
            self.transcendentals + once * inner.transcendentals,
            self.hbm_bytes + once * inner.hbm_bytes,
            self.cycles,
            self.roofline + once * (inner.roofline_seconds - inner.ici_seconds),
            self.expected + count * (inner.expected_seconds - inner.ici_seconds),
            self.mxu + count * inner.mxu_seconds,
            self.vpu + count * inner.vpu_seconds,
            self.hbm + count * inner.hbm_seconds,
            self.ici + count * inner.ici_seconds,
            self.masked + count * inner.masked_flops,
            self.executed + count * inner.executed_flops,
            self.crossed + count * inner.executed_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    flops: float
    executed: float
    transcendentals: float
    moved: memory.Traffic
    cycles: Cycles
    roofline: float


def _unit(kernel: Kernel, part: _Part, chip: Rates) -> str:
    if kernel.kind in COLLECTIVES:
        return "ici"
    hbm = part.moved.hbm / chip.bandwidth * chip.clock
    mxu, vpu = part.cycles.mxu, part.cycles.vpu
    if mxu >= vpu and mxu >= hbm:
        return "mxu"
    return "vpu" if vpu >= hbm else "hbm"


_MODELLED = ELEMENTWISE | FREE | MOVEMENT | frozenset(
    {"parameter", "result", "dot_general", "dot", "online_softmax", "vector_product", "convolution", "reduce", "reduce_window", "gather",
     "scatter", "sort", "top_k", "dynamic_update_slice", "select_and_scatter", "fft", "triangular_solve", "cholesky",
     "rng", "rng_bit_generator", "while", "case", "if", *COLLECTIVES}
)  # fmt: skip
