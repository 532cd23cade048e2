"""Run reports: what a process did on the emulated device, as one versioned JSON document.

``install_exit_report`` makes a process write its own report when it exits; ``merge`` joins the reports of the processes
of one program. The documents follow ``emutpu/schemas``. Imports neither torch nor jax.
"""

from __future__ import annotations

import atexit
import collections
import enum
import importlib.metadata
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from emutpu.backend.statistics import Statistics, TierStatistics

__all__ = [
    "ABSENT",
    "TIER_COUNTERS",
    "Document",
    "costs_on",
    "empty_run",
    "fallbacks",
    "header",
    "install_exit_report",
    "installed_version",
    "launches",
    "merge",
    "run_document",
    "this_process",
    "write_document",
]

Document = dict[str, Any]

TIER_COUNTERS = ("hits", "misses", "writes", "rejected", "failed", "evicted", "seconds")

_REGION_COUNTERS = ("count", "ops", "hits")

ABSENT = {
    "modelled.mfu": "counts every FLOP that ran, recomputation included; mfu_causal leaves out what causal masks discard; "
    "`emutpu mfu` counts a configuration's useful FLOPs",
}


UNSEEN_MASK = (
    "a mask of attention came as a tensor that another launch made: whether it is causal is not known. With is_causal=True, "
    "or in DeferAndFuse and torch.compile where the mask is made in the same region, it is seen"
)
"""Why there is no ``mfu_causal``, where it is null."""

_MODELLED = (
    "seconds",
    "mfu",
    "error_bar",
    "mfu_causal",
    "device_seconds",
    "host_seconds",
    "host_issue_seconds",
    "launches",
    "flops",
    "masked_flops",
    "hbm_bytes",
    "hbm_use",
    "ici_bytes",
    "ici_use",
    "transfer_bytes",
    "steps",
    "step_seconds",
    "step_mfu",
    "step_mfu_causal",
    "bound",
    "top",
    "unmodelled",
    "assumptions",
)


def installed_version(distribution: str) -> str | None:
    """The installed version of a distribution, or None. Imports nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def header(name: str, chip: str) -> Document:
    """The fields that every document of emutpu starts with."""
    from emutpu import __version__

    return {
        "schema": f"emutpu.{name}/1",
        "emutpu": __version__,
        "torch": installed_version("torch"),
        "jax": installed_version("jax"),
        "chip": chip,
    }


def empty_run(chip: str, reason: str) -> Document:
    """A run document whose measured fields are all null for ``reason``."""
    compiles = dict.fromkeys(("requests", "hits", "misses", "seconds", "by_tier"))
    unknown = dict.fromkeys(("ops", "compiles", "regions", "fallbacks", "peak_hbm_bytes", "hbm", "modelled"), reason)
    return header("run", chip) | {
        "client": None,
        "mode": None,
        "processes": 0,
        "ops": {"dispatched": None, "by_name": None},
        "compiles": compiles,
        "regions": None,
        "fallbacks": None,
        "peak_hbm_bytes": None,
        "hbm": None,
        "modelled": dict.fromkeys(_MODELLED),
        "wall_seconds": None,
        "exit_code": None,
        "signal": None,
        "notes": ABSENT | unknown,
    }


def run_document(
    chip: str, statistics: Statistics | None, *, client: str | None = None, mode: str | None = None
) -> Document:
    """One process's run document. ``statistics`` is None for a process that never initialised the device."""
    document = empty_run(chip, "")
    by_name = _by_count(statistics.ops) if statistics else {}
    compiles = statistics.compiles if statistics else None
    document["compiles"] |= {
        "requests": compiles.requests if compiles else 0,
        "hits": compiles.hits if compiles else 0,
        "misses": compiles.misses if compiles else 0,
        "seconds": compiles.seconds if compiles else 0.0,
        "by_tier": {str(tier.tier): _tier(tier) for tier in compiles.tiers} if compiles else {},
    }
    return document | {
        "client": client,
        "mode": mode,
        "processes": 1,
        "ops": {"dispatched": sum(by_name.values()), "by_name": by_name},
        "regions": _regions(
            {row.reason: (row.count, row.ops, row.hits) for row in (statistics.regions if statistics else ())}
        ),
        "fallbacks": [
            {"op": record.op, "count": record.count, "location": record.location}
            for record in (statistics.fallbacks if statistics else ())
        ],
        "peak_hbm_bytes": statistics.peak_hbm_bytes if statistics else 0,
        "hbm": _memory(statistics),
        "modelled": _modelled(statistics),
        "notes": ABSENT | _gaps(statistics),
    }


def _gaps(statistics: Statistics | None) -> dict[str, str]:
    if statistics is None:
        return {"client": "the device was never initialised", "modelled": "the device was never initialised"}
    if statistics.modelled is None:
        return {"modelled": "nobody kept the modelled device's time"}
    return {"modelled.mfu_causal": UNSEEN_MASK} if math.isnan(statistics.modelled.masked_flops) else {}


