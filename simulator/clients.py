"""The clients by name; each lives in the module named after it and is imported only when asked for."""

from __future__ import annotations

import difflib
import importlib

from emutpu.backend.pjrt import Client, Topology

from .topology import single_chip

__all__ = ["CLIENTS", "make_client"]

CLIENTS: dict[str, str] = {
    "cpu": "CpuClient",
    "interpreter": "InterpreterClient",
    "dry_run": "DryRunClient",
}


def make_client(
    name: str = "cpu",
    topology: Topology | None = None,
    *,
    cpu_target: str | None = None,
    quick: bool = False,
    native_highest: bool = False,
    seed: int | None = None,
    cost_chips: tuple[str, ...] = (),
) -> Client:
    """A new client: ``cpu`` computes with XLA's CPU compiler, ``interpreter`` with StableHLO's reference interpreter,
    ``dry_run`` knows shapes only, and reads give values drawn from ``seed``, if there is one. ``topology`` defaults to
    one v5e chip; ``cpu_target`` is a baseline that ``cpu`` compiles for (``x86-64-v3`` …) instead of this host, and with
    ``quick`` it spends as little time on compiling as it can; ``native_highest`` computes HIGHEST by one f32 operation
    instead of six bf16 passes. Executables are modelled on ``cost_chips``, too. Raises ValueError for an unknown name.
    """
    if name not in CLIENTS:
        close = difflib.get_close_matches(name, CLIENTS, n=1, cutoff=0.3)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown client {name!r}: known are {', '.join(CLIENTS)}{hint}")
    module = importlib.import_module(f"{__package__}.{name}_client")
    options: dict[str, dict[str, object]] = {
        "cpu": {"cpu_target": cpu_target, "quick": quick, "native_highest": native_highest},
        "dry_run": {"seed": seed},
    }
    made = getattr(module, CLIENTS[name])(topology or single_chip(), **options.get(name, {}))
    made.cost_chips = cost_chips
    client: Client = made
    return client
