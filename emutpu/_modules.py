"""Every module that a program compiles, written down with the line of the program that made it.

A client like any other around the real one; ``emutpu aot-check`` gives what it wrote to the real TPU compiler.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emutpu.backend.wrapped import WrappedClient

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Client, CompileOptions, Executable

__all__ = ["RecordingClient", "recorded"]


class RecordingClient(WrappedClient):
    """``inner``, with every module that it is asked to compile also written to ``folder``: ``<hash>.mlirbc`` and ``.json``.

    A module is written before it is compiled, so that one the CPU refuses is there too. Equal modules are written once,
    with the first line that asked for them.
    """

    def __init__(self, inner: Client, folder: str) -> None:
        super().__init__(inner)
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        description = self._record(module, options)
        made = self.inner.compile(module, options)
        if description is not None:
            self._name(description, made.name)
        return made

    @staticmethod
    def _name(description: Path, name: str) -> None:
        _write(description, json.dumps(json.loads(description.read_text()) | {"name": name}).encode())

    def _record(self, module: bytes, options: CompileOptions) -> Path | None:
        """Write the module down; where its facts stand, or None for a module that is there already."""
        digest = hashlib.sha256(module + options.effort.value.encode()).hexdigest()
        description = self.folder / f"{digest}.json"
        if description.exists():
            return None
        from emutpu.backend.location import capture, locate

        where = locate(*capture())
        _write(self.folder / f"{digest}.mlirbc", module)
        facts = {
            "name": "a module that the CPU refuses too",
            "file": where.file if where else None,
            "line": where.line if where else None,
            "code": where.code if where else None,
            "effort": options.effort.value,
            "order": len(list(self.folder.glob("*.json"))),
        }
        _write(description, json.dumps(facts).encode())
        return description


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all: several processes may record the same module."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(content)
    os.replace(partial, path)


def recorded(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The modules in ``folder`` and the facts beside them, in the order of their compilation."""
    found = [(path.with_suffix(".mlirbc"), json.loads(path.read_text())) for path in folder.glob("*.json")]
    yield from sorted(found, key=lambda entry: (entry[1]["order"], entry[0].name))
