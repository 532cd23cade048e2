"""Run exported regions with jax alone, and compare with what the emulated device computed.

    python replay.py [--rtol R] [--region NAME]

Exits with 0 when every result agrees, 1 when one does not. The emulated device multiplies float32 matrices as the chip
does at the region's precision; jax's CPU backend ignores that attribute, hence the tolerance.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jax.extend import backend
from jaxlib import _jax, xla_client

HERE = pathlib.Path(__file__).resolve().parent


def load(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    """An array; types that numpy has not are stored as bytes."""
    array = np.load(HERE / value["file"])
    if array.dtype.name != value["dtype"]:
        array = np.frombuffer(array.tobytes(), jax.numpy.dtype(value["dtype"]))
    shaped: np.ndarray[Any, Any] = array.reshape(value["shape"])
    return shaped


def run(region: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    """The results of one region on jax's default device."""
    client = backend.get_backend()
    device = client.local_devices()[0]
    options = xla_client.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    module = (HERE / region["name"] / "module.mlir").read_text(encoding="utf-8")
    executable = client.compile_and_load(module, _jax.DeviceList((device,)), options)
    arguments = [jax.device_put(load(value), device) for value in region["inputs"]]
    results = executable.execute_sharded(arguments).disassemble_into_single_device_arrays()
    return [np.asarray(result[0]) for result in results]


def error(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The largest difference, relative to the largest expected value."""
    if not expected.size:
        return 0.0
    a, b = (array.astype(np.complex128 if array.dtype.kind == "c" else np.float64) for array in (found, expected))
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    scale = max(float(np.max(np.abs(b), where=np.isfinite(b), initial=0.0)), 1e-30)
    return float(np.max(np.where(same, 0.0, np.abs(a - b)))) / scale


def main() -> int:
    """Replay all regions, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rtol", type=float, default=2e-2, help="largest relative difference that is accepted")
    parser.add_argument("--region", help="the name of one region")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    regions = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))["regions"]
    wrong = 0
    for region in regions:
        if options.region not in (None, region["name"]):
            continue
        expected = [load(value) for value in region["outputs"]]
        errors = [error(a, b) for a, b in zip(run(region), expected, strict=True)]
        worst = max(errors, default=0.0)
        verdict = "ok" if worst <= options.rtol else "DIFFERS"
        wrong += verdict != "ok"
        print(f"{region['name']} {verdict}: {len(region['ops'])} ops, largest relative difference {worst:.3g}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
