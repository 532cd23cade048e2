"""``docs/quirks.md``, the known bugs of TorchTPU, from the table: ``python -m tools.quirks`` writes it, a test compares."""

from __future__ import annotations

import torch  # noqa: F401  # activates emutpu, which must come before its parts

from emutpu.backend.quirks import QUIRKS, Quirk
from tools.layout import ROOT

__all__ = ["TARGET", "main", "rendered"]

TARGET = ROOT / "docs" / "quirks.md"
_HEAD = """# Known bugs of TorchTPU 0.2.0

Written by `python -m tools.quirks` from the table in [backend/quirks.py](../backend/quirks.py).

By default emutpu gives the correct result and warns once per bug, with a `QuirkWarning` that begins with `emutpu: TorchTPU
0.2.0 gets this wrong`, when a program meets it. `EMUTPU_QUIRKS=0.2.0` gives the release's results instead; where it aborts
the process, that is a RuntimeError. Bugs that depend on values are told of only under `TORCH_TPU_ENABLE_DEBUG_CHECKS=1`:
looking would wait for the device. What the release has no kernel for is no bug: it raises its NotImplementedError
here, too, unless `EMUTPU_BEYOND=1`.

*Recorded* rows were seen in the host side of the 0.2.0 wheel on a CPU plugin; *reported* ones come from its users' trackers and
CI notes, and may be of another revision. None was checked on a chip by us.

"""


def _told(quirk: Quirk) -> str:
    if quirk.missing or quirk.silent:
        return "–"
    return "with debug checks" if quirk.reads else "once"


def _reproduced(quirk: Quirk) -> str:
    if quirk.missing:
        return f"no: {quirk.missing}"
    return f"yes, but {quirk.approximate}" if quirk.approximate else "yes"


def rendered() -> str:
    """The document."""
    lines = ["| Name | TorchTPU | emutpu by default | Warns | Reproduced | Known from |", "|---|---|---|---|---|---|"]
    lines += [f"| `{q.name}` | {q.does} | {q.here} | {_told(q)} | {_reproduced(q)} | {q.evidence} |" for q in QUIRKS]
    return _HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Write the document."""
    TARGET.write_text(rendered(), encoding="utf-8")


if __name__ == "__main__":
    main()
