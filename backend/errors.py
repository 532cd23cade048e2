"""Error texts: the device's own words first, then where it happened and what to do."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch

from emutpu.backend.location import Origin, capture, locate
from emutpu.backend.pjrt import InvalidArgument, OutOfRange, PjrtError, ResourceExhausted, Unimplemented

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Buffer

__all__ = [
    "describe",
    "device_mismatch",
    "launch_failure",
    "not_implemented",
    "op_label",
    "read_failure",
    "region_failure",
    "user_line",
]


def op_label(name: str) -> str:
    """How the device names an op in a message: ``aten.add_.Tensor`` is ``add_``, ``_local_scalar_dense`` loses its ``_``."""
    return name.removeprefix("aten.").partition(".")[0].lstrip("_")


def describe(code: types.CodeType | None, offset: int) -> str:
    """``train.py:41: loss = model(x)``, or a statement that no Python line issued the op."""
    location = locate(code, offset)
    if location is None:
        return "no line of the program (the call came from inside PyTorch)"
    return f"{location}" + (f": {location.code}" if location.code else "")


def user_line() -> str:
    """The line of the user's program that is running now."""
    return describe(*capture())


def not_implemented(name: str) -> NotImplementedError:
    """The device's error for a missing kernel; ``name`` as the dispatcher gives it (``aten::cholesky``)."""
    return NotImplementedError(
        f"operator '{name}' is not implemented for TPU. Please file a feature request\n"
        f"  issued at {user_line()}\n"
        "  to run it on the CPU instead, allow fallbacks (emutpu run --allow-fallback, or EMUTPU_ALLOW_FALLBACK=1)"
    )


def device_mismatch(name: str, argument: str, tensor: torch.Tensor) -> RuntimeError:
    """PyTorch's own text for operands on two devices, with the argument and line named."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, tpu:0 and {tensor.device}! "
        f"(when checking argument {argument} of {op_label(name)})\n"
        f"  issued at {user_line()}\n  move it with .to('tpu')"
    )


def _exception_type(error: PjrtError) -> type[Exception]:
    if isinstance(error, Unimplemented):
        return NotImplementedError
    if isinstance(error, OutOfRange):
        return IndexError
    if isinstance(error, ResourceExhausted):
        return torch.OutOfMemoryError
    return ValueError if isinstance(error, InvalidArgument) else RuntimeError


def launch_failure(error: PjrtError, origin: Origin, what: str = "the XLA compiler failed with") -> Exception:
    """A failure at the op itself (compilation, or a launch that was refused)."""
    name, code, offset = origin
    made = _exception_type(error)(
        f"{op_label(name)}(): {what}: {error.message}\n  {name} issued at {describe(code, offset)}"
    )
    made.__cause__ = error
    return made


def region_failure(error: PjrtError, origin: Origin, trigger: Origin) -> Exception:
    """A failure to compile or launch a region: names its last op, and what asked for it."""
    name, code, offset = origin
    made = _exception_type(error)(
        f"{op_label(name)}(): the XLA compiler failed with: {error.message}\n"
        f"  {name} issued at {describe(code, offset)}\n"
        f"  materialized by {trigger[0]} at {describe(*trigger[1:])}"
    )
    made.__cause__ = error
    return made


def read_failure(error: PjrtError, trigger: str, origin: Origin | None, value: Buffer | None = None) -> Exception:
    """A failure of asynchronous work, at the read of ``value`` that met it: names the op that failed and the read."""
    if isinstance(error, Unimplemented) and error.op is None:  # no launch failed: the client has nothing to give
        refused = NotImplementedError(f"{trigger}(): {error.message}\n  read at {user_line()}")
        refused.__cause__ = error
        return refused
    issued = error.origin if isinstance(error.origin, tuple) else origin
    if issued is None:
        blame = "  the op that failed is not known"
    else:
        name, code, offset = issued
        blame = f"  {name} issued at {describe(code, offset)}"
    kind = "materialization failed with"
    if isinstance(error, ResourceExhausted):
        of = f" of value {value.dtype.name}[{', '.join(map(str, value.shape))}]" if value is not None else ""
        kind = f"the TPU ran out of memory while awaiting the materialization{of}"
    made = _exception_type(error)(
        f"{trigger}(): {kind}: {error.message}\n{blame}\n  read at {user_line()}\n"
        "  to stop at the failing op itself, run with TORCH_TPU_LAUNCH_BLOCKING=1"
    )
    made.__cause__ = error
    return made
