"""The cost of a canonical module on a chip: a pure function, the same to the last digit wherever it runs."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from emutpu.simulator.chips import Chip

from . import collectives, memory, work
from .graph import Graph, Node, read
from .kernels import Kernel, fuse
from .layout import padded_bytes
from .rates import Expected, Rates, expected, rates
from .schedule import Placement, place
from .simplify import simplify
from .tables import COLLECTIVES, ELEMENTWISE, FREE, MOVEMENT
from .units import Cycles, cycles

__all__ = ["Collective", "Estimate", "FusionCost", "Level", "estimate"]

Level = Literal["eager", "compiled"]
_STREAMED = 4  # the compiler counts a fetch into VMEM as four transfers: both ends of its start and of its end
_EAGER_MXU = 3.3  # an op compiled at the eager level: 3,571,318 against 1,083,068 cycles for 4096^3 on v5e


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
    """One collective: bytes of its operand, devices of a group, and the seconds its transfers take."""

    op: str
    bytes: int
    devices: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Estimate:
    """What the model says of one launch; seconds and bytes are of one device. All figures are modelled, none measured.

    ``hbm_bytes`` and ``roofline_seconds`` follow the compiler's accounting (every operand and result of every kernel,
    fetches into VMEM four times); ``expected_seconds`` applies measured efficiencies, and ``error_bar`` holds the
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


def estimate(module: bytes | str, chip: Chip, level: Level = "compiled") -> Estimate:
    """Cost of a StableHLO module (bytecode or text) on one device of ``chip``.

    ``compiled`` is what torch.compile gets; ``eager`` compiles at the lower level of single ops: no fetching ahead and a
    slower MXU schedule. Raises InvalidArgument for a malformed module, Unimplemented for an operation nobody can cost,
    ValueError for a chip or level without constants.
    """
    if level not in get_args(Level):
        raise ValueError(f"unknown level {level!r}: choose eager or compiled")
    return _Model(chip, level).run(read(module))


