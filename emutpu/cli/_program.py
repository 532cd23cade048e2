"""What the commands that run a program share: where its arguments begin, what can be run, and the eager modes."""

from __future__ import annotations

import os

import click

__all__ = ["MODES", "ProgramCommand", "script"]

MODES = {
    "strict": {"TORCH_TPU_LAUNCH_BLOCKING": "0", "TORCH_TPU_DEFER_AND_FUSE": "0"},
    "debug": {"TORCH_TPU_LAUNCH_BLOCKING": "1", "TORCH_TPU_DEFER_AND_FUSE": "0"},
    "defer": {"TORCH_TPU_LAUNCH_BLOCKING": "0", "TORCH_TPU_DEFER_AND_FUSE": "1"},
}


class ProgramCommand(click.Command):
    """Stops reading options at the program, as Python does: what follows SCRIPT or ``-m MODULE`` is the program's."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        at, end = self._program(args)
        if at == len(args):
            return super().parse_args(context, args)
        return super().parse_args(context, [*args[:end], "--", *args[end:]] if args[at].startswith("-m") else args)

    def _values(self) -> dict[str, int]:
        """How many words follow each option."""
        return {
            name: 0 if parameter.is_flag else parameter.nargs
            for parameter in self.params
            if isinstance(parameter, click.Option)
            for name in parameter.opts
        }

    def _program(self, args: list[str]) -> tuple[int, int]:
        """Where the program is named, and where its own arguments begin."""
        values = self._values()
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            if args[at] == "-m" or (args[at].startswith("-m") and not args[at].startswith("--")):
                return at, at + (2 if args[at] == "-m" else 1)
            at += 1 + values.get(args[at], 0)
        return min(at, len(args)), min(at + 1, len(args))


class ToolCommand(ProgramCommand):
    """Also takes its own long options after the program, up to a ``--``; all else there is the program's."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        _, end = self._program(args)
        values = self._values()
        mine: list[str] = []
        theirs: list[str] = []
        at = end
        while at < len(args) and args[at] != "--":
            name, given, _ = args[at].partition("=")
            known = name.startswith("--") and name in values
            width = 1 + (values[name] if known and not given else 0)
            (mine if known else theirs).extend(args[at : at + width])
            at += width
        return super().parse_args(context, [*mine, *args[:end], *theirs, *args[at:][1:]])


def script(program: tuple[str, ...]) -> list[str]:
    """``SCRIPT [ARGS]`` as arguments of the interpreter. Raises UsageError where there is nothing to run."""
    if not program:
        raise click.UsageError("nothing to run: give a SCRIPT or -m MODULE")
    path = program[0]
    if path != "-" and not os.path.exists(path):
        raise click.UsageError(f"there is no file {path!r}")
    if os.path.isdir(path) and not os.path.exists(os.path.join(path, "__main__.py")):
        raise click.UsageError(f"{path!r} is a directory without a __main__.py")
    return list(program)
