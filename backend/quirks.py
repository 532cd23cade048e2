"""Known bugs of TorchTPU releases: one frozen table.

By default the emulator gives the correct result and says once per bug that the release gets it wrong;
``EMUTPU_QUIRKS=0.2.0`` gives the release's result. ``python -m tools.quirks`` writes ``docs/quirks.md`` from the table.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend import quirk_effects as effects
from emutpu.backend.errors import user_line
from emutpu.backend.options import LOCAL
from emutpu.backend.runtime import runtime

__all__ = ["QUIRKS", "Quirk", "QuirkWarning", "composites", "guarded", "reproduces", "tell"]

RELEASE = "0.2.0"
_OPINFO = "recorded: PyTorch's operator database run against the 0.2.0 wheel"


class QuirkWarning(UserWarning):
    """The program met something that a release of TorchTPU gets wrong; the result here is the correct one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quirk:
    """One bug.

    ``does`` is what the release does, ``here`` what the emulator gives by default, ``evidence`` how it is known.
    ``overloads`` are the ATen overloads that meet it ``when`` their arguments say so; ``effect`` is the release's result.
    ``reads`` tells that ``when`` must look at values on the device: such a bug is told of only where costly checks are on
    (TORCH_TPU_ENABLE_DEBUG_CHECKS=1). ``approximate`` says how the reproduction
    differs from the release where its exact result is not recorded, ``missing`` why there is no reproduction. ``silent``
    ones change no result: nothing is said of them, and what reproduces them asks :func:`reproduces`.
    """

    name: str
    does: str
    here: str
    evidence: str
    overloads: tuple[str, ...] = ()
    when: Callable[..., bool] = effects.always
    effect: Callable[..., Any] | None = None
    reads: bool = False
    approximate: str = ""
    missing: str = ""
    silent: bool = False
    release: str = RELEASE


_NO_GROUPS = "process groups are not emulated yet"
_FLOORING = (
    *("floor_divide", "floor_divide.Scalar", "floor_divide_.Tensor", "floor_divide_.Scalar"),
    *("div.Tensor_mode", "div.Scalar_mode", "div_.Tensor_mode", "div_.Scalar_mode"),
    *("remainder.Tensor", "remainder.Scalar", "remainder_.Tensor", "remainder_.Scalar"),
)

