"""The recording as a trace in Chrome's JSON format, which ui.perfetto.dev opens."""

from __future__ import annotations

import json

from emutpu._report import Document
from emutpu.cli._regions.analysis import flushes, place
from emutpu.cli._regions.terminal import ops_text

__all__ = ["render"]

_READS, _HOST, _MODELLED = 1, 2, 3
_TRACKS = {
    _READS: "materialisations (host time)",
    _HOST: "regions (host time)",
    _MODELLED: "regions (modelled, one after the other)",
}


def render(document: Document) -> str:
    """Host time in microseconds since the recording began; the modelled track has its own time, which starts at 0."""
    events: list[Document] = []
    for process in document["processes"]:
        pid = process["pid"]
        name = f"rank {process['rank']}, process {pid}, emulated {document['chip']}, not hardware"
        events.append({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}})
        events += [
            {"ph": "M", "pid": pid, "tid": track, "name": "thread_name", "args": {"name": text}}
            for track, text in _TRACKS.items()
        ]
    for flush in flushes(document["regions"]):
        begin = flush.regions[0]["seconds"]["at"]
        end = flush.regions[-1]["seconds"]["launched"]
        title = f"{flush.reason} {place(flush.trigger)}"
        arguments = {"step": flush.regions[0]["step"], "code": (flush.trigger or {}).get("code")}
        events.append(_span(flush.process, _READS, title, begin, end - begin, arguments))
    events += _regions(document)
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schema": "emutpu.regions-trace/1"}}
    )


def _regions(document: Document) -> list[Document]:
    events = []
    clock: dict[int, float] = {}
    before: dict[tuple[int, int], float] = {}
    for region in document["regions"]:
        pid = region["process"]
        flush = pid, region["flush"]
        times = region["seconds"]
        begin = max(before.get(flush, times["at"]), times["at"])
        before[flush] = times["launched"]
        arguments = {
            "id": region["id"],
            "reason": region["reason"],
            "trigger": place(region["trigger"]),
            "ops": len(region["ops"]),
            "cache": region["cache"],
            "live": [value["live_because"] for value in region["outputs"]],
        }
        events.append(_span(pid, _HOST, ops_text(region), begin, times["launched"] - begin, arguments))
        modelled = region["modelled"]["seconds"]
        if modelled is not None:
            at = clock.get(pid, 0.0)
            clock[pid] = at + modelled
            events.append(_span(pid, _MODELLED, ops_text(region), at, modelled, {"id": region["id"]}))
    return events


def _span(pid: int, tid: int, name: str, at: float, duration: float, arguments: Document) -> Document:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "ts": 1e6 * at,
        "dur": 1e6 * max(duration, 0.0),
        "args": arguments,
    }
