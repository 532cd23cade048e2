"""Every overload that traced models use, in every dtype that the CPU takes, and without elements: as on the CPU."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from harness import TOLERANCES, highest
from overloads import CALLS, ELSEWHERE, ENTRIES, Call, calls, needed, with_dtype, without_elements
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from emutpu.backend.registration import load
from emutpu.cli._coverage import covered
from tools.layout import ROOT

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OTHERS = (torch.complex64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


EMPTY = 2
"""How many empty variants of an overload are compared."""
# Of one element, or of one at least; native_group_norm takes sizes as numbers of their own, and has a test below.
NEVER_EMPTY = frozenset({"_local_scalar_dense", "lift_fresh", "max", "min", "native_group_norm"})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_WIDE = frozenset({torch.float64})
_REFUSED: dict[str, frozenset[torch.dtype]] = {
    # The matrix unit takes floats; so do the device's pooling windows.
    **dict.fromkeys(
        ("addmm", "avg_pool2d", "avg_pool3d", "baddbmm", "bmm", "max_pool2d_with_indices", "mm"), _INTEGERS
    ),
    **dict.fromkeys(("convolution", "convolution_backward"), _INTEGERS | {torch.complex64}),
    # Results would be complex128, or complex32 (docs/limits.md).
    **dict.fromkeys(("_fft_r2c", "polar"), _WIDE),
    "view_as_complex": _WIDE | {torch.float16},
    # PyTorch's meta kernel asks for floats, also where the CPU has nothing to draw.
    "randn_like": _INTEGERS,
}
_OF_MASKS = frozenset({"_is_all_true"})
_REFUSAL = "not implemented|not yet supported|to be neither|expected a floating-point"
# How ties are ordered is open; saved statistics are as wide, or as empty, as a device wants them; bytes are interpolated
# in fixed point on the CPU, so a half may be rounded to the other side.
_FIRST_ONLY = frozenset(
    {"sort", "topk", "native_layer_norm", "native_batch_norm", "_weight_norm_interface", "_native_multi_head_attention"}
)
_BYTES = frozenset({"upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"})
load()
LACKING = frozenset(name for name in needed() if name not in ELSEWHERE and not covered(name))
BEYOND = os.environ.get("EMUTPU_BEYOND") == "1"
NAMES = [name for name in needed() if name not in ELSEWHERE and (BEYOND or name not in LACKING)]


class _NotOnCpu(Exception):
    """The CPU refuses the call, which is then no question to the device."""


def _on_cpu(call: Call):
    try:
        return call.on("cpu")
    except Exception as error:  # any: whatever the CPU refuses, in whatever way
        raise _NotOnCpu from error


def _random(call: Call) -> bool:
    return torch.Tag.nondeterministic_seeded in call.op.tags or "empty" in str(call.op)


def _wide(call: Call) -> Call:
    """The call in float64: what is right to all digits."""
    narrow = {torch.bfloat16, torch.float16, torch.float32}
    args, kwargs = tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.dtype in narrow else t, (call.args, call.kwargs)
    )
    return Call(call.op, args, kwargs)


def _equal(a: Any, e: Any) -> bool:
    return bool(a == e) or (isinstance(a, float) and math.isnan(a) and math.isnan(e))


def _compare(name: str, call: Call, what: str) -> None:
    """Results and arguments afterwards. 16-bit floats may stray from the exact result as far as the CPU's, or their rounding."""
    expected, actual = _on_cpu(call), call.on("tpu")
    got, want = tree_flatten(actual)[0], tree_flatten(expected)[0]
    assert len(got) == len(want), what
    exact = None
    for index, (a, e) in enumerate(zip(got, want, strict=True)):
        if index and name in _FIRST_ONLY:
            break
        if not isinstance(e, Tensor):
            assert _random(call) or isinstance(a, torch.device) or _equal(a, e), f"{what}: {a}, {e}"
            continue
        assert (a.dtype, a.shape, a.device.type) == (e.dtype, e.shape, "tpu"), what
        if _random(call):
            a.cpu()
            continue
        rtol, atol = TOLERANCES.get(e.dtype, (0.0, 1.0 if name in _BYTES else 0.0))
        if torch.allclose(a.cpu(), e, rtol=rtol, atol=atol, equal_nan=True):
            continue
        if e.dtype.is_floating_point and e.dtype.itemsize <= 4:
            exact = exact or tree_flatten(_on_cpu(_wide(call)))[0]
            right = exact[index].double()
            strays, allowed = ((t.cpu().double() - right).abs().max() for t in (a, e))
            if strays <= 2 * allowed + atol:
                continue
        torch.testing.assert_close(a.cpu(), e, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}")


