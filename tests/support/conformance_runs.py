"""Runs of the model suite that nobody made: answers of every program of smoke, with what a test changes."""

from __future__ import annotations

import zlib
from typing import Any

from emutpu import _facts
from emutpu._report import header
from emutpu.conformance import documents, manifest, runner
from emutpu.conformance.history import History, Run
from emutpu.conformance.prediction import Memory

LLAMA, RESNET, BERT = "transformers/LlamaForCausalLM", "timm/resnet18", "transformers/BertForMaskedLM"
SWIN = "timm/swin_tiny_patch4_window7_224"
ERROR = "relative error </script> of the logits 0.2"
SPECIAL: dict[str, dict[str, Any]] = {
    LLAMA: {"outcome": "mismatch", "error": f"{ERROR}\nand a second line", "tier2": False},
    RESNET: {"outcome": "corpus bug", "error": "it fails", "tier1": None, "tier2": None, "stage": "cpu"},
    BERT: {"ops": {"aten.mm.default": 2, "aten.addbmm.default": 1}, "cpu_perplexity": 12.5, "perplexity": 12.5004},
}
SIZES = Memory(16 * 2**30, {LLAMA: {"bytes": 14 * 2**30, "parameters": 7 * 10**9}})
"""A Llama of seven billion parameters just fits."""
COST = {"flops": 2e6, "hbm_bytes": 3e6, "bound": "hbm", "error_bar": 0.5, "launches": 9, "unmodelled": 0}


def answer_of(name: str, mode: str = "strict", **changed: Any) -> dict[str, Any]:
    """A program that passed, but for what the test changes."""
    passed = {
        "program": name,
        "mode": mode,
        "outcome": "pass",
        "stage": None,
        "error": None,
        "traceback": ["model.py:3 forward: return x\x00"],
        "op": None,
        "tier1": True,
        "tier2": True,
        "logit_error": 1e-7,
        "gradient_error": 1e-6,
        "tokens_equal": None,
        "ill_conditioned": [],
        "fingerprint": f"{zlib.crc32(name.encode()):016x}",
        "seconds": 1.5,
        "ops": {"aten.mm.default": 3},
        "compiles": 2,
        "fallbacks": 0,
        "regions": 4,
        "region_reasons": {".cpu()": 4},
        "peak_hbm_bytes": 2**21,
        "modelled": {chip: COST | {"seconds": seconds} for chip, seconds in (("v5e", 2e-3), ("v7", 5e-4))},
    }
    return passed | changed


def answers_of(
    special: dict[str, dict[str, Any]], left_out: tuple[str, ...] = (), modes: tuple[str, ...] = ("strict",)
) -> list[dict[str, Any]]:
    """Of every program of smoke that is not left out."""
    names = [program.name for program in manifest.select("smoke") if program.name not in left_out]
    return [answer_of(name, mode, **special.get(name, {})) for mode in modes for name in names]


def whole_document() -> dict[str, Any]:
    """The document of every program of the manifest, its answers as long as real ones: errors, ops, costs."""
    modes = ("strict",)
    plan = runner.plan_of("full", modes, "v5e", (1, 1), None)
    made = Run(1, plan, "2026-01-01T00:00:00+00:00", "2026-01-01T01:00:00+00:00", 12.0, runner.environment())
    ops = sorted(_facts.histogram("model_op_histogram_train.json"))
    answers = []
    for name in manifest.programs():
        seed = zlib.crc32(name.encode())
        mine = {ops[(seed + step * step * 7) % len(ops)]: 1 + (seed >> step) % 90 for step in range(45)}
        failed = {
            "outcome": "crash",
            "error": f"RuntimeError: {seed}",
            "traceback": [f"{name}.py:{n} f: x" for n in range(6)],
        }
        for mode in modes:
            answers.append(answer_of(name, mode, ops=mine, **(failed if seed % 20 == 0 else {})))
            answers[-1]["modelled"] = {c: COST | {"seconds": seed / 1e14} for c in ("v5e", "v5p", "v6e", "v7")}
    return header("conformance", "v5e") | documents.document(made, answers)


def document_of(
    special: dict[str, dict[str, Any]],
    left_out: tuple[str, ...] = (),
    modes: tuple[str, ...] = ("strict",),
    sizes: Memory | None = None,
) -> dict[str, Any]:
    """The document of a smoke run in which some programs did something special."""
    plan = runner.plan_of("smoke", modes, "v5e", (1, 1), None)
    made = Run(7, plan, "2026-01-01T00:00:00+00:00", "2026-01-01T01:00:00+00:00", 12.0, runner.environment())
    return header("conformance", "v5e") | documents.document(made, answers_of(special, left_out, modes), None, sizes)


def add_run(
    history: History, special: dict[str, dict[str, Any]], commit: str | None, left_out: tuple[str, ...] = ()
) -> int:
    """A finished smoke run in a history, made at a commit; gives its number."""
    plan = runner.plan_of("smoke", ["strict"], "v5e", (1, 1), None)
    number = history.start(plan, runner.environment() | {"commit": commit, "changed": False})
    for answer in answers_of(special, left_out):
        history.record(number, answer)
    history.finish(number)
    return number
