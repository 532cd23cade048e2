"""Compile options of the TPU compiler: a program that sets them must run here, and a misspelt one must not."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

from emutpu.backend.pjrt import InvalidArgument

__all__ = ["check_tpu_flags", "tpu_flags"]

_OWN_FAMILIES = ("xla_tpu_", "xla_jf_", "xla_sc_", "xla_msa_", "xla_vf_", "xla_gf_", "xla_lhs_", "xla_llo_", "xla_pf_")


@functools.cache
def tpu_flags() -> frozenset[str]:
    """The option names that libtpu carries (the file says which release)."""
    lines = (Path(__file__).parent / "tpu_flags.txt").read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if not line.startswith("#"))


def check_tpu_flags(overrides: tuple[tuple[str, str], ...]) -> None:
    """Raise InvalidArgument for a name of the TPU compiler's families that it does not have, with the closest that it has."""
    for name, _ in overrides:
        if name.startswith(_OWN_FAMILIES) and name not in tpu_flags():
            close = difflib.get_close_matches(name, tpu_flags(), n=1)
            advice = f"did you mean {close[0]}?" if close else "leave it out"
            raise InvalidArgument(f"the TPU compiler has no option '{name}': {advice}")
