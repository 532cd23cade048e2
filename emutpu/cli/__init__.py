"""The command line: one module per command, found by name and imported only when it runs. Never imports torch or jax."""

from emutpu.cli._main import main

__all__ = ["main"]
