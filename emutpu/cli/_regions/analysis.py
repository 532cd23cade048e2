"""What follows from the recorded regions alone: steps, what changed between similar ones, modelled cost, totals."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from emutpu._report import Document

__all__ = [
    "Flush",
    "add_changes",
    "add_costs",
    "add_steps",
    "flushes",
    "nbytes",
    "place",
    "stem_of",
    "steps",
    "summary",
]

_HEURISTIC = "repeated_op_heuristic"
_ITEM_BYTES = {"bool": 1, "complex64": 8, "complex128": 16}


def nbytes(value: Document) -> int:
    """Dense bytes of a value; 0 where its dtype is unknown."""
    dtype = value["dtype"]
    if dtype is None:
        return 0
    size = _ITEM_BYTES.get(dtype)
    if size is None:
        bits = re.search(r"\d+", dtype)
        size = max(1, int(bits[0]) // 8) if bits else 1
    for extent in value["shape"]:
        size *= extent
    return size


def place(line: Document | None) -> str:
    """``train.py:41`` of a recorded line."""
    return "?" if line is None or line.get("file") is None else f"{Path(line['file']).name}:{line['line']}"


@dataclasses.dataclass(frozen=True, slots=True)
class Flush:
    """One materialisation: the regions that one reading launched."""

    process: int
    number: int
    regions: tuple[Document, ...]

    @property
    def reason(self) -> str:
        return str(self.regions[0]["reason"])

    @property
    def trigger(self) -> Document | None:
        found: Document | None = self.regions[0]["trigger"]
        return found

    @property
    def where(self) -> tuple[str, int] | None:
        """File and line of the trigger."""
        line = self.trigger
        return None if line is None else (line["file"], line["line"])

    @property
    def trigger_text(self) -> str:
        """``.cpu() at train.py:41``."""
        return f"{self.reason} at {place(self.trigger)}"

    def ops(self) -> Iterator[Document]:
        for region in self.regions:
            yield from region["ops"]


def flushes(regions: Sequence[Document]) -> list[Flush]:
    """The materialisations, in order."""
    grouped: dict[tuple[int, int], list[Document]] = {}
    for region in regions:
        grouped.setdefault((region["process"], region["flush"]), []).append(region)
    return [Flush(*key, tuple(group)) for key, group in grouped.items()]


def add_steps(regions: Sequence[Document]) -> None:
    """Number the program's steps: one ends with each reading at the line that reads most often, the last of equals.

    The repeated-op rule reads nothing: its cuts end a step only in a program that has no others.
    """
    found = flushes(regions)
    for process in {flush.process for flush in found}:
        mine = [flush for flush in found if flush.process == process]
        reads = [flush.where for flush in mine if flush.reason != _HEURISTIC] or [flush.where for flush in mine]
        counts = Counter(where for where in reads if where is not None)
        end = max(counts, key=lambda where: (counts[where], reads.index(where)), default=None)
        step = 0
        for flush in mine:
            for region in flush.regions:
                region["step"] = step
            if end is None or counts[end] < 2 or flush.where == end:
                step += 1


def steps(regions: Sequence[Document]) -> list[list[Flush]]:
    """The materialisations of each step, after :func:`add_steps`."""
    grouped: dict[tuple[int, int], list[Flush]] = {}
    for flush in flushes(regions):
        grouped.setdefault((flush.process, flush.regions[0]["step"]), []).append(flush)
    return list(grouped.values())


def families(regions: Sequence[Document]) -> list[list[Document]]:
    """Regions that the same part of a program made: the same but for dimensions, and at the same place among such in a step."""
    grouped: dict[tuple[int, str, str, int], list[Document]] = {}
    places: Counter[tuple[int, int, str, str]] = Counter()
    for region in regions:
        key = region["key"]
        kind = region["process"], key["shapeless"], key["options"]
        here = kind[0], region["step"], *kind[1:]
        grouped.setdefault((*kind, places[here]), []).append(region)
        places[here] += 1
    return list(grouped.values())


def add_changes(regions: Sequence[Document]) -> None:
    """``changed``: which dimension of which op differs from the last region of its family; null where none does."""
    for family in families(regions):
        family[0]["changed"] = None
        for before, after in itertools.pairwise(family):
            differs = before["key"]["dimensions"] != after["key"]["dimensions"]
            after["changed"] = {"since": before["id"], "dimensions": _changed(before, after)} if differs else None


def _changed(before: Document, after: Document) -> list[Document]:
    found = []
    for index, (old, new) in enumerate(zip(before["ops"], after["ops"], strict=True)):
        for kind in ("operands", "results"):
            for n, (was, now) in enumerate(zip(old[kind], new[kind], strict=True)):
                found += [
                    {
                        "op": index,
                        "name": new["name"],
                        "file": new["file"],
                        "line": new["line"],
                        "value": f"{kind[:-1]} {n}",
                        "dim": dim,
                        "before": a,
                        "after": b,
                    }
                    for dim, (a, b) in enumerate(zip(was["shape"], now["shape"], strict=False))
                    if a != b
                ]
    return found  # empty: strides or offsets differ, which the shapes do not show


def add_costs(document: Document, folder: Path, chip: str) -> None:
    """``modelled`` of every region by the cost model; null with a note where it has no answer."""
    from emutpu.backend.pjrt import PjrtError
    from emutpu.simulator.chips import chip as chip_named
    from emutpu.simulator.cost import estimate

    known: dict[str, Document] = {}
    for region in document["regions"]:
        stem = stem_of(region)
        if stem not in known:
            known[stem] = {"seconds": None, "hbm_bytes": None}
            try:
                found = estimate((folder / f"{stem}.mlir").read_text(encoding="utf-8"), chip_named(chip), "compiled")
            except (PjrtError, ValueError) as error:
                document["notes"].setdefault("modelled", str(error))
            else:
                known[stem] = {"seconds": found.expected_seconds, "hbm_bytes": found.hbm_bytes}
                document["error_bar"] = list(found.error_bar)
        region["modelled"] = dict(known[stem])


def stem_of(region: Document) -> str:
    """The file name of a region's module."""
    key = region["key"]
    return f"{key['shapeless']}_{key['dimensions']}_{key['options']}"


def summary(document: Document) -> Document:
    """The totals at the head of a report."""
    regions = document["regions"]
    hits = sum(region["cache"]["hit"] for region in regions)
    return {
        "by_reason": dict(Counter(region["reason"] for region in regions).most_common()),
        "ops": sum(len(region["ops"]) for region in regions),
        "regions": len(regions),
        "distinct_regions": len({stem_of(region) for region in regions}),
        "hit_rate": hits / len(regions) if regions else None,
        "materialisations": len(flushes(regions)),
        "steps": 1 + max((region["step"] for region in regions), default=-1),
        "compile_ms": round(sum(region["cache"]["compile_ms"] for region in regions), 3),
        "modelled_seconds": _total(region["modelled"]["seconds"] for region in regions),
        "modelled_hbm_bytes": _total(region["modelled"]["hbm_bytes"] for region in regions),
    }


def _total(values: Iterable[Any]) -> float | None:
    known = list(values)
    return None if any(value is None for value in known) else float(sum(known))
