"""The gates: what a program must do on the device before it counts as passed.

Tier 1: it is built, runs forward and, where anything can be differentiated, through one training step, without an
exception and without a fallback, and its results are finite where the CPU's are. Tier 2: at precision ``highest`` it agrees
with the CPU: the answer of the forward and the gradients, and the same tokens where it generates. The relative error of a
tensor is the norm of the difference over the norm of the CPU's. A program that fails on the CPU, or whose float32 is
far from float64 there, says nothing about the device: it is a defect of the suite.

Tier 3, apart from the outcome: the forward at the device's default precision is finite and errs by no more than a bound.
How far the CPU's float32 is from float64 is measured beside it: that noise is what the limits of tier 2 are chosen by.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import os
import random
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from emutpu.conformance.agreement import finite, gradient_error, relative_error, strays, worst
from emutpu.conformance.building import Built, NoRecipe, build, loss_of, results_of
from emutpu.conformance.fingerprints import fingerprint
from emutpu.conformance.manifest import Program
from emutpu.conformance.noise import Noise, recall
from emutpu.conformance.tiers import LIMITS

__all__ = [
    "CPU_ONLY",
    "DEFAULT_PRECISION",
    "DEVICE",
    "GRADIENTS",
    "LOGITS",
    "MODES",
    "Mismatch",
    "Outcome",
    "Report",
    "examine",
    "filed",
    "found_here_too",
    "gradients_of",
    "highest",
    "seed",
    "to_device",
]

DEVICE = "tpu"
MODES = ("strict", "defer", "compile")
CPU_ONLY = "cpu"  # no mode of the device: whether the suite itself is in order
# Chosen by measured noise, which every report shows: docs/conformance.md.
LOGITS, GRADIENTS, DEFAULT_PRECISION = (LIMITS[name] for name in ("logits", "gradients", "default_precision"))
PERPLEXITY = LIMITS["perplexity"]  # relative, of trained language models
# Where the CPU itself strays by more: this many times as far as the CPU, from float64, is as good as the CPU.
AS_GOOD = 4.0
_UNFIT = 0.05
# Weights that differ by so much, relative: less than what tier 2 allows of the logits. Where that alone moves an answer as
# far (a unit that is barely on or off, two scores that are nearly equal), the answer does not tell a device's rounding from
# a fault.
_NUDGE, _NUDGES = 2.0**-17, 4
_COMPILING = frozenset({"forward", "training"})  # the stages in which graphs are compiled first
_MEASURED = "strict"  # the mode in which noise and tier 3 are measured, once for all modes
_RATE = 1e-3
_TOKENS = 4  # the prompt, and three steps that read what it left


class Outcome(enum.StrEnum):
    """What became of a program. Nothing else is possible, and every row has one."""

    PASS = "pass"  # noqa: S105  # an outcome
    CRASH = "crash"
    MISMATCH = "mismatch"
    UNSUPPORTED = "unsupported"
    TIMEOUT = "timeout"
    NOT_RUN = "not run"
    CORPUS = "corpus bug"


@dataclasses.dataclass(slots=True)
class Report:
    """What one program did: the outcome, where and how it failed, and what was measured.

    Tiers are None where they were not reached. Errors are relative norms. ``ill_conditioned`` names what was judged against
    float64, since the CPU's float32 strays as far, or strays so with slightly other weights. ``logit_noise`` and ``gradient_noise`` are how far it strays, None for
    what does not run in float64 (``noise_error`` says why). Perplexities are those of trained language models, the device's at
    ``highest`` and by default. Noise and tier 3 belong to ``strict`` alone. ``executables`` is
    how many the lengths of the bounded tier took.
    """

    program: str
    mode: str
    outcome: Outcome = Outcome.NOT_RUN
    stage: str | None = None
    error: str | None = None
    traceback: list[str] = dataclasses.field(default_factory=list)
    op: str | None = None
    tier1: bool | None = None
    tier2: bool | None = None
    trained: bool = False
    logit_error: float | None = None
    gradient_error: float | None = None
    tokens_equal: bool | None = None
    cpu_perplexity: float | None = None
    perplexity: float | None = None
    default_perplexity: float | None = None
    ill_conditioned: list[str] = dataclasses.field(default_factory=list)
    logit_noise: float | None = None
    gradient_noise: float | None = None
    noise_error: str | None = None
    tier3: bool | None = None
    default_error: float | None = None
    tier3_error: str | None = None
    executables: int | None = None
    fingerprint: str | None = None
    seconds: float = 0.0


class Mismatch(Exception):
    """Tier 2 was missed; the message says by what."""


class _Unfit(Exception):
    """The CPU's float32 is so far from float64 that no device can be judged by this program."""


