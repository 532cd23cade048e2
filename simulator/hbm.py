"""Device memory as XLA:TPU lays it out: how many bytes of HBM an array takes, and what a program needs while it runs.

An array is stored in tiles: 128 elements of its minor dimension by a few rows of the second minor one, 32 bits deep, so
narrower elements share a row. The compiler chooses which two dimensions are the minor ones so that the tiles waste
least. ``tests/data/hbm_tiling.json`` holds what the TPU compiler (libtpu 0.0.42.1) says of 410 arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from emutpu.backend.pjrt import Aval

__all__ = ["ALIGNMENT", "tiled_bytes", "total_bytes"]

LANES = 128
SUBLANES = 8
ALIGNMENT = 512
"""Bytes: no allocation is smaller, and all are multiples of it."""

_LINEAR_TILE = 1024
_WORD = 4


def _power(extent: int) -> int:
    """The next power of two."""
    return 1 << max(0, extent - 1).bit_length()


def _up(extent: int, multiple: int) -> int:
    return -(-extent // multiple) * multiple


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of HBM that an array of ``shape`` with elements of ``itemsize`` bytes takes. 0 for an array without elements.

    Elements wider than 32 bits are stored as arrays of 32-bit words. Elements of 4 bits count as whole bytes.
    """
    if itemsize > _WORD:
        return itemsize // _WORD * tiled_bytes(shape, _WORD)
    if 0 in shape:
        return 0
    packing = _WORD // itemsize
    significant = [extent for extent in shape if extent != 1]
    if len(shape) < 2:
        elements = significant[0] if significant else 1
        tile = min(max(_power(elements), LANES * packing), _LINEAR_TILE)
        return max(ALIGNMENT, _up(elements, tile) * itemsize)
    while len(significant) < 2:
        significant.append(1)
    # Extents of 1 may come second as well: they cost a tile of few rows, and the others then need no padding.
    extents = [*significant, 1] if len(significant) < len(shape) else significant
    dense = 1
    for extent in significant:
        dense *= extent
    words = min(
        _up(minor, LANES) * _up(second, min(max(_power(second), packing), SUBLANES)) * (dense // (minor * second))
        for minor, second in itertools.permutations(extents, 2)
    )
    return max(ALIGNMENT, words * itemsize)


def total_bytes(avals: Iterable[Aval]) -> int:
    """Bytes of HBM of several arrays."""
    return sum(tiled_bytes(aval.shape, aval.dtype.itemsize) for aval in avals)
