"""How values lie in the device's memory: tiles of 8 x 128 over the two minor dimensions that pad least."""

from __future__ import annotations

__all__ = ["LANES", "SUBLANES", "laid_elements", "natural"]

LANES, SUBLANES = 128, 8
_VECTOR = 1024  # elements of a one-dimensional tile, at most


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _sublanes(extent: int, bits: int) -> int:
    """The second-minor extent after padding: short ones get a tile of 1, 2 or 4 rows, below 32 bit whole packed rows."""
    if extent >= SUBLANES:
        return _up(extent, SUBLANES)
    tile = max(1, 32 // bits)
    while tile < extent:
        tile *= 2
    return tile


def laid_elements(shape: tuple[int, ...], bits: int, minor: int, second: int) -> int:
    """Elements that ``shape`` takes with dimension ``minor`` in the lanes and ``second`` in the sublanes."""
    total = _up(shape[minor], LANES) * _sublanes(shape[second], bits)
    for dimension, extent in enumerate(shape):
        if dimension not in (minor, second):
            total *= extent
    return total


def natural(shape: tuple[int, ...], bits: int) -> tuple[int, int, int]:
    """Elements with padding, minor and second-minor dimension of a program's argument or result.

    Row-major unless another choice of the two minor dimensions pads less; of equals the later dimensions win. A scalar
    takes what it is, a vector tiles of up to 1,024.
    """
    real = [dimension for dimension, extent in enumerate(shape) if extent != 1]
    if not real or 0 in shape:
        return (0 if 0 in shape else 1), -1, -1
    if len(real) == 1:
        extent, packed = shape[real[0]], max(1, 32 // bits)
        if len(shape) > 1:  # tiles of one packed row
            return _up(extent, LANES) * packed, real[0], real[0]
        tile = LANES * packed
        while tile < min(extent, _VECTOR):
            tile *= 2
        return _up(extent, tile), real[0], real[0]
    best: tuple[int, int, int] | None = None
    for minor in reversed(real):
        for second in reversed(real):
            if minor == second:
                continue
            elements = laid_elements(shape, bits, minor, second)
            if best is None or elements < best[0]:
                best = elements, minor, second
    assert best is not None
    return best
