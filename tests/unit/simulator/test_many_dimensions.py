"""Tensors of more dimensions than the buffers of XLA's matrix library have: it is not asked, and the values are right."""

from __future__ import annotations

import numpy as np
import pytest

from emutpu._jaxlib import matrix_library, read_module
from emutpu.backend.pjrt import CompileOptions, Effort
from emutpu.simulator import make_client
from emutpu.simulator._modules import inspect
from emutpu.simulator._xla_flags import prepare

_FLAG = "xla_cpu_experimental_ynn_fusion_type"


def _type(shape: tuple[int, ...]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def _sum_of_products(shape: tuple[int, ...]) -> str:
    """The second dimension of x times what is broadcast over the last two, summed."""
    whole, part, result = _type(shape), _type(shape[:-2]), _type(shape[:1] + shape[2:])
    return f"""module @m {{ func.func public @main(%x: {whole}, %y: {part}) -> {result} {{
        %0 = stablehlo.broadcast_in_dim %y, dims = {list(range(len(shape) - 2))} : ({part}) -> {whole}
        %1 = stablehlo.multiply %x, %0 : {whole}
        %2 = stablehlo.constant dense<0.0> : tensor<f32>
        %3 = stablehlo.reduce(%1 init: %2) applies stablehlo.add across dimensions = [1] : ({whole}, tensor<f32>) -> {result}
        return %3 : {result} }} }}"""


_SHAPES = [(3, 2, 9, 8, 4, 4), (3, 2, 9, 8, 8, 4, 4), (3, 2, 3, 3, 4, 2, 4, 4), (2, 2, 9, 4, 2, 2, 2, 4, 3)]


@pytest.mark.parametrize("effort", [Effort.O1, Effort.O2])
@pytest.mark.parametrize("shape", _SHAPES, ids=lambda shape: f"{len(shape)} dimensions")
def test_sums_of_products(shape: tuple[int, ...], effort: Effort) -> None:
    """With seven dimensions the library's code ended in a segmentation fault."""
    generator = np.random.default_rng(0)
    x, y = (generator.standard_normal(size).astype(np.float32) for size in (shape, shape[:-2]))
    client = make_client("cpu")
    executable = client.compile(_sum_of_products(shape).encode(), CompileOptions(effort=effort))
    (found,) = executable.execute([client.from_host(x), client.from_host(y)])
    expected = (x.astype(np.float64) * y[..., None, None]).sum(1)
    np.testing.assert_allclose(client.to_host(found), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not matrix_library(), reason="this jaxlib's matrix library is used for nothing")
@pytest.mark.parametrize("effort", list(Effort))
def test_the_library_is_asked_up_to_six(effort: Effort) -> None:
    """Of whatever module; what is left to XLA's defaults has no flag."""
    for shape in _SHAPES:
        module = read_module(_sum_of_products(shape))
        flags = dict(prepare(module, inspect(module), CompileOptions(effort=effort)))
        assert (flags.get(_FLAG) == "") is (len(shape) > 6)
