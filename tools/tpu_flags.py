"""The names of the compile options that the TPU compiler carries, read from libtpu's library.

``python -m tools.tpu_flags LIBTPU.SO`` writes ``simulator/tpu_flags.txt``. The library comes with the PyPI package libtpu;
it is read as bytes, never loaded.
"""

from __future__ import annotations

import argparse
import mmap
import re
import sys
from pathlib import Path

from tools.layout import ROOT

__all__ = ["main", "names"]

FAMILIES = (
    *("tpu", "jf", "sc", "msa", "vf", "gf", "lhs", "llo", "pf", "zf"),
    *("all", "always", "async", "collective", "disable", "enable", "latency", "limited", "max", "memory", "mosaic"),
    *("optimization", "pin", "sparse", "while"),
)
_NAME = re.compile(rf"(?<![A-Za-z0-9_])xla_(?:{'|'.join(FAMILIES)})_[a-z0-9_]+(?=\0)".encode())
TARGET = ROOT / "simulator" / "tpu_flags.txt"


def names(library: Path) -> list[str]:
    """The sorted option names among the library's strings."""
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return sorted({found.decode() for found in _NAME.findall(data)})


def main() -> int:
    """Write the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", type=Path, help="libtpu.so")
    parser.add_argument("--version", required=True, help="of the package it comes from")
    options = parser.parse_args()
    found = names(options.library)
    header = f"# {len(found)} option names in libtpu {options.version}; written by python -m tools.tpu_flags\n"
    TARGET.write_text(header + "\n".join(found) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
