"""What the CPU client does to convolutions before XLA sees them: who computes them, and how their operands are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emutpu._jaxlib import matrix_library, read_module
from emutpu.backend.pjrt import CompileOptions, Effort
from emutpu.simulator import make_client
from emutpu.simulator._modules import inspect
from emutpu.simulator._xla_flags import prepare

_FLAG = "xla_cpu_experimental_ynn_fusion_type"
_NATIVE = (("emutpu_native_highest", "true"),)


def _convolution(left: str, right: str, x: str, kernel: str, result: str, numbers: str = "[b, f, 0, 1]") -> str:
    """A 1x1 convolution of four-dimensional ``x`` at HIGHEST."""
    return f"""stablehlo.convolution({left}, {right}) dim_numbers = {numbers}x[o, i, 0, 1]->{numbers},
        window = {{}} {{batch_group_count = 1 : i64, feature_group_count = 1 : i64,
        precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]}}
        : (tensor<{x}>, tensor<{kernel}>) -> tensor<{result}>"""


def _prepared(text: str, effort: Effort) -> tuple[dict[str, str], str]:
    """The flags, and the module as XLA gets it."""
    module = read_module(text)
    flags = prepare(module, inspect(module), CompileOptions(effort=effort, overrides=_NATIVE))
    return dict(flags), str(module)


def _single(batch: int, kind: str = "f32") -> str:
    x, kernel, result = f"{batch}x8x4x4x{kind}", f"8x8x1x1x{kind}", f"{batch}x8x4x4xf32"
    return f"""module @m {{ func.func public @main(%a: tensor<{x}>, %w: tensor<{kernel}>) -> tensor<{result}> {{
        %0 = {_convolution("%a", "%w", x, kernel, result)}
        return %0 : tensor<{result}> }} }}"""


@pytest.mark.skipif(not matrix_library(), reason="this jaxlib's matrix library is used for nothing")
@pytest.mark.parametrize("effort", list(Effort))
@pytest.mark.parametrize(("batch", "kind", "own"), [(2, "f32", True), (1, "f32", False), (2, "bf16", False)])
def test_batches_take_all_threads(batch: int, kind: str, own: bool, effort: Effort) -> None:
    """A convolution of f32 with a batch is XLA's own, at every effort; others stay with the matrix library."""
    flags, _ = _prepared(_single(batch, kind), effort)
    assert ("CONVOLUTION" not in flags[_FLAG] if _FLAG in flags else False) is own


def test_modules_without_convolutions_keep_their_flags() -> None:
    """A product is left to the matrix library."""
    text = """module @m { func.func public @main(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {
        %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0] : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
        return %0 : tensor<4x4xf32> } }"""
    assert _FLAG not in _prepared(text, Effort.O2)[0]


def _on_both(text: str, values: list[np.ndarray]) -> list[np.ndarray]:
    """The first result, of XLA's compiler and of the interpreter."""
    found = []
    for name in ("cpu", "interpreter"):
        client = make_client(name)
        executable = client.compile(text.encode(), CompileOptions(effort=Effort.O1))
        found.append(client.to_host(executable.execute([client.from_host(value) for value in values])[0]))
    return found


def _in_groups(layout: str, groups: int) -> tuple[str, list[int]]:
    """A convolution of 12 pictures in groups of the batch, 5 features, 4x6 places, stride 2, and the shape of its operand."""
    sizes = {"b": 12, "f": 5, "0": 4, "1": 6}
    order = layout.split(", ")
    x = "x".join(str(sizes[name]) for name in order) + "xf32"
    kernel, result = "12x5x3x2xf32", f"{12 // groups}x12x2x4xf32"
    return (
        f"""module @m {{ func.func public @main(%a: tensor<{x}>, %w: tensor<{kernel}>) -> tensor<{result}> {{
        %0 = stablehlo.convolution(%a, %w) dim_numbers = [{layout}]x[o, i, 0, 1]->[b, f, 0, 1],
        window = {{stride = [2, 2], pad = [[1, 0], [2, 1]]}}
        {{batch_group_count = {groups} : i64, feature_group_count = 1 : i64,
        precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]}}
        : (tensor<{x}>, tensor<{kernel}>) -> tensor<{result}>
        return %0 : tensor<{result}> }} }}""",
        [sizes[name] for name in order],
    )


