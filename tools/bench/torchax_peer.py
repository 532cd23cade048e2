"""The other side of ``add_1_torchax``: a process without emutpu that times torchax's eager add when told to.

Reads a number of calls per line, answers with seconds per call. Started by :mod:`tools.bench.peers`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import torch

from tools.bench.case import repeated_add, steady

_NAMED = re.compile(r"torch\.ops\.aten\.(\w+)\.(\w+)")


def _restore_names() -> None:
    """Torchax 0.0.13 lists overloads that PyTorch 2.13 no longer has (those of named tensors): give them placeholders."""
    spec = importlib.util.find_spec("torchax")
    if spec is None or spec.origin is None:
        sys.exit("torchax is not installed: pip install torchax==0.0.13")
    for source in Path(spec.origin).parent.rglob("*.py"):
        for base, overload in _NAMED.findall(source.read_text(encoding="utf-8")):
            packet = getattr(torch.ops.aten, base, None)
            if packet is not None and not hasattr(packet, overload):
                setattr(packet, overload, f"aten.{base}.{overload}")


def main() -> None:
    """Serve until the input ends."""
    _restore_names()
    import torchax

    torchax.enable_globally()
    operand = torch.ones(1, device="jax")
    repeated_add(operand, 50)
    print("ready", flush=True)
    with steady():
        for line in sys.stdin:
            print(repeated_add(operand, int(line)), flush=True)


if __name__ == "__main__":
    main()
