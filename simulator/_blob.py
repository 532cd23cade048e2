"""The envelope of a serialised executable: magic, checksum, a JSON header with the interface, module, native code."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from emutpu.backend.pjrt import Aval, InvalidArgument

from . import _model
from ._model import Modelled
from ._modules import DTYPES, ModuleInfo

__all__ = ["Contents", "pack", "unpack"]

_MAGIC = b"EMUTPUX3"
_DIGEST = hashlib.sha256().digest_size
_PREFIX = len(_MAGIC) + _DIGEST
_LENGTH = struct.Struct("<I")
_BY_NAME: dict[str, np.dtype[Any]] = {dtype.name: dtype for dtype in DTYPES.values()}


class Contents(NamedTuple):
    """What a blob holds: the interface, the canonical module (the model of the chip reads it), native code, the CPU
    features that it needs, and by chip what the model said of it (nothing if another version of the model did).
    """

    info: ModuleInfo
    module: bytes
    code: bytes
    features: frozenset[str]
    modelled: Mapping[str, Modelled]


def pack(
    info: ModuleInfo,
    fingerprint: str,
    module: bytes,
    code: bytes,
    features: Iterable[str] = (),
    modelled: Mapping[str, Modelled] | None = None,
) -> bytes:
    """One blob of interface, canonical module and native code, under a SHA-256 of all. ``features`` are those of the CPU
    that it needs, ``modelled`` what this version of the model says, by chip.
    """
    header = json.dumps(
        {
            "name": info.name,
            "arguments": [_plain(aval) for aval in info.arguments],
            "results": [_plain(aval) for aval in info.results],
            "donated": sorted(info.donated),
            "reused": sorted(info.reused),
            "module": len(module),
            "fingerprint": fingerprint,
            "features": sorted(features),
            "model": _model.version(),
            "modelled": {chip: _model.plain(figures) for chip, figures in (modelled or {}).items()},
        }
    ).encode()
    body = _LENGTH.pack(len(header)) + header + module + code
    return _MAGIC + hashlib.sha256(body).digest() + body


def unpack(blob: bytes, fingerprint: str) -> Contents:
    """What :func:`pack` put in.

    Raises InvalidArgument when it is truncated, corrupt, or from a client with another fingerprint: native code must
    never be reached then, since loading it can crash the process.
    """
    if blob[: len(_MAGIC)] != _MAGIC:
        raise InvalidArgument("not a serialised executable of this client")
    body = blob[_PREFIX:]
    if hashlib.sha256(body).digest() != blob[len(_MAGIC) : _PREFIX]:
        raise InvalidArgument("the serialised executable is corrupt (checksum mismatch)")
    try:
        (length,) = _LENGTH.unpack_from(body)
        header = json.loads(body[_LENGTH.size : _LENGTH.size + length])
        written = header["fingerprint"]
        features = frozenset(map(str, header["features"]))
        info = ModuleInfo(
            name=str(header["name"]),
            arguments=tuple(_aval(plain) for plain in header["arguments"]),
            results=tuple(_aval(plain) for plain in header["results"]),
            donated=frozenset(map(int, header["donated"])),
            ops=frozenset(),
            reused=frozenset(map(int, header["reused"])),
        )
        found = header["modelled"].items() if header["model"] == _model.version() else ()
        modelled = {str(chip): _model.from_plain(figures) for chip, figures in found}
        start = _LENGTH.size + length
        end = start + int(header["module"])
    # A checksum proves wholeness, not good faith: whoever forges a header may leave out what they like.
    except (struct.error, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidArgument(f"the header of the serialised executable is malformed: {error!r}") from error
    if written != fingerprint:
        raise InvalidArgument(f"the serialised executable is for another environment: {written!r}, not {fingerprint!r}")
    return Contents(info, body[start:end], body[end:], features, modelled)


def _plain(aval: Aval) -> list[Any]:
    return [list(aval.shape), aval.dtype.name]


def _aval(plain: list[Any]) -> Aval:
    return Aval(tuple(plain[0]), _BY_NAME[plain[1]])