class _Model:
    def __init__(self, chip: Chip, level: Level) -> None:
        self.chip = chip
        self.level = level
        self.rates: Rates = rates(chip)
        self.expected: Expected = expected()
        self.assumptions: dict[str, None] = {}
        if self.rates.derived:
            self.assume(self.rates.derived)

    def assume(self, text: str) -> None:
        self.assumptions[text] = None

    def run(self, graph: Graph) -> Estimate:
        graph = simplify(graph)
        kernels = [kernel for kernel in fuse(graph) if not memory.is_bitcast(kernel)]
        outputs = {id(node) for node in graph.outputs}
        parts = [self._kernel(kernel) for kernel in kernels]
        placement = self._place(graph, kernels, outputs)
        return self._sum(graph, kernels, parts, placement)

    def _place(self, graph: Graph, kernels: list[Kernel], outputs: set[int]) -> Placement:
        if self.level == "eager":
            return place(kernels, [], outputs, 0)
        return place(kernels, graph.arguments, outputs, self.rates.vmem)

    def _kernel(self, kernel: Kernel) -> _Part:
        flops = transcendentals = 0.0
        for member in kernel.members.values():
            self._known(member)
            flops += work.flops(member)
            transcendentals += work.transcendentals(member)
        read_bytes = sum(memory.read_bytes(kernel, value) for value in kernel.reads)
        written = memory.result_bytes(kernel)
        spent = cycles(kernel, read_bytes, written, self.rates)
        seconds = max(flops / self.rates.peak, (read_bytes + written) / self.rates.bandwidth)
        return _Part(flops, transcendentals, read_bytes, written, spent, seconds)

    def _known(self, node: Node) -> None:
        if node.op in ELEMENTWISE or node.op in FREE or node.op in MOVEMENT or node.op in _KNOWN:
            return
        self.assume(f"{node.op}: not modelled; counted as reading its operands and writing its results once")

    def _sum(self, graph: Graph, kernels: list[Kernel], parts: list[_Part], placement: Placement) -> Estimate:
        found = []
        for kernel in kernels:
            if kernel.kind in COLLECTIVES:
                seconds = collectives.seconds(kernel.key, self.chip)
                devices = kernel.key.attrs[1]
                found.append(Collective(kernel.key.op, kernel.key.inputs[0].spec.bytes, devices, seconds))
                self.assume(collectives.ASSUMPTION)
        fusions, hbm_bytes, roofline, mxu, vpu, hbm, total_cycles = [], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        expected_seconds = self.expected.launch_seconds
        for kernel, part, fetched in zip(kernels, parts, placement.fetched, strict=True):
            counted = part.read + part.written + _STREAMED * fetched
            seconds = part.roofline + _STREAMED * fetched / self.rates.bandwidth
            matrix = part.cycles.mxu / self.rates.clock * (_EAGER_MXU if self.level == "eager" else 1.0)
            traffic = self._traffic(kernel, part, placement)
            mxu += matrix
            vpu += part.cycles.vpu / self.rates.clock
            hbm += traffic / self.rates.bandwidth
            hbm_bytes += counted
            roofline += seconds
            total_cycles += part.cycles.total + (part.cycles.mxu * (_EAGER_MXU - 1) if self.level == "eager" else 0.0)
            expected_seconds += max(
                matrix / self.expected.matmul_efficiency,
                traffic / self.rates.bandwidth / self.expected.bandwidth_efficiency,
                part.cycles.vpu / self.rates.clock,
            )
            ops = tuple(m.name for m in reversed(kernel.members.values()) if m.op not in FREE) or (kernel.key.name,)
            fusions.append(
                FusionCost(ops, part.flops, counted, seconds, _unit(kernel, part, self.rates), part.cycles.total)
            )
        ici = sum(c.seconds for c in found)
        units = {"mxu": mxu, "vpu": vpu, "hbm": hbm, "ici": ici}
        arguments = sum(padded_bytes(node.spec) for node in graph.arguments)
        results = sum(padded_bytes(node.spec) for node in graph.outputs)
        donated = sum(padded_bytes(graph.arguments[index].spec) for index in graph.donated)
        compute = sum(part.flops for part in parts) / self.rates.peak
        bound = max(units, key=lambda name: units[name])
        return Estimate(
            flops=sum(part.flops for part in parts),
            transcendentals=sum(part.transcendentals for part in parts),
            hbm_bytes=hbm_bytes,
            cycles=total_cycles,
            roofline_seconds=roofline + ici,
            expected_seconds=expected_seconds + ici,
            peak="ici bandwidth" if bound == "ici" else ("bf16 flops" if compute > roofline / 2 else "hbm bandwidth"),
            bound=bound,
            peak_hbm_bytes=arguments + max(0, results - min(donated, results)) + placement.temporaries,
            argument_bytes=arguments,
            output_bytes=results,
            temp_bytes=placement.temporaries,
            mxu_seconds=mxu,
            vpu_seconds=vpu,
            hbm_seconds=hbm,
            ici_seconds=ici,
            fusions=tuple(fusions),
            collectives=tuple(found),
            assumptions=tuple(self.assumptions),
            error_bar=(self.expected.low, self.expected.high),
        )

    @staticmethod
    def _traffic(kernel: Kernel, part: _Part, placement: Placement) -> float:
        """Bytes that cross the HBM bus: not those that stay in VMEM between kernels."""
        inside = sum(padded_bytes(v.spec) for v in kernel.reads if id(v) in placement.resident and v.op != "parameter")
        inside += sum(padded_bytes(v.spec) for v in kernel.roots if id(v) in placement.resident)
        return max(0.0, part.read + part.written - inside)


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    flops: float
    transcendentals: float
    read: int
    written: int
    cycles: Cycles
    roofline: float


def _unit(kernel: Kernel, part: _Part, chip: Rates) -> str:
    if kernel.kind in COLLECTIVES:
        return "ici"
    hbm = (part.read + part.written) / chip.bandwidth * chip.clock
    units = {"mxu": part.cycles.mxu, "vpu": part.cycles.vpu, "hbm": hbm}
    return max(units, key=lambda name: units[name])


_KNOWN = frozenset(
    {"parameter", "result", "dot_general", "dot", "vector_product", "convolution", "reduce", "reduce_window", "gather",
     "scatter", "sort", "top_k", "dynamic_update_slice", "select_and_scatter", "fft", "triangular_solve", "cholesky",
     "rng", "rng_bit_generator", "while", "case", "if", *COLLECTIVES}
)  # fmt: skip
