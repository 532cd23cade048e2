"""Whether a row that passes here would run on the chip: missing kernels, memory at full size, static shapes.

Three things that an emulator with wider kernels, small models and a CPU's freedom cannot meet by itself:

* *missing kernel*: an op that TorchTPU 0.2.0 was observed to lack a kernel of;
* *memory*: the full-size forward at batch 1 takes more than one device of the chip has. It is the dry run's figure for the
  library's own configuration, times the parameters that a hub id names ("…-70B") over those of that configuration;
* *static shapes*: in ``compile`` and ``bounded``, an op whose result's size depends on values. The compiler knows static
  shapes only, so the graph breaks there, and what is left is no compiled program. Eager modes read the size and wait.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from emutpu import _facts
from emutpu.conformance.tiers import BOUNDED

__all__ = [
    "NOTE",
    "WITHOUT_MEMORY",
    "Memory",
    "Prediction",
    "data_dependent",
    "missing_kernels",
    "named_parameters",
    "predict",
    "summary",
]

# What emutpu launches for `nonzero`, by the name of an op that TorchTPU lacks; models call `nonzero`.
_LAUNCHED = frozenset({"nonzero_static"})
_STATIC = frozenset({"compile", BOUNDED})
# Ops whose result's size is in the data, after TorchTPU's shape-dependent ops: they wait for the device.
_SIZED_BY_VALUES = frozenset(
    {
        "bincount",
        "masked_select",
        "nonzero",
        "nonzero_numpy",
        "nonzero_static",
        "repeat_interleave.Tensor",
        "unique_consecutive",
        "unique_dim",
        "unique_dim_consecutive",
        "_unique",
        "_unique2",
    }
)


WITHOUT_MEMORY = "from missing kernels, and in `compile` and `bounded` from sizes that depend on values; memory at full size was not judged"
NOTE = (
    "a row that passes, with kernels that TorchTPU 0.2.0 has, that fits one device at full size (forward at batch 1, a dry run "
    "of the library's configuration, scaled by the parameters that an id names) and, in `compile` and `bounded`, whose sizes "
    "do not depend on values"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """What one device of the chip has, in bytes, and the estimate of each program (as JSON, from ``full_size``)."""

    limit: int
    estimates: Mapping[str, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Prediction:
    """``limits`` is empty for a row that would run. ``bytes`` is None where nobody estimated it; ``size`` says of what it is:
    the ``architecture``, the library's ``default configuration``, or that scaled to what the ``id`` names.
    """

    limits: tuple[str, ...]
    missing_kernels: tuple[str, ...]
    data_dependent: tuple[str, ...]
    bytes: int | None
    size: str | None


def missing_kernels(ops: Iterable[str]) -> list[str]:
    """Which of the ATen ops that ran (``aten.add.Tensor``) TorchTPU 0.2.0 was observed to lack a kernel of."""
    return sorted(_names(ops) & _lacking() - _LAUNCHED)


def data_dependent(ops: Iterable[str]) -> list[str]:
    """Which of the ATen ops that ran give results whose size depends on values."""
    return sorted({"nonzero" if name == "nonzero_static" else name for name in _names(ops) & _SIZED_BY_VALUES})


def _names(ops: Iterable[str]) -> set[str]:
    return {op.removeprefix("aten.").removesuffix(".default") for op in ops}


@functools.cache
def _lacking() -> frozenset[str]:
    return frozenset(_facts.read("torchtpu_missing_overloads.txt"))


_COUNT = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", re.IGNORECASE)
_UNITS = {"b": 1e9, "m": 1e6}


def named_parameters(model_id: str) -> int | None:
    """How many parameters a hub id names: 7e9 for ``…-7B``, 56e9 for ``…8x7B`` (too many: experts share what is no expert).

    The largest where it names several (``30B-A3B`` has 3 active ones); None where it names none.
    """
    name = model_id.rpartition("/")[2].replace("_", "-")
    found = [float(number) * int(experts or 1) * _UNITS[unit.lower()] for experts, number, unit in _COUNT.findall(name)]
    return round(max(found)) if found else None


def predict(
    program: str, mode: str, ops: Iterable[str], sizes: Memory | None, *, builder: str, model_id: str | None = None
) -> Prediction:
    """Of a program that passed, or with ``model_id`` of one row of it. Without ``sizes`` memory is not judged."""
    ops = list(ops)
    lacking, dependent = missing_kernels(ops), data_dependent(ops)
    limits = [f"missing kernel: {name}" for name in lacking]
    needed, size = _needed(sizes, program, builder, model_id)
    if sizes is not None and needed is not None and needed > sizes.limit:
        limits.append(f"memory: {needed / 2**30:.1f} GiB of {sizes.limit / 2**30:.1f} GiB ({size})")
    if mode in _STATIC:
        limits += [f"static shapes: {name}" for name in dependent]
    return Prediction(tuple(limits), tuple(lacking), tuple(dependent), needed, size)


def summary(entries: Iterable[Mapping[str, Any]], sizes: Memory | None) -> dict[str, Any]:
    """Of the attempted rows of a document: how many programs are predicted too, and what stands in the way of how many rows.

    A program is predicted when one of its rows is: what remains is then a matter of size.
    """
    rows = [entry for entry in entries if entry["predicted_on_chip"] is not None]
    programs = {(entry["program"], entry["mode"]) for entry in rows}
    passed = {(entry["program"], entry["mode"]) for entry in rows if entry["predicted_on_chip"]}
    emulated = [entry for entry in rows if entry["emulated"]]
    kinds = collections.Counter(
        kind for entry in emulated for kind in {limit.partition(":")[0] for limit in entry["prediction_limits"]}
    )
    return {
        "programs": {"attempted": len(programs), "passed": len(passed)},
        "limits": {"not emulated": len(rows) - len(emulated)} | dict(sorted(kinds.items())),
        "memory_judged": sum(entry["full_size_bytes"] is not None for entry in rows),
        "device_bytes": sizes.limit if sizes is not None else None,
    }


def _needed(sizes: Memory | None, program: str, builder: str, model_id: str | None) -> tuple[int | None, str | None]:
    estimate = sizes.estimates.get(program) if sizes is not None else None
    if estimate is None:
        return None, None
    needed = int(estimate["bytes"])
    if builder != "transformers":
        return needed, "architecture" if builder in {"timm", "torchvision"} else "default configuration"
    named = named_parameters(model_id) if model_id is not None else None
    if named is None or not estimate["parameters"]:
        return needed, "default configuration"
    return round(needed * named / estimate["parameters"]), "id"
