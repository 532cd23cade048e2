"""The file of a cache entry: what it holds, and how it is proved whole before any of it is believed.

==================  =====  ======================================================================================
bytes               size   what
==================  =====  ======================================================================================
magic               8      ``EMUTPUC1``
version             4      of this format, little-endian like all that follows
header length       4
payload length      8
SHA-256             32     of the five fields above, the header and the payload
HMAC-SHA-256        32     of the same under the user's secret; zeros where there is none
header              –      JSON: the logical key, the binary fingerprint, seconds the compilation took, when it was made
payload             –      what the client's executable serialised to
==================  =====  ======================================================================================

There is nothing to unpickle. Nothing is parsed before the checksum holds, and with a secret nothing before the HMAC does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import json
import math
import struct
import time

__all__ = ["LARGEST", "Entry", "RejectedEntry", "pack", "read_header", "unpack"]

_MAGIC = b"EMUTPUC1"
_VERSION = 1
_FIXED = struct.Struct("<8sIIQ")
_DIGEST = 32
_UNSIGNED = bytes(_DIGEST)
_START = _FIXED.size + 2 * _DIGEST
_LARGEST_HEADER = 1 << 16
_DOMAIN = b"emutpu compile cache entry 1\0"
LARGEST = 1 << 31
"""Bytes of the largest file that is read at all."""


class RejectedEntry(ValueError):
    """An entry that must not be used; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A verified entry. ``seconds`` is what the compilation took where it was made, ``made`` seconds since the epoch."""

    key: str
    binary: str
    payload: bytes
    seconds: float
    made: float
    signed: bool


def pack(key: str, binary: str, payload: bytes, seconds: float, secret: bytes | None = None) -> bytes:
    """The bytes of an entry, signed when there is a ``secret``."""
    header = json.dumps({"key": key, "binary": binary, "seconds": seconds, "made": time.time()}).encode()
    fixed = _FIXED.pack(_MAGIC, _VERSION, len(header), len(payload))
    parts = (fixed, header, payload)
    digest = hashlib.sha256(b"".join(parts)).digest()
    return b"".join((fixed, digest, _sign(secret, parts) if secret else _UNSIGNED, header, payload))


def unpack(data: bytes, key: str, binary: str, secret: bytes | None = None) -> Entry:
    """The entry in ``data``, which must be the one for ``key`` and ``binary``. Raises RejectedEntry for anything else.

    With a ``secret`` an entry that is unsigned, or signed with another, is rejected.
    """
    entry = read_header(data, secret)
    if entry.key != key:
        raise RejectedEntry(f"the entry is for another key: {entry.key}")
    if entry.binary != binary:
        raise RejectedEntry(f"the entry is for another environment: {entry.binary}, not {binary}")
    return entry


def read_header(data: bytes, secret: bytes | None = None) -> Entry:
    """The entry in ``data``, whatever it is for. Raises RejectedEntry where it is truncated, corrupt or not signed."""
    if len(data) < _START:
        raise RejectedEntry(f"truncated: {len(data)} bytes")
    magic, version, header_size, payload_size = _FIXED.unpack_from(data)
    if magic != _MAGIC:
        raise RejectedEntry("not an entry of this cache")
    if version != _VERSION:
        raise RejectedEntry(f"format {version}, not {_VERSION}")
    if header_size > _LARGEST_HEADER or _START + header_size + payload_size != len(data):
        raise RejectedEntry(f"truncated or extended: {len(data)} bytes")
    view = memoryview(data)
    parts = (view[: _FIXED.size], view[_START:])
    signature = data[_FIXED.size + _DIGEST : _START]
    if secret is not None and not hmac.compare_digest(signature, _sign(secret, parts)):
        raise RejectedEntry("unsigned" if signature == _UNSIGNED else "the signature is not of this secret")
    digest = hashlib.sha256(parts[0])
    digest.update(parts[1])
    if digest.digest() != data[_FIXED.size : _FIXED.size + _DIGEST]:
        raise RejectedEntry("corrupt (checksum mismatch)")
    return _parse(data, header_size, signed=signature != _UNSIGNED)


def _sign(secret: bytes, parts: tuple[bytes | memoryview, ...]) -> bytes:
    made = hmac.new(secret, _DOMAIN, hashlib.sha256)
    for part in parts:
        made.update(part)
    return made.digest()


def _parse(data: bytes, header_size: int, *, signed: bool) -> Entry:
    """The fields, each of the type it must have: a checksum proves wholeness, not good faith."""
    try:
        header = json.loads(data[_START : _START + header_size])
    except (ValueError, RecursionError):
        raise RejectedEntry("the header is not JSON") from None
    if not isinstance(header, dict):
        raise RejectedEntry("the header is not an object")
    key, binary = header.get("key"), header.get("binary")
    seconds, made = _time(header.get("seconds")), _time(header.get("made"))
    if not isinstance(key, str) or not isinstance(binary, str) or seconds is None or made is None:
        raise RejectedEntry("the header has wrong fields")
    return Entry(key, binary, data[_START + header_size :], seconds, made, signed)


def _time(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        seconds = float(value)
    except OverflowError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
