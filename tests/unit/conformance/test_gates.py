"""Each outcome, from programs that do what the outcome names."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from emutpu.conformance import building, gates
from emutpu.conformance.building import Built, NoRecipe
from emutpu.conformance.gates import Outcome
from emutpu.conformance.manifest import Program
from emutpu.conformance.trained import FOLDER

PROGRAM = Program("toy/x", "toy", "x", "toy", "none", {}, "none", 1.4, 0, "toy/x", True, False, None, "pass")


class Toy(nn.Module):
    """A linear layer, with something after it that may depend on the device."""

    def __init__(self, after=lambda y: y):
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.after = after

    def forward(self, x):
        return self.after(self.linear(x))


def on_device(change):
    """``change`` on the device, nothing on the CPU."""
    return lambda y: change(y) if y.device.type == "tpu" else y


def refuse(y):
    """An error of the model's own."""
    raise ValueError("the model is broken")


def examine(monkeypatch, after, mode="strict", fallbacks=lambda: 0, program=PROGRAM):
    """The report of the toy with ``after``."""

    def build(program):
        if after is None:
            raise NoRecipe("nobody wrote one")
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
        return Built(Toy(after), {"x": x}, {})

    monkeypatch.setitem(building._BUILDERS, "toy", build)
    return gates.examine(program, mode, fallbacks=fallbacks)


@pytest.mark.parametrize("mode", gates.MODES)
def test_pass(monkeypatch, mode):
    """Both tiers, in every mode, with what was measured."""
    report = examine(monkeypatch, torch.tanh, mode)
    assert report.outcome == Outcome.PASS, report.error
    assert (report.tier1, report.tier2, report.trained, report.stage) == (True, True, True, None)
    assert report.logit_error < 1e-6
    assert report.gradient_error < 1e-6
    assert len(report.fingerprint) == 16


def test_a_wrong_answer(monkeypatch):
    """One part in a thousand is a mismatch, and tier 1 is passed."""
    report = examine(monkeypatch, on_device(lambda y: y * 1.001))
    assert (report.outcome, report.tier1, report.tier2) == (Outcome.MISMATCH, True, False)
    assert report.logit_error == pytest.approx(1e-3, rel=0.01)
    assert "logits" in report.error


def test_a_wrong_answer_of_what_has_no_float64(monkeypatch):
    """A mismatch still, never a crash: nothing excuses it, and the report says why nothing could."""

    def narrow(y):
        if y.dtype == torch.float64:
            raise TypeError("float32 alone")
        return y * 1.001 if y.device.type == "tpu" else y

    report = examine(monkeypatch, narrow)
    assert (report.outcome, report.tier1, report.tier2) == (Outcome.MISMATCH, True, False)
    assert "relative error of the logits 0.001, allowed" in report.error
    assert "it does not run in float64: TypeError: float32 alone" in report.error


def test_wrong_gradients(monkeypatch):
    """The right answer with gradients that vanish."""
    report = examine(monkeypatch, on_device(lambda y: y.detach() + 0.0 * y))
    assert report.outcome == Outcome.MISMATCH
    assert "gradients" in report.error
    assert report.logit_error < 1e-6


def test_gradients_on_one_side_only(monkeypatch):
    """A loss that cannot be differentiated on the device is told from one that need not be."""
    report = examine(monkeypatch, on_device(torch.Tensor.detach))
    assert report.outcome == Outcome.MISMATCH
    assert "on one side only" in report.error


def test_what_compiling_changes_on_the_cpu_too(monkeypatch):
    """PyTorch's decomposition interpolates to the same size where its kernel copies: no finding about a device."""

    def enlarge(y):
        return nn.functional.interpolate(y.reshape(1, 2, 2, 2), scale_factor=1.2, mode="bilinear", align_corners=False)

    report = examine(monkeypatch, enlarge, "compile")
    assert report.outcome == Outcome.CORPUS
    assert re.search(r"torch.compile alone moves the logits by 0.\d+, on the CPU too", report.error)
    assert examine(monkeypatch, enlarge, "strict").outcome == Outcome.PASS


