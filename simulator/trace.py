"""Traces of the modelled device: Chrome's JSON format, which Perfetto opens, and XSpace, which XProf and TensorBoard open.

All times are modelled: the host's row shows when launches were issued, the device's when they would run.
"""

from __future__ import annotations

import datetime as dt
import gzip
import json
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from emutpu import _jaxlib

__all__ = ["FORMATS", "Launch", "chrome", "trace_format", "write", "xspace"]

FORMATS = "FILE.json or FILE.json.gz for Perfetto, FILE.xplane.pb or a directory (no suffix) for XProf and TensorBoard"
_HOST, _DEVICE = 1, 2
_ROWS = {"launches": 1, "regions": 2, "steps": 3, "mxu": 10, "vpu": 11, "hbm": 12, "ici": 20, "dcn": 21}
_NAMES = {"mxu": "MXU", "vpu": "VPU", "hbm": "HBM", "ici": "ICI", "dcn": "DCN"}
_LINKS = ("ici", "dcn")
_PS = 10**12


class Launch(Protocol):
    """A launch in picoseconds of modelled time; ``units`` are seconds of each unit, ``live`` bytes of HBM before it."""

    @property
    def name(self) -> str: ...
    @property
    def issued(self) -> int: ...
    @property
    def issue(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def live(self) -> int: ...
    @property
    def flops(self) -> float: ...
    @property
    def hbm_bytes(self) -> float: ...
    @property
    def units(self) -> tuple[tuple[str, float], ...]: ...


# ------------------------------------------------------------------------------------------------ Chrome's JSON


def chrome(launches: Sequence[Launch], steps: Sequence[int], chip: str) -> dict[str, Any]:
    """A Chrome trace: host, device, regions, units, links with arrows from the launches that use them, memory in use."""
    events = [*_rows(chip, launches), *_steps(steps)]
    for number, launch in enumerate(launches):
        events += _launch(number, launch)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"emutpu": f"modelled {chip}, not hardware", "time": "modelled"},
    }


def _rows(chip: str, launches: Sequence[Launch]) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _HOST, 0, "host (modelled)")
    yield _named("thread_name", _HOST, 1, "issue")
    yield _named("process_name", _DEVICE, 0, f"emulated {chip} (modelled)")
    used = {unit for launch in launches for unit, seconds in launch.units if seconds}
    for row, number in _ROWS.items():
        if row not in _NAMES or row in used:
            yield _named("thread_name", _DEVICE, number, _NAMES.get(row, row))


def _named(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start: int, duration: float, **arguments: Any) -> dict[str, Any]:
    event = {"ph": "X", "pid": process, "tid": thread, "name": name, "ts": start / 1e6, "dur": duration / 1e6}
    return event | ({"args": arguments} if arguments else {})


def _arrow(number: str, start: int, source: tuple[int, int], target: tuple[int, int], end: int) -> list[dict[str, Any]]:
    common = {"cat": "flow", "name": "flow", "id": number}
    return [
        common | {"ph": "s", "pid": source[0], "tid": source[1], "ts": start / 1e6},
        common | {"ph": "f", "bp": "e", "pid": target[0], "tid": target[1], "ts": end / 1e6},
    ]


def _launch(number: int, launch: Launch) -> Iterator[dict[str, Any]]:
    duration = launch.end - launch.start
    device = (_DEVICE, _ROWS["launches"])
    yield _slice(_HOST, 1, launch.name, launch.issued, launch.issue)
    yield _slice(*device, launch.name, launch.start, duration, flops=launch.flops, hbm_bytes=launch.hbm_bytes)
    yield from _arrow(f"issue{number}", launch.issued, (_HOST, 1), device, launch.start)
    if launch.name.startswith("region"):
        yield _slice(_DEVICE, _ROWS["regions"], launch.name, launch.start, duration)
    for unit, seconds in launch.units:
        if seconds:
            yield _slice(_DEVICE, _ROWS[unit], launch.name, launch.start, min(seconds * _PS, duration))
            if unit in _LINKS:
                yield from _arrow(f"{unit}{number}", launch.start, device, (_DEVICE, _ROWS[unit]), launch.start)
    yield {"ph": "C", "pid": _DEVICE, "name": "HBM", "ts": launch.start / 1e6, "args": {"bytes": launch.live}}


