"""Elementwise lowerings that the device lacks: refused by default, equal to CPU with EMUTPU_BEYOND=1."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

_NAMES = """addbmm copysign erfc frexp gcd heaviside hypot i0 linalg.cross logaddexp logaddexp2 nextafter nn.functional.hardshrink
nn.functional.mish nn.functional.softshrink sinc special.chebyshev_polynomial_t special.chebyshev_polynomial_u
special.chebyshev_polynomial_v special.chebyshev_polynomial_w special.entr special.erfcx special.hermite_polynomial_h
special.hermite_polynomial_he special.i0e special.i1 special.i1e special.laguerre_polynomial_l
special.legendre_polynomial_p special.log_ndtr special.shifted_chebyshev_polynomial_t
special.shifted_chebyshev_polynomial_u special.shifted_chebyshev_polynomial_v special.shifted_chebyshev_polynomial_w
special.xlog1py special.zeta trace triangular_solve"""
NAMES = _NAMES.split()


def _run(*arguments: str, given: str = "") -> str:
    environment = os.environ | {"EMUTPU_BEYOND": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, input=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_database() -> None:
    """Forward, in place, out= and backward over PyTorch's samples."""
    asked = "\n".join(map(json.dumps, NAMES))
    answers = [json.loads(line) for line in _run("-m", "emutpu.cli._sweep", "4", given=asked).splitlines()]
    assert [answer["name"] for answer in answers] == NAMES
    assert all(answer["items"] for answer in answers)
    assert [(a["name"], i) for a in answers for i in a["items"] if i["outcome"] != "ok"] == []


_SPECIAL = """
import math, torch
values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 2.5, -30.0, 1e30, 9.0])
one = "erfc sinc i0 special.entr special.erfcx special.i0e special.i1e special.log_ndtr nn.functional.mish " \\
      "nn.functional.softshrink nn.functional.hardshrink"
two = "copysign hypot heaviside logaddexp logaddexp2 nextafter special.xlog1py"

def named(name):
    found = torch
    for part in name.split("."):
        found = getattr(found, part)
    return found

for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
    x = values.to(dtype)
    pair = (x[:, None].clone(), x[None, :].clone())
    for name, arguments in [(n, (x,)) for n in one.split()] + [(n, pair) for n in two.split()]:
        if dtype == torch.bfloat16 and name in ("special.xlog1py", "special.entr"):
            continue  # the CPU rounds between the steps
        for given in (arguments, tuple(a[:0] for a in arguments)):
            try:
                expected = named(name)(*given)
            except NotImplementedError:
                assert dtype == torch.bfloat16, name  # the CPU has no such kernel
                continue
            torch.testing.assert_close(
                named(name)(*(a.to("tpu") for a in given)), expected, rtol=tolerance, atol=tolerance,
                equal_nan=True, check_device=False, msg=lambda m: f"{name} {dtype}: {m}",
            )
assert torch.erfc(torch.arange(3, device="tpu")).dtype == torch.float32
for dtype in (torch.uint8, torch.int8, torch.int64):
    pair = torch.arange(12).to(dtype)[:, None].clone(), torch.arange(7).to(dtype)
    torch.testing.assert_close(torch.gcd(*(p.to("tpu") for p in pair)), torch.gcd(*pair), check_device=False)
"""


def test_special_values() -> None:
    """NaN, infinities, zeros, both float widths, no elements; integers where they are taken."""
    _run("-c", _SPECIAL)


@pytest.mark.parametrize("name", ["erfc", "sinc", "i0", "trace"])
def test_refused_by_default(name: str) -> None:
    """The device's own error."""
    with pytest.raises(NotImplementedError, match=f"aten::{name}"):
        getattr(torch, name)(torch.ones(2, 2, device="tpu"))