def masked_by_numbers(y):
    """Dynamo itself refuses to trace it."""
    places = tuple(torch.tensor(n, device=y.device) for n in (0, 1))
    mask = torch.ones(2, 4, dtype=torch.bool, device=y.device)
    mask[places, places] = False
    return y * mask


def scaled_in_place(y):
    """The assignment's backward selects, which AOTAutograd cannot trace; with the function beside it Dynamo may not run the
    frame without a graph instead.
    """
    y = kept_whole(y)
    y[y > 0] *= 2.0
    return kept_whole(y)


@torch.compiler.allow_in_graph
def kept_whole(y):
    """A node of its own in Dynamo's graph."""
    return y + 0.0


@pytest.mark.parametrize("what", [masked_by_numbers, scaled_in_place])
def test_what_cannot_be_compiled_on_the_cpu_either(monkeypatch, what):
    """Dynamo's and AOTAutograd's refusals are the same on every device; what raises on the device alone is a crash."""
    report = examine(monkeypatch, what, "compile")
    assert report.outcome == Outcome.CORPUS, report.error
    assert "with torch.compile it fails on the CPU too" in report.error
    assert examine(monkeypatch, what, "strict").outcome == Outcome.PASS
    assert examine(monkeypatch, on_device(refuse), "compile").outcome == Outcome.CRASH


class Aside(Toy):
    """A second layer in the same graph, of which the loss takes nothing on the CPU."""

    def __init__(self, taken):
        super().__init__()
        self.aside = nn.Linear(8, 4)
        self.taken = taken

    def forward(self, x):
        y, z = self.linear(x), self.aside(x)
        torch._dynamo.graph_break()
        return y + self.taken(z)


@pytest.mark.parametrize(
    ("taken", "outcome"),
    [
        (lambda z: z > 0, Outcome.PASS),
        (lambda z: 1e-9 * (z if z.device.type == "tpu" else z.detach()), Outcome.MISMATCH),
    ],
    ids=["nothing", "something on the device"],
)
def test_zeros_of_a_compiled_graph(monkeypatch, taken, outcome):
    """PyTorch gives zeros to a compiled graph's parameters without a gradient: none on the CPU. Other gradients differ."""
    monkeypatch.setitem(building._BUILDERS, "toy", lambda program: Built(Aside(taken), {"x": torch.ones(2, 8)}, {}))
    report = gates.examine(PROGRAM, "compile", fallbacks=lambda: 0)
    assert report.outcome == outcome, report.error
    assert report.error is None or "aside.bias, aside.weight on one side only" in report.error


def test_not_finite_on_the_device(monkeypatch):
    """A NaN that the CPU has not is no answer at all."""
    report = examine(monkeypatch, on_device(lambda y: y / 0.0))
    assert (report.outcome, report.tier1, report.stage) == (Outcome.CRASH, False, "finite")


def test_a_missing_op_is_named(monkeypatch):
    """NotImplementedError is a missing op."""

    def lacks(y):
        raise NotImplementedError("operator 'aten::linalg_cholesky_ex.L' is not implemented for TPU")

    report = examine(monkeypatch, on_device(lacks))
    assert (report.outcome, report.op) == (Outcome.UNSUPPORTED, "linalg_cholesky_ex.L")


def test_a_missing_op_is_named_in_a_compiled_graph(monkeypatch):
    """Dynamo's wrapping hides neither the kind nor the op: complex128 is no dtype of the device."""
    report = examine(monkeypatch, lambda y: y.to(torch.complex128).real.float(), "compile")
    assert (report.outcome, report.op) == (Outcome.UNSUPPORTED, "to_copy")
    assert "to_copy(): complex128 dtype is not yet supported on TPU" in report.error


