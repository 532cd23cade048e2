"""Read what a client needs to know of a canonical module: name, avals, donation, and whether its extents are sane."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from emutpu._jaxlib import entries, ir, read_module
from emutpu.backend.pjrt import Aval, InvalidArgument, Unimplemented

__all__ = ["DTYPES", "WIDEST", "ModuleInfo", "element_name", "entry", "inspect", "parse", "walk"]

DTYPES: dict[str, np.dtype[Any]] = {
    "i1": np.dtype(np.bool_),
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
    "i4": np.dtype(ml_dtypes.int4),
    "ui4": np.dtype(ml_dtypes.uint4),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f8E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn),
    "f8E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "f8E4M3B11FNUZ": np.dtype(ml_dtypes.float8_e4m3b11fnuz),
    "complex<f32>": np.dtype(np.complex64),
    "complex<f64>": np.dtype(np.complex128),
}
_ELEMENTS = {dtype: name for name, dtype in DTYPES.items()}
_MAX_BYTES = 2**63 - 1
WIDEST = 16  # bytes of complex<f64>


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleInfo:
    """The interface of a module, the names of the operations it uses, the bytes of its largest tensor, counted as if an
    element had :data:`WIDEST`, and the most dimensions of one.

    ``reused`` are the results that the device puts where the tensor they replace was; the host reuses more.
    """

    name: str
    arguments: tuple[Aval, ...]
    results: tuple[Aval, ...]
    donated: frozenset[int]
    ops: frozenset[str]
    largest: int = 0
    rank: int = 0
    reused: frozenset[int] = frozenset()


def element_name(dtype: np.dtype[Any]) -> str:
    """MLIR's spelling of a numpy dtype."""
    return _ELEMENTS[dtype]


def parse(module: bytes) -> Any:
    """The ``ir.Module`` of bytecode (or MLIR text as bytes). Raises InvalidArgument."""
    try:
        return read_module(module)
    except (ir.MLIRError, ValueError) as error:
        raise InvalidArgument(f"malformed StableHLO module: {error}") from error


def inspect(module: Any) -> ModuleInfo:
    """Interface and ops of a parsed module. Raises InvalidArgument for a missing ``main`` or an absurd extent."""
    main = entry(module)
    kind = main.type
    ops: set[str] = set()
    types = set(kind.inputs)
    for operation in walk(module.operation):
        ops.add(operation.name)
        types.update(result.type for result in operation.results)
    symbol = module.operation.attributes["sym_name"].value if "sym_name" in module.operation.attributes else "main"
    return ModuleInfo(
        name=symbol,
        arguments=tuple(_aval(t) for t in kind.inputs),
        results=tuple(_aval(t) for t in kind.results),
        donated=_marked(main, "jax.buffer_donor") | _marked(main, "tf.aliasing_output"),
        ops=frozenset(ops),
        largest=max(map(_size, types), default=0),
        rank=max((tensor.rank for tensor in types if isinstance(tensor, ir.RankedTensorType)), default=0),
        reused=_reused(module),
    )


def entry(module: Any) -> Any:
    """The function ``main``. Raises InvalidArgument where there is none."""
    for operation in module.body.operations:
        if operation.operation.name == "func.func" and operation.sym_name.value == "main":
            return operation
    raise InvalidArgument("the module has no function 'main'")


def walk(operation: Any) -> Iterator[Any]:
    """Every operation inside ``operation``, outer before inner."""
    for region in operation.regions:
        for block in region:
            for inner in block.operations:
                inner = inner.operation
                yield inner
                if inner.regions:
                    yield from walk(inner)


def _aval(tensor: Any) -> Aval:
    if not isinstance(tensor, ir.RankedTensorType) or not tensor.has_static_shape:
        raise InvalidArgument(f"an argument or result of 'main' is {tensor}: only static ranked tensors cross the seam")
    dtype = DTYPES.get(str(tensor.element_type))
    if dtype is None:
        raise Unimplemented(f"no buffers of element type {tensor.element_type}")
    return Aval(tuple(tensor.shape), dtype)


def _size(tensor: Any) -> int:
    """An upper bound of the bytes of a type. Raises InvalidArgument where XLA would abort: past 2^63-1."""
    if not isinstance(tensor, ir.RankedTensorType) or not tensor.has_static_shape:
        return 0
    size = WIDEST
    for extent in tensor.shape:
        size *= max(extent, 1)
    if size > _MAX_BYTES:
        raise InvalidArgument(f"{tensor} is larger than any address space")
    return size


def _marked(main: Any, name: str) -> frozenset[int]:
    """Positions of the arguments that carry an attribute (one that is not ``false``)."""
    if "arg_attrs" not in main.attributes:
        return frozenset()
    found = set()
    for position, attributes in enumerate(entries(main.arg_attrs)):
        attributes = ir.DictAttr(attributes)
        if name in attributes and str(attributes[name]) != "false":
            found.add(position)
    return frozenset(found)


def _reused(module: Any) -> frozenset[int]:
    attributes = module.operation.attributes
    if "emutpu.reused" not in attributes:
        return frozenset()
    return frozenset(entries(ir.DenseI64ArrayAttr(attributes["emutpu.reused"])))
