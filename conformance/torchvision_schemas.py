"""Makes torchvision importable beside a build of torch that its compiled operators were not built for.

The wheel of torchvision on pip's default index belongs to torch's CUDA build. Beside the CPU build its extension does not
load, and importing the package fails where it registers shape rules for two of its operators. timm imports torchvision;
no model of timm or torchvision calls these operators, except the detection models.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

__all__ = ["declare"]

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache
def declare() -> torch.library.Library | None:
    """Declare, without any kernel, what torchvision's import needs to find; call before importing it. Never collected.

    Does nothing, and gives None, where torchvision's own operators load, or where there is no torchvision.
    """
    if not _is_needed():
        return None
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library


def _is_needed() -> bool:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return False
    for extension in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            return True
        return False
    return True
