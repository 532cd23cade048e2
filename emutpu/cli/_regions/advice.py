"""Advice from recorded regions. Each kind has its evidence in it, and is given for what was seen, never for what might be."""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from emutpu._report import Document
from emutpu.cli._regions.analysis import Flush, families, flushes, nbytes, place
from emutpu.cli._regions.collect import Issued
from emutpu.cli._regions.terminal import amount, label

__all__ = ["advise"]

_REPETITIONS = 3
_READS = frozenset({".cpu()", "item()", "synchronize()"})
_RANK = re.compile(r"(^|_)rank(_|$)|^RANK$|^LOCAL_RANK$|is_(local_|world_)?(main|master)(_process)?", re.IGNORECASE)
_COLLECTIVES = frozenset(
    {
        "DistributedDataParallel",
        "FullyShardedDataParallel",
        "all_gather",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "broadcast",
        "fully_shard",
        "gather",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
    }
)


def advise(regions: Sequence[Document], issued: Issued, hit_rate: float | None) -> list[Document]:
    """All advice, most costly kind first."""
    found = flushes(regions)
    return [
        *_rank_conditional(found),
        *_growing(regions, hit_rate),
        *_last_batch(regions),
        *_every_step(found, issued),
        *_dead_values(found),
        *_cycles(regions),
    ]


def _advice(kind: str, text: str, line: Document | None, **evidence: object) -> Document:
    file, number = (None, None) if line is None else (line["file"], line["line"])
    return {"kind": kind, "text": text, "file": file, "line": number, "evidence": evidence}


def _by_trigger(found: Sequence[Flush]) -> dict[tuple[str, int], list[int]]:
    """Positions of the materialisations that each line triggered."""
    lines: dict[tuple[str, int], list[int]] = defaultdict(list)
    for position, flush in enumerate(found):
        if flush.where is not None and flush.reason in _READS:
            lines[flush.where].append(position)
    return lines


# --------------------------------------------------------------------------------------------------- reads


def _every_step(found: Sequence[Flush], issued: Issued) -> Iterator[Document]:
    """A read that comes once for every pass over the ops before it, and what crosses HBM because of it."""
    for where, positions in _by_trigger(found).items():
        if len(positions) < _REPETITIONS:
            continue
        passes = [_passes(found[a + 1 : b + 1], where, issued) for a, b in itertools.pairwise(positions)]
        once = sum(n == 1 for n in passes)
        if not once or 2 * once < len([n for n in passes if n]):
            continue
        saved = [_crossing(found[p], found[p + 1]) for p in positions if p + 1 < len(found)]
        bytes_saved = max(saved, default=0)
        if not bytes_saved:
            continue
        line = found[positions[0]].trigger
        assert line is not None
        merged = len(found[positions[0]].regions) + len(found[positions[0] + 1].regions)
        yield _advice(
            "read-every-step",
            f"`{line['code']}` at {place(line)} splits every step ({len(positions)} times): merging {merged} regions saves "
            f"{amount(bytes_saved)} of HBM traffic each time (modelled: what one writes and the next reads back). "
            "Read less often, or keep the value on the device and read it at the end",
            line,
            times=len(positions),
            regions=merged,
            hbm_bytes_saved=bytes_saved,
        )


def _passes(between: Sequence[Flush], where: tuple[str, int], issued: Issued) -> int:
    """How often the program between two readings was run, by the place that was run least often; 0 without any."""
    counts: Counter[tuple[str, str, int, int]] = Counter()
    for flush in between:
        for place_of_op, count in issued.get((flush.process, flush.number), {}).items():
            if place_of_op[1:3] != where:
                counts[place_of_op] += count
    return min(counts.values(), default=0)


def _crossing(first: Flush, second: Flush) -> int:
    """Bytes that would not cross HBM were two materialisations one: read back, and written if nobody needs it later."""
    outputs = {(r["id"], n): value for r in first.regions for n, value in enumerate(r["outputs"])}
    taken = {
        (value["made_by"]["region"], value["made_by"]["output"])
        for region in second.regions
        for value in region["inputs"]
        if value["made_by"] is not None
    }
    total = 0
    for key in taken & outputs.keys():
        value = outputs[key]
        freed = value["freed_before"]
        total += nbytes(value) * (2 if freed is not None and freed <= second.number + 1 else 1)
    return total


