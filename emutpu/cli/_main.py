"""The group of commands and the process's exit code."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Sequence

import click

from emutpu import __version__
from emutpu._settings import SettingError, unknown_variables
from emutpu.cli._exit import EmulatorExit, EmulatorFailure


class _Commands(click.Group):
    """Commands are the public modules of this package: ``aot-check`` is ``aot_check.command``."""

    def list_commands(self, context: click.Context) -> list[str]:
        import emutpu.cli

        names = (module.name for module in pkgutil.iter_modules(emutpu.cli.__path__))
        return sorted(name.replace("_", "-") for name in names if not name.startswith("_"))

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(context):
            return None
        command = importlib.import_module(f"emutpu.cli.{name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="emutpu")
def _group() -> None:
    """Run and test PyTorch-on-TPU programs without a TPU.

    Exit codes: 0 success, 1 a finding or failure, 2 wrong usage, 70-79 a failure of the emulator itself.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit. ``arguments`` default to those of the process."""
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: Sequence[str] | None) -> int:
    for name, suggestion in unknown_variables():
        hint = f" (did you mean {suggestion}?)" if suggestion else ""
        click.echo(f"emutpu: warning: unknown environment variable {name}{hint}", err=True)
    try:
        result = _group.main(args=arguments, prog_name="emutpu", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130  # interrupted, as a shell reports it
    except SettingError as error:
        click.echo(f"Error: {error}", err=True)
        return 2
    except EmulatorFailure as error:
        click.echo(f"Error: {error}", err=True)
        return error.code
    except Exception:  # noqa: BLE001 (the process boundary: a defect of emutpu must not look like a finding, exit code 1)
        traceback.print_exc()
        click.echo("emutpu: this is a defect of emutpu, not of your program", err=True)
        return EmulatorExit.INTERNAL
    return result if isinstance(result, int) else 0