QUIRKS: tuple[Quirk, ...] = (
    Quirk(
        "tied-weights",
        "moving a module to the device unties parameters that two layers share",
        "they stay one parameter",
        "reported: torch_tpu#4161",
    ),
    Quirk(
        "attention-masked-row",
        "attention with a boolean mask leaks values into rows that are masked throughout",
        "such a row is zero",
        "reported: torch_tpu#4146",
        ("scaled_dot_product_attention",),
        effects.masked_row,
        effects.attention_over_masked_rows,
        reads=True,
        approximate="the row is the mean of the values; what leaks on the chip is not recorded",
    ),
    Quirk(
        "attention-mask-gradient",
        "scaled_dot_product_attention refuses a mask that requires grad (T5's position bias)",
        "the mask gets its gradient",
        "reported: torch_tpu#4147",
        ("scaled_dot_product_attention",),
        effects.mask_wants_gradient,
        effects.refuses_mask_gradient,
        approximate="the wording of the error is ours",
    ),
    Quirk(
        "ctc-flat-targets",
        "ctc_loss with 1-D targets aborts the process",
        "the loss",
        "reported: torch_tpu#4143",
        ("_ctc_loss", "_ctc_loss.Tensor"),
        effects.flat_targets,
        effects.aborts,
    ),
    Quirk(
        "multinomial-seed",
        "multinomial ignores manual_seed",
        "equal draws after equal seeds",
        "reported: torch_tpu#4142",
        ("multinomial",),
        effects.seeded,
        effects.unseeded,
    ),
    Quirk(
        "index-gradient-apart",
        "the gradient of x[:, i, :, i] (index tensors that are not neighbours) is wrong",
        "the right gradient",
        _OPINFO,
        ("_index_put_impl_",),
        effects.indices_apart,
        effects.index_gradient_misplaced,
        approximate="wrong in the same places, with other numbers: only the size of the error is recorded",
    ),
    Quirk(
        "grid-gradient",
        "grid_sample's gradient for the grid is wrong",
        "the right gradient",
        _OPINFO,
        ("grid_sampler_2d_backward", "grid_sampler_3d_backward"),
        effects.grid_wants_gradient,
        effects.grid_gradient_negated,
        approximate="its sign is turned, which fits the recorded error (largest relative difference 2.0 in 2-D, 2.3 in 3-D)",
    ),
    Quirk(
        "pdist-gradient-one-row",
        "pdist of a single row has a gradient of NaN",
        "a gradient of zeros",
        _OPINFO,
        ("_pdist_backward",),
        effects.one_row,
        effects.pdist_gradient_nan,
    ),
    Quirk(
        "avg-pool1d-gradient",
        "avg_pool1d has no autograd formula: its result does not require grad, so gradients vanish",
        "the gradient",
        _OPINFO,
        ("avg_pool1d",),
        effects.wants_gradient,
        effects.forgets_gradient,
    ),
    Quirk(
        "replicate-pad-crop-gradient",
        "the gradient of replicate padding with negative pads aborts the process",
        "the gradient",
        _OPINFO,
        ("replication_pad1d_backward", "replication_pad2d_backward", "replication_pad3d_backward"),
        effects.negative_padding,
        effects.aborts,
    ),
    Quirk(
        "index-reduce",
        "index_reduce aborts the process, with every reduction and dtype that was tried",
        "the reduction",
        _OPINFO,
        ("index_reduce", "index_reduce_", "index_reduce.out"),
        effects.always,
        effects.aborts,
    ),
    Quirk(
        "batch-norm-out-bfloat16",
        "native_batch_norm(out=) in bfloat16 aborts the process",
        "the result",
        _OPINFO,
        ("native_batch_norm.out", "_native_batch_norm_legit.out"),
        effects.is_bfloat16,
        effects.aborts,
    ),
    Quirk(
        "scatter-mean-integers",
        "scatter_reduce(reduce='mean') of integers rounds negative means towards zero",
        "they round down, as on the CPU",
        _OPINFO,
        ("scatter_reduce.two", "scatter_reduce_.two", "scatter_reduce.two_out"),
        effects.integer_mean,
        effects.truncated_mean,
    ),
    Quirk(
        "index-select-scalar-index",
        "index_select refuses a 0-d index, so index_add and index_copy with one have no gradient",
        "a 0-d index counts as one of length 1",
        _OPINFO,
        ("index_select",),
        effects.scalar_index,
        effects.refuses_index,
    ),
    Quirk(
        "foreach-norm-nan",
        "_foreach_norm(ord=-inf) loses NaN",
        "NaN is kept",
        _OPINFO,
        ("_foreach_norm.Scalar",),
        effects.smallest_norm,
        effects.norm_without_nan,
    ),
    Quirk(
        "argmax-nan",
        "argmax and argmin (found through torch.masked) pass over NaN",
        "NaN wins, as on the CPU",
        _OPINFO,
        ("argmax", "argmin"),
        effects.holds_nan,
        effects.argmax_without_nan,
        reads=True,
    ),
    Quirk(
        "bfloat16-floor",
        "floor division and remainder of bfloat16 round the quotient to bfloat16 before they round down",
        "the quotient is rounded down first, as on the CPU",
        f"{_OPINFO}; the cause is inferred from errors of one unit at quotients near 17",
        _FLOORING,
        effects.floors_bfloat16,
        effects.bfloat16_floor,
    ),
    Quirk(
        "compile-offset-guards",
        "a compiled function compiles again for a view with another storage offset",
        "one graph for both offsets",
        "reported: torch_tpu#4163; the wheel installs such guards",
        silent=True,
    ),
    Quirk(
        "compile-mode",
        "torch.compile(mode=...) raises TypeError: unexpected keyword",
        "the same TypeError",
        "reported by users' CI",
        missing="it is not a wrong result: the emulator refuses modes as the release does",
    ),
    Quirk(
        "compile-inference-mode",
        "a compiled function called under inference_mode crashes",
        "it runs",
        "reported by users' CI",
        missing="how it crashes is not recorded",
    ),
    Quirk(
        "all-reduce-min-int64",
        "all_reduce(MIN) of int64 fails to compile",
        "–",
        "reported by users' CI",
        missing=_NO_GROUPS,
    ),
    Quirk(
        "pallas-mesh-order",
        "a Pallas mesh index follows the runtime's device order, not the mesh's",
        "–",
        "reported: torch_tpu#3522",
        missing="Pallas kernels are not emulated yet",
    ),
    Quirk(
        "held-chip-aborts",
        "a second process that opens a held chip is aborted",
        "processes share the emulated chip",
        "reported: torch_tpu#4166",
        missing="there is no chip to hold: each process has a device of its own",
    ),
    Quirk(
        "visible-devices",
        "TPU_VISIBLE_DEVICES=0 still gives device_count() == 8 on a host of eight",
        "one device per process",
        "reported by users' CI",
        missing="a process of the emulator has one device",
    ),
)

_told: set[str] = set()


def reproduces(release: str = RELEASE) -> bool:
    """Whether this process was asked for the bugs of ``release``."""
    configuration = runtime().configuration
    return configuration is not None and configuration.quirks == release


def tell(quirk: Quirk) -> None:
    """Warn of a bug that the program has just met; the first time only."""
    if quirk.name in _told:
        return
    _told.add(quirk.name)
    warnings.warn(
        f"emutpu: TorchTPU {quirk.release} gets this wrong: {quirk.does}. Here: {quirk.here}. At {user_line()}. "
        f"EMUTPU_QUIRKS={quirk.release} reproduces it ('{quirk.name}' in docs/quirks.md)",
        QuirkWarning,
        stacklevel=3,
    )


def guarded(overload: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel that the dispatcher gets: itself where no bug is known, else one that tells of the bug or has it."""
    for quirk in QUIRKS:
        if overload in quirk.overloads:
            kernel = _with_bug(quirk, overload, kernel) if reproduces(quirk.release) else _telling(quirk, kernel)
    return kernel


def _with_bug(quirk: Quirk, overload: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    effect, when = quirk.effect, quirk.when
    assert effect is not None

    def buggy(*args: Any, **kwargs: Any) -> Any:
        # What depends on values decides for itself, on the device.
        return (
            effect(overload, kernel, *args, **kwargs)
            if quirk.reads or when(*args, **kwargs)
            else kernel(*args, **kwargs)
        )

    return buggy


def _telling(quirk: Quirk, kernel: Callable[..., Any]) -> Callable[..., Any]:
    name, when, reads = quirk.name, quirk.when, quirk.reads

    def telling(*args: Any, **kwargs: Any) -> Any:
        if name not in _told and (not reads or LOCAL.state.options.bounds_checks) and when(*args, **kwargs):
            tell(quirk)
        return kernel(*args, **kwargs)

    return telling


@functools.cache
def composites() -> dict[str, Callable[..., Any]]:
    """Decompositions that stand above autograd only to have a bug told of, or shown."""
    boxed = torch.library.get_kernel("aten::avg_pool1d", "PrivateUse1").call_boxed
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return {"avg_pool1d": functools.partial(boxed, keys)}
