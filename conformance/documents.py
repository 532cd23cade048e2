"""The document of a run: every program's answer credited to each of its models, and the counts of the tiers."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from emutpu.conformance import manifest, prediction, tiers
from emutpu.conformance.history import Plan, Run
from emutpu.conformance.manifest import Model, Program
from emutpu.conformance.prediction import Memory, Prediction
from emutpu.conformance.runner import digest, selected

__all__ = ["LIMITS", "OUTCOMES", "TIERS", "credited", "document", "imported", "joined", "judged", "tiers_of"]

OUTCOMES = ("pass", "mismatch", "crash", "unsupported", "timeout", "not run", "corpus bug")
NOT_ATTEMPTED = OUTCOMES[-2:]
TIERS = ("tier1", "tier2", "emulated", "predicted_on_chip", "tier3")
"""The columns of verdicts, by the name of their field."""
LIMITS = {
    "max_rel_error": tiers.LIMITS["logits"],
    "gradient_error": tiers.LIMITS["gradients"],
    "default_error": tiers.LIMITS["default_precision"],
}
"""What tiers 2 and 3 allow, by the field that is judged."""

NOT_REACHED = "the run did not come to it"
_ABSENT: Mapping[str, Any] = {"outcome": "not run", "error": NOT_REACHED}
_PROGRAM = ("fingerprint", "op", "error", "seconds", "gradient_error", "tokens_equal", "compiles", "fallbacks")
_OF_A_MODEL = (
    "max_rel_error",
    "traceback",
    "ill_conditioned",
    "tier3_error",
    "default_error",
    "logit_noise",
    "gradient_noise",
    "executables",
)
_MEASURED = (
    *_OF_A_MODEL[3:],
    "trained",
    "noise_error",
    "cpu_perplexity",
    "perplexity",
    "default_perplexity",
    "same_as",
    "compile_seconds",
    "regions",
    "region_reasons",
    "fallback_ops",
    "peak_hbm_bytes",
    "modelled",
)
_NOTES = {
    "bounded": "programs of causal language models in the mode `bounded`; null where the run had no such mode",
    "distinct_programs": "fingerprints of the programs that ran on the CPU: ops, order, dtypes and edges",
    "modelled": "seconds that a chip is busy with the small program, forward, training step and checks, by the cost model; "
    "nothing is measured on a chip",
}


def judged(
    program: Program, mode: str, answer: Mapping[str, Any], models: Sequence[Model], sizes: Memory | None
) -> tuple[dict[str, Any], list[Prediction]]:
    """Status and tiers of one answer, and the prediction for each of the models that it is credited to.

    None where a tier was not reached, or the answer is none of the device. A program is predicted to pass on the chip when
    one of its models is (``predicted_rows`` says how many): what remains is a matter of size.
    """
    status, ops = answer["outcome"], answer.get("ops") or {}
    attempted = status not in NOT_ATTEMPTED
    whole = prediction.predict(program.name, mode, ops, sizes, builder=program.builder)
    rows = [
        prediction.predict(program.name, mode, ops, sizes, builder=program.builder, model_id=model.id)
        for model in models
    ]
    fitting = sum(not row.limits for row in rows) if status == "pass" else 0
    return {
        "status": status,
        "stage": answer.get("stage"),
        "tier1": answer.get("tier1"),
        "tier2": answer.get("tier2"),
        "tier3": answer.get("tier3"),
        "emulated": status == "pass" if attempted else None,
        "predicted_on_chip": (fitting > 0 if rows else status == "pass" and not whole.limits) if attempted else None,
        "predicted_rows": fitting,
        "prediction_limits": list(whole.limits),
        "missing_kernels": list(whole.missing_kernels),
        "data_dependent": list(whole.data_dependent),
        "full_size_bytes": whole.bytes,
        "full_size": whole.size,
    }, rows


def document(
    run: Run,
    answers: Iterable[Mapping[str, Any]],
    mutations: Mapping[str, Any] | None = None,
    sizes: Memory | None = None,
) -> dict[str, Any]:
    """The document of a run, without the fields that every document of emutpu starts with.

    ``mutations`` are the counts of a mutation run of the same manifest, ``sizes`` the memory of programs at full size and of
    a device of the chip. ``trends`` is None until :func:`trends.added`.
    """
    known = {(answer["program"], answer["mode"]): answer for answer in answers}
    programs = selected(run.plan.suite, run.plan.shard, run.plan.only)
    asked = [(program, mode) for mode in run.plan.modes for program in programs if tiers.applies(program, mode)]
    return _document(run, known, asked, mutations, sizes)


def imported(answers: Sequence[Mapping[str, Any]], chip: str, sizes: Memory | None = None) -> dict[str, Any]:
    """The document of answers that were made elsewhere, such as a file of JSON lines from a machine with a chip.

    It holds the programs that the answers name; those that this manifest lacks are named in ``notes``.
    """
    known = {(answer["program"], answer["mode"]): answer for answer in answers}
    modes = tuple(dict.fromkeys(answer["mode"] for answer in answers))
    names = {program for program, _ in known}
    programs = [program for name, program in manifest.programs().items() if name in names]
    asked = [(program, mode) for mode in modes for program in programs if (program.name, mode) in known]
    run = Run(0, Plan("full", modes, chip, (1, 1), None, digest()), "", None, 0.0, _NOWHERE)
    found = _document(run, known, asked, None, sizes)
    strangers = sorted(names - {program.name for program in programs})
    if strangers:
        found["notes"]["unknown_programs"] = f"not in this manifest, and left out: {', '.join(strangers)}"
    return found


def joined(parts: Sequence[Mapping[str, Any]], sizes: Memory | None = None) -> dict[str, Any]:
    """The document of several: shards of a suite, or its modes, which different machines ran. The first that has a program counts.

    Raises ValueError where they are not of one chip and manifest.
    """
    for field in ("chip", "manifest"):
        if len({part[field] for part in parts}) > 1:
            raise ValueError(
                f"reports of different {field}s: {', '.join(sorted({str(part[field]) for part in parts}))}"
            )
    known: dict[tuple[str, str], dict[str, Any]] = {}
    asked: set[tuple[str, str]] = set()
    for part in parts:
        for answer in _answers(part):
            key = answer["program"], answer["mode"]
            asked.add(key)
            if (answer["outcome"], answer["error"]) != (_ABSENT["outcome"], _ABSENT["error"]):
                known.setdefault(key, answer)
    suite = max((part["suite"] for part in parts), key=manifest.SUITES.index)
    modes = tuple(dict.fromkeys(mode for part in parts for mode in part["modes"]))
    finished = [part["finished"] for part in parts]
    run = Run(
        0,
        Plan(suite, modes, parts[0]["chip"], (1, 1), None, parts[0]["manifest"]),
        min(part["started"] for part in parts),
        max(finished) if all(finished) else None,
        sum(part["seconds"] for part in parts),
        _shared_environment([part["environment"] for part in parts]),
    )
    mutations = next((part["mutations"] for part in parts if part["mutations"]), None)
    ordered = [(p, mode) for mode in modes for name, p in manifest.programs().items() if (name, mode) in asked]
    names = ", ".join(f"run {part['run']} ({part['shard'][0]}/{part['shard'][1]})" for part in parts)
    found = _document(run, known, ordered, mutations, sizes)
    return found | {"notes": found["notes"] | {"joined": f"of {len(parts)} reports: {names}"}}


def _shared_environment(given: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first, without a commit, or a way to compute HIGHEST, where they have different ones."""
    parted = [name for name in ("commit", "highest") if len({environment.get(name) for environment in given}) > 1]
    return dict(given[0]) | dict.fromkeys(parted) | {"changed": any(e.get("changed") for e in given)}


