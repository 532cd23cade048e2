"""What the commands share of their output: the ``--json`` option and the console."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from emutpu.cli._exit import EmulatorExit, EmulatorFailure

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["console", "json_option", "writable", "write_json"]

F = TypeVar("F", bound=Callable[..., Any])


def writable(context: click.Context, parameter: click.Parameter, path: str | None) -> str | None:
    """Callback of an option that names a file to write: find out before a long run that its report could not be written."""
    if path is None or path == "-":
        return path
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise click.BadParameter(f"there is no directory {folder!r}")
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise click.BadParameter(f"{path!r} cannot be written")
    return path


def json_option(help_text: str, default: str | None = None) -> Callable[[F], F]:
    """The option ``--json PATH``; a path that cannot be written is wrong usage."""
    return click.option(
        "--json", "json_path", metavar="PATH", default=default, show_default=True, callback=writable, help=help_text
    )


def write_json(document: Mapping[str, Any], path: str) -> None:
    """Write a document where ``--json`` says. Raises EmulatorFailure when it cannot be written after all."""
    from emutpu._report import write_document

    try:
        write_document(document, path)
    except OSError as error:
        raise EmulatorFailure(EmulatorExit.REPORT_NOT_WRITTEN, f"the report was not written: {error}") from error


def console(*, stderr: bool) -> Console:
    """A rich console that never wraps a path or a message in the middle of a log."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=True)
