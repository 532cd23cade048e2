"""Writes ``conformance/data``: ``python -m tools.manifest`` (``--check`` compares instead, exit code 1 when they differ).

Everything comes from pinned packages: timm, transformers, diffusers and torchvision as ``tools/constraints.txt`` has them
installed, and the list of hub ids with architectures in the wheel of TransformerLens, which pip downloads and which is read
without being installed. No id is made up: what has none is a row of kind ``architecture``. Fingerprints and expected outcomes
that ``tools.corpus`` found are kept as long as their program stays the same.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.diffusers_models import DIFFUSERS
from tools.image_shrinking import as_vit, gain_of, options_of, shrink_of
from tools.layout import ROOT

__all__ = ["installed_programs", "jsonl", "main", "rendered"]

DATA = ROOT / "conformance" / "data"
LENS = ("transformer-lens", "4.3.0", "fd3aff408b4145a8b4b00cacdc32a25c047c4c4f416de4b7b260abd375ae89db")
_LENS_DATA = "transformer_lens/tools/model_registry/data/"
# No more ids of one architecture than this: they share a program, and generative language models would drown the rest.
IDS_AN_ARCHITECTURE = 80
SEED = 0

# Families of timm whose depth, width and heads are arguments of the constructor.
_VITS = frozenset(
    ("vision_transformer", "vision_transformer_relpos", "deit", "beit", "eva", "naflexvit", "vision_transformer_hybrid")
)

# A program of every kind of architecture and op: the suite that runs with every change.
SMOKE = frozenset(
    """
    timm/resnet18 timm/resnext50_32x4d timm/mobilenetv3_small_100 timm/efficientnet_b0 timm/convnext_tiny timm/regnety_002
    timm/densenet121 timm/vit_tiny_patch16_224 timm/beit_base_patch16_224 timm/swin_tiny_patch4_window7_224
    timm/mixer_b16_224 timm/ghostnet_100 timm/repvgg_a0 timm/mobilevit_xxs timm/eva02_tiny_patch14_224
    transformers/LlamaForCausalLM transformers/MistralForCausalLM transformers/MixtralForCausalLM
    transformers/Qwen2ForCausalLM transformers/Qwen3MoeForCausalLM transformers/Gemma3ForCausalLM
    transformers/GPT2LMHeadModel transformers/GPTNeoXForCausalLM transformers/BloomForCausalLM
    transformers/MambaForCausalLM transformers/FalconForCausalLM transformers/Phi3ForCausalLM
    transformers/BertForMaskedLM transformers/RobertaForSequenceClassification transformers/DistilBertForQuestionAnswering
    transformers/ElectraForTokenClassification transformers/T5ForConditionalGeneration
    transformers/BartForConditionalGeneration transformers/ViTForImageClassification transformers/CLIPModel
    transformers/Wav2Vec2ForCTC transformers/WhisperForConditionalGeneration transformers/SegformerForSemanticSegmentation
    diffusers/UNet2DModel diffusers/AutoencoderKL
    """.split()  # noqa: SIM905  # a list of words is read best as one
)

# Which of the Auto classes names a transformers model's task, the most telling first.
_TASKS = (
    "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ", "CTC",
    "IMAGE_CLASSIFICATION", "OBJECT_DETECTION", "SEMANTIC_SEGMENTATION", "UNIVERSAL_SEGMENTATION", "INSTANCE_SEGMENTATION",
    "DEPTH_ESTIMATION", "AUDIO_CLASSIFICATION", "TEXT_TO_WAVEFORM", "ZERO_SHOT_IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """What a source yields: a program's description, and models of it (none: the architecture itself is the row)."""

    program: dict[str, Any]
    models: list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare. Gives the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    parser.add_argument("--wheel", type=Path, help="the wheel of TransformerLens, if it is there already")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        files = rendered(options.wheel or _download(Path(folder)))
    differing = [name for name, text in files.items() if not _same(DATA / name, text)]
    if options.check:
        print(f"differ: {', '.join(differing)}" if differing else "the manifest is what the sources give")
        return 1 if differing else 0
    DATA.mkdir(exist_ok=True)
    for name, text in files.items():
        (DATA / name).write_text(text, encoding="utf-8")
    print(", ".join(f"{name}: {text.count(chr(10)):,} lines" for name, text in files.items()))
    return 0


