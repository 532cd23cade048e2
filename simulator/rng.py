"""Spell ``rng_bit_generator`` out in integer arithmetic, with the bits that XLA gives.

Philox4x32-10 and Threefry2x32-20 are the counter-based generators of Salmon et al., *Parallel random numbers: as easy
as 1, 2, 3* (SC 2011). What is XLA's own is how it lays counters out over an array and how it advances the state, so
that is what the contract suite compares.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from emutpu._jaxlib import context, ir, stablehlo

from ._modules import ModuleInfo, walk

__all__ = ["legalize_rng", "unsign_rng"]

_OP = "stablehlo.rng_bit_generator"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_PHILOX_ROUNDS = 10
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)


@dataclasses.dataclass(frozen=True, slots=True)
class _Word:
    """A tensor of ui32 or ui64 with the arithmetic of such words."""

    builder: _Builder
    value: Any

    def _with(self, name: str, other: _Word | int) -> _Word:
        right = self.like(other) if isinstance(other, int) else other
        return self.builder.emit(name, [self, right], self.value.type)

    def like(self, number: int) -> _Word:
        return self.builder.splat(number, self.value.type)

    def __add__(self, other: _Word | int) -> _Word:
        return self._with("add", other)

    def __mul__(self, other: _Word | int) -> _Word:
        return self._with("multiply", other)

    def __xor__(self, other: _Word | int) -> _Word:
        return self._with("xor", other)

    def __or__(self, other: _Word) -> _Word:
        return self._with("or", other)

    def __lshift__(self, bits: int) -> _Word:
        return self._with("shift_left", bits)

    def __rshift__(self, bits: int) -> _Word:
        return self._with("shift_right_logical", bits)

    def rotate(self, bits: int) -> _Word:
        return (self << bits) | (self >> (32 - bits))

    def to(self, bits: int) -> _Word:
        return self.builder.emit("convert", [self], self.builder.words(self.shape, bits))

    @property
    def shape(self) -> list[int]:
        return list(self.value.type.shape)

    def halves(self) -> tuple[_Word, _Word]:
        """The low and the high ui32 of a ui64."""
        return self.to(32), (self >> 32).to(32)


class _Builder:
    def __init__(self, point: Any) -> None:
        self.point = point

    def words(self, shape: list[int], bits: int) -> Any:
        return ir.RankedTensorType.get(shape, ir.IntegerType.get_unsigned(bits))

    def emit(self, name: str, operands: list[_Word], kind: Any, attributes: dict[str, Any] | None = None) -> _Word:
        made = ir.Operation.create(
            f"stablehlo.{name}",
            results=[kind],
            operands=[operand.value for operand in operands],
            attributes=attributes or {},
            ip=self.point,
        )
        return _Word(self, made.results[0])

    def splat(self, number: int, kind: Any) -> _Word:
        value = ir.DenseElementsAttr.get_splat(kind, ir.IntegerAttr.get(kind.element_type, number))
        return self.emit("constant", [], kind, {"value": value})

    def count(self, size: int) -> _Word:
        """ui64 0, 1, …, size - 1."""
        dimension = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)
        return self.emit("iota", [], self.words([size], 64), {"iota_dimension": dimension})

    def element(self, vector: _Word, index: int, size: int) -> _Word:
        """Element ``index`` of a vector, ``size`` times."""
        one = self.slice(vector, [index], [index + 1])
        dims = {"broadcast_dimensions": ir.DenseI64ArrayAttr.get([0])}
        return self.emit("broadcast_in_dim", [one], self.words([size], 64), dims)

    def slice(self, word: _Word, start: list[int], limit: list[int]) -> _Word:
        bits = word.value.type.element_type.width
        kind = self.words([high - low for low, high in zip(start, limit, strict=True)], bits)
        names = {"start_indices": start, "limit_indices": limit, "strides": [1] * len(start)}
        return self.emit("slice", [word], kind, {k: ir.DenseI64ArrayAttr.get(v) for k, v in names.items()})

    def reshape(self, word: _Word, shape: list[int]) -> _Word:
        return self.emit("reshape", [word], self.words(shape, word.value.type.element_type.width))

    def concatenate(self, parts: list[_Word], dimension: int) -> _Word:
        shape = parts[0].shape
        shape[dimension] = sum(part.shape[dimension] for part in parts)
        where = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), dimension)
        kind = self.words(shape, parts[0].value.type.element_type.width)
        return self.emit("concatenate", parts, kind, {"dimension": where})

    def less(self, left: _Word, right: _Word) -> _Word:
        kind = ir.RankedTensorType.get(left.shape, ir.IntegerType.get_signless(1))
        direction = stablehlo.ComparisonDirectionAttr.get("LT")
        return self.emit("compare", [left, right], kind, {"comparison_direction": direction})


def _threefry(inputs: tuple[_Word, _Word], key: tuple[_Word, _Word]) -> tuple[_Word, _Word]:
    schedule = (*key, key[0] ^ key[1] ^ _PARITY)
    first, second = inputs[0] + schedule[0], inputs[1] + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            first = first + second
            second = first ^ second.rotate(rotation)
        first = first + schedule[(group + 1) % 3]
        second = second + schedule[(group + 2) % 3] + (group + 1)
    return first, second


def _philox(counter: tuple[_Word, _Word, _Word, _Word], key: tuple[_Word, _Word]) -> tuple[_Word, ...]:
    first, second, third, fourth = counter
    for _ in range(_PHILOX_ROUNDS):
        low0, high0 = (first.to(64) * _PHILOX_MULTIPLIERS[0]).halves()
        low1, high1 = (third.to(64) * _PHILOX_MULTIPLIERS[1]).halves()
        first, second, third, fourth = high1 ^ second ^ key[0], low1, high0 ^ fourth ^ key[1], low0
        key = (key[0] + _PHILOX_WEYL[0], key[1] + _PHILOX_WEYL[1])
    return first, second, third, fourth


def _join(low: _Word, high: _Word) -> _Word:
    return low.to(64) | (high.to(64) << 32)


def _threefry_bits(build: _Builder, state: _Word, shape: list[int], bits: int) -> tuple[_Word, _Word]:
    """Data and new state. Below 64 bits one block feeds two neighbours along the dimension that splits best."""
    half, axis = ([*shape], 0) if bits == 64 else _split(shape)
    size = int(np.prod(half, dtype=np.int64))
    counter = build.element(state, 1, size) + build.count(size)
    low, high = _threefry(counter.halves(), build.element(state, 0, size).halves())
    key = build.slice(state, [0], [1])
    new = build.concatenate([key, build.slice(state, [1], [2]) + size], 0)
    if bits == 64:
        return build.reshape(_join(low, high), shape), new
    if not shape:
        return build.reshape(low, shape), new
    pair = [build.reshape(word, [*half[: axis + 1], 1, *half[axis + 1 :]]) for word in (low, high)]
    whole = [*shape]
    whole[axis] = 2 * half[axis]
    data = build.reshape(build.concatenate(pair, axis + 1), whole)
    return build.slice(data, [0] * len(shape), shape) if whole != shape else data, new


def _split(shape: list[int]) -> tuple[list[int], int]:
    """The shape with its first even dimension halved, else its first longest one, rounded up."""
    if not shape:
        return [1], 0
    even = [index for index, extent in enumerate(shape) if extent % 2 == 0]
    axis = even[0] if even else shape.index(max(shape))
    half = [*shape]
    half[axis] = -(-shape[axis] // 2)
    return half, axis


def _philox_bits(build: _Builder, state: _Word, shape: list[int], bits: int) -> tuple[_Word, _Word]:
    """Data and new state. The counter is 128 bits: of a state of two words the key is also its high half."""
    count = int(np.prod(shape, dtype=np.int64))
    per_block = 2 if bits == 64 else 4
    blocks = -(-count // per_block)
    high_at = 2 if state.shape[0] > 2 else 0

    def advance(size: int, step: _Word) -> tuple[_Word, _Word]:
        low, high = build.element(state, 1, size), build.element(state, high_at, size)
        moved = low + step
        carry = build.less(moved, low)
        return moved, build.emit("select", [carry, high + 1, high], high.value.type)

    low, high = advance(blocks, build.count(blocks))
    words = _philox((*low.halves(), *high.halves()), build.element(state, 0, blocks).halves())
    if bits == 64:
        words = (_join(words[0], words[1]), _join(words[2], words[3]))
    columns = build.concatenate([build.reshape(word, [blocks, 1]) for word in words], 1)
    flat = build.slice(build.reshape(columns, [blocks * per_block]), [0], [count])
    moved = advance(1, build.splat(blocks, build.words([1], 64)))
    new = build.concatenate([build.slice(state, [0], [1]), *moved[: state.shape[0] - 1]], 0)
    return build.reshape(flat, shape), new


def legalize_rng(module: Any, info: ModuleInfo) -> None:
    """Replace every ``rng_bit_generator`` of ``module`` in place; at once when there is none."""
    if _OP not in info.ops:
        return
    for operation in [found for found in walk(module.operation) if found.name == _OP]:
        algorithm = stablehlo.RngAlgorithmAttr(operation.attributes["rng_algorithm"]).value
        generate = _threefry_bits if algorithm == "THREE_FRY" else _philox_bits
        with context(), operation.location:
            build = _Builder(ir.InsertionPoint(operation))
            kind = operation.results[1].type
            width = kind.element_type.width
            data, state = generate(build, _Word(build, operation.operands[0]), list(kind.shape), max(width, 32))
            converted = build.emit("bitcast_convert", [data.to(width)], kind)
            operation.results[0].replace_all_uses_with(state.value)
            operation.results[1].replace_all_uses_with(converted.value)
            operation.erase()


def unsign_rng(module: Any, info: ModuleInfo) -> None:
    """Make signed ``rng_bit_generator`` unsigned ones, bit-cast: XLA:CPU gives unsigned data whatever was asked for."""
    if _OP not in info.ops:
        return
    for operation in [found for found in walk(module.operation) if found.name == _OP]:
        kind = operation.results[1].type
        if not isinstance(kind.element_type, ir.IntegerType) or not kind.element_type.is_signless:
            continue
        with context(), operation.location:
            plain = ir.RankedTensorType.get(kind.shape, ir.IntegerType.get_unsigned(kind.element_type.width))
            point = ir.InsertionPoint(operation)
            made = ir.Operation.create(
                _OP,
                results=[operation.results[0].type, plain],
                operands=list(operation.operands),
                attributes={"rng_algorithm": operation.attributes["rng_algorithm"]},
                ip=point,
            )
            cast = ir.Operation.create(
                "stablehlo.bitcast_convert", results=[kind], operands=[made.results[1]], ip=point
            )
            operation.results[0].replace_all_uses_with(made.results[0])
            operation.results[1].replace_all_uses_with(cast.results[0])
            operation.erase()
