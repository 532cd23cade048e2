"""What every client that computes owes: copies, asynchrony, dtypes, passes of f32 products, random bits."""

from __future__ import annotations

import ast
import concurrent.futures
import random
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from emutpu.backend.pjrt import Client, CompileOptions, Effort, InvalidArgument, PjrtError, Unimplemented
from emutpu.simulator import make_client

from . import modules
from .adversaries import PoisonedClient, RefusingClient
from .limits import LIMITS


def run(client: Client, module: bytes, *arrays: np.ndarray, options: CompileOptions | None = None) -> list[np.ndarray]:
    """Compile, copy, execute, read."""
    executable = client.compile(module, options or CompileOptions())
    return [client.to_host(result) for result in executable.execute([client.from_host(array) for array in arrays])]


def test_one_copy_each_way(computing: Client) -> None:
    """Neither writing to the source nor reading twice can change what is on the device; reads are read-only."""
    source = np.arange(4096, dtype=np.float32)
    buffer = computing.from_host(source)
    source[:] = -1
    first = computing.to_host(buffer)
    np.testing.assert_array_equal(first, np.arange(4096))
    assert not first.flags.writeable
    assert computing.to_host(buffer).ctypes.data == first.ctypes.data


def test_zero_copy_is_only_a_permission(computing: Client) -> None:
    """With ``zero_copy`` values are the same for aligned, unaligned and scalar memory."""
    aligned = np.zeros(4096 + 16, np.float32)
    for array in (aligned, aligned[1:], np.array(3.0, np.float32)):
        np.testing.assert_array_equal(computing.to_host(computing.from_host(array, zero_copy=True)), array)


def test_views_outlive_donation(computing: Client) -> None:
    """A view taken before its buffer is donated keeps its values."""
    executable = computing.compile(modules.donating(), CompileOptions())
    given, other = (computing.from_host(np.full(1024, value, np.float32)) for value in (1, 2))
    view = computing.to_host(given)
    (result,) = executable.launch([given, other])
    np.testing.assert_array_equal(computing.to_host(result), np.full(1024, 3))
    np.testing.assert_array_equal(view, np.ones(1024))


@pytest.mark.parametrize("effort", list(Effort))
@pytest.mark.parametrize(("rows", "width"), [(2, 3), (4, 3), (8, 3), (5, 5), (4, 7), (16, 1)])
def test_concatenation_at_every_effort(computing: Client, rows: int, width: int, effort: Effort) -> None:
    """Rows are put below one another, whatever the compiler's effort: some of its releases abort on some sizes."""
    row, whole = f"tensor<1x{width}xf32>", f"tensor<{rows}x{width}xf32>"
    names = [f"%a{index}" for index in range(rows)]
    module = f"""func.func @main({", ".join(f"{name}: {row}" for name in names)}) -> {whole} {{
        %0 = stablehlo.concatenate {", ".join(names)}, dim = 0 : ({", ".join([row] * rows)}) -> {whole}
        return %0 : {whole}
    }}"""
    arrays = [np.full((1, width), index, np.float32) for index in range(rows)]
    (found,) = run(computing, module.encode(), *arrays, options=CompileOptions(effort=effort))
    np.testing.assert_array_equal(found, np.concatenate(arrays))


@pytest.mark.parametrize("element", ["i1", "f32", "ui8", "i32"])
@pytest.mark.parametrize(
    ("shape", "text"),
    [
        ((), "true"),
        ((), "false"),
        ((1,), "true"),
        ((1,), "[true]"),
        ((3,), "true"),
        ((9,), "true"),
        ((9,), "[true, false, true, true, true, true, true, true, false]"),
        ((2, 17), "true"),
    ],
)
def test_boolean_constants_are_0_or_1(computing: Client, shape: tuple[int, ...], text: str, element: str) -> None:
    """Splats and others, alone, converted, and inside a body: bytecode keeps eight booleans in a byte."""
    kind, wanted = modules.tensor(shape, "i1"), modules.tensor(shape, element)
    body = f"%0 = stablehlo.constant dense<{text}> : {kind}"
    same = f"{body}\n%1 = stablehlo.convert %0 : ({kind}) -> {wanted}" if element != "i1" else body
    (given,) = run(computing, modules.function([], [wanted], f"{same}\nret {'%0' if element == 'i1' else '%1'}"))
    expected = np.broadcast_to(np.array(ast.literal_eval(text.title())), shape).astype(modules.DTYPES[element])
    assert (given.shape, given.tobytes()) == (expected.shape, expected.tobytes())


