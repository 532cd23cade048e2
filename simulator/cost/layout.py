"""How many bytes a value occupies on the device: XLA's tiles of 8 x 128, with the two minor dimensions that pad least."""

from __future__ import annotations

from .graph import BITS, Spec

__all__ = ["LANES", "SUBLANES", "padded_bytes", "tiled"]

LANES, SUBLANES = 128, 8
_VECTOR = 1024  # elements of a one-dimensional tile


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _sublanes(extent: int, bits: int) -> int:
    """The second-minor extent after padding: short dimensions get a tile of 1, 2 or 4 rows (packed rows below 32 bit)."""
    packed = max(1, 32 // bits)
    if extent >= SUBLANES:
        return _up(extent, SUBLANES)
    tile = max(1, packed)
    while tile < extent:
        tile *= 2
    return max(tile, 1)


def tiled(minor: int, second: int, bits: int) -> int:
    """Elements that a ``second`` x ``minor`` plane takes in tiles."""
    return _up(minor, LANES) * _sublanes(second, bits)


def padded_bytes(spec: Spec) -> int:
    """Bytes of ``spec`` in the layout that pads least. A scalar counts its own bytes."""
    bits = BITS.get(spec.dtype, 32)
    shape = [extent for extent in spec.shape if extent != 1]
    if not shape or spec.size == 0:
        return spec.bytes
    if len(shape) == 1:
        packing = max(1, 32 // bits)
        tile = LANES * packing
        while tile < min(shape[0], _VECTOR):
            tile *= 2
        return _up(shape[0], tile) * bits // 8
    best = 0
    for index, minor in enumerate(shape):
        for other, second in enumerate(shape):
            if index != other:
                elements = spec.size // (minor * second) * tiled(minor, second, bits)
                best = min(best, elements) if best else elements
    return best * bits // 8
