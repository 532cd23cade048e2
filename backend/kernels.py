"""Dispatcher kernels, generated from schemas.

A kernel is the hot path of an op: key → entry → launch → wrap, on the caller's thread, with no loop over argument kinds.
So its source is written out for the op's own schema and compiled once, when the table of lowerings is loaded. Everything
that happens only on a miss is in :mod:`emutpu.backend.strict`.
"""

from __future__ import annotations

import cmath
import keyword
import math
from collections import Counter
from collections.abc import Callable, Sequence
from sys import _getframe, getrefcount
from typing import Any

import numpy as np
import torch

from emutpu.backend.cell import Cell
from emutpu.backend.deferred.ops import deferred_entry
from emutpu.backend.deferred.queue import forget as forget_deferred
from emutpu.backend.deferred.values import Pending, operand
from emutpu.backend.errors import describe, device_mismatch, launch_failure
from emutpu.backend.hlo import Number
from emutpu.backend.location import KNOWN_FILES, Origin, capture
from emutpu.backend.lowering._registry import Lowering
from emutpu.backend.options import LOCAL
from emutpu.backend.pjrt import Buffer, ErrorBuffer, PjrtError
from emutpu.backend.rng import draw
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import cell_of
from emutpu.backend.strict import Entry, Signature, argument_kind, miss
from emutpu.backend.views import View, partly_overlaps

__all__ = ["Kernel", "forget_entries", "launch_count", "op_counts", "out_kernel"]

_SCALAR_DTYPES = {bool: np.bool_, int: np.int64, float: np.float64, complex: np.complex64}
_SCALAR_LIMIT = 4096
_NUMBERS = frozenset(_SCALAR_DTYPES)
_WHOLE = frozenset({bool, int})
_EXACT = 1 << 53


class _Scalars:
    """Device buffers of Python scalars by type and value (0-d: i64, f64, bool, complex64)."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[type, Any], Buffer] = {}

    def get(self, value: complex) -> Buffer:
        found = self._buffers.get((value.__class__, value))
        if found is not None and (value or math.copysign(1.0, value.real) > 0):
            return found
        return self._put(value)

    def _put(self, value: complex) -> Buffer:
        kind = next(k for k in _SCALAR_DTYPES if isinstance(value, k))
        try:
            made = runtime().client.from_host(np.asarray(value, _SCALAR_DTYPES[kind]))
        except OverflowError:
            raise RuntimeError(f"value cannot be converted to type int64_t without overflow: {value}") from None
        if not cmath.isnan(value) and (value or math.copysign(1.0, value.real) > 0):
            if len(self._buffers) >= _SCALAR_LIMIT:
                self._buffers.clear()
            self._buffers[value.__class__, value] = made
        return made

    def clear(self) -> None:
        self._buffers.clear()

    def take(self) -> dict[tuple[type, Any], Buffer]:
        """Forget all, and give them."""
        taken, self._buffers = self._buffers, {}
        return taken


def _as_float(value: int) -> float:
    """The same number as a float, where there is one."""
    return float(value) if -_EXACT <= value <= _EXACT else value


_runtime = runtime()


def _donating() -> bool:
    """Donation is for launches: what is recorded may be computed after its operands changed hands."""
    return _runtime.donating and not LOCAL.state.defers


_scalars = _Scalars()
_kernels: dict[str, Kernel] = {}


def op_counts() -> dict[str, int]:
    """Ops launched or recorded, by overload name, since the start."""
    counts = {f"aten.{name}": kernel.calls for name, kernel in _kernels.items()}
    return {name: calls for name, calls in sorted(counts.items(), key=lambda item: -item[1]) if calls}


def launch_count() -> int:
    """Launches of single ops since the start; what was recorded is launched in regions, which the runtime counts."""
    return sum(kernel.calls - kernel.recorded for kernel in _kernels.values())


def forget_entries() -> None:
    """Drop every loaded executable and scalar buffer (they belong to one client); counters stay."""
    for kernel in _kernels.values():
        kernel.forget()
    _scalars.clear()
    forget_deferred()


def abandon_entries() -> object:
    """Forget the executables and scalars of another process without freeing them: they are given to the caller to keep."""
    kept: list[object] = [_scalars.take()]
    for kernel in _kernels.values():
        kept.append(dict(kernel.entries))
        kernel.forget()
    return kept


def _foreign(name: str, argument: str, tensor: torch.Tensor | Number) -> tuple[Buffer, tuple[Any, ...]]:
    """Buffer and key of an operand without a cell: numbers and 0-d CPU tensors may mix, nothing else."""
    if not isinstance(tensor, torch.Tensor):
        return _scalars.get(tensor), (tensor.__class__, None, None, None, None)
    cell = cell_of(tensor)
    if cell is not None:
        value = cell.value
        if value is None or value.__class__ is Pending:
            value = operand(cell)
        key = (cell.layout, tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        return value, key
    if tensor.dim() or tensor.device.type != "cpu":
        raise device_mismatch(name, argument, tensor)
    from emutpu.backend.copies import host_array

    return runtime().client.from_host(host_array(tensor)), (None, None, None, None, tensor.dtype)


def _target(name: str, argument: str, tensor: torch.Tensor) -> Cell:
    """The cell of a tensor that is written; it must be on the device."""
    cell = cell_of(tensor)
    if cell is None:
        raise device_mismatch(name, argument, tensor)
    return cell


def _shared(donate: bool, values: list[Buffer], cells: list[Cell]) -> tuple[bool, tuple[int, ...] | None]:
    """Whether the lists' written values may be donated when some value comes twice, and which targets share a cell."""
    counts = Counter(map(id, values))
    donate = donate and all(counts[id(cell.value)] <= 1 for cell in cells)
    first: dict[int, int] = {}
    pattern = tuple(first.setdefault(id(cell), index) for index, cell in enumerate(cells))
    return donate, pattern if len(first) != len(cells) else None