def test_the_table_is_complete() -> None:
    """Every overload of the histograms has a way to be called, or is tested under another name."""
    assert {*ENTRIES, *CALLS, *ELSEWHERE} >= set(needed())


def _check_dtypes(name: str, dtypes: tuple[torch.dtype, ...], limit: int) -> None:
    compared = []
    with highest():
        for dtype in dtypes:
            for call in calls(name)[:limit]:
                given = with_dtype(call, dtype) or call
                try:
                    _on_cpu(given)
                except _NotOnCpu:
                    continue
                if dtype in _REFUSED.get(name, ()):
                    with pytest.raises((NotImplementedError, RuntimeError), match=_REFUSAL):
                        given.on("tpu")
                else:
                    _compare(name, given, f"{name} {dtype}")
                compared.append(dtype)
    assert compared


@pytest.mark.parametrize("name", NAMES)
def test_dtypes(name: str) -> None:
    """What the CPU computes in a dtype, the device computes: one call in the commonest."""
    masks = (torch.bool,) if name in _OF_MASKS else ()
    _check_dtypes(name, (torch.float32, torch.bfloat16, torch.int64, *masks), 1)


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_all_dtypes(name: str) -> None:
    """Three calls in every dtype."""
    _check_dtypes(name, (*FLOATS, *OTHERS), 3)


# Beneath the public functions nothing is checked: the CPU's own kernels crash, hang or give anything.
_UNCHECKED = frozenset({"_weight_norm_interface", "native_batch_norm", "_fft_c2c", "_fft_c2r", "_fft_r2c"})


@pytest.mark.parametrize("name", [name for name in NAMES if "backward" not in name and name not in _UNCHECKED])
def test_no_elements(name: str) -> None:
    """Nor do empty tensors make a difference."""
    compared = 0
    with highest():
        for call in calls(name):
            for empty in without_elements(call):
                if compared == EMPTY:
                    return
                try:
                    _compare(name, empty, f"{name} {[getattr(a, 'shape', a) for a in empty.args]}")
                except _NotOnCpu:
                    continue
                compared += 1
    assert compared or name in NEVER_EMPTY


_NORMS = {
    "group": lambda x, w: torch.nn.functional.group_norm(x, 2, w),
    "layer": lambda x, w: torch.nn.functional.layer_norm(x.transpose(1, 2), (4,), w),
    "layer-of-images": lambda x, w: torch.nn.functional.layer_norm(x, x.shape[1:]) * w.sum(),
    "batch": lambda x, w: torch.nn.functional.batch_norm(x, w.detach(), w.detach(), w),
}


@pytest.mark.parametrize("norm", _NORMS)
@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 4, 0)])
def test_empty_normalisations(norm: str, shape: tuple[int, ...]) -> None:
    """Results and gradients of a batch, or of images, without elements: a sum of nothing is 0 (on the CPU at times NaN)."""
    seen = []
    for device in ("cpu", "tpu"):
        x, weight = torch.empty(shape, device=device).requires_grad_(), torch.ones(4, device=device).requires_grad_()
        result = _NORMS[norm](x, weight)
        result.sum().backward()
        seen.append((result.shape, x.grad.shape, weight.grad.shape))
    assert seen[0] == seen[1]
    assert not weight.grad.count_nonzero()


@pytest.mark.parametrize("name", sorted(LACKING))
def test_what_the_device_lacks(name: str) -> None:
    """TorchTPU 0.2.0 has no kernel, so neither has the device."""
    if BEYOND:
        pytest.skip("lowerings beyond the device are on")
    with pytest.raises(NotImplementedError, match="is not implemented for TPU"):
        calls(name)[0].on("tpu")


def test_beyond_the_device() -> None:
    """With EMUTPU_BEYOND=1 these, too, are as on the CPU."""
    chosen = [f"{kind}[{name}]" for kind in ("test_all_dtypes",) for name in sorted(LACKING)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *(f"{__file__}::{test}" for test in chosen)]
    environment = os.environ | {"EMUTPU_BEYOND": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(chosen)} passed" in done.stdout