def _steps(steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    for number, (start, end) in enumerate(zip((0, *steps), steps, strict=False)):
        yield _slice(_DEVICE, _ROWS["steps"], f"step {number}", start, end - start)


# ------------------------------------------------------------------------------------------------ XSpace


def xspace(launches: Sequence[Launch], steps: Sequence[int], chip: str, peaks: tuple[float, float]) -> bytes:
    """A serialised XSpace: the device's plane with modules, ops and steps, and the host's. ``peaks``: FLOP/s, bytes/s."""
    names = {name: number for number, name in enumerate(dict.fromkeys(launch.name for launch in launches), 1)}
    runs = [(names[launch.name], launch.start, launch.end - launch.start) for launch in launches]
    first_step = len(names) + 1
    step_names = {f"{number}": first_step + number for number in range(len(steps))}
    spans = [
        (first_step + number, start, end - start)
        for number, (start, end) in enumerate(zip((0, *steps), steps, strict=False))
    ]
    stats = {"device_type_string": f"emulated {chip}", "device_vendor": "emutpu (modelled, not hardware)"}
    figures = {
        "peak_teraflops_per_second": peaks[0] / 1e12,
        "peak_hbm_bw_gigabytes_per_second": peaks[1] / 1e9,
    }
    lines = [("Steps", spans), ("XLA Modules", runs), ("XLA Ops", runs)]
    device = _plane(1, "/device:TPU:0", names | step_names, lines, stats, figures)
    issued = [(names[launch.name], launch.issued, launch.issue) for launch in launches]
    host = _plane(2, "/host:CPU", names, [("issue (modelled)", issued)], {}, {})
    hostname = json.dumps(socket.gethostname())
    return _jaxlib.serialize_xspace(f"{device}{host}hostnames: {hostname}\n")


def _plane(
    number: int,
    name: str,
    names: dict[str, int],
    lines: Iterable[tuple[str, Iterable[tuple[int, int, int]]]],
    texts: dict[str, str],
    figures: dict[str, float],
) -> str:
    parts = [f"planes {{ id: {number} name: {json.dumps(name)}\n"]
    for index, (line, events) in enumerate(lines, 1):
        parts.append(f"lines {{ id: {index} name: {json.dumps(line)} timestamp_ns: 0\n")
        parts += [
            f"events {{ metadata_id: {what} offset_ps: {at} duration_ps: {took} }}\n" for what, at, took in events
        ]
        parts.append("}\n")
    parts += [
        f"event_metadata {{ key: {key} value {{ id: {key} name: {json.dumps(text)} }} }}\n"
        for text, key in names.items()
    ]
    values = {text: f"str_value: {json.dumps(value)}" for text, value in texts.items()}
    values |= {text: f"double_value: {value!r}" for text, value in figures.items()}
    for index, (text, value) in enumerate(values.items(), 1):
        parts.append(f"stat_metadata {{ key: {index} value {{ id: {index} name: {json.dumps(text)} }} }}\n")
        parts.append(f"stats {{ metadata_id: {index} {value} }}\n")
    return "".join((*parts, "}\n"))


# ------------------------------------------------------------------------------------------------ files


def trace_format(path: str) -> str:
    """``chrome``, ``xspace`` or ``directory``, by the name. Raises ValueError for any other suffix."""
    name = os.path.basename(path.rstrip(os.sep))
    if name.endswith((".json", ".json.gz")):
        return "chrome"
    if name.endswith(".xplane.pb"):
        return "xspace"
    if os.path.isdir(path) or not os.path.splitext(name)[1]:
        return "directory"
    raise ValueError(f"{path} is no trace: expected {FORMATS}")


def write(path: str, launches: Sequence[Launch], steps: Sequence[int], chip: str, peaks: tuple[float, float]) -> str:
    """Write a trace in the format that ``path`` asks for, and give the file written. Raises OSError or ValueError."""
    kind = trace_format(path)
    if kind == "directory":
        run = dt.datetime.now().astimezone().strftime("%Y_%m_%d_%H_%M_%S")
        folder = os.path.join(path, "plugins", "profile", run)
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"{socket.gethostname()}.xplane.pb")
    if kind == "chrome":
        text = json.dumps(chrome(launches, steps, chip))
        data = gzip.compress(text.encode()) if path.endswith(".gz") else text.encode()
    else:
        data = xspace(launches, steps, chip, peaks)
    with open(path, "wb") as stream:
        stream.write(data)
    return path
