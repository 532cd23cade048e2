"""Makes torchvision importable beside a build of torch that its compiled operators were not built for.

The wheel of torchvision on pip's default index belongs to torch's CUDA build. Beside the CPU build its extension does not
load, and importing the package fails where it registers shape rules for two of its operators. timm imports torchvision;
no model of timm or torchvision calls these operators, except the detection models.
"""

from __future__ import annotations

import functools

import torch

__all__ = ["declare"]

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@functools.cache
def declare() -> torch.library.Library:
    """Declare, without any kernel, what torchvision's import needs to find; call before importing it. Never collected."""
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    return library
