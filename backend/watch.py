"""What `emutpu regions` and `emutpu fuzz` switch on in the program's process."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emutpu.backend.pjrt import Client

__all__ = ["watch"]


def watch(regions: str | None, fuzz: str | None, *, inputs: bool) -> Callable[[Client], Client]:
    """Start what is asked for, and give what is to be put around the client.

    ``regions`` is the folder of a recording, ``fuzz`` the file with perturbations. Both write when the process exits;
    what cannot be written is said on standard error. Raises OSError and ValueError for an unusable ``fuzz``.
    """
    wrappers: list[Callable[[Client], Client]] = []
    if fuzz is not None:
        from emutpu.backend.fuzzing import start as disturb

        disturbance = disturb(Path(fuzz))
        wrappers.append(disturbance.disturbed)
        _at_exit(disturbance.write)
    if regions is not None:
        from emutpu.backend.deferred.recorder import start as record

        recording = record(Path(regions), inputs=inputs)
        wrappers.append(recording.metered)
        _at_exit(recording.write)

    def wrap(client: Client) -> Client:
        for wrapper in wrappers:
            client = wrapper(client)
        return client

    return wrap


def _at_exit(write: Callable[[], None]) -> None:
    owner = os.getpid()

    def run() -> None:
        if os.getpid() != owner:  # a fork's child writes nothing
            return
        try:
            write()
        except OSError as error:
            print(f"emutpu: the recording was not written: {error}", file=sys.stderr)

    atexit.register(run)
