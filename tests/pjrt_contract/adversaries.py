"""Two clients that lie, to prove that a caller really depends on its client.

Whatever still gives right answers over :class:`PoisonedClient`, or still computes over :class:`RefusingClient`, does
not run through the protocol.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from emutpu._jaxlib import context, ir
from emutpu.backend.pjrt import Buffer, Client, CompileOptions, Executable, MemoryStats, Topology, Unimplemented

__all__ = ["PoisonedClient", "RefusingClient"]


class _Forwarding:
    """Everything but ``compile`` goes to the client inside."""

    def __init__(self, inner: Client) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def topology(self) -> Topology:
        return self.inner.topology

    @property
    def computes(self) -> bool:
        return self.inner.computes

    def fingerprint(self) -> str:
        """Never that of an honest client: their executables must not meet in a cache."""
        return f"{type(self).__name__} {self.inner.fingerprint()}"

    def from_host(self, array: np.ndarray[Any, Any], *, zero_copy: bool = False) -> Buffer:
        return self.inner.from_host(array, zero_copy=zero_copy)

    def to_host(self, buffer: Buffer) -> np.ndarray[Any, Any]:
        return self.inner.to_host(buffer)

    def synchronize(self) -> None:
        self.inner.synchronize()

    def memory_stats(self) -> MemoryStats:
        return self.inner.memory_stats()

    def close(self) -> None:
        self.inner.close()


class PoisonedClient(_Forwarding):
    """Multiplication gives ``-x * y``: every ``stablehlo.multiply`` is rewritten before it is compiled.

    Booleans (where negation does not exist) and the bodies of reductions, sorts and scatters are poisoned alike where
    their type allows it.
    """

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        return self.inner.compile(poison(module), options)

    def deserialize(self, blob: bytes, options: CompileOptions) -> Executable:
        return self.inner.deserialize(blob, options)


class RefusingClient(_Forwarding):
    """Every compilation raises Unimplemented."""

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        raise Unimplemented("this client refuses to compile")

    def deserialize(self, blob: bytes, options: CompileOptions) -> Executable:
        raise Unimplemented("this client refuses to load")


def poison(module: bytes) -> bytes:
    """The same module with every numeric product negated."""
    parsed = ir.Module.parse(module, context=context())
    for operation in list(_walk(parsed.operation)):
        if operation.name == "stablehlo.multiply" and str(operation.results[0].type.element_type) != "i1":
            _negate(operation)
    buffer = io.BytesIO()
    parsed.operation.write_bytecode(buffer)
    return buffer.getvalue()


def _negate(operation: Any) -> None:
    with context(), operation.location:
        left, right = operation.operands
        point = ir.InsertionPoint(operation)
        # Unsigned integers wrap, which is as wrong as it needs to be.
        negative = ir.Operation.create("stablehlo.negate", results=[left.type], operands=[left], ip=point)
        operation.operands[0] = negative.results[0]
        operation.operands[1] = right


def _walk(operation: Any) -> Any:
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                yield inner.operation
                yield from _walk(inner.operation)
