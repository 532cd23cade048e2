"""The pending ops of a stream: where they are recorded, and how they are done."""

from __future__ import annotations

import enum
import threading
from typing import TYPE_CHECKING

from emutpu.backend.deferred.log import LOG, Execution
from emutpu.backend.deferred.plan import Plan, Step, make_plan
from emutpu.backend.deferred.region import Node, RegionKey, forget_regions, region
from emutpu.backend.deferred.repeats import Detector
from emutpu.backend.deferred.trace import Traces
from emutpu.backend.deferred.values import BEING_COMPUTED, Batch
from emutpu.backend.errors import describe, region_failure
from emutpu.backend.location import Origin, capture
from emutpu.backend.options import LOCAL
from emutpu.backend.pjrt import Buffer, ErrorBuffer, PjrtError
from emutpu.backend.runtime import runtime
from emutpu.backend.streams import current_stream

if TYPE_CHECKING:
    from emutpu.backend.cache import Acquired, Flight
    from emutpu.backend.keys import Key
    from emutpu.backend.rng import TpuGenerator

__all__ = ["Queue", "Repeats", "current_queue", "forget", "materialize_all"]


class Repeats(enum.Enum):
    """What the repeated-op rule does: cut the list as a read would, launch it whole, or nothing."""

    SAFE = "safe"
    AGGRESSIVE = "aggressive"
    OFF = "off"


class Queue:
    """One stream's pending ops. ``repeats`` says what happens when they begin to repeat themselves."""

    def __init__(self, repeats: Repeats) -> None:
        self.lock = threading.RLock()
        self.repeats = repeats
        self.detector = Detector()
        self.batch = Batch(self, TRACES.root)

    @property
    def pending(self) -> bool:
        """Whether anything is recorded that was not done."""
        return bool(self.batch.origins)

    def cut(self) -> None:
        """The repeated-op rule found the end of a copy."""
        if self.repeats is not Repeats.OFF:
            self._do("repeated_op_heuristic", whole=self.repeats is Repeats.AGGRESSIVE)

    def leave(self) -> None:
        """The first op after DEFER_AND_FUSE was left: all of the list in one region."""
        try:
            self._do("debug_mode", whole=True)
        finally:
            LOCAL.state.refresh()

    def state_of(self, generator: TpuGenerator, numbers: int) -> Buffer:
        """The generator's state on the device, for an op that takes ``numbers`` draws."""
        return generator.value(numbers)

    def drawn(self, generator: TpuGenerator, numbers: int, state: Buffer) -> None:  # a capture counts them
        """An op that draws was recorded, and left ``state``."""
        generator.keep(state)
        if generator.updated():
            self.materialize("synchronize()")

    def materialize(self, reason: str) -> None:
        """Do everything that is live. Raises the failure of the first region that fails."""
        if LOCAL.state.compiles:
            self._materialize_if_free(reason)
            return
        with self.lock:
            if self._do(reason, whole=False):
                self.detector.reset()

    def _materialize_if_free(self, reason: str) -> None:
        """For a finalizer on a thread of the compile pool: who has the lock may be waiting for this very thread."""
        if not self.lock.acquire(blocking=False):
            raise RuntimeError(BEING_COMPUTED)
        try:
            if self._do(reason, whole=False):
                self.detector.reset()
        finally:
            self.lock.release()

    def _do(self, reason: str, *, whole: bool) -> bool:
        """Whether anything was to be done."""
        with self.lock:
            if not self.batch.origins:
                return False
            fresh = Batch(self, TRACES.root)
            batch = self.batch
            self.batch = fresh
            try:
                plan = self._plan(batch, whole=whole)
                if plan.steps:
                    _Run(batch, plan, reason).run()
            except Exception as error:  # any: every value of the list has it, and it goes on
                batch.fail(error)
                raise
            except BaseException as interruption:  # Ctrl-C too: what waits must be told, and it goes on
                batch.fail(_interrupted(interruption, reason))
                raise
            batch.references = []
            return bool(plan.steps)

    @staticmethod
    def _plan(batch: Batch, *, whole: bool) -> Plan:
        """The plan for what of the batch is live, from the trace where it was made before."""
        marks = bytes(batch.marks)
        state = batch.state
        plan = state.plans.get((marks, whole)) if state.epoch == TRACES.epoch else None
        if plan is None:
            plan = make_plan(state, marks, whole=whole)
            if runtime().cache.allow:
                state.plans[marks, whole] = plan
        return plan


def _interrupted(interruption: BaseException, reason: str) -> RuntimeError:
    return RuntimeError(
        f"the value was never computed: {type(interruption).__name__} interrupted its computation, which was "
        f"materialized by {reason} at {describe(*capture())}. Run the code that makes it again"
    )