def _dead_values(found: Sequence[Flush]) -> Iterator[Document]:
    """A read that is split although nothing in between is read: values that were dropped feed ops beyond a cut."""
    for positions in _by_trigger(found).values():
        split = [(found[p], dead) for p in positions if (dead := list(_dead(found[p])))]
        if not split:
            continue
        first, dead = split[0]
        region, value = dead[0]
        op = region["ops"][value["op"]]
        total = sum(2 * nbytes(o) for _, o in dead)
        line = first.trigger
        assert line is not None
        yield _advice(
            "dead-values",
            f"`{line['code']}` at {place(line)} is done as {len(first.regions)} regions instead of one: "
            f"{_values(len(dead), op)} read beyond a cut. Merging "
            f"{len(first.regions)} regions saves {amount(total)} of HBM traffic (modelled); torch.compile of the step does",
            line,
            times=len(split),
            regions=len(first.regions),
            dead_values=len(dead),
            hbm_bytes_saved=total,
        )


def _dead(flush: Flush) -> Iterator[tuple[Document, Document]]:
    """Values that were dropped, with their regions. Not those that cross a collective, beside which the list is cut anyway."""
    readers: dict[tuple[int, int], int] = {}
    for region in flush.regions:
        for value in region["inputs"]:
            if value["made_by"] is not None:
                readers.setdefault((value["made_by"]["region"], value["made_by"]["output"]), region["id"])
    collectives = [r["id"] for r in flush.regions if any(op["name"].startswith("c10d.") for op in r["ops"])]
    for region in flush.regions:
        for number, value in enumerate(region["outputs"]):
            reader = readers.get((region["id"], number), region["id"])
            if not value["live"] and not any(region["id"] <= c <= reader for c in collectives):
                yield region, value


def _values(count: int, op: Document) -> str:
    of = f"{label(op['name'])} at {place(op)}"
    if count == 1:
        return f"one value that nobody holds any more, the result of {of}, is"
    return f"{count} values that nobody holds any more, such as the result of {of}, are"


# --------------------------------------------------------------------------------------------------- recompilation


def _families(regions: Sequence[Document]) -> Iterator[list[Document]]:
    """Families whose dimensions differ."""
    for family in families(regions):
        if len({region["key"]["dimensions"] for region in family}) > 1:
            yield family


def _last_batch(regions: Sequence[Document]) -> Iterator[Document]:
    """One size most of the time, a smaller one seldom: the batch that is left over at the end of an epoch."""
    told: set[tuple[int, int]] = set()
    for family in _families(regions):
        counts = Counter(region["key"]["dimensions"] for region in family)
        (usual, often), *others = counts.most_common()
        if often < _REPETITIONS or sum(n for _, n in others) * 2 > often or len(others) > 2:
            continue
        for region in family:
            change = next(iter((region["changed"] or {}).get("dimensions", ())), None)
            if region["key"]["dimensions"] == usual or change is None or region["cache"]["hit"]:
                continue
            if change["after"] >= change["before"] or (change["before"], change["after"]) in told:
                continue
            told.add((change["before"], change["after"]))
            twins = [
                r
                for r in regions
                if not r["cache"]["hit"]
                and any(c["after"] == change["after"] for c in (r["changed"] or {}).get("dimensions", ()))
            ]
            seconds = sum(r["cache"]["compile_ms"] for r in twins) / 1e3
            yield _advice(
                "last-batch",
                f"the last batch recompiles: dimension {change['dim']} of {label(change['name'])} at {place(change)} was "
                f"{change['before']} in {often} launches, then {change['after']}; {len(twins)} regions were compiled for it in "
                f"{seconds:.2g} s. Use DataLoader(drop_last=True), or pad the batch",
                change,
                dim=change["dim"],
                usual=change["before"],
                last=change["after"],
                times=often,
                recompiled=len(twins),
                compile_seconds=seconds,
            )


def _growing(regions: Sequence[Document], hit_rate: float | None) -> Iterator[Document]:
    """A dimension that is larger every time: no region is ever found again."""
    for family in _families(regions):
        changes = [change for region in family for change in (region["changed"] or {}).get("dimensions", ())]
        by_value: dict[tuple[int, str, int], list[Document]] = defaultdict(list)
        for change in changes:
            by_value[change["op"], change["value"], change["dim"]].append(change)
        for sequence in by_value.values():
            grows = all(c["after"] > c["before"] for c in sequence)
            if grows and len(sequence) >= _REPETITIONS and 2 * len(sequence) >= len(family) - 1:
                first, last = sequence[0], sequence[-1]
                rate = "no" if hit_rate is None else f"{hit_rate:.0%}"
                yield _advice(
                    "growing-dimension",
                    f"{rate} hit rate: dimension {first['dim']} of {label(first['name'])} at {place(first)} grows every step "
                    f"({first['before']} to {last['after']} in {len(sequence)}): each size is compiled anew. Pad to a "
                    "few sizes, or allocate the final size and mask (a static cache)",
                    first,
                    dim=first["dim"],
                    first=first["before"],
                    last=last["after"],
                    times=len(sequence),
                    hit_rate=hit_rate,
                )
                return