@pytest.mark.parametrize("groups", [2, 4, 12])
@pytest.mark.parametrize("layout", ["b, f, 0, 1", "f, b, 0, 1", "0, f, 1, b", "b, 0, 1, f"])
def test_groups_of_the_batch_become_groups_of_features(layout: str, groups: int) -> None:
    """XLA multiplies all groups with all where they are in the batch; the values are the interpreter's, which does as it is told."""
    text, shape = _in_groups(layout, groups)
    prepared = _prepared(text, Effort.O1)[1]
    assert "batch_group_count = 1 " in prepared
    assert f"feature_group_count = {groups} " in prepared
    generator = np.random.default_rng(0)
    values = [generator.integers(-3, 4, size).astype(np.float32) for size in (shape, (12, 5, 3, 2))]
    np.testing.assert_array_equal(*_on_both(text, values))


def _windowed(x: list[int], kernel: list[int], result: list[int], window: str, groups: int) -> str:
    """A convolution at HIGHEST; batch and features come first, then places."""
    places = ", ".join(map(str, range(len(x) - 2)))
    kinds = ["x".join(map(str, sizes)) + "xf32" for sizes in (x, kernel, result)]
    return f"""module @m {{ func.func public @main(%a: tensor<{kinds[0]}>, %w: tensor<{kinds[1]}>) -> tensor<{kinds[2]}> {{
        %0 = stablehlo.convolution(%a, %w) dim_numbers = [b, f, {places}]x[o, i, {places}]->[b, f, {places}],
        window = {{{window}}} {{batch_group_count = 1 : i64, feature_group_count = {groups} : i64,
        precision_config = [#stablehlo<precision HIGHEST>, #stablehlo<precision HIGHEST>]}}
        : (tensor<{kinds[0]}>, tensor<{kinds[1]}>) -> tensor<{kinds[2]}>
        return %0 : tensor<{kinds[2]}> }} }}"""


_WINDOWS = {
    "larger than the operand": (([2, 3, 4, 5], [7, 3, 5, 5], [2, 7, 4, 5], "pad = [[2, 2], [2, 2]]", 1), True),
    "as large as the operand": (([2, 3, 5, 5], [7, 3, 5, 5], [2, 7, 5, 5], "pad = [[2, 2], [2, 2]]", 1), False),
    "larger without padding": (([2, 3, 2, 2], [7, 3, 2, 2], [2, 7, 1, 1], "", 1), False),
    "cropped": (
        ([2, 3, 3, 4], [7, 3, 4, 4], [2, 7, 3, 4], "pad = [[-1, 2], [1, -1]], lhs_dilate = [2, 2]", 1),
        True,
    ),
    "volume": (
        (
            [1, 2, 3, 4, 5],
            [3, 2, 2, 1, 3],
            [1, 3, 5, 4, 9],
            "pad = [[1, 0], [0, 0], [1, 1]], lhs_dilate = [2, 1, 2]",
            1,
        ),
        True,
    ),
    "strided groups": (
        ([2, 4, 3, 3], [8, 2, 2, 2], [2, 8, 3, 3], "stride = [2, 2], pad = [[1, 1], [1, 1]], lhs_dilate = [2, 2]", 2),
        True,
    ),
    "strided plane": (
        ([2, 4, 3, 3], [8, 4, 2, 2], [2, 8, 6, 6], "pad = [[1, 1], [1, 1]], lhs_dilate = [2, 2]", 1),
        False,
    ),
}


@pytest.mark.parametrize("name", _WINDOWS)
def test_zeros_are_written_out_where_no_library_takes_them(name: str) -> None:
    """A window that XLA computes place by place is given its zeros; the values are the interpreter's, which does as it is told."""
    window, written = _WINDOWS[name]
    text = _windowed(*window)
    prepared = _prepared(text, Effort.O1)[1]
    assert (prepared.count("stablehlo.pad"), prepared.count("optimization_barrier")) == ((1, 1) if written else (0, 0))
    generator = np.random.default_rng(0)
    values = [generator.integers(-3, 4, size).astype(np.float32) for size in window[:2]]
    np.testing.assert_array_equal(*_on_both(text, values))


_WHOLE = "4x16x32x32xf32"