def test_a_crash_has_the_models_line(monkeypatch):
    """The error and where it was raised."""
    report = examine(monkeypatch, on_device(refuse))
    assert (report.outcome, report.stage, report.tier1) == (Outcome.CRASH, "forward", False)
    assert report.error == "ValueError: the model is broken"
    assert "refuse" in report.traceback[-1]


def test_what_fails_on_the_cpu_is_a_corpus_bug(monkeypatch):
    """It says nothing about the device."""
    report = examine(monkeypatch, refuse)
    assert (report.outcome, report.stage, report.tier1) == (Outcome.CORPUS, "cpu", None)


@pytest.mark.parametrize("empty", [lambda y: ["a", "b"], lambda y: y[:0]], ids=["names", "no elements"])
def test_an_answer_without_tensors_is_a_corpus_bug(monkeypatch, empty):
    """It was a pass that compared nothing."""
    report = examine(monkeypatch, empty)
    assert (report.outcome, report.stage, report.tier1) == (Outcome.CORPUS, "cpu", None)
    assert "no tensor in the answer" in report.error


@pytest.mark.parametrize("shift", [0, 1])
def test_an_answer_of_numbers_is_compared(monkeypatch, shift):
    """Where no tensor is of floating point, as of a tokenizer of sounds, the whole numbers have to be the same."""
    report = examine(monkeypatch, lambda y: y.argmax(-1) + (shift if y.device.type == "tpu" else 0))
    assert report.outcome == (Outcome.MISMATCH if shift else Outcome.PASS), report.error


def test_an_answer_of_nans_is_a_corpus_bug(monkeypatch):
    """Any device that gives NaN would agree with it."""
    report = examine(monkeypatch, lambda y: y * float("nan"))
    assert (report.outcome, report.stage, report.tier1) == (Outcome.CORPUS, "cpu", None)
    assert "nothing is finite" in report.error


def test_no_recipe_is_not_run(monkeypatch):
    """With the reason."""
    report = examine(monkeypatch, None)
    assert (report.outcome, report.error, report.tier1) == (Outcome.NOT_RUN, "nobody wrote one", None)


def test_a_fallback_fails_tier_1(monkeypatch):
    """An op that ran on the CPU instead did not run on the device."""
    counts = iter((0, 1))
    report = examine(monkeypatch, torch.tanh, fallbacks=lambda: next(counts))
    assert (report.outcome, report.tier1) == (Outcome.CRASH, False)
    assert "instead of the device" in report.error


def test_ill_conditioned_programs_are_judged_against_float64(monkeypatch):
    """A difference of nearly equal numbers: the CPU strays as far from float64 as the device may."""
    ill = examine(monkeypatch, lambda y: (y + 1e4).square() - y.square() - 1e8 - 2e4 * y)
    assert ill.outcome == Outcome.CORPUS
    assert "say nothing about a device" in ill.error
    monkeypatch.setattr(gates, "LOGITS", 0.0)
    monkeypatch.setattr(gates, "GRADIENTS", 0.0)
    judged = examine(monkeypatch, torch.tanh)
    assert judged.outcome == Outcome.PASS, judged.error
    wrong = examine(monkeypatch, on_device(lambda y: y * 1.001))
    assert wrong.outcome == Outcome.MISMATCH


class Beside(Toy):
    """A second answer, of a layer of its own, a million times as small as the first."""

    def __init__(self, after, small=1e-6):
        super().__init__(after)
        self.beside = nn.Linear(8, 4)
        self.small = small

    def forward(self, x):
        return super().forward(x), self.small * self.beside(x)


def examine_beside(monkeypatch, after, wrong):
    """The report of :class:`Beside` with ``after`` in the first answer, and the layer of the second wrong by the factor ``wrong``."""

    def beside(layer, inputs):
        return inputs[0] * wrong if inputs[0].device.type == "tpu" else inputs[0]

    def build(program):
        model = Beside(after)
        model.beside.register_forward_pre_hook(beside)
        return Built(model, {"x": torch.randn(2, 8, generator=torch.Generator().manual_seed(0))}, {})

    monkeypatch.setitem(building._BUILDERS, "toy", build)
    return gates.examine(PROGRAM, "strict", fallbacks=lambda: 0)


