"""The real TPU compiler in a process of its own: ``python _aot_worker.py TOPOLOGY``, jobs on standard input.

A job is a line ``{"path", "effort"}``, its answer a line on the original standard output. libtpu may abort on a module,
so whoever gives the jobs must expect the end of the process. The first line says whether the compiler is there.
Needs no TPU: libtpu compiles for a named topology.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, TextIO

__all__ = ["main"]

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no chip is opened, so its lock need not be held
    "JAX_PLATFORMS": "cpu",
    "EMUTPU_CHIP": "none",
    "TPU_SKIP_MDS_QUERY": "1",
}


def main(topology: str) -> None:
    """Answer jobs until standard input ends."""
    os.environ.update(_QUIET)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libtpu prints to standard output
    try:
        compiler = _Compiler(topology)
    except Exception as error:  # noqa: BLE001 (the process boundary: whatever it is, the other side reports it)
        _answer(answers, {"ready": False, "error": _text(error)})
        return
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        job = json.loads(line)
        try:
            _answer(answers, {"ok": True, "error": None} | compiler.compile(job["path"], job["effort"]))
        except Exception as error:  # noqa: BLE001 (as above)
            _answer(answers, {"ok": False, "error": _text(error)})


class _Compiler:
    def __init__(self, topology: str) -> None:
        from jax.experimental import topologies

        (self.device, *_) = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices

    def compile(self, path: str, effort: str) -> dict[str, Any]:
        import numpy as np
        from jax._src.interpreters import mlir
        from jaxlib import _jax, xla_client
        from jaxlib.mlir import ir

        options = xla_client.CompileOptions()
        options.num_replicas = options.num_partitions = 1
        options.device_assignment = xla_client.DeviceAssignment.create(np.array([[0]]))
        options.env_option_overrides = [("xla_optimization_level", f"EFFORT_{effort}")]
        with open(path, "rb") as stream, mlir.make_ir_context():
            module = ir.Module.parse(stream.read())
            made = self.device.client.compile(module, _jax.DeviceList((self.device,)), options)
        memory = made.get_compiled_memory_stats()
        costs = made.cost_analysis()
        optimal = float(costs.get("optimal_seconds", -1.0))
        text = "".join(part.to_string() for part in made.hlo_modules())
        return {
            "cycles": sum(map(int, _CYCLES.findall(text))) or None,
            "optimal_seconds": optimal if optimal > 0 else None,
            "flops": max(0.0, float(costs.get("flops", 0.0))),
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporary_bytes": memory.temp_size_in_bytes,
        }


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _answer(stream: TextIO, document: dict[str, Any]) -> None:
    stream.write(json.dumps(document) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1])
