"""What a launch would take of the emulated chip: the cost model's figures in the protocol's terms."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emutpu.backend.pjrt import CompileOptions, Effort, ModelledCost, Unimplemented

from ._modules import ModuleInfo
from .chips import Chip, chip
from .cost import Estimate, Graph, Level, estimate_graph, read
from .cost.collectives import over_slice
from .hbm import total_bytes
from .topology import Slice

__all__ = ["Modelled", "collective_cost", "from_plain", "modelled", "plain", "version"]

_UNMODELLED_ERROR = 9.0
"""Relative error bar of a launch whose operations have no model: a factor of ten either way."""


_LINK_ERROR = 1.0
"""Relative error bar of a collective: a factor of two either way, an assumption (no measured point names its size)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Modelled:
    """``cost`` is None where nothing is known of the chip; ``temporaries`` are bytes beside arguments and results."""

    cost: ModelledCost | None
    temporaries: int


def modelled(module: bytes, info: ModuleInfo, names: Sequence[str], options: CompileOptions) -> dict[str, Modelled]:
    """The modelled cost of one launch of ``module`` on a device of each of the chips, by their names.

    An operation that has no model makes the launch cost the traffic of its arguments and results, which is said in the
    cost's assumptions. None for a chip without constants. Raises ValueError for a name that is no chip's.
    """
    specs = {name: chip(name) for name in names}
    level: Level = "eager" if options.effort in (Effort.O0, Effort.O1) else "compiled"
    try:
        graph = read(module)
    except Unimplemented as error:
        unread = str(error)
        return {name: Modelled(_traffic(info, spec, unread), 0) for name, spec in specs.items()}
    except ValueError:
        return dict.fromkeys(names, Modelled(None, 0))
    return {
        name: _modelled(graph if name == names[-1] else graph.copy(), info, spec, level) for name, spec in specs.items()
    }


def _modelled(graph: Graph, info: ModuleInfo, spec: Chip, level: Level) -> Modelled:
    try:
        found = estimate_graph(graph, spec, level)
    except Unimplemented as error:
        return Modelled(_traffic(info, spec, str(error)), 0)
    except ValueError:
        return Modelled(None, 0)
    return Modelled(_cost(found), found.temp_bytes)


@functools.cache
def version() -> str:
    """Sixteen digits for the sources and constants of the model: what another version found is modelled anew."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*here.glob("*.py"), *here.glob("cost/*.py"), *here.glob("cost/*.json")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def plain(figures: Modelled) -> list[Any]:
    """As JSON can hold it."""
    cost = figures.cost
    return [figures.temporaries, None if cost is None else dataclasses.astuple(cost)]


def from_plain(value: list[Any]) -> Modelled:
    """What :func:`plain` gave. Raises TypeError or ValueError for anything else."""
    temporaries, cost = value
    if cost is None:
        return Modelled(None, int(temporaries))
    seconds, flops, hbm_bytes, error_bar, bound, units, assumptions, masked_flops, ici_bytes = cost
    return Modelled(
        ModelledCost(
            seconds=float(seconds),
            flops=float(flops),
            hbm_bytes=float(hbm_bytes),
            error_bar=float(error_bar),
            bound=str(bound),
            units=tuple([(str(unit), float(taken)) for unit, taken in units]),
            assumptions=tuple(map(str, assumptions)),
            masked_flops=float(masked_flops),
            ici_bytes=float(ici_bytes),
        ),
        int(temporaries),
    )


def _cost(found: Estimate) -> ModelledCost:
    low, high = found.error_bar
    between = sum(each.dcn for each in found.collectives)
    return ModelledCost(
        seconds=found.expected_seconds,
        flops=found.executed_flops,
        hbm_bytes=found.executed_bytes,
        error_bar=max(high, 1 / low) - 1,
        bound=found.bound,
        units=(
            ("mxu", found.mxu_seconds),
            ("vpu", found.vpu_seconds),
            ("hbm", found.hbm_seconds),
            ("ici", found.ici_seconds - between),
            ("dcn", between),
        ),
        assumptions=found.assumptions,
        masked_flops=found.masked_flops,
        ici_bytes=sum(each.received for each in found.collectives),
    )


def collective_cost(op: str, operand: float, devices: int, world: int, where: Slice) -> ModelledCost | None:
    """A collective of a program whose other ranks are not there: ``operand`` bytes per device, over ``devices`` of ``world``.

    None where the links of the chip are not published.
    """
    found, assumed = over_slice(op, operand, devices, world, where)
    if found is None:
        return None
    return ModelledCost(
        seconds=found.seconds,
        flops=0.0,
        hbm_bytes=0.0,
        error_bar=_LINK_ERROR,
        bound="dcn" if found.dcn > found.ici else "ici",
        units=(("ici", found.ici), ("dcn", found.dcn)),
        assumptions=(assumed,),
        ici_bytes=found.received,
    )


def _traffic(info: ModuleInfo, spec: Chip, reason: str) -> ModelledCost:
    bandwidth = spec.hbm_bandwidth / spec.devices
    nbytes = total_bytes(info.arguments) + total_bytes(info.results)
    return ModelledCost(
        seconds=nbytes / bandwidth,
        flops=0.0,
        hbm_bytes=float(nbytes),
        error_bar=_UNMODELLED_ERROR,
        bound="hbm",
        units=(("hbm", nbytes / bandwidth),),
        assumptions=(f"{info.name} is charged with the traffic of its arguments and results alone: {reason}",),
    )
