"""Which overloads a program may call on the device, against what TorchTPU has, PyTorch calls core, and models use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from emutpu import _facts

__all__ = ["Target", "covered", "is_structured", "registered", "targets"]

# The traces of models were made on a CPU; the device reaches these ops under other names.
_ELSEWHERE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_fused_attention_overrideable_backward",
    "convolution": "convolution_overrideable",
    "convolution_backward": "convolution_backward_overrideable",
    "mkldnn_rnn_layer": "_thnn_fused_lstm_cell",
    "mkldnn_rnn_layer_backward": "_thnn_fused_lstm_cell_backward_impl",
}
_DECOMPOSE = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
_STRUCTURED = "CompositeExplicitAutogradNonFunctional"
# Non-functional composites that call nothing which could be missing; a test holds that they run.
_COMPLETE = frozenset({"as_strided_", "bernoulli.p", "copy", "new_empty_strided"})


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """How many overloads are asked for, how many of them there are, and which are not."""

    total: int
    covered: int
    missing: list[str]


def _has(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key))


def is_structured(name: str) -> bool:
    """True for overloads whose generic kernel only calls the out= form, which may be missing."""
    return _has(name, _STRUCTURED)


def covered(name: str) -> bool:
    """Whether an ATen overload (``add.Tensor``, ``relu``) has a kernel of ours, or decomposes into others."""
    name = _ELSEWHERE.get(name, name)
    if name in _COMPLETE or _has(name, "PrivateUse1"):
        return True
    return not is_structured(name) and any(_has(name, key) for key in _DECOMPOSE)


def registered() -> int:
    """How many overloads have a kernel of ours."""
    from emutpu.backend.registration import load
    from emutpu.backend.registration import registered as kernels

    load()
    return len(kernels())


def targets() -> dict[str, Target]:
    """The three lists by name."""
    from emutpu.backend.registration import load

    load()
    models = set(_facts.histogram("model_op_histogram_forward.json"))
    models |= set(_facts.histogram("model_op_histogram_train.json"))
    of_models = {name.removeprefix("aten.").removesuffix(".default") for name in models if name.startswith("aten.")}
    return {
        "torchtpu": _target(_facts.read("torchtpu_overloads.txt")),
        "core_aten": _target(_core()),
        "models": _target(of_models),
    }


def _target(names: Iterable[str]) -> Target:
    names = sorted(set(names))
    missing = [name for name in names if not covered(name)]
    return Target(len(names), len(names) - len(missing), missing)


def _core() -> Iterator[str]:
    """The overloads that PyTorch tags as core ATen. Listed by the dispatcher: ``dir(torch.ops.aten)`` knows what was used."""
    for qualified in torch._C._dispatch_get_all_op_names():
        base, _, variant = qualified.removeprefix("aten::").partition(".")
        if not qualified.startswith("aten::") or not hasattr(torch.ops.aten, base):
            continue
        packet = getattr(torch.ops.aten, base)
        if torch.Tag.core in getattr(packet, variant or "default").tags:
            yield f"{base}.{variant}" if variant else base
