"""The table of lowerings: ATen schema → a function that emits StableHLO.

A lowering is ``emit(cx, *arguments)``: tensors arrive as :class:`~emutpu.backend.hlo.Value`, absent ones as None, lists as
lists, Python scalars as 0-d values (i64, f64, bool, complex64) or, when equal to the schema's default, as numbers;
everything else as it is. It returns one value, or a sequence for several results, in schema order, followed by the new
values of the arguments named in ``mutates``.

In-place and out= overloads are derived (:mod:`emutpu.backend.kernels`); a lowering is written once, for the functional
overload, or for the in-place one where PyTorch has no other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Builder, Number, Value

if TYPE_CHECKING:
    from typing import TypeAlias

__all__ = ["LOWERINGS", "Context", "Emit", "Lowering", "OutputSpec", "lowering", "lowerings"]

Emitted: TypeAlias = "Value | Sequence[Value | None] | None"
Emit = Callable[..., Emitted]
E = TypeVar("E", bound=Emit)


@dataclasses.dataclass(frozen=True, slots=True)
class OutputSpec:
    """What PyTorch's own meta kernel says of one result. ``room`` elements of storage, where that is more than it fills."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    room: int = 0


@dataclasses.dataclass(slots=True)
class Context:
    """What a lowering may ask for beside its arguments.

    ``outputs`` are the results' specs; ``arguments`` the call's own arguments by name, tensors as meta tensors (0-d CPU
    tensors, and numbers given for tensors, as they came); ``state`` the generator's state, ui64[3].
    """

    builder: Builder
    outputs: tuple[OutputSpec | None, ...]
    arguments: dict[str, Any]
    state: Value | None = None

    @property
    def output(self) -> OutputSpec:
        """The first result's spec."""
        spec = self.outputs[0]
        if spec is None:
            raise AssertionError("the first result is undefined")
        return spec

    def promote(self, kind: ELEMENTWISE_TYPE_PROMOTION_KIND, *names: str) -> torch.dtype:
        """The dtype to compute in, for the named arguments: PyTorch's promotion, 16-bit floats raised to float32."""
        values = [self.arguments[name] for name in names if self.arguments[name] is not None]
        computation, _ = elementwise_dtypes(*values, type_promotion_kind=kind)
        return opmath(computation)

    def common(self, *names: str) -> torch.dtype:
        """The dtype the named arguments are converted to before anything is computed: PyTorch's result type."""
        values = [self.arguments[name] for name in names if self.arguments[name] is not None]
        _, common = elementwise_dtypes(*values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.NO_OPMATH)
        return common

    def scalar(self, value: Value | Number, dtype: torch.dtype) -> Value:
        """A scalar argument as a 0-d value of ``dtype``."""
        if isinstance(value, Value):
            return value.convert(dtype)
        return self.builder.full(value, (), dtype)

    def random_bits(self, shape: Sequence[int], dtype: torch.dtype = torch.uint32) -> Value:
        """Philox bits of this draw."""
        if self.state is None:
            raise AssertionError("this lowering did not declare that it draws")
        return self.builder.random_bits(self.state, shape, dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Lowering:
    """One row of the table.

    ``static``  names of Scalar arguments whose value decides a shape (their value is part of the key).
    ``mutates`` arguments that the op writes although the schema does not say so (running statistics).
    ``draws``   how many 32-bit random numbers a call takes, from the output specs (the written arguments' where nothing is
                returned anew) and the arguments by name; None for ops that draw none.
    ``meta``    replaces PyTorch's meta kernel where that is missing or depends on the backend.
    ``dots``    the op emits dots or convolutions, so the matmul precision is part of its key.
    ``reads``   False for in-place ops that overwrite their target without reading it.
    ``dynamic`` names of float arguments that are device inputs, like Scalars (a learning rate).
    ``room``    how many elements the first result's storage holds beyond what it fills, from the arguments by name.
    ``shapes``  names of tensors of which only size, strides and dtype matter: they are no operands.
    ``dispatched`` False for rows that only other kernels of ours call.
    ``beyond``  the real device has no kernel for it: registered only with ``EMUTPU_BEYOND=1``.
    ``typed``   a Scalar that the device takes in the dtype of a tensor or dtype argument, and that argument: an int and a
                float given with a floating-point one are the same program.
    ``around``  makes what the dispatcher calls from the generated kernel, for ops with something to do on the host first.
    """

    name: str
    schema: str
    emit: Emit
    static: frozenset[str] = frozenset()
    mutates: tuple[str, ...] = ()
    draws: Callable[[tuple[OutputSpec | None, ...], dict[str, Any]], int] | None = None
    meta: Callable[..., Any] | None = None
    dots: bool = False
    reads: bool = True
    dynamic: frozenset[str] = frozenset()
    room: Callable[[dict[str, Any]], int] | None = None
    shapes: frozenset[str] = frozenset()
    dispatched: bool = True
    beyond: bool = False
    around: Callable[[Any], Callable[..., Any]] | None = None
    typed: tuple[str, str] | None = None


LOWERINGS: dict[str, Lowering] = {}


def _add(row: Lowering) -> None:
    if row.name in LOWERINGS:
        raise AssertionError(f"two lowerings for aten::{row.name}")
    LOWERINGS[row.name] = row


def lowering(schema: str, **options: Any) -> Callable[[E], E]:
    """Register the decorated function for ``schema``, written as ATen writes it: ``"mm(Tensor self, …) -> Tensor"``."""
    name = schema.partition("(")[0]
    for option in ("static", "dynamic", "shapes"):
        if isinstance(options.get(option), str):
            options[option] = frozenset(options[option].split())

    def register(emit: E) -> E:
        _add(Lowering(name, schema, emit, **options))
        return emit

    return register


def lowerings(signature: str, rows: dict[str, Emit], **options: Any) -> None:
    """Register a table of ops that share one signature, ``"(Tensor self) -> Tensor"``."""
    for name, emit in rows.items():
        lowering(name + signature, **options)(emit)
