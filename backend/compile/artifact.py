"""Compiled graphs as bytes: what a call does, as JSON, with each module and its native code.

An artifact is an entry of the compile cache's format (:mod:`emutpu.backend.cache_entry`): checksummed, signed where the
cache has a secret, and believed in nothing before that holds. There is no pickle in it. In the environment that made it,
the native code is loaded; in another, the StableHLO module is compiled.

The payload is the length of a JSON document (8 bytes, little-endian), the document, and the blobs that it refers to.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx

from emutpu.backend.cache_entry import RejectedEntry, pack, read_header
from emutpu.backend.cache_store import read_file
from emutpu.backend.cell import Layout, layout_of
from emutpu.backend.compile.assembly import CompiledGraph
from emutpu.backend.compile.program import DeviceProgram
from emutpu.backend.compile.replay import (
    Alias,
    Drawn,
    Fresh,
    Given,
    Held,
    Hosted,
    Replayed,
    Restored,
    State,
    Taken,
    Write,
)
from emutpu.backend.deferred.ops import DeferredOp
from emutpu.backend.deferred.region import Node, Region, RegionKey, region
from emutpu.backend.dtypes import DTYPES, dtype_name
from emutpu.backend.keys import Key
from emutpu.backend.options import LOCAL
from emutpu.backend.pjrt import Buffer, InvalidArgument
from emutpu.backend.runtime import runtime

__all__ = ["LoadedGraph", "dumps", "load", "loads", "save"]

_SCHEMA = "emutpu.compiled_graph/1"
_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES}
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (Taken, Hosted, Held, Drawn, Restored, Fresh, Alias, Given, State, Write)
}
_PLAIN = (type(None), bool, int, float, str)


class LoadedGraph:
    """A compiled graph that was loaded: call it with the list of its inputs, as :class:`CompiledGraph`."""

    def __init__(self, name: str, steps: Sequence[_Step], count: int, returned: Sequence[Any], attributes: Any) -> None:
        self._boxed_call = True
        self.name = name
        self.steps = tuple(steps)
        self._count = count
        self._returned = tuple(returned)
        self._attributes = attributes

    def __call__(self, inputs: list[Any]) -> list[Any]:
        if len(inputs) != self._count:
            raise TypeError(f"the graph {self.name} takes {self._count} inputs, got {len(inputs)}")
        slots: dict[int, Any] = dict(enumerate(inputs)) | self._attributes
        inputs.clear()
        for step in self.steps:
            made = step.program([slots[slot] for slot in step.inputs])
            slots.update(zip(step.outputs, made, strict=True))
        return [slots[value["slot"]] if isinstance(value, dict) else value for value in self._returned]


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    program: LoadedProgram
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class LoadedProgram(DeviceProgram):
    """A piece that was loaded, for the options that it was compiled for."""

    def __init__(self, name: str, replayed: Replayed, options: str, key: Key, module: bytes, code: bytes) -> None:
        super().__init__(None, None, name)  # type: ignore[arg-type]  # it has no graph any more
        self._replayed = replayed
        self._canonical = options
        self._key = key
        self._module = module
        self._code = code

    def replay(self) -> Replayed:
        """What was saved, with an executable of the client there is now. Raises RuntimeError for other options."""
        now = LOCAL.state.options.canonical()
        if now != self._canonical:
            raise RuntimeError(
                f"the graph {self.name} was compiled and saved for other options ({self._canonical}) than this thread "
                f"has now ({now}): set those, or compile it again"
            )
        made = dataclasses.replace(self._replayed, options=LOCAL.state.plain)
        if made.region is not None:
            made.region.executables[made.options] = (self._key, self._executable(made))
        return made

    def _executable(self, made: Replayed) -> Any:
        client, options = runtime().client, made.options.compile_options
        if self._code:
            try:
                return client.deserialize(self._code, options)
            except InvalidArgument as error:
                raise RejectedEntry(f"the client refuses the code of {self.name}: {error}") from error
        return client.compile(self._module, options)


# Writing -------------------------------------------------------------------------------------------------


class _Blobs:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, data: bytes) -> list[int]:
        place = [self.size, len(data)]
        self.parts.append(data)
        self.size += len(data)
        return place


def dumps(compiled: CompiledGraph) -> bytes:
    """The artifact of a compiled graph, for the calling thread's options. Raises NotImplementedError for a graph with work on
    the host between, or with values that JSON does not hold.
    """
    blobs = _Blobs()
    slots: dict[fx.Node, int] = {node: n for n, node in enumerate(compiled.module.graph.find_nodes(op="placeholder"))}
    count = len(slots)
    attributes = {}
    steps = []
    for program in compiled.steps:
        if not isinstance(program, DeviceProgram):
            raise NotImplementedError(
                f"the graph {compiled.name} works on the host between ({program.nodes[0].target}): it cannot be saved"
            )
        for node in program.piece.inputs:
            if node.op == "get_attr":
                attributes[slots.setdefault(node, len(slots))] = _attribute(compiled.module, str(node.target), blobs)
        for node in program.piece.outputs:
            slots.setdefault(node, len(slots))
        steps.append(_piece(program, slots, blobs))
    returned = [{"slot": slots[v]} if isinstance(v, fx.Node) else _constant(v) for v in compiled.returned]
    document = {
        "schema": _SCHEMA,
        "name": compiled.name,
        "inputs": count,
        "attributes": [{"slot": slot} | value for slot, value in attributes.items()],
        "steps": steps,
        "returned": returned,
    }
    text = json.dumps(document).encode()
    payload = b"".join((len(text).to_bytes(8, "little"), text, *blobs.parts))
    key = "+".join(step["key"] for step in steps) or compiled.name
    return pack(key, runtime().binary_fingerprint(), payload, 0.0, runtime().cache_secret)


def _piece(program: DeviceProgram, slots: dict[fx.Node, int], blobs: _Blobs) -> dict[str, Any]:
    launch = program.prepare()
    replayed = launch.replayed
    found = replayed.region
    written: dict[str, Any] = {
        "name": program.name,
        "options": LOCAL.state.options.canonical(),
        "inputs": [slots[node] for node in program.piece.inputs],
        "outputs": [slots[node] for node in program.piece.outputs],
        "arguments": [_encoded(argument, blobs) for argument in replayed.arguments],
        "results": [_encoded(layout, blobs) for layout in replayed.results],
        "writes": [_encoded(write, blobs) for write in replayed.writes],
        "produced": [_encoded(output, blobs) for output in replayed.outputs],
        "key": program.name,
    }
    if found is not None:
        constants = {constant.number for constant in found.key.constants}
        numbers = [number for number in range(found.key.inputs) if number not in constants]
        written |= {
            "donated": [numbers.index(number) for number in sorted(found.key.donated - constants)],
            "key": str(launch.key),
            "module": blobs.add(found.build(replayed.origins)),
            "code": blobs.add(launch.executable.serialize()),
        }
    return written


def _encoded(value: Any, blobs: _Blobs) -> Any:
    if isinstance(value, Layout):
        return {"$layout": [list(value.dims), dtype_name(value.dtype)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, tuple | list):
        return [_encoded(item, blobs) for item in value]
    if isinstance(value, _PLAIN):
        return value
    kind = type(value).__name__
    if kind in _KINDS:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.name != "wraps"}
        return {"kind": kind} | {name: _encoded(field, blobs) for name, field in fields.items()}
    if isinstance(value, Buffer):
        return {"$buffer": _array(np.asarray(runtime().client.to_host(value)), blobs)}
    raise NotImplementedError(f"a compiled graph that holds {value!r} cannot be saved")


def _array(array: np.ndarray[Any, Any], blobs: _Blobs) -> list[Any]:
    return [list(array.shape), array.dtype.name, blobs.add(np.ascontiguousarray(array).tobytes())]


def _constant(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    raise NotImplementedError(f"a compiled graph that returns the constant {value!r} cannot be saved")


def _attribute(module: fx.GraphModule, target: str, blobs: _Blobs) -> dict[str, Any]:
    found: Any = module
    for part in target.split("."):
        found = getattr(found, part)
    if not isinstance(found, torch.Tensor):
        raise NotImplementedError(f"a compiled graph with the subgraph {target} cannot be saved")
    host = found.detach().cpu().contiguous()
    data = host.view(torch.uint8).numpy() if host.dim() else host.reshape(1).view(torch.uint8).numpy()
    return {
        "device": found.device.type,
        "dtype": dtype_name(found.dtype),
        "shape": list(found.shape),
        "data": blobs.add(data.tobytes()),
    }


# Reading -------------------------------------------------------------------------------------------------


def loads(data: bytes) -> LoadedGraph:
    """The graph in an artifact. Raises RejectedEntry for one that is corrupt, unsigned where a secret is set, or no artifact."""
    entry = read_header(data, runtime().cache_secret)
    try:
        size = int.from_bytes(entry.payload[:8], "little")
        document = json.loads(entry.payload[8 : 8 + size])
        if document["schema"] != _SCHEMA:
            raise RejectedEntry(f"an artifact of schema {document['schema']}, not {_SCHEMA}")
        reader = _Reader(entry.payload[8 + size :], own=entry.binary == runtime().binary_fingerprint())
        return reader.graph(document)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, RejectedEntry):
            raise
        raise RejectedEntry(f"no compiled graph: {type(error).__name__}: {error}") from error


class _Reader:
    """Makes what a verified document says. ``own``: native code in it is of this environment."""

    def __init__(self, blobs: bytes, *, own: bool) -> None:
        self.blobs = blobs
        self.own = own

    def blob(self, place: Sequence[int]) -> bytes:
        start, size = place
        if start < 0 or size < 0 or start + size > len(self.blobs):
            raise RejectedEntry("a part of the artifact lies outside of it")
        return self.blobs[start : start + size]

    def graph(self, document: dict[str, Any]) -> LoadedGraph:
        steps = [_Step(self.program(step), tuple(step["inputs"]), tuple(step["outputs"])) for step in document["steps"]]
        attributes = {written["slot"]: self.tensor(written) for written in document["attributes"]}
        return LoadedGraph(document["name"], steps, document["inputs"], document["returned"], attributes)

    def tensor(self, written: dict[str, Any]) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(self.blob(written["data"])), dtype=torch.uint8)
        return flat.view(_DTYPES[written["dtype"]]).reshape(written["shape"]).to(written["device"])

    def program(self, written: dict[str, Any]) -> LoadedProgram:
        name = written["name"]
        arguments, results, writes, produced = (
            tuple(self.decoded(item) for item in written[field])
            for field in ("arguments", "results", "writes", "produced")
        )
        module = self.blob(written["module"]) if "module" in written else b""
        code = self.blob(written["code"]) if "code" in written and self.own else b""
        found = _opaque(name, module, len(arguments), results, written.get("donated", ())) if module else None
        origin = (name, None, 0)
        replayed = Replayed(found, (origin,), LOCAL.state.plain, arguments, results, writes, produced)
        key = Key(*written["key"].split("_")) if module else Key(name, "", "")
        return LoadedProgram(name, replayed, written["options"], key, module, code)

    def decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return tuple(self.decoded(item) for item in value)
        if not isinstance(value, dict):
            return value
        if "$layout" in value:
            dims, dtype = value["$layout"]
            return layout_of(tuple(dims), _DTYPES[dtype])
        if "$dtype" in value:
            return _DTYPES[value["$dtype"]]
        if "$buffer" in value:
            shape, dtype, place = value["$buffer"]
            return runtime().client.from_host(np.frombuffer(self.blob(place), np.dtype(dtype)).reshape(shape).copy())
        fields = {name: self.decoded(field) for name, field in value.items() if name != "kind"}
        kind = _KINDS[value["kind"]]
        if kind is Fresh:
            fields["wraps"] = tuple(fields[name] for name in ("layout", "nbytes", "dtype", "size", "stride"))
        return kind(**fields)


def _opaque(name: str, module: bytes, inputs: int, results: Sequence[Layout], donated: Sequence[int]) -> Region:
    """A region of one op that stands for a whole module."""

    def emit(*_arguments: object) -> Any:
        raise RuntimeError(f"the graph {name} was loaded from an artifact, which holds no ops")

    digest = hashlib.sha256(module).hexdigest()
    op = DeferredOp(
        name,
        emit,
        results,
        (f"artifact:{digest}", ""),
        results=[(layout.dims, layout.dtype) for layout in results],
        parts=[name],
    )
    node = Node(op, tuple(~n for n in range(inputs)))
    return region(RegionKey((node,), tuple(range(len(results))), (), frozenset(donated), name))


# Files ---------------------------------------------------------------------------------------------------


def save(compiled: CompiledGraph, path: str | Path) -> None:
    """Write the artifact as a file of mode 0600, whole or not at all. Raises FileExistsError if the file is there."""
    data = dumps(compiled)
    temporary = Path(f"{path}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.link(temporary, path)
    finally:
        os.unlink(temporary)


def load(path: str | Path) -> LoadedGraph:
    """The graph in a file, which must be ours, closed to other writers and no link. Raises RejectedEntry, OSError."""
    return loads(read_file(path))
