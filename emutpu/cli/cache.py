"""``emutpu cache``: the tiers of the compile cache that outlive a process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from emutpu import _settings
from emutpu.cli._exit import EmulatorExit, EmulatorFailure
from emutpu.cli._output import console, json_option, write_json

if TYPE_CHECKING:
    from emutpu._report import Document
    from emutpu.cli._tiers import Row

__all__ = ["command"]

_WHAT = "Write the tiers as JSON; '-' is standard output."


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_option(_WHAT),
        click.option("--tier3", metavar="ROOT", help="The persistent root, instead of the environment's."),
        click.option("--tier2", metavar="NAME", help="The shared-memory cache, instead of the environment's."),
    ):
        function = option(function)
    return function


@click.group("cache", short_help="Look at, verify, prune or clear the compile cache.")
def command() -> None:
    """The compile cache's tiers 2 (shared memory) and 3 (persistent), as this environment configures them.

    Tier 1 lives inside a process: `emutpu run --json` reports it.
    """


@command.command("stats")
@_options
def stats(tier2: str | None, tier3: str | None, json_path: str | None) -> int:
    """Count entries and bytes. `corrupt` counts what was set aside and what would be rejected now."""
    return _report("stats", tier2, tier3, json_path)


@command.command("verify")
@_options
def verify(tier2: str | None, tier3: str | None, json_path: str | None) -> int:
    """Check every entry's checksum, signature, owner and name; exits with 1 when one is bad."""
    return _report("verify", tier2, tier3, json_path)


@command.command("prune")
@_options
@click.option(
    "--max-bytes", metavar="SIZE", help="Keep no more than this per tier, such as 512M.  [EMUTPU_CACHE_MAX_BYTES]"
)
def prune(tier2: str | None, tier3: str | None, json_path: str | None, max_bytes: str | None) -> int:
    """Remove what was set aside or never finished, then the least recently used entries beyond the size cap."""
    if max_bytes is not None:
        variable = next(row for row in _settings.VARIABLES if row.field == "cache_max_bytes")
        try:
            return _report("prune", tier2, tier3, json_path, cap=0 if max_bytes == "0" else variable.parse(max_bytes))
        except ValueError:
            raise click.BadParameter(f"{max_bytes!r} is no size: expected {variable.accepted}") from None
    return _report("prune", tier2, tier3, json_path)


@command.command("clear")
@_options
def clear(tier2: str | None, tier3: str | None, json_path: str | None) -> int:
    """Remove every entry. Running programs keep what they loaded."""
    return _report("clear", tier2, tier3, json_path)


def _report(action: str, tier2: str | None, tier3: str | None, json_path: str | None, cap: int | None = None) -> int:
    from emutpu._activation import tier_settings
    from emutpu.backend.cache_setup import CACHE_NAME, DEFAULT
    from emutpu.cli._tiers import act

    settings = tier_settings(_settings.settings())
    if tier2 is not None and not CACHE_NAME.fullmatch(tier2):
        raise click.BadParameter(f"--tier2 {tier2!r} is no name of a cache")
    settings = dataclasses.replace(
        settings,
        tier2=tier2 or settings.tier2_name or DEFAULT,
        tier3=tier3 or settings.tier3,
        cap=settings.cap if cap is None else cap,
    )
    try:
        rows = act(action, settings)
    except (OSError, ImportError, ValueError) as error:
        raise EmulatorFailure(EmulatorExit.CACHE_UNUSABLE, str(error)) from error
    _print(rows, to_stderr=json_path == "-")
    if json_path is not None:
        write_json(_document(action, rows), json_path)
    return 1 if action == "verify" and any(row.corrupt for row in rows) else 0


def _document(action: str, rows: list[Row]) -> Document:
    from emutpu._report import header

    notes = {f"tiers.{row.name}.{field}": reason for row in rows for field, reason in row.notes.items()}
    tiers = [{name: value for name, value in dataclasses.asdict(row).items() if name != "notes"} for row in rows]
    return header("cache", _settings.settings().chip) | {"action": action, "tiers": tiers, "notes": notes}


def _print(rows: list[Row], *, to_stderr: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    terminal = console(stderr=to_stderr)
    table = Table()
    for title in ("tier", "path", "entries", "bytes", "corrupt", "unfinished", "removed"):
        table.add_column(title, overflow="fold")
    for row in rows:
        numbers = (row.entries, row.bytes, row.corrupt, row.unfinished, row.removed)
        table.add_row(row.name, Text(row.path), *("-" if n is None else f"{n:,}" for n in numbers))
    terminal.print(table)
    for row in rows:
        for bad in row.findings:
            terminal.print(Text(f"{row.name}: {bad['entry']}: {bad['reason']}"))
        for reason in row.notes.values():
            terminal.print(Text(f"{row.name}: {reason}"))