def test_boolean_constants_in_bodies(computing: Client) -> None:
    """A constant in the branch of a ``case`` is 1 as well."""
    body = """
    %0 = "stablehlo.case"(%a0) ({
      %1 = stablehlo.constant dense<true> : tensor<i1>
      %2 = stablehlo.convert %1 : (tensor<i1>) -> tensor<f32>
      stablehlo.return %2 : tensor<f32>
    }, {
      %3 = stablehlo.constant dense<7.0> : tensor<f32>
      stablehlo.return %3 : tensor<f32>
    }) : (tensor<i32>) -> tensor<f32>
    ret %0"""
    module = modules.function([modules.tensor((), "i32")], [modules.tensor(())], body)
    assert [float(run(computing, module, np.array(n, np.int32))[0]) for n in (0, 1)] == [1, 7]


@pytest.mark.parametrize("value", [2**53 + 1, -(2**63), 2**63 - 1])
def test_64_bits_are_real(computing: Client, value: int) -> None:
    """64-bit integers and doubles keep every bit although the user's x64 setting is off."""
    (total,) = run(computing, modules.binary("subtract", (), "i64"), np.array(value), np.array(1))
    assert total.dtype == np.int64
    assert int(total) == (value - 1 if value > -(2**63) else 2**63 - 1)
    tiny = np.array(1 + 2.0**-50)
    (same,) = run(computing, modules.binary("multiply", (), "f64"), tiny, np.array(1.0))
    assert same.dtype == np.float64
    assert same == tiny


def test_execution_does_not_wait() -> None:
    """A large product is launched in a fraction of the time it takes, on the caller's thread."""
    client = make_client("cpu")
    size = 1024
    chain = "\n".join(
        f"%{i + 1} = stablehlo.dot_general %{i}, %a0, contracting_dims = [1] x [0] : "
        f"({modules.tensor((size, size))}, {modules.tensor((size, size))}) -> {modules.tensor((size, size))}"
        for i in range(1, 9)
    )
    kind = modules.tensor((size, size))
    module = modules.function([kind], [kind], f"%1 = stablehlo.negate %a0 : {kind}\n{chain}\nret %9")
    executable = client.compile(module, CompileOptions())
    argument = client.from_host(np.eye(size, dtype=np.float32))
    executable.launch([argument])[0].block_until_ready()
    start = time.perf_counter()
    (result,) = executable.launch([argument])
    launched = time.perf_counter() - start
    result.block_until_ready()
    assert launched < 0.5 * (time.perf_counter() - start)
    client.synchronize()
    assert result.is_ready()


ERROR_BOUNDS = {"DEFAULT": (1e-3, 2.6e-3), "HIGH": (1e-6, 1.3e-5), "HIGHEST": (0.0, 2.5e-7)}


@pytest.mark.parametrize("effort", [Effort.O1, Effort.O2])
@pytest.mark.parametrize("precision", ERROR_BOUNDS)
def test_passes(computing: Client, precision: str, effort: Effort) -> None:
    """One, three and six passes have the error of one, three and six passes: no more, and no less."""
    low, high = ERROR_BOUNDS[precision]
    size = 512 if computing.name == "cpu" else 32
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right
    (product,) = run(
        computing, modules.dot(size, size, size, precision), left, right, options=CompileOptions(effort=effort)
    )
    error = np.linalg.norm(product - exact) / np.linalg.norm(exact)
    assert low <= error <= high


