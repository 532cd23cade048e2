"""Connectionist temporal classification: forward and backward variables in the log domain, a loop over time.

Both rows take padded targets [N, S] and lengths on the device; :mod:`emutpu.backend.composed` brings every form that
PyTorch knows into this one, so that lengths are inputs and not part of a module.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Builder, Value
from emutpu.backend.lowering._matrices import INDEX, masked, take
from emutpu.backend.lowering._registry import Context, lowering

__all__: list[str] = []

Meta = torch.Tensor
_NEVER = -math.inf


def _meta(
    log_probs: Meta, targets: Meta, input_lengths: Meta, target_lengths: Meta, blank: int, zero_infinity: bool
) -> Any:
    time, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, 2 * targets.shape[1] + 1)


def _backward_meta(grad: Meta, log_probs: Meta, *_: Any, **__: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


class _Problem:
    """Labels with blanks between them [N, L], which of them exist, and the log-probability of each: [N, L, T]."""

    def __init__(
        self, log_probs: Value, targets: Value, input_lengths: Value, target_lengths: Value, blank: int
    ) -> None:
        self.builder: Builder = log_probs.builder
        self.time, self.batch, self.classes = log_probs.shape
        self.labels = self._with_blanks(targets.convert(INDEX), blank)
        self.states = self.labels.shape[1]
        shape = (self.batch, self.states)
        self.places = self.builder.iota(shape, 1, INDEX)
        self.last = (target_lengths.convert(INDEX) * 2).reshape((self.batch, 1))
        self.steps = input_lengths.convert(INDEX).reshape((self.batch, 1))
        self.exists = self.places <= self.last
        self.emitted = take(log_probs.transpose([1, 2, 0]), self.labels)

    def _with_blanks(self, targets: Value, blank: int) -> Value:
        spaced = targets.pad([0, 1], [0, 1], [0, 1], blank)
        return spaced if targets.shape[1] else self.builder.full(blank, (self.batch, 1), INDEX)

    def at(self, x: Value, t: Value) -> Value:
        """Time ``t`` of [N, L, T] as [N, L]."""
        zero = self.builder.full(0, (), INDEX)
        return self.builder.dynamic_slice(x, [zero, zero, t], [self.batch, self.states, 1]).reshape(
            (self.batch, self.states)
        )

    def moved(self, x: Value, by: int) -> Value:
        """``x[n, s - by]``, with nothing where there is no such state."""
        low, high = max(by, 0), max(-by, 0)
        return x.pad([0, low], [0, high], None, _NEVER).slice([0, high], [self.batch, high + self.states])

    def differs(self, by: int) -> Value:
        """Whether the label ``by`` before is another one, so that the blank between may be left out."""
        low, high = max(by, 0), max(-by, 0)
        other = self.labels.pad([0, low], [0, high], None, -1).slice([0, high], [self.batch, high + self.states])
        return self.labels.ne(other)

    def sum(self, *terms: Value) -> Value:
        """Log of the sum of exponentials."""
        peak = terms[0]
        for term in terms[1:]:
            peak = peak.maximum(term)
        base = self.builder.select(peak.eq(_NEVER), 0, peak)
        total = (terms[0] - base).exp()
        for term in terms[1:]:
            total = total + (term - base).exp()
        return total.log() + base

    def step(self, before: Value, direction: int) -> Value:
        """From the states one step away (``direction`` 1 is forward in time) to these."""
        jump = self.builder.select(self.differs(2 * direction), self.moved(before, 2 * direction), _NEVER)
        return self.sum(before, self.moved(before, direction), jump)


def _forward(problem: _Problem) -> tuple[Value, Value]:
    """log_alpha [N, L, T], and the negative log-likelihood [N]."""
    p = problem
    builder, dtype = p.builder, p.emitted.dtype
    shape = (p.batch, p.states)
    start = builder.select((p.places < 2) & p.exists, 0, builder.full(_NEVER, shape, dtype))
    zero = builder.full(0, (), INDEX)

    def body(t: Value, before: Value, every: Value) -> list[Value]:
        first = t.eq(0).broadcast(shape)
        now = builder.select(first, start, p.step(before, 1)) + p.at(p.emitted, t)
        now = builder.select(p.exists, now, _NEVER)
        every = builder.dynamic_update_slice(every, now.reshape((*shape, 1)), [zero, zero, t])
        return [t + 1, now, every]

    every = builder.full(_NEVER, (*shape, p.time), dtype)
    if p.time and p.batch:
        every = builder.while_loop([zero, start, every], lambda t, *_: t < p.time, body)[2]
    times = builder.iota(every.shape, 2, INDEX)
    ends = p.steps.reshape((p.batch, 1, 1)) - 1
    final = builder.select(times.eq(ends), every, _NEVER).max([2]) if p.time else every.reshape(shape)
    # No step at all: certain for the empty target, impossible for others.
    final = builder.select(p.steps.eq(0), builder.select(p.places.eq(0) & p.last.eq(0), 0, start), final)
    final = builder.select(p.steps.eq(0) & p.last.ne(0), _NEVER, final)
    ending = builder.select(p.places.eq(p.last) | p.places.eq(p.last - 1), final, _NEVER)
    peak = ending.max([1], keepdim=True)
    base = builder.select(peak.eq(_NEVER), 0, peak)
    return every, -((ending - base).exp().sum([1]).log() + base.reshape((p.batch,)))


_ARGUMENTS = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"


@lowering(
    f"_ctc_loss.Tensor({_ARGUMENTS}, int blank=0, bool zero_infinity=False) -> (Tensor, Tensor)",
    meta=_meta,
    dispatched=False,
)
def _ctc_loss(
    cx: Context,
    log_probs: Value,
    targets: Value,
    input_lengths: Value,
    target_lengths: Value,
    blank: int,
    zero_infinity: bool,
) -> list[Value]:
    wide = log_probs.convert(opmath(log_probs.dtype))
    every, loss = _forward(_Problem(wide, targets, input_lengths, target_lengths, blank))
    return [loss.convert(log_probs.dtype), every.transpose([0, 2, 1]).convert(log_probs.dtype)]


@lowering(
    f"_ctc_loss_backward.Tensor(Tensor grad, {_ARGUMENTS}, Tensor neg_log_likelihood, Tensor log_alpha, int blank, "
    "bool zero_infinity=False) -> Tensor",
    meta=_backward_meta,
    dispatched=False,
)
def _ctc_loss_backward(
    cx: Context,
    grad: Value,
    log_probs: Value,
    targets: Value,
    input_lengths: Value,
    target_lengths: Value,
    loss: Value,
    log_alpha: Value,
    blank: int,
    zero_infinity: bool,
) -> Value:
    """``grad * (p - posterior)``: PyTorch's form, which takes the log-probabilities to be normalised."""
    builder = cx.builder
    if not log_probs.numel:
        return log_probs
    dtype = opmath(log_probs.dtype)
    wide = log_probs.convert(dtype)
    p = _Problem(wide, targets, input_lengths, target_lengths, blank)
    alpha = log_alpha.convert(dtype).transpose([0, 2, 1])
    shape = (p.batch, p.states)
    loss = loss.convert(dtype).reshape((p.batch, 1))
    classes = builder.iota((*shape, p.classes), 2, INDEX).eq(p.labels.reshape((*shape, 1)))
    ending = builder.select(p.places.eq(p.last) | p.places.eq(p.last - 1), 0, builder.full(_NEVER, shape, dtype))
    zero = builder.full(0, (), INDEX)

    def body(count: Value, after: Value, posteriors: Value) -> list[Value]:
        t = count * -1 + (p.time - 1)
        emitted = p.at(p.emitted, t)
        reached = builder.select((t + 1).broadcast(shape).eq(p.steps), ending, p.step(after, -1))
        now = builder.select(p.exists & (t < p.steps), reached + emitted, _NEVER)
        both = p.at(alpha, t) + now
        weight = builder.select(both.eq(_NEVER), 0, (both - emitted + loss).exp())
        by_class = masked(classes, weight.reshape((*shape, 1))).sum([1])
        posteriors = builder.dynamic_update_slice(
            posteriors, by_class.reshape((1, p.batch, p.classes)), [t, zero, zero]
        )
        return [count + 1, now, posteriors]

    start = builder.full(_NEVER, shape, dtype)
    posteriors = builder.full(0, wide.shape, dtype)
    posteriors = builder.while_loop([zero, start, posteriors], lambda t, *_: t < p.time, body)[2]
    per_sample = (1, p.batch, 1)
    slope = (wide.exp() - posteriors) * grad.convert(dtype).reshape(per_sample)
    lost = loss.eq(math.inf).reshape(per_sample)
    slope = builder.select(lost, 0.0 if zero_infinity else math.nan, slope)
    inside = builder.iota(wide.shape, 0, INDEX) < p.steps.reshape(per_sample)
    return masked(inside, slope).convert(log_probs.dtype)
