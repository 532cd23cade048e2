"""Map what XLA, jaxlib and the MLIR parser raise to the protocol's error classes, by absl status prefix."""

from __future__ import annotations

from emutpu.backend.pjrt import (
    DeviceUnavailable,
    FailedPrecondition,
    InternalError,
    InvalidArgument,
    OutOfRange,
    PjrtError,
    ResourceExhausted,
    Unimplemented,
)

__all__ = ["translate"]

_BY_CODE: dict[str, type[PjrtError]] = {
    kind.code: kind
    for kind in (
        DeviceUnavailable,
        FailedPrecondition,
        InternalError,
        InvalidArgument,
        OutOfRange,
        ResourceExhausted,
        Unimplemented,
    )
}
_DELETED = ("deleted or donated", "has been deleted", "deleted buffer")


def translate(error: Exception, op: str | None = None) -> PjrtError:
    """The protocol's error for ``error``: class by the status code its text starts with, message kept whole."""
    if isinstance(error, PjrtError):
        return error
    message = str(error)
    if any(phrase in message for phrase in _DELETED):
        return FailedPrecondition(message, op=op)
    kind = _BY_CODE.get(message.partition(":")[0].strip())
    if kind is None:
        kind = InvalidArgument if isinstance(error, (ValueError, TypeError)) else InternalError
    return kind(message, op=op)