def _same(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


def _download(folder: Path) -> Path:
    name, version, _ = LENS
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{name}=={version}", "-d", str(folder)]
    subprocess.run(pip, check=True)
    return next(folder.glob("*.whl"))


def rendered(wheel: Path) -> dict[str, str]:
    """The texts of the files by name. ``wheel`` is that of TransformerLens. Raises ValueError for another wheel."""
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != LENS[2]:
        raise ValueError(f"{wheel} is not the wheel of {LENS[0]} {LENS[1]} that the manifest is made from")
    os.environ["HF_HUB_OFFLINE"] = "1"
    programs, models = _of_packages(_hub_ids(wheel))
    return {
        "sources.json": json.dumps(_sources(wheel), indent=1) + "\n",
        "programs.jsonl": programs,
        "models.jsonl": models,
    }


def installed_programs(without: Collection[str] = ()) -> str:
    """The text of ``programs.jsonl``, for which the installed packages are enough, ``without`` the programs of some builders."""
    return _of_packages({}, without)[0]


def _of_packages(ids: dict[str, list[tuple[str, str]]], without: Collection[str] = ()) -> tuple[str, str]:
    found = [*_timm(), *_transformers(ids), *_diffusers(), *_torchvision(), *_libraries(without), *_trained()]
    programs, models = _joined(found)
    return jsonl(programs), jsonl(models)


def jsonl(entries: Iterable[dict[str, Any]]) -> str:
    """A line of JSON for each entry."""
    return "".join(json.dumps(entry, ensure_ascii=False, separators=(",", ":")) + "\n" for entry in entries)


def _joined(found: Sequence[_Found]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Programs with their group's representative marked, and models with the first source of an id only."""
    traced = _traced()
    programs: list[dict[str, Any]] = []
    models: list[dict[str, Any]] = []
    seen: set[str] = set()
    groups: set[str] = set()
    for entry in found:
        program = entry.program
        program["representative"] = program["group"] not in groups
        groups.add(program["group"])
        program["smoke"] = program["name"] in SMOKE
        program["fingerprint"], program["expected"] = traced.get(_identity(program), (None, "pass"))
        programs.append({field: program[field] for field in _PROGRAM})
        by_id = {model["id"]: model for model in reversed(entry.models)}  # the first source of an id counts
        new = [model for model in reversed(by_id.values()) if model["id"] not in seen]
        # Some architectures of timm are other readings of weights that another one has.
        new = new or [_model(f"{program['builder']}:{program['architecture']}", "architecture", program["builder"])]
        seen.update(model["id"] for model in new)
        models += [model | {"program": program["name"]} for model in new]
    missing = SMOKE - {program["name"] for program in programs}
    if missing:
        raise ValueError(f"no source has the smoke programs {sorted(missing)}")
    return programs, models


_PROGRAM = (
    "name", "builder", "architecture", "task", "shrink", "options", "inputs", "gain", "seed", "group", "representative",
    "smoke", "fingerprint", "expected",
)  # fmt: skip
_DESCRIBES = ("name", "builder", "architecture", "shrink", "options", "inputs", "gain", "seed")


def _identity(program: dict[str, Any]) -> str:
    return json.dumps([program[field] for field in _DESCRIBES])


def _traced() -> dict[str, tuple[str | None, str]]:
    """What ``tools.corpus`` found out about programs that are still the same: fingerprint and expected outcome."""
    path = DATA / "programs.jsonl"
    if not path.is_file():
        return {}
    known = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {_identity(program): (program["fingerprint"], program["expected"]) for program in known}


def _program(builder: str, architecture: str, group: str, task: str, shrink: str, inputs: str) -> dict[str, Any]:
    return {
        "name": f"{builder}/{architecture}",
        "builder": builder,
        "architecture": architecture,
        "group": f"{builder}/{group}",
        "task": task,
        "shrink": shrink,
        "options": {},
        "inputs": inputs,
        "gain": gain_of(f"{builder}/{architecture}"),
        "seed": SEED,
    }


def _model(identity: str, kind: str, source: str, licence: str | None = None) -> dict[str, Any]:
    return {"id": identity, "kind": kind, "source": source, "licence": licence}


def _timm() -> Iterator[_Found]:
    from emutpu.conformance.torchvision_schemas import declare

    declare()
    import timm
    from timm.models import get_pretrained_cfg, model_entrypoint

    for architecture, tags in itertools.groupby(sorted(timm.list_models(pretrained=True)), lambda t: t.split(".")[0]):
        configs: dict[str, Any] = {tag: get_pretrained_cfg(tag) for tag in tags}
        family = model_entrypoint(architecture).__module__.rpartition(".")[2]
        first = next(iter(configs.values()))
        shrink = "vit" if as_vit(architecture, family in _VITS) else shrink_of("timm", architecture)
        task = "image-classification" if first.num_classes else "image-features"
        models = [
            _model(config.hf_hub_id, "hub", "timm", config.license)
            if config.hf_hub_id
            else _model(f"timm:{tag}", "weights", "timm", config.license)
            for tag, config in configs.items()
        ]
        program = _program("timm", architecture, family, task, shrink, "image")
        if shrink != "vit":
            program["options"] = options_of("timm", architecture, sized=first.fixed_input_size)
        yield _Found(program, models)


def _hub_ids(wheel: Path) -> dict[str, list[tuple[str, str]]]:
    """(id, source) by architecture, in the order of the lists."""
    found: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
    for entry in _of_wheel(wheel, "supported_models.json")["models"]:
        found[entry["architecture_id"]].append((entry["model_id"], "transformer-lens"))
    for gap in _of_wheel(wheel, "architecture_gaps.json")["gaps"]:
        found[gap["architecture_id"]] += [(name, "transformer-lens-gaps") for name in gap["sample_models"]]
    return found


def _of_wheel(wheel: Path, name: str) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        return json.loads(archive.read(_LENS_DATA + name))


# Image networks whose stages have to fit each other: their settings keep their widths.
_WIDE = frozenset(
    """
    align d_fine deimv2 glpn efficientloftr pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4
    rt_detr rt_detr_v2 pp_ocrv5_server_det pp_ocrv6_medium_det pp_ocrv6_small_det uvdoc slanext
    pp_formulanet sam sam_hq sam2 sam2_vision_model
    """.split()  # noqa: SIM905  # as above
)
# With an image network of timm inside that is too deep. FastVLM's is not: shorter, it strays from float64 by 4e-3.
_TOWERS = frozenset(["gemma3n"])
# Those of the wide whose channels can be divided once they are built.
_NARROWED = frozenset(
    [
        "hgnet_v2",
        "poolformer",
        "pp_ocrv5_server_rec",
        "sam2_hiera_det_model",
        "textnet",
        "timm_backbone",
        "timm_wrapper",
    ]
)


def _transformers(ids: dict[str, list[tuple[str, str]]]) -> Iterator[_Found]:
    for architecture, (model_type, tasks) in sorted(_auto_classes().items()):
        rank = {task: place for place, task in enumerate(_TASKS)}
        best = min(tasks, key=lambda task: (rank.get(task, len(rank)), task))
        task = (best or "base").lower().replace("_", "-")
        kinds = {"depth": _WIDE, "narrow": _NARROWED, "tower": _TOWERS}
        shrink = next((kind for kind, types in kinds.items() if model_type in types), "config")
        program = _program("transformers", architecture, model_type, task, shrink, "signature")
        program["options"] = {"model_type": model_type}
        known = list(dict.fromkeys(ids.get(architecture, [])))[:IDS_AN_ARCHITECTURE]
        models = [_model(name, "hub", source) for name, source in known]
        yield _Found(program, models)


def _auto_classes() -> dict[str, tuple[str, list[str]]]:
    """Class name → (model type, Auto tasks), from the tables of the Auto classes."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, list[str]]] = {}
    for table, names in vars(modeling_auto).items():
        match = re.fullmatch(r"MODEL_(?:FOR_)?(\w*?)_?MAPPING_NAMES", table)
        if match is None:
            continue
        for model_type, classes in names.items():
            for name in classes if isinstance(classes, (tuple, list)) else [classes]:
                found.setdefault(name, (model_type, []))[1].append(match[1])
    return found


_DIFFUSERS = {
    "autoencoders": "diffusion-autoencoder",
    "controlnets": "diffusion-controlnet",
    "transformers": "diffusion-transformer",
    "unets": "diffusion-unet",
}


def _diffusers() -> Iterator[_Found]:
    import diffusers
    from diffusers import models

    structure = models._import_structure  # class names by module, without importing them
    for module, names in sorted(structure.items()):
        kind = module.partition(".")[0]
        if kind not in _DIFFUSERS:
            continue
        for name in sorted(name for name in names if hasattr(diffusers, name)):
            program = _program("diffusers", name, name, _DIFFUSERS[kind], "written", "written")
            program["options"] = DIFFUSERS.get(name, {})
            yield _Found(program, [])


def _torchvision() -> Iterator[_Found]:
    from torchvision import models

    for name in sorted(models.list_models()):
        builder = models.get_model_builder(name)
        family = builder.__module__.removeprefix("torchvision.models.")
        task = {"detection": "object-detection", "segmentation": "semantic-segmentation"}.get(family.partition(".")[0])
        weights = models.get_model_weights(name)
        entries = [_model(f"torchvision:{member}", "weights", "torchvision") for member in weights]
        inputs = {"video": "video", "optical_flow": "image-pair"}.get(family.partition(".")[0], "image")
        shrink = "image" if inputs == "image-pair" else shrink_of("torchvision", name)
        program = _program("torchvision", name, family, task or "image-classification", shrink, inputs)
        program["options"] = options_of("torchvision", name)
        if family == "vision_transformer":  # the name ends with the side of a patch
            program["options"] = {"image_size": 4 * int(name.rpartition("_")[2])}
        yield _Found(program, entries)


_DISTRIBUTIONS = {"open_clip": "open_clip_torch"}  # under another name than the import's


def _libraries(without: Collection[str] = ()) -> Iterator[_Found]:
    from tools import manifest_libraries as libraries

    known = (
        ("open_clip", libraries.open_clip),
        ("segmentation_models_pytorch", libraries.segmentation_models),
        ("litgpt", libraries.litgpt),
        ("sentence_transformers", libraries.sentence_transformers),
    )
    for builder, found in known:
        if builder in without:
            continue
        for architecture, family, task, options, models in found():
            pixels = builder == "segmentation_models_pytorch"
            shrink = shrink_of(builder, options["config"]["encoder_name"]) if pixels else "written"
            program = _program(builder, architecture, family, task, shrink, "written")
            program["options"] = options | options_of(builder, architecture)
            yield _Found(program, [_model(identity, kind, builder) for identity, kind in models])


def _trained() -> Iterator[_Found]:
    """Programs with trained weights, each a row of its own."""
    from emutpu.conformance import trained

    for name, (source, architecture, task) in trained.PROGRAMS.items():
        program = _program("trained", name, name, task, "none", "text")
        program["architecture"] = architecture
        yield _Found(program, [_model(f"{source}:{name}", "trained", source, trained.PACKAGES[source][1])])


def _sources(wheel: Path) -> list[dict[str, Any]]:
    from emutpu.conformance import trained

    installed = {
        "timm": ("Apache-2.0", "tags of pretrained weights with hub id, architecture and licence"),
        "transformers": ("Apache-2.0", "architectures: the tables of the Auto classes"),
        "diffusers": ("Apache-2.0", "architectures: the exported model classes"),
        "torchvision": ("BSD-3-Clause", "names of published weights with their builder"),
        "open_clip": ("MIT", "configurations, with the hub ids of their published weights"),
        "segmentation_models_pytorch": ("MIT", "encoders with the hub ids of their weights, and decoders"),
        "litgpt": ("Apache-2.0", "configurations, each with the hub id that it is of"),
        "sentence_transformers": ("Apache-2.0", "modules after an encoder: pooling, projection, sparse encoding"),
    }
    lists = {"transformer-lens": "supported_models.json", "transformer-lens-gaps": "architecture_gaps.json"}
    return (
        [
            {
                "name": name,
                "version": importlib.metadata.version(_DISTRIBUTIONS.get(name, name)),
                "snapshot": None,
                "licence": licence,
                "what": what,
            }
            for name, (licence, what) in installed.items()
        ]
        + [
            {
                "name": name,
                "version": LENS[1],
                "snapshot": _of_wheel(wheel, file)["generated_at"],
                "licence": "MIT",
                "what": f"hub ids with architecture, {file}",
            }
            for name, file in lists.items()
        ]
        + [
            {"name": name, "version": version, "snapshot": None, "licence": licence, "what": what}
            for name, (version, licence, what, _) in trained.PACKAGES.items()
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
