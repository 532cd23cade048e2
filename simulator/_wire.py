"""Run a module in StableHLO's reference interpreter with every value carried across as signless integers.

MLIR's Python attributes abort the process on some element types (complex) and know others not at all (fp8), integers
they carry exactly. So the module gets a ``main`` that takes and gives bits, and converts around the original.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from emutpu import _jaxlib
from emutpu._jaxlib import context, ir, stablehlo
from emutpu.backend.pjrt import Aval, InternalError

from ._modules import ModuleInfo, element_name

__all__ = ["Wire"]

_INNER = "emutpu_inner"


class Wire:
    """A module with its interface turned into integers."""

    def __init__(self, module: Any, info: ModuleInfo) -> None:
        self._results = info.results
        self._module = _wrap(module, info)

    def run(self, values: Sequence[np.ndarray[Any, Any]], op: str) -> list[np.ndarray[Any, Any]]:
        """Interpret; raises InternalError when the interpreter fails."""
        with context(), ir.Location.unknown():
            attributes = [_attribute(part) for value in values for part in _encode(value)]
            try:
                answers = stablehlo.eval_module(self._module, attributes)
            except _jaxlib.xla_error_types() as error:
                raise InternalError(f"the reference interpreter failed: {error}", op=op) from error
            parts = [np.array(answer) for answer in answers]
        decoded = []
        for aval in self._results:
            count = 2 if aval.dtype.kind == "c" else 1
            decoded.append(_decode(parts[:count], aval))
            del parts[:count]
        return decoded


def _attribute(part: Any) -> Any:
    """The MLIR attribute of an integer array (jaxlib's stubs know the buffer protocol only)."""
    return ir.DenseElementsAttr.get(part)


def _bits(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The signed integer that carries a real ``dtype``."""
    return np.dtype(f"i{dtype.itemsize}")


def _encode(value: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    if value.dtype.kind == "c":
        return [part for half in (value.real, value.imag) for part in _encode(np.ascontiguousarray(half))]
    shape = value.shape
    return [np.ascontiguousarray(value).reshape(-1).view(_bits(value.dtype)).reshape(shape)]


def _decode(parts: list[np.ndarray[Any, Any]], aval: Aval) -> np.ndarray[Any, Any]:
    if aval.dtype.kind == "c":
        half = np.dtype(f"f{aval.dtype.itemsize // 2}")
        whole = np.empty(aval.shape, aval.dtype)
        whole.real, whole.imag = (_decode([part], Aval(aval.shape, half)) for part in parts)
        return whole
    return np.ascontiguousarray(parts[0]).reshape(-1).view(aval.dtype).reshape(aval.shape)


def _tensor(aval: Aval, element: str | None = None) -> str:
    return "tensor<" + "".join(f"{extent}x" for extent in aval.shape) + (element or element_name(aval.dtype)) + ">"


class _Text:
    """The body of the new ``main``, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def emit(self, operation: str) -> str:
        name = f"%v{len(self.lines)}"
        self.lines.append(f"{name} = {operation}")
        return name

    def receive(self, parts: list[str], aval: Aval) -> str:
        """The value of ``aval`` from the integers that carry it."""
        real, wire = _tensor(aval), [_tensor(a, t) for a, t in _carriers(aval)]
        if aval.dtype.kind == "c":
            half = Aval(aval.shape, np.dtype(f"f{aval.dtype.itemsize // 2}"))
            left, right = (self.receive([part], half) for part in parts)
            return self.emit(f"stablehlo.complex {left}, {right} : {real}")
        return self.emit(f"stablehlo.{_cast(aval)} {parts[0]} : ({wire[0]}) -> {real}")

    def send(self, value: str, aval: Aval) -> list[str]:
        """The integers that carry ``value``."""
        real = _tensor(aval)
        if aval.dtype.kind == "c":
            half = Aval(aval.shape, np.dtype(f"f{aval.dtype.itemsize // 2}"))
            parts = [self.emit(f"stablehlo.{op} {value} : ({real}) -> {_tensor(half)}") for op in ("real", "imag")]
            return [word for part in parts for word in self.send(part, half)]
        wire = _tensor(*_carriers(aval)[0])
        return [self.emit(f"stablehlo.{_cast(aval)} {value} : ({real}) -> {wire}")]


def _carriers(aval: Aval) -> list[tuple[Aval, str]]:
    if aval.dtype.kind == "c":
        bits = 4 * aval.dtype.itemsize
        return [(aval, f"i{bits}")] * 2
    return [(aval, f"i{8 * aval.dtype.itemsize}")]


def _cast(aval: Aval) -> str:
    """Booleans and 4-bit integers take a byte on the host, so they are converted; all others keep their bits."""
    return "convert" if element_name(aval.dtype) in ("i1", "i4", "ui4") else "bitcast_convert"


def _wrap(module: Any, info: ModuleInfo) -> Any:
    text = _Text()
    parameters: list[str] = []
    inner: list[str] = []
    for aval in info.arguments:
        names = []
        for carrier, element in _carriers(aval):
            names.append(f"%a{len(parameters)}")
            parameters.append(f"{names[-1]}: {_tensor(carrier, element)}")
        inner.append(text.receive(names, aval))
    kinds = [_tensor(aval) for aval in info.results]
    call = f"func.call @{_INNER}({', '.join(inner)}) : ({', '.join(map(_tensor, info.arguments))}) -> "
    if info.results:
        text.lines.append(f"%r:{len(kinds)} = {call}({', '.join(kinds)})")
    sent = [word for index, aval in enumerate(info.results) for word in text.send(f"%r#{index}", aval)]
    wires = [_tensor(*carrier) for aval in info.results for carrier in _carriers(aval)]
    ending = f"return {', '.join(sent)} : {', '.join(wires)}" if sent else "return"
    body = "\n".join([*text.lines, ending])
    main = f"func.func public @main({', '.join(parameters)}) -> ({', '.join(wires)}) {{\n{body}\n}}"
    with context(), ir.Location.unknown():
        functions = []
        for operation in module.body.operations:
            if operation.operation.name == "func.func" and operation.sym_name.value == "main":
                operation.attributes["sym_name"] = ir.StringAttr.get(_INNER)
                operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
            functions.append(operation.operation.get_asm())
        return ir.Module.parse("module {\n" + "\n".join([*functions, main]) + "\n}")