# --------------------------------------------------------------------------------------------------- liveness


def _cycles(regions: Sequence[Document]) -> Iterator[Document]:
    """Outputs that nothing but a reference cycle holds."""
    seen: dict[tuple[str | None, int | None, str], list[Document]] = defaultdict(list)
    for region in regions:
        for value in region["outputs"]:
            cycles = [h for h in value["held_by"] if h["kind"] == "cycle"]
            if cycles and len(cycles) == len(value["held_by"]):
                op = region["ops"][value["op"]]
                seen[op["file"], op["line"], op["name"]].append(value | {"because": cycles[0]["text"], "made": op})
    for (_, _, name), values in seen.items():
        op = values[0]["made"]
        total = sum(nbytes(value) for value in values)
        yield _advice(
            "cycle",
            f"the result of {label(name)} at {place(op)} is kept alive by a cycle ({len(values)} times, {amount(total)}): "
            f"{values[0]['because']}. It is computed and stored for nobody; break the cycle, or use a weak reference",
            op,
            times=len(values),
            bytes=total,
        )


# --------------------------------------------------------------------------------------------------- ranks


def _rank_conditional(found: Sequence[Flush]) -> Iterator[Document]:
    """A read that only some ranks do, in a program with collectives."""
    trees: dict[str, ast.Module | None] = {}
    files = {op["file"] for flush in found for op in flush.ops()} | {f.where[0] for f in found if f.where is not None}
    for file in sorted(file for file in files if file is not None):
        trees[file] = _parsed(file)
    called = sorted({name for tree in trees.values() if tree is not None for name in _called(tree)} & _COLLECTIVES)
    if not called:
        return
    for (file, number), positions in _by_trigger(found).items():
        tree = trees.get(file)
        condition = None if tree is None else _rank_condition(tree, number)
        if condition is None:
            continue
        line = found[positions[0]].trigger
        assert line is not None
        yield _advice(
            "rank-conditional-read",
            f"rank-conditional read at line {number} ({place(line)}: `{line['code']}`) will deadlock with collectives "
            f"({', '.join(called)}): `{ast.unparse(condition)}` is true on some ranks only, and these launch the pending "
            "collectives while the others have not. Read on every rank, print on one",
            line,
            condition=ast.unparse(condition),
            collectives=called,
            times=len(positions),
        )


def _parsed(file: str) -> ast.Module | None:
    try:
        return ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # typed in, generated, or gone: there is nothing to look at
        return None


def _called(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield node.func.attr
            elif isinstance(node.func, ast.Name):
                yield node.func.id


def _rank_condition(tree: ast.Module, line: int) -> ast.expr | None:
    """The condition on the rank under which ``line`` runs: around it, or one that leaves its function or loop before it."""
    test: Callable[[ast.expr], bool] = _mentions_rank
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.While) and test(node.test):
            inside = [statement for body in (node.body, node.orelse) for statement in body]
            if any(_spans(statement, line) for statement in inside) or _same_line(node, line):
                return node.test
        if isinstance(node, ast.IfExp) and test(node.test) and _spans(node, line):
            return node.test
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            guard = _guard(body, line) if isinstance(body, list) else None
            if guard is not None:
                return guard
    return None


def _same_line(node: ast.If | ast.While, line: int) -> bool:
    return node.lineno == line and node.body[0].lineno == line


def _guard(body: Sequence[ast.stmt], line: int) -> ast.expr | None:
    for position, statement in enumerate(body):
        if (
            isinstance(statement, ast.If)
            and _mentions_rank(statement.test)
            and isinstance(statement.body[-1], ast.Return | ast.Continue | ast.Break | ast.Raise)
            and any(_spans(later, line) for later in body[position + 1 :])
        ):
            return statement.test
    return None


def _spans(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= getattr(node, "end_lineno", line - 1)


def _mentions_rank(test: ast.expr) -> bool:
    for node in ast.walk(test):
        word = getattr(node, "id", None) or getattr(node, "attr", None)
        if word is None and isinstance(node, ast.Constant):
            word = node.value
        if isinstance(word, str) and _RANK.search(word):
            return True
    return False
