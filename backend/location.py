"""Which line of the user's program issued an op.

Captured on every launch, so it costs little: a code object and an instruction offset, never a frame (a frame keeps its
locals alive, and liveness of tensors must not depend on who is watching).
"""

from __future__ import annotations

import dataclasses
import linecache
import os
import sys
import types
from itertools import islice

import torch

__all__ = ["KNOWN_FILES", "Location", "Origin", "capture", "is_library", "locate"]

# (overload name, code object, instruction offset) of a launch.
Origin = tuple[str, types.CodeType | None, int]

_LIBRARY_ROOTS = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "emutpu") + os.sep,
)
# File name -> whether it belongs to PyTorch, emutpu or the interpreter. Generated kernels look it up in line.
KNOWN_FILES: dict[str, bool] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Location:
    """A line of the user's program; ``code`` is its source text, empty when it cannot be read."""

    file: str
    line: int
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def is_library(filename: str) -> bool:
    """Whether a file belongs to PyTorch, emutpu or the interpreter."""
    known = KNOWN_FILES.get(filename)
    return _library(filename) if known is None else known


def _library(filename: str) -> bool:
    known = filename.startswith(_LIBRARY_ROOTS) or filename.startswith(("<frozen ", "<emutpu "))
    KNOWN_FILES[filename] = known
    return known


def capture() -> tuple[types.CodeType | None, int]:
    """The innermost frame that belongs neither to PyTorch nor to emutpu, as (code, offset); (None, 0) if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    known = KNOWN_FILES
    while frame is not None:
        code = frame.f_code
        filename = code.co_filename
        library = known.get(filename)
        if library is None:
            library = _library(filename)
        if not library:
            return code, frame.f_lasti
        frame = frame.f_back
    return None, 0


def locate(code: types.CodeType | None, offset: int) -> Location | None:
    """Resolve what :func:`capture` gave to file, line and source text."""
    if code is None:
        return None
    position = next(islice(code.co_positions(), offset // 2, None), (None, None, None, None))
    line = position[0] or code.co_firstlineno
    text = linecache.getline(code.co_filename, line).strip()
    return Location(code.co_filename, line, code.co_qualname, text)