def test_a_large_answer_excuses_no_small_one(monkeypatch):
    """Each result is judged by what the CPU makes of that one: the first strays there, the second does not."""

    def strays(y):
        return y + 1e-3 * ((y + 1e4).square() - y.square() - 1e8 - 2e4 * y)

    assert examine_beside(monkeypatch, strays, 1.0).outcome == Outcome.PASS
    wrong = examine_beside(monkeypatch, strays, 1.01)
    assert wrong.outcome == Outcome.MISMATCH
    assert "logits" in wrong.error


class Scaling(Toy):
    """A layer, whose gradient the device takes ``wrong`` times, and beside its answer a scale as CLIP gives one."""

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.scale = wrong, nn.Parameter(torch.tensor(7.0))

    def forward(self, x):
        y = super().forward(x)
        if y.device.type == "tpu" and y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.wrong)
        return y, self.scale.exp()


@pytest.mark.parametrize(("wrong", "outcome"), [(1.0, Outcome.PASS), (1.01, Outcome.MISMATCH)])
def test_a_large_gradient_hides_no_small_ones(monkeypatch, wrong, outcome):
    """That of the scale is a million times as large as the layer's, which is compared with what it should be."""
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    monkeypatch.setitem(building._BUILDERS, "toy", lambda program: Built(Scaling(wrong), {"x": x}, {}))
    report = gates.examine(PROGRAM, "strict", fallbacks=lambda: 0)
    assert report.outcome == outcome, report.error
    assert ("gradients" in (report.error or "")) == (outcome == Outcome.MISMATCH)


@pytest.mark.parametrize("wide", [True, False], ids=["judged by float64", "without float64"])
def test_a_unit_that_is_barely_on_says_nothing(monkeypatch, wide):
    """The device's rounding turns it on, and so do slightly other weights on the CPU: ill-conditioned, no mismatch."""
    examine(monkeypatch, lambda y: y)  # so that the toy can be built
    built = building.build(PROGRAM)
    barely = built.model(**built.inputs).abs().max().item() * (1 + 1e-6)

    def step(y):
        if y.dtype == torch.float64 and not wide:
            raise TypeError("float32 alone")
        rounded = y * (1 + 2e-6) if y.device.type == "tpu" else y
        return y + 0.02 * (rounded.abs() > barely)

    report = examine(monkeypatch, step)
    assert report.outcome == Outcome.PASS, report.error
    assert report.logit_error > 1e-3
    assert report.ill_conditioned == ["logits", "gradients"]  # the loss is made of squares
    assert report.noise_error == (None if wide else "TypeError: float32 alone")
    assert examine(monkeypatch, on_device(lambda y: y + 0.02 * (y.abs() > 0))).outcome == Outcome.MISMATCH


def test_noise_is_measured_beside_the_error(monkeypatch):
    """How far the CPU's float32 is from float64, once for all modes; what does not run in float64 says why."""
    report = examine(monkeypatch, torch.tanh)
    assert 0 < report.logit_noise < 1e-6
    assert 0 < report.gradient_noise < 1e-6
    assert examine(monkeypatch, torch.tanh, "defer").logit_noise is None
    narrowed = examine(monkeypatch, lambda y: y.tanh().float())  # float32 whatever the model's dtype is
    assert 0 < narrowed.logit_noise < 1e-6
    narrow = examine(monkeypatch, lambda y: y @ torch.ones(4, 4, device=y.device))
    assert narrow.outcome == Outcome.PASS, narrow.error
    assert narrow.logit_noise is None
    assert "RuntimeError" in narrow.noise_error


