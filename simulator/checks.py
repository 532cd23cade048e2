"""The argument checks that every client owes :meth:`Executable.execute`."""

from __future__ import annotations

from collections.abc import Sequence

from emutpu.backend.pjrt import (
    Aval,
    Buffer,
    CompileOptions,
    ErrorBuffer,
    FailedPrecondition,
    InvalidArgument,
    Topology,
    Unimplemented,
)

from ._tpu_flags import check_tpu_flags

__all__ = ["check_arguments", "check_options", "propagate"]


def check_arguments(name: str, expected: tuple[Aval, ...], arguments: Sequence[Buffer]) -> None:
    """Raise InvalidArgument for a wrong count, shape or dtype, FailedPrecondition for a deleted buffer."""
    if len(arguments) != len(expected):
        raise InvalidArgument(f"{name} takes {len(expected)} arguments, not {len(arguments)}", op=name)
    for position, (aval, buffer) in enumerate(zip(expected, arguments, strict=True)):
        if not isinstance(buffer, ErrorBuffer) and not hasattr(buffer, "is_deleted"):
            raise InvalidArgument(f"argument {position} of {name} is a {type(buffer).__name__}, no buffer", op=name)
        if buffer.is_deleted():
            raise FailedPrecondition(f"argument {position} of {name} has been deleted or donated", op=name)
        if tuple(buffer.shape) != aval.shape or buffer.dtype != aval.dtype:
            got = Aval(tuple(buffer.shape), buffer.dtype)
            raise InvalidArgument(f"argument {position} of {name} is {got}, expected {aval}", op=name)


def propagate(
    arguments: Sequence[Buffer], results: tuple[Aval, ...], donated: frozenset[int]
) -> Sequence[Buffer] | None:
    """The results of a launch that uses a failed buffer: the same failure, once per result. None if all are well."""
    error = next((buffer.error for buffer in arguments if isinstance(buffer, ErrorBuffer)), None)
    if error is None:
        return None
    for position in donated:
        arguments[position].delete()
    return [ErrorBuffer(aval, error) for aval in results]


def check_options(topology: Topology, options: CompileOptions) -> None:
    """Raise InvalidArgument for a device outside ``topology`` or a misspelt TPU option, Unimplemented for replicas."""
    check_tpu_flags(options.overrides)
    if options.device not in range(len(topology.devices)):
        raise InvalidArgument(f"{topology.name} has no device {options.device}, only {len(topology.devices)}")
    if options.replicas != 1:
        raise Unimplemented(f"a program of {options.replicas} replicas: this client runs one device")