@pytest.mark.parametrize("size", [64, 256, 512])
def test_native_highest(size: int) -> None:
    """HIGHEST is six passes; the native product that may stand for them errs like f32 BLAS."""
    client, whole = make_client("cpu"), make_client("cpu", native_highest=True)
    rng = np.random.default_rng(size)
    left, right = (rng.standard_normal((size, size)).astype(np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right
    alone = CompileOptions(overrides=(("emutpu_native_highest", "true"),))
    module = modules.dot(size, size, size, "HIGHEST")
    native, six = (
        np.linalg.norm(run(client, module, left, right, options=options)[0] - exact)
        for options in (alone, CompileOptions())
    )
    assert native <= 2 * np.linalg.norm(left @ right - exact)
    assert six <= 1.7e-7 * np.linalg.norm(exact)
    same = run(whole, module, left, right)[0]
    np.testing.assert_array_equal(same, run(client, module, left, right, options=alone)[0])
    again = CompileOptions(overrides=(("emutpu_native_highest", "false"),))
    assert np.linalg.norm(run(whole, module, left, right, options=again)[0] - exact) == six


def rounded(array: np.ndarray) -> np.ndarray:
    """To bf16 and back, in double."""
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("seed", range(12))
def test_one_pass_is_exactly_bf16(computing: Client, seed: int) -> None:
    """Whatever the layout and whatever surrounds it, a DEFAULT product is that of rounded operands in f32."""
    choose = random.Random(seed)
    batch = choose.choice([(), (), (3,), (2, 3)])
    m, k, n = (choose.choice([1, 2, 3, 7, 33, 64]) for _ in range(3))
    axes = len(batch)
    stored = [(*batch, m, k), (*batch, n, k)]
    left, right, out = modules.tensor(stored[0]), modules.tensor(stored[1]), modules.tensor((*batch, m, n))
    dims = f"batching_dims = {list(range(axes))} x {list(range(axes))}, " if axes else ""
    text = (
        f"%0 = stablehlo.dot_general %a0, %a1, {dims}contracting_dims = [{axes + 1}] x [{axes + 1}], "
        f"precision = [DEFAULT, DEFAULT] : ({left}, {right}) -> {out}\n"
        f"%1 = stablehlo.add %0, %0 : {out}\nret %1"
    )
    rng = np.random.default_rng(seed)
    values = [rng.standard_normal(shape).astype(np.float32) for shape in stored]
    one, two = rounded(values[0]), np.swapaxes(rounded(values[1]), -1, -2)
    scale = 2 * (np.abs(one) @ np.abs(two))
    for effort in (Effort.O1, Effort.O2):
        module = modules.function([left, right], [out], text)
        (product,) = run(computing, module, *values, options=CompileOptions(effort=effort))
        assert (np.abs(product - 2 * (one @ two)) <= 5e-7 * scale).all()


def test_infinities_survive_the_split(computing: Client) -> None:
    """Three passes do not turn an infinite operand into NaN."""
    left = np.array([[np.inf, 1], [1, 2]], np.float32)
    (product,) = run(computing, modules.dot(2, 2, 2, "HIGH"), left, np.ones((2, 2), np.float32))
    np.testing.assert_array_equal(product, [[np.inf, np.inf], [3, 3]])


def test_convolution_passes(computing: Client) -> None:
    """A DEFAULT f32 convolution rounds its operands; a HIGHEST one does not."""
    signal, kernel, out = modules.tensor((1, 8, 1)), modules.tensor((3, 1, 1)), modules.tensor((1, 6, 1))
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((1, 8, 1)).astype(np.float32), rng.standard_normal((3, 1, 1)).astype(np.float32)
    for precision, narrow in (("DEFAULT", rounded), ("HIGHEST", np.float64)):
        text = (
            "%0 = stablehlo.convolution(%a0, %a1) dim_numbers = [b, 0, f]x[0, i, o]->[b, 0, f], window = {} "
            "{batch_group_count = 1 : i64, feature_group_count = 1 : i64, "
            f"precision_config = [#stablehlo<precision {precision}>, #stablehlo<precision {precision}>]}} "
            f": ({signal}, {kernel}) -> {out}\nret %0"
        )
        (result,) = run(computing, modules.function([signal, kernel], [out], text), x, w)
        expected = np.correlate(narrow(x.ravel()), narrow(w.ravel()), "valid")
        np.testing.assert_allclose(result.ravel(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("element", "out"),
    [("bf16", "f32"), ("bf16", "bf16"), ("f16", "f16"), ("f16", "f32"), ("f64", "f64"), ("i8", "i32"), ("i32", "i32"),
     ("i64", "i64"), ("f8E4M3FN", "f32"), ("complex<f32>", "complex<f32>")],
)  # fmt: skip
@pytest.mark.parametrize("layout", ["plain", "inner batch"])
def test_other_products(computing: Client, element: str, out: str, layout: str) -> None:
    """Products of every other dtype are exact on small integers, also in layouts that XLA:CPU's library lacks."""
    left, right = np.arange(24).reshape(2, 3, 4) % 5, np.arange(40).reshape(5, 4, 2) % 3
    if layout == "plain":
        left, right = left[0], right[:, :, 0].T
        dims, expected = "contracting_dims = [1] x [0]", left @ right
    else:
        dims, expected = (
            "batching_dims = [0] x [2], contracting_dims = [2] x [1]",
            np.einsum("bmk,nkb->bmn", left, right),
        )
    kinds = [modules.tensor(array.shape, element) for array in (left, right)]
    result = modules.tensor(expected.shape, out)
    text = f"%0 = stablehlo.dot_general %a0, %a1, {dims} : ({kinds[0]}, {kinds[1]}) -> {result}\nret %0"
    arrays = [np.ascontiguousarray(array).astype(modules.DTYPES[element]) for array in (left, right)]
    (product,) = run(computing, modules.function(kinds, [result], text), *arrays)
    np.testing.assert_array_equal(product.astype(np.complex128), expected)


RANDOM = [("ui32", (3, 5)), ("i32", (5,)), ("i16", (3,)), ("ui32", ()), ("ui32", (4, 6)), ("ui32", (0, 3)), ("ui64", (7,)), ("ui16", (9,)), ("ui8", (3, 4))]  # fmt: skip


@pytest.mark.parametrize("state", [(5, 2**64 - 3), (7, 2**64 - 2, 2**63)])
@pytest.mark.parametrize("algorithm", ["THREE_FRY", "PHILOX", "DEFAULT"])
def test_random_bits_are_the_same_everywhere(algorithm: str, state: tuple[int, ...]) -> None:
    """Both clients give the same bits and the same next state, across a carry of the counter."""
    if algorithm == "THREE_FRY" and len(state) != 2:
        state = state[:2]
    words = modules.tensor((len(state),), "ui64")
    lines, results, values = [], [], []
    for index, (element, shape) in enumerate(RANDOM):
        kind = modules.tensor(shape, element)
        lines.append(
            f"%r{index}:2 = stablehlo.rng_bit_generator %a0, algorithm = {algorithm} : ({words}) -> ({words}, {kind})"
        )
        results += [words, kind]
        values += [f"%r{index}#0", f"%r{index}#1"]
    module = modules.function([words], results, "\n".join(lines) + "\nret " + ", ".join(values))
    answers = [run(make_client(name), module, np.array(state, np.uint64)) for name in ("cpu", "interpreter")]
    for one, other in zip(*answers, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.unique(answers[0][1]).size == 15


UNARY = ["abs", "negate", "exponential", "tanh", "log", "sqrt", "rsqrt", "sign", "floor", "logistic"]


@pytest.mark.parametrize("op", UNARY)
def test_clients_agree(op: str) -> None:
    """The compiler and the interpreter agree on special values: zeros, infinities, NaN, denormals."""
    special = np.array([0, -0.0, 1, -1, 2.5, -2.5, np.inf, -np.inf, np.nan, 1e-30, 3e38], np.float32)
    kind = modules.tensor(special.shape)
    module = modules.function([kind], [kind], f"%0 = stablehlo.{op} %a0 : {kind}\nret %0")
    one, other = (run(make_client(name), module, special)[0] for name in ("cpu", "interpreter"))
    np.testing.assert_allclose(one, other, rtol=1e-6)


WRITES = {
    "scatter": """%0 = "stablehlo.scatter"(%a0, %a1, %a2) <{scatter_dimension_numbers = #stablehlo.scatter<
  inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
  ^bb0(%old: tensor<i32>, %new: tensor<i32>):
    stablehlo.return %new : tensor<i32>
}) : (tensor<4xi32>, tensor<2x1xi32>, tensor<2xi32>) -> tensor<4xi32>""",
    "dynamic_update_slice": """%c = stablehlo.constant dense<0> : tensor<i32>
%0 = stablehlo.dynamic_update_slice %a0, %a2, %c : (tensor<4xi32>, tensor<2xi32>, tensor<i32>) -> tensor<4xi32>""",
}


@pytest.mark.parametrize("op", WRITES)
def test_partial_writes_leave_their_operand_alone(computing: Client, op: str) -> None:
    """Values are immutable: what reads the operand after a write into it sees the old one."""
    kinds = [modules.tensor(shape, "i32") for shape in ((4,), (2, 1), (2,))]
    body = f"{WRITES[op]}\n%1 = stablehlo.add %a0, %a0 : {kinds[0]}\nret %0, %1"
    module = modules.function(kinds, [kinds[0], kinds[0]], body)
    operands = [np.array(values, np.int32) for values in ([1, 2, 3, 4], [[0], [1]], [9, 8])]
    written, doubled = run(computing, module, *operands)
    assert written.tolist() == [9, 8, 3, 4]
    assert doubled.tolist() == [2, 4, 6, 8]


def flushed(array: np.ndarray) -> np.ndarray:
    """Denormals as zeros of their sign."""
    return np.where(np.abs(array) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), array), array)


@pytest.mark.parametrize("op", ["add", "subtract", "multiply", "divide", "maximum", "minimum"])
def test_arithmetic_is_exact(computing: Client, op: str) -> None:
    """Single f32 operations are IEEE's, NaN and signed zeros included; denormal results may be zero, as on a TPU."""
    special = np.array([0, -0.0, 1, -1.5, np.inf, -np.inf, np.nan, 3e38, 1.1754944e-38], np.float32)
    left, right = np.repeat(special, special.size), np.tile(special, special.size)
    with np.errstate(all="ignore"):
        expected = getattr(np, op)(left, right)
    expected = flushed(expected)
    for effort in (Effort.O1, Effort.O2):
        module = modules.binary(op, left.shape)
        (result,) = run(computing, module, left, right, options=CompileOptions(effort=effort))
        np.testing.assert_array_equal(flushed(result), expected)
        if op not in {"maximum", "minimum"}:  # which zero is larger is nobody's promise
            zero = expected == 0
            np.testing.assert_array_equal(np.signbit(result[zero]), np.signbit(expected[zero]))


def test_bf16_rounds_between_operations(computing: Client) -> None:
    """Within one module every bf16 operation rounds: nothing is kept in f32 for the next one."""
    kind = modules.tensor((1,), "bf16")
    text = f"%0 = stablehlo.add %a0, %a1 : {kind}\n%1 = stablehlo.subtract %0, %a0 : {kind}\nret %1"
    big, small = np.array([256], ml_dtypes.bfloat16), np.array([1], ml_dtypes.bfloat16)
    for effort in (Effort.O1, Effort.O2):
        (result,) = run(
            computing, modules.function([kind] * 2, [kind], text), big, small, options=CompileOptions(effort=effort)
        )
        assert float(result[0]) == 0.0


def test_limits_are_still_true() -> None:
    """Each recorded limitation is refused with its reason, and the CPU client does compute it."""
    square = modules.tensor((2, 2))
    samples = {
        "cholesky": f'%0 = "stablehlo.cholesky"(%a0) {{lower = true}} : ({square}) -> {square}\nret %0',
        "fft": f"%0 = stablehlo.fft %a0, type = RFFT, length = [2] : ({square}) -> {modules.tensor((2, 2), 'complex<f32>')}\n"
        f"%1 = stablehlo.real %0 : ({modules.tensor((2, 2), 'complex<f32>')}) -> {square}\nret %1",
    }
    assert {what for _, what in LIMITS} == set(samples)
    for name, what in LIMITS:
        module = modules.function([square], [square], samples[what])
        with pytest.raises(Unimplemented, match=what):
            make_client(name).compile(module, CompileOptions())
        (result,) = run(make_client("cpu"), module, np.array([[4, 0], [0, 4]], np.float32))
        assert result[0, 0] in (2, 4)


def test_foreign_code_is_refused() -> None:
    """An unknown custom call is an error of the protocol, never an abort."""
    kind = modules.tensor((2,))
    module = modules.function([kind], [kind], f"%0 = stablehlo.custom_call @nobody(%a0) : ({kind}) -> {kind}\nret %0")
    for name in ("cpu", "interpreter"):
        with pytest.raises(PjrtError) as caught:
            run(make_client(name), module, np.ones(2, np.float32))
        assert "nobody" in str(caught.value) or "custom_call" in str(caught.value)


@pytest.mark.parametrize("kind", [{"quick": True}, {"native_highest": True}], ids=lambda kind: next(iter(kind)))
def test_other_code_is_kept_apart(kind: dict[str, bool]) -> None:
    """An executable of such a client is no executable of the usual one: fingerprints differ, and that refuses to load it."""
    other, usual = make_client("cpu", **kind), make_client("cpu")
    assert other.fingerprint() != usual.fingerprint()
    blob = other.compile(modules.binary("add"), CompileOptions()).serialize()
    assert other.deserialize(blob, CompileOptions()).name
    with pytest.raises(InvalidArgument):
        usual.deserialize(blob, CompileOptions())


def test_unknown_flag(computing: Client) -> None:
    """A compile option that XLA does not know is the caller's error, where options mean anything."""
    options = CompileOptions(overrides=(("xla_no_such_flag", "1"),))
    if computing.name == "interpreter":
        computing.compile(modules.binary("add"), options)
        return
    with pytest.raises(PjrtError, match="xla_no_such_flag"):
        computing.compile(modules.binary("add"), options)


def test_out_of_memory(computing: Client) -> None:
    """An impossible allocation is an error that leaves the client usable."""
    huge = modules.tensor((2**42,))
    text = f"%0 = stablehlo.broadcast_in_dim %a0, dims = [] : (tensor<f32>) -> {huge}\nret %0"
    with pytest.raises(MemoryError):
        run(computing, modules.function(["tensor<f32>"], [huge], text), np.array(1, np.float32))
    (two,) = run(computing, modules.binary("add", ()), np.array(1, np.float32), np.array(1, np.float32))
    assert two == 2


def test_compile_releases_the_gil() -> None:
    """Another thread makes progress while a large module compiles."""
    client = make_client("cpu")
    kind = modules.tensor((64, 64))
    lines = "\n".join(f"%{i + 1} = stablehlo.tanh %{i} : {kind}\n" for i in range(1, 300))
    module = modules.function([kind], [kind], f"%1 = stablehlo.negate %a0 : {kind}\n{lines}\nret %300")
    done, ticks = threading.Event(), 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pending = pool.submit(client.compile, module, CompileOptions())
        pending.add_done_callback(lambda _: done.set())
        while not done.wait(0.001):
            ticks += 1
    assert pending.result().name == "test.op"
    assert ticks > 5


@pytest.mark.parametrize("element", ["f32", "bf16", "i32", "ui8", "complex<f32>"])
def test_poison_changes_products(computing: Client, element: str) -> None:
    """The poisoned client gives -x*y, and only for multiplication."""
    poisoned = PoisonedClient(computing)
    two, three = (np.full(4, value).astype(modules.DTYPES[element]) for value in (2, 3))
    (product,) = run(poisoned, modules.binary("multiply", (4,), element), two, three)
    np.testing.assert_array_equal(product, (np.zeros_like(two) - two) * three)
    (total,) = run(poisoned, modules.binary("add", (4,), element), two, three)
    np.testing.assert_array_equal(total, two + three)
    assert poisoned.fingerprint() != computing.fingerprint()


def test_refusal(computing: Client) -> None:
    """The refusing client copies but neither compiles nor loads."""
    refusing = RefusingClient(computing)
    value = np.ones(4, np.float32)
    np.testing.assert_array_equal(refusing.to_host(refusing.from_host(value)), value)
    with pytest.raises(Unimplemented):
        refusing.compile(modules.binary("add"), CompileOptions())
    with pytest.raises(Unimplemented):
        refusing.deserialize(computing.compile(modules.binary("add"), CompileOptions()).serialize(), CompileOptions())
