"""Clients around another client: the base of those that count, delay or disturb what passes through them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from emutpu.backend.pjrt import ErrorBuffer

if TYPE_CHECKING:
    import numpy as np

    from emutpu.backend.pjrt import (
        Aval,
        Buffer,
        Client,
        CompileOptions,
        Executable,
        ExecutableMemory,
        MemoryStats,
        ModelledCost,
        Topology,
    )

__all__ = ["MeteredClient", "WrappedClient", "WrappedExecutable"]


class WrappedClient:
    """Everything goes to ``inner``; what it compiles or loads goes through :meth:`wrap`."""

    def __init__(self, inner: Client) -> None:
        self.inner = inner

    def wrap(self, executable: Executable) -> Executable:
        """What stands for a compiled or loaded executable."""
        return executable

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
        return self.inner.fingerprint()

    def compile(self, module: bytes, options: CompileOptions) -> Executable:
        return self.wrap(self.inner.compile(module, options))

    def deserialize(self, blob: bytes, options: CompileOptions) -> Executable:
        return self.wrap(self.inner.deserialize(blob, options))

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


class WrappedExecutable:
    """Everything goes to ``inner``; both ways to launch go through :meth:`run`."""

    def __init__(self, inner: Executable) -> None:
        self.inner = inner

    def run(
        self, arguments: Sequence[Buffer], launch: Callable[[Sequence[Buffer]], Sequence[Buffer]]
    ) -> Sequence[Buffer]:
        """One launch. ``launch`` is the inner executable's."""
        return launch(arguments)

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def arguments(self) -> tuple[Aval, ...]:
        return self.inner.arguments

    @property
    def results(self) -> tuple[Aval, ...]:
        return self.inner.results

    @property
    def donated(self) -> frozenset[int]:
        return self.inner.donated

    @property
    def launch(self) -> Callable[[Sequence[Buffer]], Sequence[Buffer]]:
        return self._launch

    def _launch(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        return self.run(arguments, self.inner.launch)

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        return self.run(arguments, self.inner.execute)

    def serialize(self) -> bytes:
        return self.inner.serialize()

    def memory(self) -> ExecutableMemory:
        return self.inner.memory()

    def cost(self) -> ModelledCost | None:
        return self.inner.cost()


class MeteredClient(WrappedClient):
    """Counts launches, and the buffers and dense bytes that they leave in the device's memory, in every mode alike."""

    def __init__(self, inner: Client) -> None:
        super().__init__(inner)
        self.launches = 0
        self.buffers = 0
        self.bytes = 0
        self.lock = threading.RLock()

    def wrap(self, executable: Executable) -> Executable:
        return _Metered(executable, self)


class _Metered(WrappedExecutable):
    def __init__(self, inner: Executable, client: MeteredClient) -> None:
        super().__init__(inner)
        self._client = client

    def run(
        self, arguments: Sequence[Buffer], launch: Callable[[Sequence[Buffer]], Sequence[Buffer]]
    ) -> Sequence[Buffer]:
        results = launch(arguments)
        made = [result.nbytes for result in results if not isinstance(result, ErrorBuffer)]
        client = self._client
        with client.lock:
            client.launches += 1
            client.buffers += len(made)
            client.bytes += sum(made)
        return results