def _refuse_overlap(name: str, target: torch.Tensor, operands: Sequence[Any]) -> None:
    """Raise RuntimeError, in PyTorch's words, for an operand that is part of what is written."""
    cell = cell_of(target)
    written = View(tuple(target.shape), target.stride(), int(target.storage_offset()), target.dtype)
    for other in operands:
        if not isinstance(other, torch.Tensor) or other is target or cell_of(other) is not cell:
            continue
        read = View(tuple(other.shape), other.stride(), int(other.storage_offset()), other.dtype)
        if partly_overlaps(written, read):
            raise RuntimeError(
                "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single "
                "memory location. Please clone() the tensor before performing the operation.\n"
                f"  {name} issued at {describe(*capture())}"
            )


def _blame(results: Sequence[Buffer], origin: Origin) -> None:
    """Remember which launch made an asynchronous failure, the first time it is seen."""
    for result in results:
        if isinstance(result, ErrorBuffer) and result.error.origin is None:
            result.error.origin = origin


class Kernel:
    """One overload's kernel: ``function`` is what the dispatcher calls, ``entries`` its table of loaded executables."""

    def __init__(self, op: torch._ops.OpOverload[..., Any], row: Lowering) -> None:
        self.op = op
        self.name = str(op)
        self.signature = Signature.of(op, row)
        self.entries: dict[Any, Entry] = {}
        self._forgotten = 0
        self._recorded = 0
        self.source = _Source(self.signature).text()
        self.function = self._compile()
        _kernels[self.name.removeprefix("aten.")] = self

    @property
    def calls(self) -> int:
        return self._forgotten + sum(entry.calls for entry in list(self.entries.values()))  # others may be adding some

    def forget(self) -> None:
        self._forgotten, self._recorded = self.calls, self.recorded
        self.entries.clear()

    @property
    def recorded(self) -> int:
        """How many of the calls were recorded rather than launched."""
        return self._recorded + sum(entry.calls for entry in list(self.entries.values()) if entry.record is not None)

    def _miss(self, key: Any, values: tuple[Any, ...], donate: bool) -> Entry:
        options = key[0]
        if options.flushes:
            self._forgotten += 1
            self._recorded += 1
            return deferred_entry(self.signature, options, values)
        if options.defers:
            entry = deferred_entry(self.signature, options, values)
        else:
            entry = miss(self.signature, options, values, donate)
        if runtime().cache.allow:
            self.entries[key] = entry
        else:
            self._forgotten += 1  # the launch counts, though its entry is not kept
            self._recorded += entry.record is not None
        return entry

    def _compile(self) -> Callable[..., Any]:
        namespace: dict[str, Any] = {
            "Cell": Cell,
            "ErrorBuffer": ErrorBuffer,
            "PjrtError": PjrtError,
            "LOCAL": LOCAL,
            "blame": _blame,
            "capture": capture,
            "donating": _donating,
            "draw": draw,
            "exact": _as_float,
            "entries": self.entries,
            "fill": operand,
            "foreign": _foreign,
            "getframe": _getframe,
            "getrefcount": getrefcount,
            "library": KNOWN_FILES,
            "launch_failure": launch_failure,
            "miss": self._miss,
            "name": self.name,
            "numbers": _NUMBERS,
            "pending": Pending,
            "refuse_overlap": _refuse_overlap,
            "scalar_value": _scalars.get,
            "shared": _shared,
            "storage": torch.Tensor.untyped_storage,
            "target": _target,
            "unready": frozenset({type(None), Pending}),
            "whole": _WHOLE,
            **{f"default_{a.name}": a.default_value for a in self.op._schema.arguments if a.has_default_value()},
        }
        exec(compile(self.source, f"<emutpu kernel {self.name}>", "exec"), namespace)  # noqa: S102  # our own text
        function: Callable[..., Any] = namespace["kernel"]
        return function


