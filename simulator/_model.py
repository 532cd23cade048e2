"""What a launch would take of the emulated chip: the cost model's figures in the protocol's terms."""

from __future__ import annotations

import dataclasses

from emutpu.backend.pjrt import CompileOptions, Effort, ModelledCost, Unimplemented

from ._modules import ModuleInfo
from .chips import chip
from .cost import Estimate, estimate
from .cost.collectives import over_slice
from .hbm import total_bytes
from .topology import Slice

__all__ = ["Modelled", "collective_cost", "modelled"]

_UNMODELLED_ERROR = 9.0
"""Relative error bar of a launch whose operations have no model: a factor of ten either way."""


_LINK_ERROR = 1.0
"""Relative error bar of a collective: a factor of two either way, an assumption (no measured point names its size)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Modelled:
    """``cost`` is None where nothing is known of the chip; ``temporaries`` are bytes beside arguments and results."""

    cost: ModelledCost | None
    temporaries: int


def modelled(module: bytes, info: ModuleInfo, name: str, options: CompileOptions) -> Modelled:
    """The modelled cost of one launch of ``module`` on a device of the chip of that name.

    An operation that has no model makes the launch cost the traffic of its arguments and results, which is said in the
    cost's assumptions. None for a chip without constants.
    """
    spec = chip(name)
    level = "eager" if options.effort in (Effort.O0, Effort.O1) else "compiled"
    try:
        found = estimate(module, spec, level)  # type: ignore[arg-type]  # one of the two
    except Unimplemented as error:
        return Modelled(_traffic(info, spec.hbm_bandwidth / spec.devices, str(error)), 0)
    except ValueError:
        return Modelled(None, 0)
    return Modelled(_cost(found), found.temp_bytes)


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


def _traffic(info: ModuleInfo, bandwidth: float, reason: str) -> ModelledCost:
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