def test_noise_is_recalled(monkeypatch, tmp_path):
    """With the folder of an earlier run float64 is computed only where a limit is missed; the report is the same."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    wide = []

    def after(y):
        wide.append(y.dtype == torch.float64)
        return y.tanh()

    measured, recalled = (examine(monkeypatch, after) for _ in range(2))
    assert measured.outcome == recalled.outcome == Outcome.PASS
    assert (recalled.logit_noise, recalled.gradient_noise) == (measured.logit_noise, measured.gradient_noise)
    assert sum(wide) == 2  # forward and training, once
    monkeypatch.setattr(gates, "LOGITS", 0.0)
    assert examine(monkeypatch, after).ill_conditioned == ["logits"]
    assert sum(wide) == 4


def test_noise_is_measured_with_representatives(monkeypatch):
    """The others are judged as strictly; where one misses, float64 is computed for it."""
    other = dataclasses.replace(PROGRAM, representative=False)
    report = examine(monkeypatch, torch.tanh, program=other)
    assert (report.outcome, report.logit_noise, report.noise_error) == (Outcome.PASS, None, None)
    assert report.tier3
    wrong = examine(monkeypatch, on_device(lambda y: y * 1.01), program=other)
    assert wrong.outcome == Outcome.MISMATCH
    assert "from float64" in wrong.error


def test_a_known_fingerprint_is_not_traced_again(monkeypatch):
    """Except on the CPU alone, which is what the manifest has it from."""
    known = dataclasses.replace(PROGRAM, fingerprint="0123456789abcdef")
    assert examine(monkeypatch, torch.tanh, program=known).fingerprint == known.fingerprint
    assert examine(monkeypatch, torch.tanh, gates.CPU_ONLY, program=known).fingerprint != known.fingerprint


def test_default_precision_is_judged_apart(monkeypatch):
    """Products of one bfloat16 pass err by more than `highest` does, and within the bound."""
    report = examine(monkeypatch, torch.tanh)
    assert report.tier3
    assert 1e-4 < report.default_error < gates.DEFAULT_PRECISION
    assert report.logit_error < 1e-6


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda y: y * 3, "allowed 0.5"),
        (lambda y: y / 0.0, "not finite where the CPU is"),
        (refuse, "the model is broken"),
        (lambda y: (y, y), "2 results"),
    ],
)
def test_what_default_precision_misses(monkeypatch, wrong, told):
    """Far off, not finite or broken at default precision only: tier 3 fails with the reason, the outcome stays."""
    calls = 0

    def at_default(y):
        nonlocal calls
        calls += y.device.type == "tpu"
        return wrong(y) if calls == 1 and y.device.type == "tpu" else y

    report = examine(monkeypatch, at_default)
    assert (report.outcome, report.tier3) == (Outcome.PASS, False)
    assert told in report.tier3_error


def test_running_statistics_do_not_leak(monkeypatch):
    """Training on the CPU moves a batch normalisation's statistics: the device must start where the CPU did."""

    def build(program):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        return Built(model, {"input": x}, {})

    monkeypatch.setitem(building._BUILDERS, "toy", build)
    report = gates.examine(PROGRAM, "strict", fallbacks=lambda: 0)
    assert report.outcome == Outcome.PASS, report.error


def test_a_result_that_is_a_parameter(monkeypatch):
    """What a model returns is judged as it was returned: the step that follows changes a parameter in place."""

    class Scaled(Toy):
        def forward(self, x):
            return self.linear(x), self.linear.bias

    monkeypatch.setitem(building._BUILDERS, "toy", lambda program: Built(Scaled(), {"x": torch.ones(2, 8)}, {}))
    report = gates.examine(PROGRAM, "strict", fallbacks=lambda: 0)
    assert report.outcome == Outcome.PASS, report.error


def test_reports_are_plain_values(monkeypatch):
    """They go through JSON unchanged."""
    import json

    report = dataclasses.asdict(examine(monkeypatch, torch.tanh))
    assert json.loads(json.dumps(report)) == report