def _local_name(argument: Any) -> str:
    """The parameter's name in the kernel: positional ones may be Python keywords or names of the kernel's own."""
    name: str = argument.name
    tensor = argument_kind(argument).startswith("tensor")
    clashes = keyword.iskeyword(name) or (len(name) == 1 and not argument.kwarg_only and not tensor)
    return f"{name}_" if clashes else name


def _label(local: str) -> str:
    """The argument's own name, quoted, for messages."""
    return repr(local.removesuffix("_"))


class _Source:
    """Writes the text of one kernel. Keys are flat tuples, and nothing is called that can be written in line."""

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.lines: list[str] = []
        self.keys: list[str] = []
        kinds = [argument_kind(a, signature.row) for a in signature.schema.arguments]
        # The values of the required tensors that come first are a display, not a series of appends.
        self.display = not signature.targets
        self.leading = next((n for n, k in enumerate(kinds) if k not in ("tensor", "static", "shape")), len(kinds))
        self.values: list[str] = []

    def text(self) -> str:
        signature = self.signature
        self._add(0, f"def kernel({self._parameters()}):")
        self._add(1, "u = LOCAL.state")
        if not self.display:
            self._add(1, "a = []")
        if signature.targets:
            self._add(1, "d = donating()")
            self.keys.append("d")
        kinds = [argument_kind(a, signature.row) for a in signature.schema.arguments]
        last = max((position for position, kind in enumerate(kinds) if kind.startswith("tensor")), default=0)
        for position, argument in enumerate(signature.schema.arguments):
            if self.display and position == self.leading:
                self._begin_values()
            self._argument(argument, first=position == 0)
            if position == last:
                self._shared_values()  # before the scalars: equal ones share a buffer, which means nothing
        if self.display:
            self._begin_values()
        names = "".join(f"{_local_name(a)}, " for a in signature.schema.arguments)
        self._add(
            1,
            f"k = (u.{'options' if signature.row.dots else 'plain'}, {''.join(k + ', ' for k in self.keys)})",
        )
        self._add(1, "e = entries.get(k)")
        self._add(1, "if e is None:")
        self._add(2, f"e = miss(k, ({names}), {'d' if signature.targets else 'False'})")
        self._add(1, "e.calls += 1")
        self._late_arguments()
        self._origin()
        self._add(1, "if e.record is not None: r = e.record(a, g)")
        self._add(1, "else:")
        self._add(2, "try:")
        self._add(3, "r = e.launch(a)")
        self._add(2, "except PjrtError as error:")
        self._add(3, 'raise launch_failure(error, g, "the launch was refused") from error')
        self._add(2, "if r and r[0].__class__ is ErrorBuffer:")
        self._add(3, "blame(r, g)")
        self._results()
        return "\n".join(self.lines) + "\n"

    def _begin_values(self) -> None:
        self._add(1, f"a = [{', '.join(self.values)}]")
        self.display = False

    def _origin(self) -> None:
        """The caller's frame is the user's most of the time; only otherwise walk the stack."""
        self._add(1, "f = getframe(1)")
        self._add(1, "i = f.f_code")
        self._add(1, "if library.get(i.co_filename) is False: g = (name, i, f.f_lasti)")
        self._add(1, "else: g = (name, *capture())")
        self._add(1, "f = None")

    def _add(self, depth: int, line: str) -> None:
        self.lines.append("    " * depth + line)

    def _parameters(self) -> str:
        parts = []
        starred = False
        for argument in self.signature.schema.arguments:
            if argument.kwarg_only and not starred:
                parts.append("*")
                starred = True
            parts.append(_local_name(argument) + (f"=default_{argument.name}" if argument.has_default_value() else ""))
        return ", ".join(parts)

    # Arguments -------------------------------------------------------------------------------------------

    def _argument(self, argument: Any, *, first: bool) -> None:
        name = _local_name(argument)
        kind = argument_kind(argument, self.signature.row)
        written = argument.name in self.signature.targets
        if kind == "tensor":
            self._written(1, name) if written else self._tensor(1, name, first=first)
        elif kind == "tensor?":
            self._add(1, f"if {name} is None: {self._null(name)}")
            self._add(1, "else:")
            self._written(2, name) if written else self._tensor(2, name, first=first)
        elif kind in ("tensors", "tensors?"):
            self._list(name, written)
        elif kind in ("scalar", "scalar?"):
            self._scalar(argument)
        elif kind == "scalars":
            self._add(1, f"for s in {name}: a.append(scalar_value(s))")
            self.keys.append(f"tuple([s.__class__ for s in {name}])")
        elif kind == "shape":
            self.keys.append(f"{name}.shape, {name}.stride(), {name}.dtype")
        elif kind == "static":
            if "List" in str(argument.type):
                self.keys.append(f"(tuple({name}) if {name}.__class__ is list else {name})")
            else:
                self.keys.append(name)

    def _null(self, x: str) -> str:
        return f"l_{x} = z_{x} = s_{x} = o_{x} = t_{x} = None"

    def _tensor(self, depth: int, x: str, *, first: bool) -> None:
        """Read: append the cell's value, and key on how the tensor lies over it."""
        # PyTorch hands the 2 of ``x + 2`` over as a number. In the first place only ``torch.add(2, x)`` and its like have one,
        # so nothing asks there.
        if first:
            self._add(depth, f"try: c_{x} = getattr(storage({x}), 'cell', None)")
            self._add(depth, f"except TypeError: c_{x} = None")
        else:
            self._add(depth, f"c_{x} = None if {x}.__class__ in numbers else getattr(storage({x}), 'cell', None)")
        self._add(depth, f"if c_{x} is None:")
        self._add(depth + 1, f"v_{x}, (l_{x}, z_{x}, s_{x}, o_{x}, t_{x}) = foreign(name, {_label(x)}, {x})")
        self._add(depth, "else:")
        self._add(depth + 1, f"v_{x} = c_{x}.value")
        self._add(depth + 1, f"if v_{x} is None or {self._elsewhere(x)}: v_{x} = fill(c_{x})")
        self._lies(depth + 1, x)
        if self.display:
            self.values.append(f"v_{x}")
        else:
            self._add(depth, f"a.append(v_{x})")
        self._key(x)

    @staticmethod
    def _elsewhere(x: str) -> str:
        """Pending, but not on this thread's own list, where it is recorded as it is: :func:`operand` without the call."""
        return f"v_{x}.__class__ is pending and (v_{x}.buffer is not None or v_{x}.batch.queue is not u.queue or not u.defers)"

    def _lies(self, depth: int, x: str) -> None:
        self._add(
            depth,
            f"l_{x} = c_{x}.layout; z_{x} = {x}.shape; s_{x} = {x}.stride(); o_{x} = {x}.storage_offset(); "
            f"t_{x} = {x}.dtype",
        )

    def _key(self, x: str) -> None:
        self.keys.append(f"l_{x}, z_{x}, s_{x}, o_{x}, t_{x}")

    def _written(self, depth: int, x: str) -> None:
        """Read and written (or only written): donate the value when the cell is its only holder."""
        self._add(depth, f"c_{x} = getattr(storage({x}), 'cell', None)")
        self._add(depth, f"if c_{x} is None: c_{x} = target(name, {_label(x)}, {x})")
        self._add(depth, f"v_{x} = c_{x}.value")
        unwritten = f"v_{x} is None or " if self.signature.row.reads else ""
        self._add(depth, f"if {unwritten}{self._elsewhere(x)}: v_{x} = fill(c_{x})")
        # References: the cell, this frame's local, the argument of getrefcount itself.
        unwritten = "" if self.signature.row.reads else f"v_{x} is not None and "
        self._add(depth, f"if {unwritten}getrefcount(v_{x}) != 3: d = False")
        self._lies(depth, x)
        if self.signature.row.reads:
            self._add(depth, f"a.append(v_{x})")
        self._key(x)

    def _list(self, x: str, written: bool) -> None:
        self._add(1, f"k_{x} = []; c_{x} = []")
        self._add(1, f"for t in {x}:")
        self._add(2, "if t is None:")
        self._add(3, f"k_{x}.append(None); continue")
        number = "" if written else "None if t.__class__ in numbers else "
        self._add(2, f"c = {number}getattr(storage(t), 'cell', None)")
        self._add(2, "if c is None:")
        if written:
            self._add(3, f"c = target(name, {_label(x)}, t)")
        else:
            self._add(3, f"v, k = foreign(name, {_label(x)}, t)")
            self._add(3, f"a.append(v); k_{x}.append(k); continue")
        self._add(2, "v = c.value")
        self._add(2, "if v.__class__ in unready: v = fill(c)")
        if written:
            self._add(2, "if getrefcount(v) != 3: d = False")
            self._add(2, f"c_{x}.append(c)")
        self._add(2, "a.append(v)")
        self._add(2, f"k_{x}.append((c.layout, t.shape, t.stride(), t.storage_offset(), t.dtype))")
        self._add(1, "v = None")
        self.keys.append(f"tuple(k_{x})")

    def _scalar(self, argument: Any) -> None:
        """A Scalar: its type is keyed, its value is a device input, unless it is the schema's default."""
        x, local = argument.name, _local_name(argument)
        default = argument.default_value if argument.has_default_value() else None
        typed = self.signature.row.typed
        if typed is not None and typed[0] == x:
            self._add(1, f"if {local}.__class__ in whole and {self._is_float(typed[1])}: {local} = exact({local})")
        absent = f"{local} is None" if default is None else f"{local} == default_{x}"
        self._add(1, f"if {absent}: k_{x} = None")
        self._add(1, "else:")
        self._add(2, f"k_{x} = {local}.__class__")
        self._add(2, f"a.append(scalar_value({local}))")
        self.keys.append(f"k_{x}")

    def _is_float(self, name: str) -> str:
        """The condition that an argument is a floating-point tensor or dtype."""
        argument = next(a for a in self.signature.schema.arguments if a.name == name)
        local = _local_name(argument)
        if argument_kind(argument).startswith("tensor"):
            return f"{local}.is_floating_point()"
        return f"{local} is not None and {local}.is_floating_point"

    def _shared_values(self) -> None:
        """A written value passed twice (``x.mul_(x)``, views of one storage) must not be donated."""
        kinds = {a.name: argument_kind(a) for a in self.signature.schema.arguments}
        if any(kinds[x] == "tensors" for x in self.signature.targets):
            cells = ", ".join(f"*c_{x}" if kinds[x] == "tensors" else f"c_{x}" for x in self.signature.targets)
            self._add(1, "w = None")
            self._add(1, f"if len({{id(v) for v in a}}) != len(a): d, w = shared(d, a, [{cells}])")
            self.keys.append("w")
        elif self.signature.elementwise:
            self._overlaps(self.signature.targets[0], kinds)
        elif self.signature.targets:
            self._add(1, "if d and len(a) > 1 and len({id(v) for v in a}) != len(a): d = False")
            if not self.signature.row.reads:
                # Its old value comes last, and may be a source's too (``x[0] = x[1]``).
                for x in self.signature.targets:
                    self._add(1, f"if d and any([v is v_{x} for v in a]): d = False")

    def _overlaps(self, x: str, kinds: dict[str, str]) -> None:
        """As above, where one target is written element by element: an operand must be all of it, or none."""
        operands = [_local_name(a) for a in self.signature.schema.arguments if kinds[a.name].startswith("tensor")]
        others = [f"{name}, " for name in operands if name != x]
        if not others:
            return
        twice = "len(a) > 1 and len({id(v) for v in a}) != len(a)"
        self._add(1, f"if {twice if self.signature.row.reads else f'any([v is v_{x} for v in a])'}:")
        self._add(2, "d = False")
        self._add(2, f"refuse_overlap(name, {x}, ({''.join(others)}))")

    def _late_arguments(self) -> None:
        """What is known only with the entry: the old value of a target that is not read, and the generator's state."""
        if self.signature.targets and not self.signature.row.reads:
            for x in self.signature.targets:
                self._add(1, f"if e.base: a.append(v_{x} if v_{x} is not None else fill(c_{x}))")
        if self.signature.row.draws is not None:
            generator = next(
                (a.name for a in self.signature.schema.arguments if argument_kind(a) == "generator"), "None"
            )
            self._add(1, f"a.append(draw({generator}, e.draws))")

    # Results ---------------------------------------------------------------------------------------------

    def _results(self) -> None:
        signature = self.signature
        if signature.fresh_list:
            fresh = ["[w(next(n), g) for w in e.wrappers]"]
        else:
            fresh = [f"t{index}" for index in range(len(signature.fresh))]
        if len(signature.fresh) == 1 and not signature.fresh_list and not signature.targets:
            self._add(1, "return e.wrappers[0](r[0], g)")
            return
        self._add(1, "n = iter(r)")
        if not signature.fresh_list:
            for index, name in enumerate(fresh):
                self._add(1, f"w = e.wrappers[{index}]")
                self._add(1, f"{name} = None if w is None else w(next(n), g)")
        if signature.targets:
            self._add(1, "l = iter(e.layouts)")
        for x in signature.targets:
            self._write_back(x)
        for position, index in enumerate(signature.numbers):
            fresh.insert(index, f"e.numbers[{position}]")
        returns = [*fresh, *signature.returned_targets] or ["None"]
        self._add(1, f"return {returns[0]}" if len(returns) == 1 else f"return ({', '.join(returns)})")

    def _write_back(self, x: str) -> None:
        kind = argument_kind(next(a for a in self.signature.schema.arguments if a.name == x))
        if kind == "tensors":
            self._add(1, f"for c, v, y in zip(c_{x}, n, l):")
            self._add(2, "c.value = v; c.layout = y; c.origin = g")
            self._add(2, "if y.held != c.held or v.__class__ is ErrorBuffer: c.recount()")
            return
        depth = 1
        if kind == "tensor?":
            self._add(1, f"if {x} is not None:")
            depth = 2
        self._add(depth, f"c_{x}.value = next(n); c_{x}.layout = y = next(l); c_{x}.origin = g")
        self._add(depth, f"if y.held != c_{x}.held or c_{x}.value.__class__ is ErrorBuffer: c_{x}.recount()")


