"""What the clients have in common: the state of a client, and what an executable knows of its module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from emutpu.backend.pjrt import (
    Buffer,
    CompileOptions,
    ErrorBuffer,
    ExecutableMemory,
    FailedPrecondition,
    InvalidArgument,
    ModelledCost,
    Topology,
)

from . import _blob
from ._model import Modelled, modelled
from ._modules import ModuleInfo
from .checks import check_arguments, check_options, propagate
from .hbm import total_bytes

__all__ = ["EmulatedClient", "EmulatedExecutable", "Launch"]

Launch = Callable[[Sequence[Any]], Sequence[Any]]


class EmulatedClient:
    """Topology, being open, and whether this process may use the client. ``cost_chips`` are those of which every executable
    is modelled along with the emulated one.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.cost_chips: tuple[str, ...] = ()
        self._closed = False
        self._process = os.getpid()

    def check_open(self) -> None:
        """Raise FailedPrecondition after :meth:`close` and in a forked child."""
        if self._closed:
            raise FailedPrecondition("the client is closed")
        if os.getpid() != self._process:
            raise FailedPrecondition(
                "the client was made in another process: its threads do not survive fork and the next compilation "
                "would hang; start workers with 'spawn' or 'forkserver'"
            )

    def check_compile(self, options: CompileOptions) -> None:
        """Raise FailedPrecondition, InvalidArgument or Unimplemented unless ``options`` can be compiled for here."""
        self.check_open()
        check_options(self.topology, options)

    def close(self) -> None:
        """Refuse every later use with FailedPrecondition."""
        self._closed = True

    def fingerprint(self) -> str:
        """Identifies what decides the generated code besides module and options."""
        raise NotImplementedError

    def unpack(self, blob: bytes, options: CompileOptions) -> _blob.Contents:
        """What is in a serialised executable. Raises InvalidArgument for a corrupt or foreign one."""
        self.check_compile(options)
        return _blob.unpack(blob, self.fingerprint())


class EmulatedExecutable:
    """A module on one device: its interface, what it would cost on the chip, and the checks of :meth:`execute`.

    ``module`` is the canonical bytecode; the cost is modelled when it is first asked for, and kept.
    """

    __slots__ = (
        "__weakref__",
        "_client",
        "_info",
        "_modelled",
        "_module",
        "_options",
        "arguments",
        "donated",
        "launch",
        "name",
        "results",
    )

    def __init__(
        self, client: EmulatedClient, info: ModuleInfo, module: bytes, options: CompileOptions, launch: Launch
    ) -> None:
        self._client = client
        self._info = info
        self._module = module
        self._options = options
        self._modelled: dict[str, Modelled] = {}
        self.name = info.name
        self.arguments = info.arguments
        self.results = info.results
        self.donated = info.donated
        self.launch = launch

    def execute(self, arguments: Sequence[Buffer]) -> Sequence[Buffer]:
        """Check every argument, then launch. Raises InvalidArgument or FailedPrecondition."""
        self._client.check_open()
        check_arguments(self.name, self.arguments, arguments)
        return self.launch(arguments)

    def _code(self) -> bytes:
        """Generated code, if there is any."""
        return b""

    def _features(self, code: bytes) -> frozenset[str]:
        """CPU features that the code needs."""
        return frozenset()

    def serialize(self) -> bytes:
        """Interface, canonical module, code and costs under a checksum, for :meth:`Client.deserialize`."""
        self._client.check_open()
        self._figures(self._client.topology.chip)
        code = self._code()
        return _blob.pack(
            self._info, self._client.fingerprint(), self._module, code, self._features(code), self._modelled
        )

    def knowing(self, figures: Mapping[str, Modelled]) -> Self:
        """This executable, with what the model said of it before, by chip."""
        self._modelled |= figures
        return self

    def _figures(self, chip: str) -> Modelled:
        if chip not in self._modelled:
            missing = [name for name in dict.fromkeys((chip, *self._client.cost_chips)) if name not in self._modelled]
            self._modelled |= modelled(self._module, self._info, missing, self._options)
        return self._modelled[chip]

    def memory(self) -> ExecutableMemory:
        """Bytes of the emulated device's memory, tiles filled up; ``temporaries`` by the cost model."""
        return ExecutableMemory(
            arguments=total_bytes(self.arguments),
            results=total_bytes(self.results),
            temporaries=self._figures(self._client.topology.chip).temporaries,
            code=0,
            aliased=total_bytes(self.results[index] for index in self._info.reused),
        )

    def cost(self) -> ModelledCost | None:
        """What the emulated chip would spend on a launch."""
        return self.cost_on(self._client.topology.chip)

    def cost_on(self, chip: str) -> ModelledCost | None:
        """What a launch would cost on that chip; None where nothing is known of it. Kept, once it was asked for."""
        return self._figures(chip).cost


def emulated_launch(
    client: EmulatedClient, info: ModuleInfo, kind: type[Any], run: Callable[[Sequence[Any]], Sequence[Any]]
) -> Launch:
    """``run`` behind what every launch owes: an open client, failures that spread, buffers of ``kind``, donation."""
    name, results, donated = info.name, info.results, info.donated

    def launch(arguments: Sequence[Any]) -> Sequence[Any]:
        client.check_open()
        failed = propagate(arguments, results, donated)
        if failed is not None:
            return failed
        for position, argument in enumerate(arguments):
            if not isinstance(argument, kind):
                raise InvalidArgument(f"a {type(argument).__name__} is no buffer of this client", op=name)
            if argument.is_deleted():
                raise FailedPrecondition(f"argument {position} of {name} has been deleted or donated", op=name)
        made = run(arguments)
        for position in donated:
            arguments[position].delete()
        return made

    return launch


def readable(buffer: Any, kind: type[Any]) -> None:
    """Raise the error of a failed buffer, InvalidArgument for another client's, FailedPrecondition for a deleted one."""
    if isinstance(buffer, ErrorBuffer):
        raise buffer.error
    if not isinstance(buffer, kind):
        raise InvalidArgument(f"a {type(buffer).__name__} is no buffer of this client")
    if buffer.is_deleted():
        raise FailedPrecondition("the buffer has been deleted or donated")
