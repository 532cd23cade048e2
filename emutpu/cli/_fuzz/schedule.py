"""Drawing perturbations. Plain values, as :mod:`emutpu.backend.fuzzing` reads them."""

from __future__ import annotations

import random

from emutpu._report import Document

__all__ = ["KINDS", "draw", "text"]

# kind -> (is at a launch, weight, longest length; 0 for a kind without one)
KINDS: dict[str, tuple[bool, float, int]] = {
    "read": (False, 4.0, 0),
    "collect": (False, 2.0, 0),
    "hold": (False, 1.0, 64),
    "forget": (False, 1.0, 0),
    "uncached": (False, 1.0, 16),
    "late": (True, 3.0, 4),
    "wait": (True, 1.0, 0),
}
_MOST = 16


def draw(seed: int, run: int, ops: int, launches: int) -> list[Document]:
    """The perturbations of one run of a program that recorded ``ops`` ops and did ``launches`` launches.

    The same arguments give the same list. Each run has a handful up to sixteen, so that faults show that need several.
    """
    source = random.Random(f"{seed}:{run}")  # noqa: S311  # a schedule, no secret
    wanted = source.randint(2, _MOST)
    chosen = source.choices(list(KINDS), [weight for _, weight, _ in KINDS.values()], k=wanted)
    found = {}
    for kind in chosen:
        at_launch, _, longest = KINDS[kind]
        count = launches if at_launch else ops
        if count:
            at = source.randrange(count)
            found[kind, at] = {"kind": kind, "at": at, "length": source.randint(1, longest) if longest else 0}
    return [found[key] for key in sorted(found)]


def text(perturbation: Document) -> str:
    """One perturbation in one line."""
    what = "launch" if KINDS[perturbation["kind"]][0] else "op"
    length = f" for {perturbation['length']}" if perturbation["length"] else ""
    return f"{perturbation['kind']} at {what} {perturbation['at']}{length}"