@dataclasses.dataclass(slots=True)
class _Answer:
    """Results and gradients of one run, on the CPU; ``gradients`` is empty for what cannot be trained."""

    results: list[Tensor]
    gradients: dict[str, Tensor]
    finite: bool


def examine(program: Program, mode: str, *, fallbacks: Callable[[], int]) -> Report:
    """Run one program on the CPU and on the device. Raises nothing of a program's making.

    ``fallbacks`` counts the ops that ran on the CPU instead so far.
    """
    report = Report(program.name, mode)
    started = time.perf_counter()
    try:
        _examine(program, report, fallbacks)
    except Exception as error:  # noqa: BLE001  # whatever a program raises is the finding
        compiling = report.stage in _COMPILING and mode == "compile"
        filed(report, found_here_too(error, functools.partial(_compiled_here, program)) if compiling else error)
    report.seconds = time.perf_counter() - started
    return report


def _examine(program: Program, report: Report, fallbacks: Callable[[], int]) -> None:
    report.stage = "cpu"
    built = build(program)
    model = copy.deepcopy(built.model)  # before training moves running statistics
    known = None if report.mode == CPU_ONLY else program.fingerprint
    report.fingerprint = known or fingerprint(built.model, built.inputs)
    expected = _answer(built, built.model, nullcontext)
    _refuse_what_cannot_differ(expected)
    measured = report.mode == _MEASURED and program.representative
    exact = _measured_noise(built, model, expected, report) if measured else None
    if built.perplexity is not None:
        report.cpu_perplexity = built.perplexity(built.model, _same)
    if report.mode == CPU_ONLY:
        report.outcome, report.stage = Outcome.PASS, None
        return
    report.stage = "move"
    before = fallbacks()
    model = _placed(model, report.mode)
    if report.mode == _MEASURED:
        _at_default_precision(built, model, expected, report)
    report.stage = "device"
    actual = _answer(built, model, highest, to_device, lambda stage: setattr(report, "stage", stage))
    report.trained = bool(expected.gradients)
    report.stage = "finite"
    if expected.finite and not actual.finite:
        raise FloatingPointError("the device's results, gradients or stepped weights are not finite, the CPU's are")
    if fallbacks() > before:
        raise RuntimeError("an op ran on the CPU instead of the device")
    report.tier1 = True
    report.stage = "compare"
    report.tier2 = False
    _compare(program, expected, actual, report, exact)
    if built.generates:
        _compare_tokens(built, model, report)
    if built.perplexity is not None:
        report.stage = "perplexity"
        with highest():
            report.perplexity = built.perplexity(model, to_device)
        _compare_perplexity(report.perplexity, report)
    report.tier2, report.outcome, report.stage = True, Outcome.PASS, None


def _refuse_what_cannot_differ(expected: _Answer) -> None:
    """Raise for an answer that any device would agree with: ValueError where it has no tensor, FloatingPointError where
    nothing of one is finite.
    """
    if not any(result.numel() for result in expected.results):
        raise ValueError("there is no tensor in the answer on the CPU, so no device could differ")
    if expected.finite:
        return
    named = [("a result", result) for result in expected.results] + list(expected.gradients.items())
    for name, value in named:
        if value.numel() and not bool(value.isfinite().any()):
            raise FloatingPointError(f"nothing is finite in {name} on the CPU, so no device could differ")


def _placed(model: nn.Module, mode: str) -> nn.Module:
    moved = model.to(DEVICE)
    if mode == "compile":
        moved.compile(backend=DEVICE)
    return moved


def to_device(value: Any) -> Any:
    """The same structure with its tensors on the device."""
    return tree_map(lambda leaf: leaf.to(DEVICE) if isinstance(leaf, Tensor) else leaf, value)


def _same(value: Any) -> Any:
    return value


def highest() -> AbstractContextManager[Any]:
    """A context in which the device multiplies float32 in full precision."""
    tpu: Any = torch.get_device_module(DEVICE)
    context: AbstractContextManager[Any] = tpu.precision(tpu.Precision.HIGHEST)
    return context