def _memory(statistics: Statistics | None) -> Document | None:
    memory = statistics.memory if statistics else None
    if memory is None:
        return None
    return {
        "limit_bytes": memory.limit_bytes,
        "chip_bytes": memory.chip_bytes,
        "missing_bytes": memory.missing_bytes,
        "peak_op": memory.peak_op,
        "peak_line": memory.peak_line,
        "largest": [
            {"bytes": size, "dense_bytes": dense, "shape": list(shape), "dtype": dtype, "op": op, "line": line}
            for size, dense, shape, dtype, op, line in memory.holders
        ],
    }


def _modelled(statistics: Statistics | None) -> Document:
    known = statistics.modelled if statistics else None
    values: Document = dict.fromkeys(_MODELLED)
    if known is None:
        return values
    values |= {name: getattr(known, name) for name in _MODELLED if hasattr(known, name)}
    span, flops, masked = known.between_steps
    if math.isnan(known.masked_flops):
        values["masked_flops"] = None
    return values | {
        "mfu": _mfu(known.flops, known.seconds, known.peak_flops),
        "mfu_causal": _mfu(known.flops - known.masked_flops, known.seconds, known.peak_flops),
        "step_mfu": _mfu(flops, span, known.peak_flops),
        "step_mfu_causal": _mfu(flops - masked, span, known.peak_flops),
        "host_issue_seconds": known.host_issue,
        "top": [{"name": name, "launches": launches, "seconds": seconds} for name, launches, seconds in known.top],
        "assumptions": list(known.assumptions),
    }


def _mfu(flops: float, seconds: float, peak: float) -> float | None:
    """Utilisation by the formula of every report; None where nothing or not all was counted, or no peak is known."""
    from emutpu.simulator.mfu import mfu

    return mfu(flops, 1 / seconds, peak) if flops and seconds and peak and not math.isnan(flops) else None


def _regions(by_reason: Mapping[str, Sequence[int]]) -> list[Document]:
    """One row a reason, the most frequent first; empty where nothing was deferred."""
    rows = sorted(by_reason.items(), key=lambda row: (-row[1][0], row[0]))
    return [{"reason": reason} | dict(zip(_REGION_COUNTERS, counts, strict=True)) for reason, counts in rows]


def _merged_regions(reports: Sequence[Document]) -> list[Document]:
    total: dict[str, list[int]] = {}
    for report in reports:
        for row in report["regions"]:
            into = total.setdefault(row["reason"], [0] * len(_REGION_COUNTERS))
            into[:] = [count + row[name] for count, name in zip(into, _REGION_COUNTERS, strict=True)]
    return _regions(total)


def _tier(tier: TierStatistics) -> Document:
    return {name: getattr(tier, name) for name in TIER_COUNTERS}


def _merged_tiers(reports: Sequence[Document]) -> Document:
    merged: Document = {}
    for report in reports:
        for tier, counts in report["compiles"]["by_tier"].items():
            into = merged.setdefault(tier, dict.fromkeys(TIER_COUNTERS, 0))
            for name in TIER_COUNTERS:
                into[name] += counts[name]
    return dict(sorted(merged.items()))


def merge(reports: Sequence[Document]) -> Document:
    """The document of a program from those of its processes: counts add up, peak memory is that of the fullest device,
    modelled figures are those of the device that takes longest.

    Raises ValueError when ``reports`` is empty.
    """
    if not reports:
        raise ValueError("a merged report needs at least one process")
    used = [report for report in reports if report["client"] is not None] or list(reports)
    by_name: collections.Counter[str] = collections.Counter()
    fallbacks: collections.Counter[tuple[str, str]] = collections.Counter()
    for report in reports:
        by_name.update(report["ops"]["by_name"])
        fallbacks.update({(entry["op"], entry["location"]): entry["count"] for entry in report["fallbacks"]})
    totals = {
        name: sum(report["compiles"][name] for report in reports) for name in ("requests", "hits", "misses", "seconds")
    }
    return used[0] | {
        "processes": sum(report["processes"] for report in reports),
        "ops": {"dispatched": sum(by_name.values()), "by_name": _by_count(by_name)},
        "regions": _merged_regions(reports),
        "compiles": used[0]["compiles"] | totals | {"by_tier": _merged_tiers(reports)},
        "fallbacks": [
            {"op": op, "count": count, "location": location} for (op, location), count in fallbacks.most_common()
        ],
        "peak_hbm_bytes": max(report["peak_hbm_bytes"] for report in reports),
        "hbm": max(reports, key=lambda report: report["peak_hbm_bytes"])["hbm"],
        "modelled": max(reports, key=lambda report: report["modelled"]["seconds"] or 0.0)["modelled"],
    }