def _masked(shape: str = _WHOLE, second: str = "%b") -> str:
    """A gradient where its activation is positive, through a convolution, and with it another of what is masked."""
    kernel, result = "8x16x1x1xf32", "4x8" + shape[4:]
    predicate = shape.replace("f32", "i1")
    return f"""module @m {{
      func.func public @main(%a: tensor<{shape}>, %b: tensor<{shape}>, %w: tensor<{kernel}>)
          -> (tensor<{result}>, tensor<{shape}>) {{
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %zeros = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> tensor<{shape}>
        %le = stablehlo.compare LE, %a, %zeros, FLOAT : (tensor<{shape}>, tensor<{shape}>) -> tensor<{predicate}>
        %masked = stablehlo.select %le, %zeros, {second} : tensor<{predicate}>, tensor<{shape}>
        %0 = {_convolution("%masked", "%w", shape, kernel, result)}
        return %0, %masked : tensor<{result}>, tensor<{shape}> }} }}"""


def _calls(text: str) -> int:
    return text.count("call @emutpu.operand")


@pytest.mark.parametrize(("effort", "calls"), [(Effort.O0, 0), (Effort.O1, 0), (Effort.O2, 1), (Effort.O3, 1)])
def test_operands_of_two_streams_are_computed_apart(effort: Effort, calls: int) -> None:
    """In fused modules what computes an operand from two arguments is a function of its own, that XLA may not inline."""
    _, text = _prepared(_masked(), effort)
    assert (_calls(text), text.count('inlineable = "false"')) == (calls, calls)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(_masked("4x16x8x8xf32"), id="small"),
        pytest.param(_masked(second="%a"), id="one stream"),
        pytest.param(
            _masked()
            .replace("%le =", f"%s = stablehlo.sine %b : tensor<{_WHOLE}>\n%le =")
            .replace("%zeros, %b", "%zeros, %s"),
            id="made by the module",
        ),
    ],
)
def test_other_operands_stay(text: str) -> None:
    """Small operands, those of one argument, and those of values that the module makes are left to XLA's fusions."""
    assert _calls(_prepared(_masked(), Effort.O2)[1])
    assert not _calls(_prepared(text, Effort.O2)[1])


def test_an_operand_of_two_convolutions_is_computed_once() -> None:
    """Both convolutions, and what else reads the value, take it from one call."""
    text = _masked().replace("return %0, %masked", "%1 = stablehlo.abs %masked : tensor<" + _WHOLE + ">\nreturn %0, %1")
    twice = text.replace(
        "%1 = stablehlo.abs",
        f"%2 = {_convolution('%masked', '%w', _WHOLE, '8x16x1x1xf32', '4x8x32x32xf32')}\n%1 = stablehlo.abs",
    )
    _, prepared = _prepared(twice, Effort.O2)
    assert _calls(prepared) == 1
    reader, called = "stablehlo.convolution(", prepared[: prepared.index("call @emutpu")].rsplit("%", 1)[1].split()[0]
    assert prepared.count(f"{reader}%{called}, ") == 2
    assert f"stablehlo.abs %{called} " in prepared


@pytest.mark.parametrize("precision", [(), _NATIVE])
def test_values_are_those_of_the_operand_computed_first(precision: Any) -> None:
    """Against float64, NaN and infinities of either argument included, with one product and with six passes."""
    client = make_client("cpu")
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((4, 16, 32, 32)).astype(np.float32) for _ in range(2))
    a[0, 0, 0, :4] = np.nan, -np.inf, np.inf, 0
    b[1, 2, 3, :2] = np.inf, np.nan
    w = random.standard_normal((8, 16, 1, 1)).astype(np.float32)
    executable = client.compile(_masked().encode(), CompileOptions(effort=Effort.O2, overrides=precision))
    convolved, masked = (client.to_host(r) for r in executable.execute([client.from_host(x) for x in (a, b, w)]))
    expected = np.where(a <= 0, np.float32(0), b)
    np.testing.assert_array_equal(masked, expected)
    with np.errstate(invalid="ignore"):
        exact = np.einsum("nchw,oc->nohw", expected.astype(np.float64), w[:, :, 0, 0].astype(np.float64))
    finite = np.isfinite(exact)
    assert not finite.all()
    np.testing.assert_array_equal(np.isfinite(convolved), finite)
    np.testing.assert_allclose(convolved[finite], exact[finite], rtol=0, atol=4e-7 * np.abs(exact[finite]).max())