def _answers(document: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The answers that a document was made of, as far as it holds them."""
    names = document["op_names"]
    for result in document["results"]:
        ops = result["ops"]
        yield dict(result) | {
            "outcome": result["status"],
            "logit_error": result["max_rel_error"],
            "ops": None if ops is None else {names[place]: count for place, count in ops},
            "hardware": document["hardware"],
        }


_NOWHERE: Mapping[str, Any] = {"versions": {}, "machine": "unknown", "cpus": None, "commit": None, "changed": False}


def _document(
    run: Run,
    known: Mapping[tuple[str, str], Mapping[str, Any]],
    asked: Sequence[tuple[Program, str]],
    mutations: Mapping[str, Any] | None,
    sizes: Memory | None,
) -> dict[str, Any]:
    models = credited(program for program, _ in asked)
    names: dict[str, int] = {}
    results, entries = [], []
    for program, mode in asked:
        answer, mine = known.get((program.name, mode), _ABSENT), models[program.name]
        verdict, predictions = judged(program, mode, answer, mine, sizes)
        results.append(_result(program, mode, answer, names) | verdict)
        entries += [_model(model, results[-1], found) for model, found in zip(mine, predictions, strict=True)]
    attempted = [entry for entry in entries if entry["status"] not in NOT_ATTEMPTED and entry["mode"] != tiers.BOUNDED]
    rows = {name: len(mine) for name, mine in models.items()}
    fingerprints = {answer.get("fingerprint") for answer in known.values()} - {None}
    return {
        "run": run.id,
        "suite": run.plan.suite,
        "only": run.plan.only,
        "modes": list(run.plan.modes),
        "shard": list(run.plan.shard),
        "manifest": run.plan.manifest,
        "started": run.started,
        "finished": run.finished,
        "seconds": run.seconds,
        "environment": dict(run.environment),
        "hardware": next((answer["hardware"] for answer in known.values() if answer.get("hardware")), None),
        "rows": len(entries),
        "programs": len(results),
        "distinct_programs": len(fingerprints),
        "tier1": _tier(attempted, "tier1"),
        "tier2": _tier([entry for entry in attempted if entry["tier1"]], "tier2"),
        "predicted_on_chip": _tier(attempted, "predicted_on_chip"),
        "predicted_distinct": _distinct(results),
        "tier3": tiers.default_precision(known.values(), rows),
        "bounded": tiers.bounded(known.values(), rows),
        "noise": tiers.noise(known.values()),
        "by_mode": {mode: tiers_of(mode, results, models) for mode in run.plan.modes},
        "prediction": prediction.summary(attempted, sizes),
        "perplexity": tiers.perplexity(known.values()),
        "of_programs": _of_programs(known.values()),
        "not_run": _reasons(entries, "not run"),
        "corpus_bugs": sorted({entry["program"] for entry in entries if entry["status"] == "corpus bug"}),
        "mutations": None if mutations is None else dict(mutations),
        "limits": dict(LIMITS),
        "trends": None,
        "op_names": list(names),
        "results": results,
        "models": entries,
        "notes": ({} if mutations else {"mutations": "`emutpu conformance mutate` has not run with this manifest"})
        | {"trends": "only `emutpu conformance report` looks at the runs beside this one"}
        | _NOTES
        | {"predicted_on_chip": prediction.NOTE if sizes is not None else prediction.WITHOUT_MEMORY},
    }


def credited(programs: Iterable[Program]) -> dict[str, list[Model]]:
    """The models of each of the programs, by its name."""
    found: dict[str, list[Model]] = {program.name: [] for program in programs}
    for model in manifest.models():
        if model.program in found:
            found[model.program].append(model)
    return found


def _result(program: Program, mode: str, answer: Mapping[str, Any], names: dict[str, int]) -> dict[str, Any]:
    """What a program did in a mode. ``ops`` are pairs: a place in ``op_names``, and how often it ran."""
    ops = answer.get("ops")
    return {
        "program": program.name,
        "mode": mode,
        "arch": program.architecture,
        "group": program.group,
        "task": program.task,
        "builder": program.builder,
        "representative": program.representative,
        "max_rel_error": _finite(answer.get("logit_error")),
        "traceback": list(answer.get("traceback") or ()),
        "ill_conditioned": list(answer.get("ill_conditioned") or ()),
        "ops": None if ops is None else [[names.setdefault(op, len(names)), count] for op, count in ops.items()],
    } | {name: _finite(answer.get(name)) for name in (*_PROGRAM, *_MEASURED)}


def _finite(value: Any) -> Any:
    """JSON has no infinity; where an error is infinite, the text of the error says so."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _model(model: Model, result: Mapping[str, Any], found: Prediction) -> dict[str, Any]:
    names = (
        "arch",
        "program",
        "group",
        "task",
        "builder",
        "mode",
        "status",
        "stage",
        "missing_kernels",
        "data_dependent",
    )
    counted, attempted = result["ops"], result["emulated"] is not None
    return (
        {"id": model.id, "kind": model.kind, "source": model.source}
        | {name: result[name] for name in (*names, *TIERS, *_PROGRAM, *_OF_A_MODEL)}
        | {
            "ops": None if counted is None else sum(count for _, count in counted),
            "predicted_on_chip": result["status"] == "pass" and not found.limits if attempted else None,
            "prediction_limits": list(found.limits),
            "full_size_bytes": found.bytes,
            "full_size": found.size,
        }
    )


def _tier(entries: Sequence[Mapping[str, Any]], tier: str) -> dict[str, Any]:
    failed = [f"{entry['id']} ({entry['mode']})" for entry in entries if not entry[tier]]
    return {"attempted": len(entries), "passed": len(entries) - len(failed), "failed": failed}


def _distinct(results: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Of the fingerprints: those predicted to pass on the chip in every program and mode that has them."""
    prints: dict[str, bool] = {}
    for result in results:
        if result["fingerprint"] and result["predicted_on_chip"] is not None and result["mode"] != tiers.BOUNDED:
            seen = prints.get(result["fingerprint"], True)
            prints[result["fingerprint"]] = seen and result["predicted_on_chip"]
    return {"attempted": len(prints), "passed": sum(prints.values())}


def tiers_of(
    mode: str, results: Iterable[Mapping[str, Any]], models: Mapping[str, Sequence[Any]]
) -> dict[str, dict[str, list[int]]]:
    """Tier → ``rows``, ``programs``, ``distinct`` → how many passed, and of how many that came to the tier.

    A distinct program is a fingerprint, and passes when every program does that has it. A tier that nothing came to is left out.
    """
    here = [result for result in results if result["mode"] == mode and result["status"] not in NOT_ATTEMPTED]
    found = {}
    for tier in ("emulated",) if mode == tiers.BOUNDED else TIERS:
        reached = [result for result in here if _reached(tier, result)]
        if not reached:
            continue
        prints: dict[str, bool] = {}
        for result in reached:
            if result["fingerprint"]:
                prints[result["fingerprint"]] = prints.get(result["fingerprint"], True) and bool(result[tier])
        passed = [result for result in reached if result[tier]]
        rows = [len(models.get(result["program"], ())) for result in passed]
        if tier == "predicted_on_chip":
            rows = [result["predicted_rows"] for result in passed]
        found[tier] = {
            "rows": [sum(rows), sum(len(models.get(result["program"], ())) for result in reached)],
            "programs": [len(passed), len(reached)],
            "distinct": [sum(prints.values()), len(prints)],
        }
    return found


def _reached(tier: str, result: Mapping[str, Any]) -> bool:
    if tier == "tier2":
        return bool(result["tier1"])
    return result[tier] is not None if tier == "tier3" else True


def _of_programs(answers: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many programs had which outcome."""
    return dict(sorted(collections.Counter(answer["outcome"] for answer in answers).items()))


def _reasons(entries: Sequence[Mapping[str, Any]], status: str) -> dict[str, int]:
    found = collections.Counter(entry["error"] for entry in entries if entry["status"] == status)
    return dict(found.most_common())
