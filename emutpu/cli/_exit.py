"""Exit codes beyond click's 0, 1 and 2 (``emutpu run`` passes the program's own code through)."""

from __future__ import annotations

import enum

__all__ = ["EmulatorExit", "EmulatorFailure"]


class EmulatorExit(enum.IntEnum):
    """Failures of the emulator itself; numbers as in BSD's sysexits where it has one."""

    INTERNAL = 70
    PROGRAM_NOT_STARTED = 71
    NO_NAMESPACE = 72
    REPORT_NOT_WRITTEN = 73
    CACHE_UNUSABLE = 74
    NO_COMPILER = 75
    FORBIDDEN = 77


class EmulatorFailure(Exception):
    """Ends the command with ``code`` and one line on standard error."""

    def __init__(self, code: EmulatorExit, message: str) -> None:
        super().__init__(message)
        self.code = code
