"""How far the CPU's float32 is from float64 in a program, kept in the folder of the run.

It says nothing of the device, and to measure it was a quarter of the time of a run whose modules are all compiled. What was
measured stands for as long as the CPU's float32 gives the same answer bit for bit, in the same suite and with the same PyTorch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from emutpu.conformance.trained import FOLDER

__all__ = ["Noise", "recall"]


@dataclasses.dataclass(frozen=True, slots=True)
class Noise:
    """Relative errors of the answer and of the gradients; None for what is not there, or does not run in float64 (``error``)."""

    logits: float | None = None
    gradients: float | None = None
    error: str | None = None


def recall(program: str, answer: Iterable[Tensor], measure: Callable[[], Noise]) -> Noise:
    """What ``measure`` gave when ``answer``, the CPU's in float32, was this one; it is called where nothing is kept.

    A failure to measure is not kept.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return measure()
    file = Path(folder) / "noise" / f"{_digest(program, answer)}.json"
    try:
        return Noise(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # nothing is kept, or nothing that can be read
        found = measure()
    if found.error is None:
        with contextlib.suppress(OSError):  # a farm's node that has no such folder measures every time
            _keep(file, found)
    return found


def _keep(file: Path, found: Noise) -> None:
    """Whole or not at all, also with several workers."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(dataclasses.asdict(found)) + "\n", encoding="utf-8")
    partial.replace(file)


def _digest(program: str, answer: Iterable[Tensor]) -> str:
    digest = hashlib.sha256(f"{program} {torch.__version__} {_suite()}".encode())
    for tensor in answer:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


@functools.cache
def _suite() -> str:
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
