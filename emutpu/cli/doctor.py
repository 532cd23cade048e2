"""``emutpu doctor``: is this installation fit, and what should be done where it is not."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from emutpu import _settings
from emutpu.cli._output import console, json_option, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from emutpu._report import Document
    from emutpu.cli._checks import Check

__all__ = ["command"]

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@click.command("doctor", short_help="Check the installation and the environment.")
@click.option("--env", "show_environment", is_flag=True, help="List every variable with its value and meaning.")
@json_option("Write the findings as JSON; '-' is standard output.")
def command(show_environment: bool, json_path: str | None) -> int:
    """Check versions, conflicts, environment variables, topology, caches and memory, and run one op on the device.

    Exits with 1 when a check fails; warnings do not count.
    """
    from emutpu.cli._checks import FAIL, examine

    terminal = console(stderr=json_path == "-")
    if show_environment:
        _print_environment(terminal)
    checks = []
    for check in examine(os.environ):
        checks.append(check)
        _print_check(check, terminal)
    failed = sum(check.status == FAIL for check in checks)
    terminal.print(f"{failed} of {len(checks)} checks failed" if failed else f"{len(checks)} checks, none failed")
    if json_path is not None:
        write_json(_document(checks), json_path)
    return 1 if failed else 0


def _document(checks: Sequence[Check]) -> Document:
    from emutpu._report import header

    chip = os.environ.get("EMUTPU_CHIP") or _settings.read({}).chip  # as it is set, even when that is a mistake
    return header("doctor", chip) | {
        "ok": all(check.status != "fail" for check in checks),
        "checks": [dataclasses.asdict(check) for check in checks],
        "environment": [
            {
                "name": variable.name,
                "value": variable.shown_in(os.environ),
                "default": variable.default,
                "accepted": variable.accepted,
                "meaning": variable.meaning,
            }
            for variable in _settings.VARIABLES
        ],
        "notes": {},
    }


def _print_check(check: Check, terminal: Console) -> None:
    from rich.text import Text

    line = Text.assemble(
        (f"{check.status:>4}", _COLOURS[check.status]), "  ", (check.name, "bold"), "  ", check.message
    )
    if check.fix:
        line.append(f"\n      -> {check.fix}", style="cyan")
    terminal.print(line)


def _print_environment(terminal: Console) -> None:
    from rich.text import Text

    for variable in _settings.VARIABLES:
        value = variable.shown_in(os.environ)
        default = "unset" if variable.default is None else str(variable.default)
        shown = (f"={value}", "bold green") if value is not None else (f" (default {default})", "dim")
        terminal.print(Text.assemble((variable.name, "bold"), shown))
        terminal.print(Text(f"      {variable.meaning}; {variable.accepted}"))
