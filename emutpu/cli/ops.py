"""``emutpu ops``: which ATen overloads work on the device, and whether they give what the CPU gives."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from emutpu import _settings
from emutpu.cli._output import console, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document

__all__ = ["command"]

_SCHEMA = "emutpu.ops/1"
_NOT_OK = ("mismatch", "unsupported", "error")
_SHOWN = 20


def _old_document(context: click.Context, parameter: click.Parameter, path: str | None) -> Any:
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"{path!r} cannot be read as JSON: {error}") from error
    if not isinstance(document, dict) or document.get("schema") != _SCHEMA:
        raise click.BadParameter(f"{path!r} is not a report of `emutpu ops --json`")
    return document


@click.command("ops", short_help="Operator coverage, and a sweep against the CPU.")
@click.option("--sweep", "sweeping", is_flag=True, help="Run PyTorch's op database on the device and on the CPU.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes for the sweep.")
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True, help="Sample inputs of each entry.")
@click.option("--only", metavar="PATTERN", help="Sweep only entries with such a name, as in 'linalg.*'.")
@click.option("--timeout", type=click.FloatRange(1), default=300, show_default=True, help="Seconds for one entry.")
@click.option("--compare", "old", metavar="OLD.json", callback=_old_document, help="Report what changed since then.")
@json_option("Write the report as JSON; '-' is standard output.")
def command(
    sweeping: bool, jobs: int, samples: int, only: str | None, timeout: float, old: Any, json_path: str | None
) -> int:
    """Count the overloads that TorchTPU has, that PyTorch calls core ATen and that models use, and say which are missing.

    With --sweep every entry of PyTorch's op database runs on the device and on the CPU: forward, in-place, out= and
    backward. Exits with 1 when a result differs or an op fails, and when --compare finds that something was lost.
    """
    if only is not None and not sweeping:
        raise click.UsageError("--only chooses what --sweep runs")
    if os.environ.get("EMUTPU_CHIP") == _settings.NO_CHIP:
        raise click.UsageError("EMUTPU_CHIP=none is a host without a TPU: there is no device to look at")
    terminal = console(stderr=json_path == "-")
    names = _chosen(only) if sweeping else []
    document = _document()
    _print_targets(document, terminal)
    if sweeping:
        document["opinfo"] = _swept(names, jobs, samples, timeout, terminal)
        document["notes"].pop("opinfo")
        _print_sweep(document["opinfo"], terminal)
    if old is not None:
        document["compare"] = _changes(old, document)
        document["notes"].pop("compare")
        _print_changes(document["compare"], terminal)
    if json_path is not None:
        write_json(document, json_path)
    swept = document["opinfo"] or {}
    lost = document["compare"] is not None and any(change["lost"] for change in document["compare"].values())
    return 1 if swept.get("mismatch") or swept.get("error") or lost else 0


def _chosen(only: str | None) -> list[str]:
    """Names of the op database that match. Raises UsageError when there are none, or no database."""
    try:
        from emutpu.cli._sweep import database

        names = list(database())
    except ImportError as error:
        raise click.UsageError(
            f"PyTorch's op database cannot be imported ({error}): pip install 'emutpu[sweep]'"
        ) from error
    names = [name for name in names if only is None or fnmatch.fnmatchcase(name, only)]
    if not names:
        raise click.UsageError(f"no entry of the op database matches {only!r}")
    return names


def _document() -> Document:
    from emutpu._report import header
    from emutpu.cli._coverage import registered, targets

    settings = _settings.settings()
    return header("ops", settings.chip) | {
        "beyond": settings.beyond,
        "registered": registered(),
        "targets": {name: dataclasses.asdict(target) for name, target in targets().items()},
        "opinfo": None,
        "compare": None,
        "notes": {"opinfo": "not asked for (--sweep)", "compare": "not asked for (--compare)"},
    }


def _swept(names: list[str], jobs: int, samples: int, timeout: float, terminal: Console) -> dict[str, Any]:
    from emutpu.cli._sweepers import summary, sweep

    started = time.perf_counter()
    with terminal.status("sweeping") as status:
        results = sweep(
            names,
            jobs=jobs,
            samples=samples,
            patience=timeout,
            progress=lambda done: status.update(f"sweeping: {done} of {len(names)}"),
        )
    return summary(results) | {
        "entries": len(names),
        "samples": samples,
        "seconds": time.perf_counter() - started,
    }


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """What was lost and gained, by target and, where both documents have one, in the sweep."""
    changes = {}
    for name, target in new["targets"].items():
        before = set(old["targets"].get(name, {}).get("missing", target["missing"]))
        changes[name] = _difference(before, set(target["missing"]))
    if old.get("opinfo") and new["opinfo"]:
        changes["opinfo"] = _difference(_not_ok(old["opinfo"]), _not_ok(new["opinfo"]))
    return changes


def _not_ok(swept: Mapping[str, Any]) -> set[str]:
    return {f"{item['name']} {item['kind']}" for outcome in _NOT_OK for item in swept[outcome]}


def _difference(before: set[str], now: set[str]) -> dict[str, list[str]]:
    return {"lost": sorted(now - before), "gained": sorted(before - now)}


def _print_targets(document: Document, terminal: Console) -> None:
    beyond = ", lowerings beyond the device included" if document["beyond"] else ""
    terminal.print(f"{document['registered']} overloads have a kernel{beyond}")
    for name, target in document["targets"].items():
        terminal.print(f"{name:>10}  {target['covered']} of {target['total']}")
        _print_list("missing", target["missing"], terminal)


def _print_list(what: str, names: list[str], terminal: Console) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        terminal.print(f"            {what}: {' '.join(names[:_SHOWN])}{more}", markup=False)


def _print_sweep(swept: Mapping[str, Any], terminal: Console) -> None:
    counts = ", ".join(f"{len(swept[outcome])} {outcome}" for outcome in _NOT_OK)
    terminal.print(
        f"op database: {swept['ok']} of {swept['tested']} ok, {counts} ({swept['entries']} entries, "
        f"{swept['seconds']:.0f} s)"
    )
    for outcome in ("mismatch", "error"):
        for item in swept[outcome]:
            terminal.print(f"  {outcome}  {item['name']} {item['kind']}: {item['message']}", markup=False)


def _print_changes(changes: Mapping[str, Mapping[str, list[str]]], terminal: Console) -> None:
    for name, change in changes.items():
        terminal.print(f"{name:>10}  {len(change['lost'])} lost, {len(change['gained'])} gained")
        for what, names in change.items():
            _print_list(what, list(names), terminal)
