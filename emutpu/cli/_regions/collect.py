"""Running a program with its regions recorded, and the document that comes of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from emutpu._report import Document, header
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._launch import Outcome, launch
from emutpu.cli._program import MODES

__all__ = ["Issued", "Recording", "document_of", "record"]

# (process, materialisation) -> place in the program (op, file, line, position in it) -> ops that it issued
Issued = dict[tuple[int, int], dict[tuple[str, str, int, int], int]]

_COUNTS = ("launches", "buffers", "bytes", "compiles", "compile_seconds", "flushes", "dropped")


@dataclasses.dataclass(frozen=True, slots=True)
class Recording:
    """What the processes of one program recorded. ``folder`` holds ``<key>.mlir`` of every region while it exists."""

    outcome: Outcome
    processes: tuple[Document, ...]
    folder: Path

    @property
    def issued(self) -> Issued:
        """How often each place in the program issued an op before each materialisation, computed or not."""
        return {
            (process["pid"], flush[0][0]): {(op, file, line, at): n for _, op, file, line, at, n in flush}
            for process in self.processes
            for flush in process["issued"]
            if flush
        }


def record(
    arguments: Sequence[str],
    folder: Path,
    mode: str,
    variables: Mapping[str, str],
    *,
    inputs: bool = False,
    quiet: bool = False,
) -> Recording:
    """Run ``python *arguments`` in ``mode`` and read what it recorded into ``folder``.

    ``quiet`` sends its standard output to standard error. Raises EmulatorFailure when no process wrote a recording.
    """
    environment = {**MODES[mode], **variables, "EMUTPU_REGIONS": str(folder), "EMUTPU_REGIONS_INPUTS": str(int(inputs))}
    outcome = launch(arguments, environment, stdout_to_stderr=quiet)
    processes = tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json")))
    if not processes:
        raise EmulatorFailure(
            EmulatorExit.INTERNAL if outcome.exit_code == 0 else EmulatorExit.PROGRAM_NOT_STARTED,
            f"the program (exit code {outcome.exit_code}) wrote no recording: it never imported torch with emutpu active, "
            "was killed, or ended without exit handlers (os._exit); `emutpu doctor` checks the installation",
        )
    used = tuple(process for process in processes if process["client"] is not None)
    return Recording(outcome, used or processes, folder)


def document_of(recording: Recording, chip: str, program: Sequence[str]) -> Document:
    """The regions of all processes, numbered one after the other, without what is concluded from them."""
    regions: list[Document] = []
    for process in recording.processes:
        base = len(regions)
        for region in process["regions"]:
            for value in region["inputs"]:
                if value["made_by"] is not None:
                    value["made_by"]["region"] += base
            regions.append({"id": base + region.pop("id"), "process": process["pid"], **region})
    totals: dict[str, Any] = {name: sum(p[name] for p in recording.processes) for name in _COUNTS}
    notes = {}
    if totals["dropped"]:
        notes["regions"] = f"the first of many: {totals['dropped']} further launches of regions were counted only"
    return header("regions", chip) | {
        "program": list(program),
        "mode": recording.processes[0]["mode"],
        "client": recording.processes[0]["client"],
        "processes": [
            {"pid": p["pid"], "rank": p["rank"], "peak_hbm_bytes": p["peak_hbm_bytes"]} for p in recording.processes
        ],
        "exit_code": recording.outcome.exit_code,
        "wall_seconds": recording.outcome.seconds,
        "totals": totals,
        "error_bar": None,
        "regions": regions,
        "notes": notes,
    }
