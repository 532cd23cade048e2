"""The regions as files that jax alone can run: StableHLO, inputs, expected outputs, and a script that replays them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from emutpu._report import Document
from emutpu.cli._regions.analysis import stem_of

__all__ = ["write"]


def write(document: Document, folder: Path, target: Path) -> int:
    """Write every distinct region of a recording made with inputs into ``target``; gives their number. Raises OSError."""
    target.mkdir(parents=True, exist_ok=True)
    entries: dict[str, Document] = {}
    for region in document["regions"]:
        stem = stem_of(region)
        if stem in entries or not (folder / f"{stem}.inputs").exists():
            continue
        name = f"region_{region['id']:04}"
        place = target / name
        place.mkdir(exist_ok=True)
        shutil.copyfile(folder / f"{stem}.mlir", place / "module.mlir")
        entry: Document = {"name": name, "key": region["key"], "ops": [op["name"] for op in region["ops"]]}
        for kind in ("input", "output"):
            avals = json.loads((folder / f"{stem}.{kind}s").read_text(encoding="utf-8"))
            for n, aval in enumerate(avals):
                aval["file"] = f"{name}/{kind}{n}.npy"
                shutil.copyfile(folder / f"{stem}.{kind}{n}.npy", target / aval["file"])
            entry[f"{kind}s"] = avals
        entries[stem] = entry
    manifest = {"schema": "emutpu.regions-export/1", "chip": document["chip"], "regions": list(entries.values())}
    (target / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("replay.py"), target / "replay.py")
    return len(entries)