class _Run:
    """One execution of a plan."""

    def __init__(self, batch: Batch, plan: Plan, reason: str) -> None:
        self.batch = batch
        self.plan = plan
        self.reason = reason
        self.values: dict[int, Buffer] = {}
        self.failures: dict[int, BaseException] = {}
        self.trigger = (reason, *capture())
        # Regions take no precision from the thread: each op has its own.
        self.options = LOCAL.state.plain
        self.flights: dict[int, Flight] = {}  # compilations under way, by the first of the plan's steps that need them

    def run(self) -> None:
        if LOG.observer is not None:
            LOG.observer.planned(self.batch, self.plan, self.trigger)
        failure: BaseException | None = None
        try:
            for number, step in enumerate(self.plan.steps):
                problem = self._inherited(step) or self._step(number, step)
                if problem is not None:
                    failure = failure or problem
                    self.failures |= dict.fromkeys(step.outputs, problem)
        finally:
            self._settle(failure)
        if failure is not None:
            raise failure

    def _inherited(self, step: Step) -> BaseException | None:
        if not self.failures:
            return None
        return next((self.failures[i] for i in step.inputs if i in self.failures), None)

    def _executable(self, number: int, step: Step) -> tuple[Key, Acquired]:
        """The step's executable, while those of the next steps compile beside it."""
        later = self._missing(number)
        if later:
            self._begin(number)
        for other in later:
            try:
                self._begin(other)
            except Exception:  # noqa: BLE001  # any: it comes again when that step's turn does
                break
        flight = self.flights.pop(number, None)
        if flight is not None:
            return step.region.finish(self.options, flight)
        return step.region.acquire(self.options, self._origins(step))

    def _missing(self, number: int) -> list[int]:
        """Steps after this one that wait for regions of their own, as many as may be compiled beside it."""
        steps = self.plan.steps
        room = runtime().cache.ahead - len({number, *self.flights})
        seen = {id(steps[n].region) for n in (number, *self.flights)}
        found: list[int] = []
        for later in range(number + 1, len(steps)):
            if len(found) >= room:
                break
            region = steps[later].region
            if region.key.nodes[0].op.collective is None and self.options not in region.executables:
                if id(region) not in seen:
                    found.append(later)
                seen.add(id(region))
        return found

    def _begin(self, number: int) -> None:
        if number not in self.flights:
            step = self.plan.steps[number]
            flight = step.region.begin(self.options, self._origins(step))
            if flight is not None:
                self.flights[number] = flight

    def _origins(self, step: Step) -> list[Origin]:
        return [self.batch.origins[k] for k in step.nodes]

    def _step(self, number: int, step: Step) -> Exception | None:
        batch, values = self.batch, self.values
        tier, seconds = 1, 0.0
        executable = step.region.executables.get(self.options)
        collective = step.region.key.nodes[0].op.collective
        try:
            arguments = [batch.inputs[~i] if i < 0 else values[i] for i in step.inputs]
            if collective is not None:
                key = step.region.logical_key(self.options)
                results = collective(arguments)
            else:
                if executable is None:
                    key, acquired = self._executable(number, step)
                    executable = key, acquired.executable
                    tier, seconds = acquired.tier, acquired.seconds
                key = executable[0]
                results = executable[1].launch(arguments)
        except PjrtError as error:
            return region_failure(error, self._culprit(step), self.trigger)
        except Exception as error:  # noqa: BLE001  # kept for every value that it concerns, and raised by run()
            error.add_note(f"  materialized by {self.reason} at {describe(*self.trigger[1:])}")
            return error
        for slot, buffer in zip(step.outputs, results, strict=True):
            values[slot] = buffer
            if buffer.__class__ is ErrorBuffer:
                self._blame(step, buffer)
        runtime().region_launches += 1
        execution = Execution(batch.origins, step, self.reason, self.trigger, key, tier, seconds)
        LOG.add(execution)
        if LOG.observer is not None:
            LOG.observer.launched(execution, arguments, results)
        return None

    def _settle(self, failure: BaseException | None) -> None:
        """Give every live value its buffer, or what kept it from having one."""
        references = self.batch.references
        for step in self.plan.steps:
            for slot in step.outputs:
                pending = references[slot]()
                if pending is None:
                    continue
                pending.buffer = self.values.get(slot)
                if pending.buffer is None:
                    pending.failure = self.failures.get(slot) or failure
        self.batch.inputs, self.batch.index = [], {}

    def _culprit(self, step: Step) -> Origin:
        """Which op of a region that failed it was: each is tried alone, with the region's own inputs."""
        origins = self._origins(step)
        inputs = [self.batch.inputs[~i] if i < 0 else self.values[i] for i in step.inputs]
        made: list[Buffer] = []
        for (op, operands), origin in zip(step.region.key.nodes, origins, strict=True):
            node = Node(op, tuple(~n for n in range(len(operands))))
            alone = region(RegionKey((node,), tuple(range(len(op.layouts)))))
            try:
                arguments = [inputs[~o] if o < 0 else made[o] for o in operands]
                results = alone.executable(self.options, [origin])[1].launch(arguments)
            except PjrtError:
                return origin
            if any(result.__class__ is ErrorBuffer for result in results):
                return origin
            made += results
        return origins[-1]  # none fails alone

    def _blame(self, step: Step, buffer: Buffer) -> None:
        assert isinstance(buffer, ErrorBuffer)
        if buffer.error.origin is None:
            buffer.error.origin = self._culprit(step)


TRACES = Traces()
_queues: dict[int, Queue] = {}
_lock = threading.RLock()  # a finalizer or a signal handler may come in


def queue_of(stream: int) -> Queue:
    """The queue of a stream, by its id."""
    found = _queues.get(stream)
    if found is None:
        configuration = runtime().configuration
        repeats = Repeats(configuration.repeats) if configuration is not None else Repeats.SAFE
        with _lock:
            found = _queues.setdefault(stream, Queue(repeats))
    return found


def current_queue() -> Queue:
    """The queue of the calling thread's stream."""
    state = LOCAL.state
    queue = state.queue
    if queue is None:
        # A thread that compiles for others must not wait for them: what a finalizer records there has its own list.
        stream = current_stream().stream_id
        queue = state.queue = queue_of(stream) if not state.compiles else Queue(Repeats.OFF)
    assert isinstance(queue, Queue)
    return queue


def materialize_all(reason: str) -> None:
    """Do what is pending on every stream."""
    for queue in list(_queues.values()):
        queue.materialize(reason)


def forget() -> None:
    """Drop all plans and regions: what is recorded from now on is planned and compiled anew."""
    TRACES.clear()
    forget_regions()