def out_kernel(functional: torch._ops.OpOverload[..., Any], out: torch._ops.OpOverload[..., Any]) -> Callable[..., Any]:
    """The out= overload of a functional op: compute, resize if need be, then move or copy the results in."""
    names = [a.name for a in out._schema.arguments if a.is_out]
    factory = any(a.name == "device" and a.kwarg_only for a in functional._schema.arguments)
    elementwise = torch.Tag.pointwise in functional.tags

    def kernel(*args: Any, **kwargs: Any) -> Any:
        from emutpu.backend.copies import write_out

        positional = [a.name for a in out._schema.arguments]
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        targets = [given.pop(name) for name in names]
        if factory:
            given |= {"device": targets[0].device, "dtype": targets[0].dtype}
        order = [a.name for a in functional._schema.arguments if not a.kwarg_only]
        if elementwise:
            for target in targets:
                _refuse_overlap(str(out), target, [*given.values()])
        result = functional(*[given.pop(n) for n in order if n in given], **given)
        results = list(result) if isinstance(result, tuple | list) else [result]
        flat = targets[0] if len(targets) == 1 and isinstance(targets[0], list | tuple) else targets
        for name, target, value in zip(names * len(flat), flat, results, strict=False):
            write_out(str(out), name, target, value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return kernel
