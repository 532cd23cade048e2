"""Bounded dynamic dimensions of single tensors.

The functions of TorchTPU's ``torch_tpu._internal.dynamism``, by their names: a program that imports them from there
imports them from ``emutpu.dynamism`` here. Compiled functions take ``torch._dynamo.mark_dynamic`` instead.
"""

from __future__ import annotations

from emutpu.backend.dynamism.eager import BoundedDynamicDimension, get_dynamism_info, mark_dynamic

__all__ = ["BoundedDynamicDimension", "get_dynamism_info", "mark_dynamic"]
