"""The document of a run: every program's answer credited to each of its models, and the counts of the tiers."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from emutpu.conformance import manifest, prediction, tiers
from emutpu.conformance.history import Run
from emutpu.conformance.manifest import Model, Program
from emutpu.conformance.prediction import Memory
from emutpu.conformance.runner import selected

__all__ = ["changes", "document"]

_NOT_ATTEMPTED = ("not run", "corpus bug")


def document(
    run: Run,
    answers: Iterable[Mapping[str, Any]],
    mutations: Mapping[str, Any] | None = None,
    sizes: Memory | None = None,
) -> dict[str, Any]:
    """The document of a run, without the fields that every document of emutpu starts with.

    ``mutations`` are the counts of a mutation run of the same manifest, ``sizes`` the memory of programs at full size and of
    a device of the chip.
    """
    known = {(answer["program"], answer["mode"]): answer for answer in answers}
    programs = selected(run.plan.suite, run.plan.shard, run.plan.only)
    credited = _credited(programs)
    entries = []
    for mode in run.plan.modes:
        for program in (program for program in programs if tiers.applies(program, mode)):
            answer = known.get((program.name, mode))
            entries += [_model(model, program, mode, answer, sizes) for model in credited[program.name]]
    attempted = [entry for entry in entries if entry["status"] not in _NOT_ATTEMPTED and entry["mode"] != tiers.BOUNDED]
    rows = {name: len(models) for name, models in credited.items()}
    fingerprints = {answer.get("fingerprint") for answer in known.values()} - {None}
    return {
        "run": run.id,
        "suite": run.plan.suite,
        "modes": list(run.plan.modes),
        "shard": list(run.plan.shard),
        "manifest": run.plan.manifest,
        "started": run.started,
        "finished": run.finished,
        "seconds": run.seconds,
        "environment": dict(run.environment),
        "rows": len(entries),
        "programs": len({(entry["program"], entry["mode"]) for entry in entries}),
        "distinct_programs": len(fingerprints),
        "tier1": _tier(attempted, "tier1"),
        "tier2": _tier([entry for entry in attempted if entry["tier1"]], "tier2"),
        "predicted_on_chip": _tier(attempted, "predicted_on_chip"),
        "prediction": prediction.summary(attempted, sizes),
        "tier3": tiers.default_precision(known.values(), rows),
        "bounded": tiers.bounded(known.values(), rows),
        "noise": tiers.noise(known.values()),
        "of_programs": _of_programs(known.values()),
        "not_run": _reasons(entries, "not run"),
        "corpus_bugs": sorted({entry["program"] for entry in entries if entry["status"] == "corpus bug"}),
        "mutations": None if mutations is None else dict(mutations),
        "models": entries,
        "notes": ({} if mutations else {"mutations": "`emutpu conformance mutate` has not run with this manifest"})
        | {
            "bounded": "programs of causal language models in the mode `bounded`; null where the run had no such mode",
            "distinct_programs": "fingerprints of the programs that ran on the CPU: ops, order, dtypes and edges",
            "predicted_on_chip": prediction.NOTE if sizes is not None else prediction.WITHOUT_MEMORY,
        },
    }


def _credited(programs: Sequence[Program]) -> dict[str, list[Model]]:
    found: dict[str, list[Model]] = {program.name: [] for program in programs}
    for model in manifest.models():
        if model.program in found:
            found[model.program].append(model)
    return found


def _model(
    model: Model, program: Program, mode: str, answer: Mapping[str, Any] | None, sizes: Memory | None
) -> dict[str, Any]:
    told: Mapping[str, Any] = answer or {"outcome": "not run", "error": "the run did not come to it"}
    status = told["outcome"]
    ops = told.get("ops") or {}
    predicted = prediction.predict(program.name, mode, ops, sizes, builder=program.builder, model_id=model.id)
    attempted = status not in _NOT_ATTEMPTED
    return {
        "id": model.id,
        "kind": model.kind,
        "source": model.source,
        "arch": program.architecture,
        "program": program.name,
        "group": program.group,
        "task": program.task,
        "builder": program.builder,
        "fingerprint": told.get("fingerprint"),
        "mode": mode,
        "status": status,
        "stage": told.get("stage"),
        "tier1": told.get("tier1"),
        "tier2": told.get("tier2"),
        "emulated": status == "pass" if attempted else None,
        "predicted_on_chip": status == "pass" and not predicted.limits if attempted else None,
        "prediction_limits": list(predicted.limits),
        "missing_kernels": list(predicted.missing_kernels),
        "data_dependent": list(predicted.data_dependent),
        "full_size_bytes": predicted.bytes,
        "full_size": predicted.size,
        "op": told.get("op"),
        "error": told.get("error"),
        "traceback": list(told.get("traceback") or ()),
        "seconds": told.get("seconds"),
        "max_rel_error": told.get("logit_error"),
        "gradient_error": told.get("gradient_error"),
        "tokens_equal": told.get("tokens_equal"),
        "ill_conditioned": list(told.get("ill_conditioned") or ()),
        "tier3": told.get("tier3"),
        "tier3_error": told.get("tier3_error"),
        "default_error": told.get("default_error"),
        "logit_noise": told.get("logit_noise"),
        "gradient_noise": told.get("gradient_noise"),
        "executables": told.get("executables"),
        "ops": sum(ops.values()) if answer else None,
        "compiles": told.get("compiles"),
        "fallbacks": told.get("fallbacks"),
    }


def _tier(entries: Sequence[Mapping[str, Any]], tier: str) -> dict[str, Any]:
    failed = [f"{entry['id']} ({entry['mode']})" for entry in entries if not entry[tier]]
    return {"attempted": len(entries), "passed": len(entries) - len(failed), "failed": failed}


def _of_programs(answers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many programs had which outcome."""
    return dict(sorted(collections.Counter(answer["outcome"] for answer in answers).items()))


def _reasons(entries: Sequence[Mapping[str, Any]], status: str) -> dict[str, int]:
    found = collections.Counter(entry["error"] for entry in entries if entry["status"] == status)
    return dict(found.most_common())


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What became worse and what better between two documents, by program and mode; only what both have counts.

    Worse is a program that passed and does not, also one that is not run any more.
    """
    old, new = _by_program(before), _by_program(after)
    shared = [key for key in old if key in new]
    found: dict[str, list[dict[str, Any]]] = {"worse": [], "better": []}
    for program, mode in shared:
        was, now = old[program, mode], new[program, mode]
        if (was["status"] == "pass") != (now["status"] == "pass"):
            entry = {"program": program, "mode": mode, "before": was["status"], "after": now["status"]}
            entry |= {"error": now["error"] or was["error"]}
            found["worse" if was["status"] == "pass" else "better"].append(entry)
    return found


def _by_program(given: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    return {(entry["program"], entry["mode"]): entry for entry in given["models"]}