def write_document(document: Mapping[str, Any], path: str) -> None:
    """Write one JSON document to ``path``, whole or not at all; ``-`` is standard output. Raises OSError."""
    text = json.dumps(document, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe cannot be replaced
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(text)
        return
    descriptor, partial = tempfile.mkstemp(
        dir=os.path.dirname(os.path.abspath(path)), prefix=".emutpu-", suffix=".json"
    )
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, path)
    except OSError:
        os.unlink(partial)
        raise


def install_exit_report(path: str) -> None:
    """Write this process's run document to ``path`` when the interpreter exits; ``{pid}`` stands for the process id.

    Children made by a fork do not write. A process that is killed writes nothing.
    """
    owner = os.getpid()
    atexit.register(_write_at_exit, path.replace("{pid}", str(owner)), owner, time.perf_counter())


def _write_at_exit(path: str, owner: int, started: float) -> None:
    if os.getpid() != owner:
        return
    document = this_process() | {"wall_seconds": time.perf_counter() - started}
    document["notes"] |= {
        "wall_seconds": "since the device was registered",
        "exit_code": "a process cannot report its own exit code; `emutpu run` can",
    }
    try:
        write_document(document, path)
    except OSError as error:
        print(f"emutpu: the run report was not written: {error}", file=sys.stderr)


def this_process(*, modelled: bool = True) -> Document:
    """What this process did so far, as a run document; looking initialises no device.

    Unless ``modelled``, what the cost model and the memory's holders say is left out: it takes a look at every executable.
    """
    from emutpu import _settings

    chip = _settings.settings().chip
    # Looking must not initialise the device, nor import jax at exit.
    if "emutpu.backend.runtime" not in sys.modules:
        return run_document(chip, None)
    module: Any = sys.modules["emutpu.backend.runtime"]
    runtime = module.runtime()
    if not runtime.initialized:
        return run_document(chip, None)
    statistics = cast("Statistics", runtime.statistics(modelled=modelled))
    mode = runtime.mode.name if isinstance(runtime.mode, enum.Enum) else str(runtime.mode)
    return run_document(chip, statistics, client=runtime.client.name, mode=mode)


def fallbacks() -> int:
    """How often this process ran an op on the CPU instead so far."""
    runtime = _runtime()
    return 0 if runtime is None else runtime.fallbacks.total()


def launches() -> dict[int, int]:
    """How often this process launched each of its executables so far, by a number of the executable."""
    meter = _meter()
    return {} if meter is None else {place: tally.calls for place, tally in enumerate(meter.tallies)}


def costs_on(chips: Sequence[str], before: Mapping[int, int]) -> dict[str, Document]:
    """What the launches since ``before`` would cost on each of the chips, by the cost model: nothing here is measured.

    Seconds that the device is busy, one launch after the other; FLOPs and bytes of HBM traffic; the unit that most of the
    time is bound by; the relative error bar, weighted by time; and how many of the launches have no cost.
    """
    meter = _meter()
    tallies = [] if meter is None else list(enumerate(meter.tallies))
    launched = [(tally, tally.calls - before.get(place, 0)) for place, tally in tallies]
    launched = [(tally, calls) for tally, calls in launched if calls]
    return {chip: _cost_on(chip, launched) for chip in chips}


def _cost_on(chip: str, launched: Sequence[tuple[Any, int]]) -> Document:
    costs = []
    for tally, calls in launched:
        executable: Any = tally.executable()
        cost = executable.cost_on(chip) if hasattr(executable, "cost_on") else None
        if cost is not None:
            costs.append((cost, calls))
    bound: collections.Counter[str] = collections.Counter()
    for cost, calls in costs:
        bound[cost.bound] += calls * cost.seconds
    busy = bound.total()
    return {
        "seconds": busy,
        "flops": sum(calls * cost.flops for cost, calls in costs),
        "hbm_bytes": sum(calls * cost.hbm_bytes for cost, calls in costs),
        "bound": bound.most_common(1)[0][0] if bound else None,
        "error_bar": sum(calls * cost.seconds * cost.error_bar for cost, calls in costs) / busy if busy else None,
        "launches": sum(calls for _, calls in launched),
        "unmodelled": sum(calls for _, calls in launched) - sum(calls for _, calls in costs),
    }


def _meter() -> Any:
    runtime = _runtime()
    return None if runtime is None else runtime.meter


def _runtime() -> Any:
    """That of this process, None as long as the device was not used. Looking imports and initialises nothing."""
    module: Any = sys.modules.get("emutpu.backend.runtime")
    runtime = module.runtime() if module else None
    return runtime if runtime is not None and runtime.initialized else None


def _by_count(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(((name, n) for name, n in counts.items() if n), key=lambda item: (-item[1], item[0])))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
