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
        values = {
            name: parameter.nargs
            for parameter in self.params
            if isinstance(parameter, click.Option) and not parameter.is_flag
            for name in parameter.opts
        }
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] not in ("-", "--"):
            if args[at] == "-m" or (args[at].startswith("-m") and not args[at].startswith("--")):
                end = at + (2 if args[at] == "-m" else 1)
                return super().parse_args(context, [*args[:end], "--", *args[end:]])
            at += 1 + values.get(args[at], 0)
        return super().parse_args(context, args)


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
