"""The report as one HTML file that needs nothing else: steps as a timeline, regions as blocks, the source beside."""

from __future__ import annotations

import json
from pathlib import Path

from emutpu._report import Document
from emutpu.cli._regions.analysis import stem_of
from emutpu.cli._regions.terminal import amount, seconds

__all__ = ["render"]

_MODULE_BYTES = 200_000
_MODULES_BYTES = 4_000_000
_SOURCE_BYTES = 400_000


def render(document: Document, folder: Path) -> str:
    """The page. ``folder`` holds the modules of the regions."""
    import jinja2
    from markupsafe import Markup

    templates = Path(__file__).resolve().parents[2] / "templates"
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(templates), autoescape=True)
    data = {
        "regions": document["regions"],
        "sources": _sources(document["regions"]),
        "modules": _modules(document["regions"], folder),
    }
    # Nothing in the data may end the element that it is in.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return environment.get_template("regions.html").render(
        title=" ".join(document["program"]),
        chip=document["chip"],
        version=document["emutpu"],
        torch=document["torch"],
        jax=document["jax"],
        cards=_cards(document),
        advice=document["advice"],
        data=Markup(text),  # noqa: S704  # JSON, with every < escaped
    )


def _cards(document: Document) -> list[tuple[str, str]]:
    found, totals = document["summary"], document["totals"]
    rate = "-" if found["hit_rate"] is None else f"{found['hit_rate']:.0%}"
    return [
        (f"{found['regions']:,}", f"regions, {found['distinct_regions']:,} distinct"),
        (f"{found['ops']:,}", "ops"),
        (f"{found['materialisations']:,}", f"materialisations in {found['steps']:,} steps"),
        (rate, "cache hits"),
        (seconds(found["compile_ms"] / 1e3), "compiling, on this host"),
        (amount(totals["bytes"]), "written to HBM by launches"),
        (amount(found["modelled_hbm_bytes"]), "HBM traffic, modelled"),
        (seconds(found["modelled_seconds"]), "on the chip, modelled"),
    ]


def _sources(regions: list[Document]) -> dict[str, list[str]]:
    files = {op["file"] for region in regions for op in region["ops"]}
    files |= {region["trigger"]["file"] for region in regions if region["trigger"] is not None}
    found: dict[str, list[str]] = {}
    for file in sorted(file for file in files if file is not None):
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, ValueError):  # typed in or generated: the page says that it has not got it
            continue
        if len(text) <= _SOURCE_BYTES:
            found[file] = text.splitlines()
    return found


def _modules(regions: list[Document], folder: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    room = _MODULES_BYTES
    for stem in dict.fromkeys(map(stem_of, regions)):
        text = (folder / f"{stem}.mlir").read_text(encoding="utf-8")
        if len(text) <= min(room, _MODULE_BYTES):
            found[stem] = text
            room -= len(text)
    return found
