"""Recorded sequences of ops, as a tree that all batches share.

A batch is a path from the root: recording an op that was recorded at this place before is one dictionary look-up, and two
batches that recorded the same end in the same node, where what was decided for that sequence is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emutpu.backend.deferred.plan import Plan

__all__ = ["Event", "State", "Traces"]

# An op, followed by the numbers of its operands: values of the batch, or ``~n`` for its nth input.
Event = tuple[Any, ...]
_LIMIT = 200_000


class State:
    """A node of the tree. ``plans`` are by (live marks, whether cuts are forbidden)."""

    __slots__ = ("epoch", "event", "next", "parent", "plans", "traces")

    def __init__(self, traces: Traces, parent: State | None, event: Event) -> None:
        self.traces = traces
        self.epoch: int = traces.epoch if parent is None else parent.epoch
        self.parent = parent
        self.event = event
        self.next: dict[Event, State] = {}
        self.plans: dict[tuple[bytes, bool], Plan] = {}

    def extend(self, event: Event) -> State:
        """The state after a further op."""
        self.traces.count += 1
        made = self.next[event] = State(self.traces, self, event)
        return made

    def events(self) -> list[Event]:
        """All ops from the root to here."""
        found = []
        state: State | None = self
        while state is not None and state.parent is not None:
            found.append(state.event)
            state = state.parent
        return found[::-1]


class Traces:
    """The current tree. It is replaced when it has grown too large, and when the cache is cleared."""

    def __init__(self) -> None:
        self.count = 0
        self.epoch: int = 0
        self._root = State(self, None, ())

    @property
    def root(self) -> State:
        """Where a new batch begins."""
        if self.count > _LIMIT:
            self.clear()
        return self._root

    def clear(self) -> None:
        """Forget all sequences; batches that are being recorded go on in the old tree, whose plans count no more."""
        self.count = 0
        self.epoch += 1
        self._root = State(self, None, ())