def _answer(
    built: Built,
    model: nn.Module,
    precision: Callable[[], AbstractContextManager[Any]],
    place: Callable[[Any], Any] = _same,
    tell: Callable[[str], None] = lambda stage: None,
) -> _Answer:
    """Forward in evaluation mode, then one training step. ``tell`` learns which of them runs."""
    inputs, labels = place(dict(built.inputs)), place(dict(built.labels))
    seed()
    with precision():
        tell("forward")
        model.eval()
        with torch.no_grad():
            # Copies: a result may be a parameter, which the step changes in place.
            results = [result.detach().to("cpu", copy=True) for result in results_of(model(**inputs))]
        tell("training")
        again = built.generates or built.perplexity is not None
        gradients, stepped = _trained(model, inputs | labels, restore=again)
    return _Answer(results, gradients, all(map(finite, [*results, *gradients.values(), *stepped])))


def seed() -> None:
    """Seed every generator. The CPU and the device draw the same: models mask their inputs with numpy's and Python's random numbers."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator that those models use
    random.seed(0)


def gradients_of(model: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Those of a training step, by parameter; empty where no loss can be differentiated."""
    seed()
    return _trained(model, arguments, restore=True)[0]


def _trained(
    model: nn.Module, arguments: Mapping[str, Any], *, restore: bool
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Gradients by parameter, and the weights after a step of SGD; both empty where no loss can be differentiated.

    ``restore`` takes the step back afterwards.
    """
    model.train()
    loss = loss_of(model(**arguments))
    if loss is None or not loss.requires_grad:
        return {}, []
    loss.backward()
    trainable = {name: p for name, p in model.named_parameters() if p.grad is not None}
    gradients = {name: p.grad.detach().cpu() for name, p in trainable.items() if p.grad is not None}
    before = [p.detach().to("cpu", copy=True) for p in trainable.values()] if restore else None  # no modules to compile
    torch.optim.SGD(trainable.values(), lr=_RATE).step()
    stepped = [p.detach().cpu() for p in trainable.values()]
    if before is not None:
        for p, value in zip(trainable.values(), before, strict=True):
            p.data = value.to(p.device)
    model.zero_grad()
    model.eval()
    return gradients, stepped


# ------------------------------------------------------------------------------------------------ agreement


def _compare(
    program: Program, expected: _Answer, actual: _Answer, report: Report, exact: _Answer | None = None
) -> None:
    if len(actual.results) != len(expected.results):
        raise Mismatch(f"{len(actual.results)} results, the CPU gives {len(expected.results)}")
    if report.mode == "compile":
        _leave_out_zeros(actual, expected)
    if actual.gradients.keys() != expected.gradients.keys():
        missing = sorted(expected.gradients.keys() ^ actual.gradients.keys())
        raise Mismatch(f"gradients of {', '.join(missing[:4])} on one side only")
    errors = list(map(relative_error, actual.results, expected.results))
    report.logit_error = max(errors, default=None)
    missed = [_Miss("logits", place, error, LOGITS) for place, error in enumerate(errors) if not error <= LOGITS]
    if expected.gradients:
        report.gradient_error = gradient_error(actual.gradients, expected.gradients)
        if not report.gradient_error <= GRADIENTS:
            missed.append(_Miss("gradients", None, report.gradient_error, GRADIENTS))
    if missed and exact is None:
        exact = _exact(program, expected, report)
    for miss in missed:
        assert exact is not None
        inexact = report.noise_error if exact is expected else None
        _judge(program, report.mode, miss, expected, actual, exact, inexact)
    report.ill_conditioned = list(dict.fromkeys(miss.what for miss in missed))


class _Miss(NamedTuple):
    """A limit that was missed: by one result of the answer ("logits"), or by the gradients."""

    what: str
    place: int | None
    error: float
    limit: float

    def between(self, actual: _Answer, expected: _Answer) -> float:
        """The error of the part of two answers that it is about."""
        if self.place is None:
            return gradient_error(actual.gradients, expected.gradients)
        return strays(actual.results[self.place], expected.results[self.place])


def _judge(
    program: Program,
    mode: str,
    miss: _Miss,
    expected: _Answer,
    actual: _Answer,
    exact: _Answer,
    inexact: str | None,
) -> None:
    """Raise unless the CPU's rounding explains a miss: Mismatch, or _Unfit for what says nothing about a device. ``inexact``
    says why ``exact`` is the CPU's own answer: then slightly other weights alone can explain it.
    """
    what, _, error, limit = miss
    astray, allowed = miss.between(actual, exact), miss.between(expected, exact)
    if not allowed <= _UNFIT:
        raise _Unfit(f"the {what} of the CPU stray from float64 by {allowed:.2g}: they say nothing about a device")
    if astray <= AS_GOOD * allowed:
        return
    moved = max(miss.between(answer, exact) for answer in _nudged(program))
    if astray <= AS_GOOD * moved:
        return
    if mode == "compile" and miss.between(actual, _compiled_here(program)) <= limit:
        raise _Unfit(f"torch.compile alone moves the {what} by {error:.2g}, on the CPU too")
    missed = f"relative error of the {what} {error:.2g}, allowed {limit:.0e}"
    if inexact is not None:
        raise Mismatch(f"{missed}, with slightly other weights {moved:.2g}; it does not run in float64: {inexact}")
    raise Mismatch(
        f"{missed}; from float64 the device strays by {astray:.2g}, the CPU by {allowed:.2g}, with slightly other weights "
        f"by {moved:.2g}"
    )


def _leave_out_zeros(actual: _Answer, expected: _Answer) -> None:
    """Of ``actual``, drop zeros where the CPU has no gradient: PyTorch gives them to every parameter of a compiled graph,
    on any device, also where the loss takes none of the results that the parameter is in.
    """
    for name in actual.gradients.keys() - expected.gradients.keys():
        if not bool(actual.gradients[name].any()):
            del actual.gradients[name]


def _nudged(program: Program) -> Iterator[_Answer]:
    """The CPU's answers with weights that are slightly other ones."""
    for number in range(_NUDGES):
        built = build(program)
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in built.model.parameters():
                if parameter.is_floating_point():
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                    parameter.mul_(1 + _NUDGE * noise)
        yield _answer(built, built.model, nullcontext)


def found_here_too(error: Exception, here: Callable[[], object]) -> Exception:
    """``error``, or what files as a corpus bug where ``here``, which compiles on the CPU, raises one of the same kind."""
    try:
        here()
    except Exception as own:  # noqa: BLE001  # of any kind: it is compared with the device's
        if _told(own) == _told(error):
            return _Unfit(f"with torch.compile it fails on the CPU too: {': '.join(_told(own))}")
    return error


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _told(error: Exception) -> tuple[str, str]:
    """The kind and the first line of an error, without the backend that Dynamo names around it."""
    within = getattr(error, "inner_exception", error)
    return type(within).__name__, str(within).partition("\n")[0]


def _compiled_here(program: Program) -> _Answer:
    """What PyTorch's own compilation makes of the program on the CPU: its decompositions, run as they are."""
    torch._dynamo.reset()
    built = build(program)
    built.model.compile(backend="aot_eager")
    return _answer(built, built.model, nullcontext)


def _exact(program: Program, expected: _Answer, report: Report) -> _Answer:
    """The answer in float64, or ``expected`` where there is none, with the reason in the report."""
    if report.noise_error is not None:  # asked before
        return expected
    try:
        return _in_float64(program)
    except Exception as error:  # noqa: BLE001  # kept: as for the measured noise
        report.noise_error = _short(error)
        return expected


def _in_float64(program: Program) -> _Answer:
    built = build(program)
    return _answer(built, _double(built.model), nullcontext, _widened)


def _double(model: nn.Module) -> nn.Module:
    """In float64, in place. Grouped products of experts are not there in float64, so experts take turns."""
    choose = getattr(model, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")
    return model.double()


def _measured_noise(built: Built, model: nn.Module, expected: _Answer, report: Report) -> _Answer | None:
    """Put into the report how far the CPU's float32 is from float64; gives the answer in float64 where it was made for that."""
    exact: _Answer | None = None

    def measure() -> Noise:
        nonlocal exact
        try:
            exact = _answer(built, _double(copy.deepcopy(model)), nullcontext, _widened)
        except Exception as error:  # noqa: BLE001  # kept: not every model runs in float64, and that is no finding about a device
            return Noise(error=_short(error))
        comparable = expected.gradients and expected.gradients.keys() == exact.gradients.keys()
        return Noise(
            worst(_widened(expected.results), _widened(exact.results)),
            gradient_error(expected.gradients, exact.gradients) if comparable else None,
        )

    noise = recall(report.program, [*expected.results, *expected.gradients.values()], measure)
    report.logit_noise, report.gradient_noise, report.noise_error = noise.logits, noise.gradients, noise.error
    return exact


def _at_default_precision(built: Built, model: nn.Module, expected: _Answer, report: Report) -> None:
    """Tier 3: what it finds, a crash too, is kept apart from the outcome."""
    try:
        report.default_error = _default_error(built, model, expected)
        if built.perplexity is not None:
            report.default_perplexity = built.perplexity(model, to_device)
            _compare_perplexity(report.default_perplexity, report)
    except Exception as error:  # noqa: BLE001  # kept: the same program at `highest` is still judged
        report.tier3, report.tier3_error = False, f"{type(error).__name__}: {error}"[:2000]
        return
    report.tier3 = report.default_error is None or report.default_error <= DEFAULT_PRECISION
    if not report.tier3:
        report.tier3_error = f"relative error {report.default_error:.2g}, allowed {DEFAULT_PRECISION:g}"


def _default_error(built: Built, model: nn.Module, expected: _Answer) -> float | None:
    seed()
    with torch.no_grad():
        results = [result.cpu() for result in results_of(model(**to_device(dict(built.inputs))))]
    if len(results) != len(expected.results):
        raise Mismatch(f"{len(results)} results, the CPU gives {len(expected.results)}")
    if not all(bool((a.isfinite() | ~e.isfinite()).all()) for a, e in zip(results, expected.results, strict=True)):
        raise FloatingPointError("not finite where the CPU is")
    return worst(results, expected.results)


def _widened(value: Any) -> Any:
    def widen(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(widen, value)


def _compare_tokens(built: Built, model: nn.Module, report: Report) -> None:
    """Greedy generation gives the same tokens."""
    prompt = {name: value for name, value in built.inputs.items() if not name.startswith(("decoder_", "use_cache"))}
    options = {"max_new_tokens": _TOKENS, "min_new_tokens": _TOKENS, "do_sample": False, "num_beams": 1}
    report.stage = "cpu"
    expected = _generate(built.model, prompt, options)
    report.stage = "tokens"
    with highest():
        actual = _generate(model, to_device(prompt), options).cpu()
    report.tokens_equal = bool(torch.equal(actual, expected))
    if not report.tokens_equal:
        raise Mismatch(f"generated {actual.tolist()[0]}, the CPU {expected.tolist()[0]}")


def _compare_perplexity(found: float, report: Report) -> None:
    assert report.cpu_perplexity is not None
    strays = abs(found - report.cpu_perplexity) / report.cpu_perplexity
    if not strays <= PERPLEXITY:
        raise Mismatch(
            f"perplexity {found:.4g}, the CPU's {report.cpu_perplexity:.4g}: {strays:.2g} apart, allowed {PERPLEXITY:g}"
        )


def _generate(model: Any, prompt: Mapping[str, Any], options: Mapping[str, Any]) -> Tensor:
    tokens: Tensor = model.generate(**prompt, **options)
    return tokens


# ---------------------------------------------------------------------------------------------- what went wrong

_OPERATOR = re.compile(r"operator '(?:aten::)?([\w.:]+)'|aten::([\w.]+)|(\w+)\(\): \w+ dtype is not yet supported")
_FRAMES = 6


def filed(report: Report, error: Exception) -> None:
    """Put into the report the outcome of a program that ended in ``error``, from its kind and from where it came."""
    report.error = f"{type(error).__name__}: {error}"[:2000]
    report.traceback = _users_frames(error)
    if isinstance(error, NoRecipe):
        report.outcome, report.error = Outcome.NOT_RUN, str(error)
    elif report.stage == "cpu" or isinstance(error, _Unfit):
        report.outcome = Outcome.CORPUS
    elif isinstance(error, Mismatch):
        report.outcome, report.error = Outcome.MISMATCH, str(error)
    elif isinstance(getattr(error, "inner_exception", error), NotImplementedError):  # Dynamo wraps a backend's
        report.outcome = Outcome.UNSUPPORTED
        found = _OPERATOR.search(str(error))
        report.op = next(filter(None, found.groups())) if found else None
    else:
        report.outcome = Outcome.CRASH
    if report.tier1 is None and report.outcome not in {Outcome.NOT_RUN, Outcome.CORPUS}:
        report.tier1 = False


def _users_frames(error: Exception) -> list[str]:
    """The innermost lines outside torch, jax and emutpu: the model's."""
    frames = [
        f"{frame.filename}:{frame.lineno} {frame.name}: {frame.line}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_inner_folders())
    ]
    return frames[-_FRAMES:]


@functools.cache
def _inner_folders() -> tuple[str, ...]:
    import jax

    import emutpu

    package, *roots = emutpu.__path__  # a checkout has a second one, with folders beside the package
    beside = [os.path.join(root, name) for root in roots for name in ("backend", "simulator", "conformance")]
    libraries = [os.path.dirname(library.__file__ or "") for library in (torch, jax)]
    return tuple(folder + os.sep for folder in (package, *beside, *libraries))
