"""One op with everything its arguments decide, ready to be recorded any number of times."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

from emutpu.backend.cell import Layout, layout_of
from emutpu.backend.deferred.names import READ, WRITE
from emutpu.backend.deferred.queue import current_queue
from emutpu.backend.deferred.values import Pending
from emutpu.backend.hlo import Builder, Value
from emutpu.backend.keys import Key
from emutpu.backend.location import Origin
from emutpu.backend.options import LOCAL, EagerMode, Options
from emutpu.backend.pjrt import Buffer
from emutpu.backend.rng import advanced
from emutpu.backend.runtime import runtime
from emutpu.backend.strict import Entry, OpModule, Record, Signature, Take

__all__ = ["HOOKS", "Collective", "DeferredOp", "deferred_entry", "repeat_number"]

Collective = Callable[[Sequence[Buffer]], Sequence[Buffer]]
_STATE = layout_of((3,), torch.uint64)


class DeferredOp:
    """What is recorded of an op beside its operands' numbers. Compared by identity.

    ``layouts``    of its values: fresh results first, then the new values of what it writes.
    ``shapeless``, ``dimensions``  its part of a region's keys.
    ``emit``       emits it into a builder, as :meth:`OpModule.emit`; ``precision`` of its dots.
    ``undefined``  how many of its results are undefined: the device gives empty ones.
    ``repeat``     what the repeated-op rule compares; 0 for a view, which it does not count.
    ``collective`` takes part with other ranks: it is always done, alone and in order, by this function on its operands.
    """

    __slots__ = (
        "alive",
        "collective",
        "dimensions",
        "draws",
        "emit",
        "flushes",
        "layouts",
        "name",
        "one",
        "parts",
        "precision",
        "repeat",
        "results",
        "shapeless",
        "undefined",
    )

    def __init__(
        self,
        name: str,
        emit: Callable[[Builder, Take], list[Value]],
        layouts: Sequence[Layout],
        keys: tuple[str, str],
        *,
        results: Sequence[tuple[tuple[int, ...], torch.dtype]],
        parts: Sequence[str],
        precision: Any = None,
        draws: int = 0,
        repeat: int | None = None,
        flushes: bool = False,
        undefined: int = 0,
        collective: Collective | None = None,
    ) -> None:
        self.name = name
        self.emit = emit
        self.layouts = tuple(layouts)
        self.one = len(self.layouts) == 1
        self.alive = b"\1" * len(self.layouts)  # the marks of new values
        self.shapeless, self.dimensions = keys
        self.results = tuple(results)
        self.parts = tuple(parts)
        self.precision = precision
        self.draws = draws
        self.repeat = next(_numbers) if repeat is None else repeat
        self.flushes = flushes
        self.undefined = undefined
        self.collective = collective

    def operands(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Dims and dtypes of what the op reads, in order. Emits it to find out: for reports."""
        builder = Builder(self.name, self.precision)
        found: list[tuple[tuple[int, ...], torch.dtype]] = []

        def take(shape: tuple[int, ...], dtype: torch.dtype, **_options: bool) -> Value:
            found.append((tuple(shape), dtype))
            return builder.argument(shape, dtype)

        self.emit(builder, take)
        return found

    def record(self, values: Sequence[Buffer], origin: Origin) -> Sequence[Buffer]:  # noqa: C901  # every op comes through here, and a call costs as much as ten branches
        """Append the op to the calling thread's queue; gives its values, pending. Most ops have a :meth:`recorder` instead."""
        queue = LOCAL.state.queue or current_queue()
        with queue.lock:
            while True:
                # Whatever allocates or calls may run a finalizer or a signal's handler, which may use the device too.
                batch = queue.batch
                before = batch.state
                event: list[Any] = [self]
                index = batch.index
                value: Any
                for value in values:
                    if value.__class__ is Pending:
                        if value.batch is batch:
                            event.append(value.slot)
                            continue
                        value = value.settled()
                    slot = index.get(id(value))
                    event.append(batch.add_input(value) if slot is None else slot)
                recorded = tuple(event)
                after = before.next.get(recorded) or before.extend(recorded)
                made = [Pending(batch, layout) for layout in self.layouts]
                references = [ref(pending) for pending in made]
                issued, alive = [origin], self.alive
                origins, marks, known = batch.origins, batch.marks, batch.references
                first = len(marks)
                # From here to the break nothing is called and nothing is allocated: either all of it happens or nothing.
                if batch.state is before and queue.batch is batch:
                    batch.state = after
                    origins += issued
                    marks += alive
                    known += references
                    break
            for place, pending in enumerate(made, first):
                pending.slot = place
            if self.flushes:
                queue.leave()
            elif self.repeat:
                detector = queue.detector
                state = detector.state = detector.state.next.get(self.repeat) or detector.learn(self.repeat)
                if state.found:
                    queue.cut()
            if self.draws:
                # The generator's state is a value of the device, and drawing updates it there.
                update = _state_update(-(-self.draws // 4))
                updated = update.record(values[-1:], (update.name, *origin[1:]))
                queue.drawn(LOCAL.state.drawer, self.draws, updated[0])
        return made

    def recorder(self, arity: int) -> Record:
        """:meth:`record` for so many operands, without what the op never needs."""
        if not self.one or self.draws or self.flushes or arity > _LONGEST:
            return self.record
        return _recorder(arity)(self, self.layouts[0], self.alive, self.repeat)


_LONGEST = 4
_RECORD = """
def make(op, layout, alive, repeat):
    def record(values, origin):
        {names} = values
        queue = LOCAL.state.queue or current_queue()
        with queue.lock:
            while True:  # as in DeferredOp.record
                batch = queue.batch
                before = batch.state
                {operands}
                event = (op, {slots})
                after = before.next.get(event) or before.extend(event)
                pending = Pending(batch, layout)
                made = [pending]
                references, issued = [ref(pending)], [origin]
                origins, marks, known = batch.origins, batch.marks, batch.references
                slot = len(marks)
                if batch.state is before and queue.batch is batch:
                    batch.state = after
                    origins += issued
                    marks += alive
                    known += references
                    break
            pending.slot = slot
            if repeat:
                detector = queue.detector
                state = detector.state = detector.state.next.get(repeat) or detector.learn(repeat)
                if state.found:
                    queue.cut()
        return made
    return record
"""
_OPERAND = """
                if v{0}.__class__ is Pending and v{0}.batch is batch: s{0} = v{0}.slot
                else:
                    if v{0}.__class__ is Pending: v{0} = v{0}.settled()
                    s{0} = batch.index.get(id(v{0}))
                    if s{0} is None: s{0} = batch.add_input(v{0})
"""


@functools.cache
def _recorder(arity: int) -> Callable[..., Record]:
    """The text of ``record`` for ops of one result and so many operands, with its loop written out."""
    names = ", ".join(f"v{n}" for n in range(arity))
    text = _RECORD.format(
        names=f"[{names}]",
        operands="".join(_OPERAND.format(n) for n in range(arity)).strip(),
        slots=", ".join(f"s{n}" for n in range(arity)) + ("," if arity == 1 else ""),
    )
    namespace: dict[str, Any] = {"LOCAL": LOCAL, "Pending": Pending, "current_queue": current_queue, "ref": ref}
    exec(compile(text, f"<emutpu recorder {arity}>", "exec"), namespace)  # noqa: S102  # our own text
    made: Callable[..., Record] = namespace["make"]
    return made


_numbers = itertools.count(1)
_updates: dict[int, DeferredOp] = {}


def _state_update(steps: int) -> DeferredOp:
    made = _updates.get(steps)
    if made is None:
        name = "rng_state_update"

        def emit(builder: Builder, take: Take) -> list[Value]:
            return [advanced(builder, take((3,), torch.uint64), steps)]

        made = _updates[steps] = DeferredOp(
            name,
            emit,
            [_STATE],
            (name, str(steps)),
            results=[((3,), torch.uint64)],
            parts=[name],
        )
    return made


_repeat_numbers: dict[str, int] = {}


def repeat_number(text: str) -> int:
    """What the repeated-op rule compares of an op that ``text`` describes."""
    return _repeat_numbers.get(text) or _repeat_numbers.setdefault(text, next(_numbers))


def deferred_entry(signature: Signature, options: Options, values: tuple[Any, ...]) -> Entry:
    """The entry of an op that is recorded. Raises what PyTorch's meta kernel, or the lowering, raises for it."""
    by_name = dict(zip((a.name for a in signature.schema.arguments), values, strict=True))
    module = OpModule(signature, options, by_name, donate=False)
    _ = runtime().client  # a forked child must be told at the op
    if options.mode is not EagerMode._INTERNAL_COMPILE_FX_GRAPH:
        module.build()  # a lowering that refuses its arguments does so at the op, not at the read
    shapeless, dimensions = module.key_texts()
    precision = options.precision
    wraps = module.wraps()
    written = module.written_layouts()
    parts = module.parts()
    counts = not set(parts) <= {READ, WRITE}
    text = f"{shapeless}|{module.repeat_text()}"
    op = DeferredOp(
        signature.name,
        module.emit,
        [w[0] for w in wraps if w is not None] + written,
        (f"{shapeless};precision={precision.name if precision is not None else None}", dimensions),
        results=module.result_shapes(),
        parts=parts,
        precision=None if precision is None else precision.name,
        draws=module.draws if signature.row.draws else 0,
        repeat=repeat_number(text) if counts else 0,
        flushes=options.flushes,
        undefined=wraps.count(None),
    )
    entry = Entry(
        launch=_never,
        executable=None,
        key=Key("", "", ""),
        outputs=wraps,
        layouts=written,
        base=module.needs_base,
        draws=module.draws,
        numbers=module.numbers,
        record=op.record,
    )

    def first(values: Sequence[Buffer], origin: Origin) -> Sequence[Buffer]:
        """How many operands there are shows at the first record, and all of an entry's are alike."""
        record = op.recorder(len(values))
        entry.record = record if HOOKS.before is None else _after(HOOKS.before, record)
        return entry.record(values, origin)

    entry.record = first
    return entry


class _Hooks:
    """``before`` is called before an op is recorded. Set it before the first op is."""

    before: Callable[[], None] | None = None


HOOKS = _Hooks()


def _after(before: Callable[[], None], record: Record) -> Record:
    def recorded(values: Sequence[Buffer], origin: Origin) -> Sequence[Buffer]:
        before()
        return record(values, origin)

    return recorded


def _never(arguments: Sequence[Buffer]) -> Sequence[Buffer]:
    raise AssertionError("a deferred op is recorded, not launched")
