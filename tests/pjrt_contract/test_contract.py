"""What every client owes the protocol, whether it computes or not."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib

import numpy as np
import pytest

from emutpu.backend.pjrt import (
    Aval,
    Client,
    CompileOptions,
    Effort,
    ErrorBuffer,
    FailedPrecondition,
    Fault,
    FaultInjectingClient,
    FaultSite,
    InternalError,
    InvalidArgument,
    OutOfRange,
    PjrtError,
    ResourceExhausted,
    Unimplemented,
)

from . import modules

ONES = np.ones(4, np.float32)


def put(client: Client, *arrays: np.ndarray) -> list:
    """Each array on the device."""
    return [client.from_host(array) for array in arrays]


def test_interface(client: Client, options: CompileOptions) -> None:
    """Name, avals and donation come from the module; results have the avals that were promised."""
    executable = client.compile(modules.donating(), options)
    aval = Aval((1024,), np.dtype(np.float32))
    assert executable.name == "aten.add_.Tensor"
    assert executable.arguments == (aval, aval)
    assert executable.results == (aval,)
    assert executable.donated == {0}
    (result,) = executable.execute(put(client, *[np.ones(1024, np.float32)] * 2))
    assert tuple(result.shape) == (1024,)
    assert result.dtype == np.float32
    assert result.nbytes == 4096
    assert not result.is_deleted()
    assert result.block_until_ready() is result
    assert result.is_ready()


@pytest.mark.parametrize("element", modules.DTYPES)
def test_dtypes(client: Client, options: CompileOptions, element: str) -> None:
    """Every dtype crosses both ways bit for bit, and its own addition (or disjunction) is right."""
    dtype = modules.DTYPES[element]
    left, right = np.array([1, 0, 1, 0]).astype(dtype), np.array([0, 0, 1, 1]).astype(dtype)
    op = "or" if element == "i1" else "add"
    executable = client.compile(modules.binary(op, (4,), element), options)
    arguments = put(client, left, right)
    assert arguments[0].dtype == dtype
    (result,) = executable.execute(arguments)
    assert result.dtype == dtype
    assert tuple(result.shape) == (4,)
    if client.computes:
        expected = left | right if element == "i1" else left + right
        np.testing.assert_array_equal(client.to_host(result), expected)
        np.testing.assert_array_equal(client.to_host(arguments[0]), left)
    else:
        with pytest.raises(Unimplemented, match="values"):
            client.to_host(result)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
def test_shapes(client: Client, options: CompileOptions, shape: tuple[int, ...]) -> None:
    """Scalars and empty arrays are ordinary."""
    value = np.full(shape, 2.0, np.float32)
    (result,) = client.compile(modules.binary("add", shape), options).execute(put(client, value, value))
    assert tuple(result.shape) == shape
    if client.computes:
        np.testing.assert_array_equal(client.to_host(result), value + value)


def test_wrong_arguments(client: Client, options: CompileOptions) -> None:
    """A wrong count, shape, dtype or kind of argument is InvalidArgument, and the message says which."""
    executable = client.compile(modules.binary("add"), options)
    good = client.from_host(ONES)
    with pytest.raises(InvalidArgument, match="takes 2 arguments, not 1"):
        executable.execute([good])
    with pytest.raises(InvalidArgument, match=r"argument 1 .* float32\[2,2\], expected float32\[4\]"):
        executable.execute([good, client.from_host(np.ones((2, 2), np.float32))])
    with pytest.raises(InvalidArgument, match=r"argument 0 .* int32\[4\], expected float32\[4\]"):
        executable.execute([client.from_host(np.ones(4, np.int32)), good])
    with pytest.raises(InvalidArgument, match="argument 1") as caught:
        executable.execute([good, ONES])
    assert caught.value.op == "aten.add.Tensor"
    assert caught.value.code == "INVALID_ARGUMENT"


def test_deleted_arguments(client: Client, options: CompileOptions) -> None:
    """A deleted buffer is refused by execute and by a read."""
    executable = client.compile(modules.binary("add"), options)
    gone, good = put(client, ONES, ONES)
    gone.delete()
    assert gone.is_deleted()
    with pytest.raises(FailedPrecondition, match="argument 0"):
        executable.execute([gone, good])
    with pytest.raises(FailedPrecondition):
        client.to_host(gone)


def test_donation(client: Client, options: CompileOptions) -> None:
    """A donated argument is dead after the launch, others live; using it again is FailedPrecondition."""
    executable = client.compile(modules.donating(), options)
    given, kept = put(client, *[np.ones(1024, np.float32)] * 2)
    (result,) = executable.launch([given, kept])
    assert given.is_deleted()
    assert not kept.is_deleted()
    with pytest.raises(FailedPrecondition):
        executable.execute([given, kept])
    with pytest.raises(FailedPrecondition):
        executable.launch([given, kept])
    (again,) = executable.execute([result, kept])
    if client.computes:
        np.testing.assert_array_equal(client.to_host(again), np.full(1024, 3, np.float32))


def test_malformed_modules(client: Client, options: CompileOptions) -> None:
    """Rubbish, a module without main and dynamic shapes are InvalidArgument."""
    for text, what in (
        (b"rubbish", "malformed"),
        (b"", "main"),
        (b"module { func.func @f() { return } }", "main"),
        (b"module { func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { return %a : tensor<?xf32> } }", "static"),
    ):
        with pytest.raises(InvalidArgument, match=what):
            client.compile(text, options)


def test_absurd_extents(client: Client, options: CompileOptions) -> None:
    """A product of extents past 2**63-1 is refused before XLA, which aborts on it, sees it."""
    huge = modules.tensor((2**31, 2**31, 4))
    body = f"%0 = stablehlo.broadcast_in_dim %a0, dims = [] : (tensor<f32>) -> {huge}\nret %a0"
    with pytest.raises(InvalidArgument, match="larger than any address space"):
        client.compile(modules.function([modules.tensor(())], [modules.tensor(())], body), options)


def test_options(client: Client) -> None:
    """An unknown device is InvalidArgument, a program of several replicas Unimplemented."""
    with pytest.raises(InvalidArgument, match="no device 7"):
        client.compile(modules.binary("add"), CompileOptions(device=7))
    with pytest.raises(Unimplemented, match="2 replicas"):
        client.compile(modules.binary("add"), CompileOptions(replicas=2))


def test_several_results(client: Client, options: CompileOptions) -> None:
    """Results come in order; none at all is possible."""
    kind = modules.tensor((4,))
    module = modules.function([kind], [kind, kind], f"%0 = stablehlo.negate %a0 : {kind}\nret %0, %a0")
    results = client.compile(module, options).execute(put(client, ONES))
    assert len(results) == 2
    if client.computes:
        np.testing.assert_array_equal(client.to_host(results[0]), -ONES)
        np.testing.assert_array_equal(client.to_host(results[1]), ONES)
    assert list(client.compile(modules.function([kind], [], "ret"), options).execute(put(client, ONES))) == []


def test_serialize(client: Client, options: CompileOptions) -> None:
    """An executable survives serialisation with its interface, donation included."""
    original = client.compile(modules.donating(), options)
    loaded = client.deserialize(original.serialize(), options)
    for field in ("name", "arguments", "results", "donated"):
        assert getattr(loaded, field) == getattr(original, field)
    given, kept = put(client, *[np.ones(1024, np.float32)] * 2)
    (result,) = loaded.execute([given, kept])
    assert given.is_deleted()
    if client.computes:
        np.testing.assert_array_equal(client.to_host(result), np.full(1024, 2, np.float32))


def test_corrupt_blobs(client: Client, options: CompileOptions) -> None:
    """A blob with any byte changed, cut short, or of another environment is refused before native code is loaded."""
    blob = client.compile(modules.binary("add"), options).serialize()
    broken = [b"", b"\0" * 64, blob[:-1], blob[: len(blob) // 2], blob + b"\0"]
    positions = range(0, len(blob), max(1, len(blob) // 40))
    broken += [blob[:position] + bytes([blob[position] ^ 1]) + blob[position + 1 :] for position in positions]
    for bad in broken:
        with pytest.raises(InvalidArgument):
            client.deserialize(bad, options)
    body = blob[40:].replace(b'"fingerprint": "', b'"fingerprint": "x', 1)
    body = (int.from_bytes(body[:4], "little") + 1).to_bytes(4, "little") + body[4:]
    with pytest.raises(InvalidArgument, match="another environment"):
        client.deserialize(blob[:8] + hashlib.sha256(body).digest() + body, options)


def test_answers(client: Client, options: CompileOptions) -> None:
    """Names, fingerprints, memory and cost have the shapes the protocol gives them."""
    assert client.name in client.fingerprint()
    assert client.fingerprint() == client.fingerprint()
    assert client.topology.chip == "v5e"
    assert len(client.topology.devices) == 1
    assert client.topology.devices[0].kind == "TPU v5 lite"
    executable = client.compile(modules.donating(), options)
    memory = executable.memory()
    assert memory.arguments == 8192
    assert memory.results == 4096
    assert memory.aliased == 0
    cost = executable.cost()
    assert cost is not None
    assert cost.seconds > 0
    assert cost.hbm_bytes >= 4096
    assert executable.cost() == cost
    stats = client.memory_stats()
    assert 0 <= stats.bytes_in_use <= stats.peak_bytes_in_use
    assert stats.bytes_limit is None
    client.synchronize()


def test_close(fresh: Client, options: CompileOptions) -> None:
    """After close everything is FailedPrecondition."""
    executable = fresh.compile(modules.binary("add"), options)
    buffers = put(fresh, ONES, ONES)
    blob = executable.serialize()
    fresh.close()
    fresh.close()
    for call in (
        lambda: fresh.compile(modules.binary("add"), options),
        lambda: fresh.deserialize(blob, options),
        lambda: fresh.from_host(ONES),
        lambda: fresh.to_host(buffers[0]),
        lambda: executable.execute(buffers),
        lambda: executable.launch([buffers[0], object()]),
        fresh.synchronize,
        fresh.memory_stats,
    ):
        with pytest.raises(FailedPrecondition):
            call()


def test_faults_at_execute(client: Client, options: CompileOptions) -> None:
    """An injected failure is asynchronous, hits the named op's nth launch only, and travels through later launches."""
    fault = Fault(FaultSite.EXECUTE, ResourceExhausted("out of memory"), op="aten.mul*", nth=2)
    faulty = FaultInjectingClient(client, [fault])
    add = faulty.compile(modules.binary("add", name="aten.add"), options)
    mul = faulty.compile(modules.binary("multiply", name="aten.mul.Tensor"), options)
    arguments = put(faulty, ONES, ONES)
    assert not isinstance(mul.launch(arguments)[0], ErrorBuffer)
    (failed,) = mul.launch(arguments)
    (later,) = add.execute([failed, arguments[0]])
    assert isinstance(later, ErrorBuffer)
    assert later.is_ready()
    assert later.shape == (4,)
    with pytest.raises(ResourceExhausted, match="out of memory") as caught:
        later.block_until_ready()
    assert caught.value.op == "aten.mul.Tensor"
    with pytest.raises(ResourceExhausted):
        faulty.synchronize()
    faulty.synchronize()
    assert not isinstance(mul.launch(arguments)[0], ErrorBuffer)


@pytest.mark.parametrize("site", [FaultSite.COMPILE, FaultSite.FROM_HOST, FaultSite.TO_HOST])
def test_faults_elsewhere(client: Client, options: CompileOptions, site: FaultSite) -> None:
    """Failures at the other sites are immediate."""
    faulty = FaultInjectingClient(client, [Fault(site, InternalError("broken"), nth=0)])
    buffer = client.from_host(ONES)
    calls = {
        FaultSite.COMPILE: lambda: faulty.compile(modules.binary("add"), options),
        FaultSite.FROM_HOST: lambda: faulty.from_host(ONES),
        FaultSite.TO_HOST: lambda: faulty.to_host(buffer),
    }
    with pytest.raises(InternalError, match="broken"):
        calls[site]()


def test_bare_clients_propagate_errors(client: Client, options: CompileOptions) -> None:
    """A failed buffer makes the results of a launch fail alike, even without the injecting wrapper; donation holds."""
    error = OutOfRange("index 9 outside 4")
    executable = client.compile(modules.donating(), options)
    for run in (executable.launch, executable.execute):
        failed = ErrorBuffer(executable.arguments[1], error)
        given = client.from_host(np.ones(1024, np.float32))
        (result,) = run([given, failed])
        assert given.is_deleted()
        with pytest.raises(OutOfRange, match="index 9"):
            client.to_host(result)


def test_threads(client: Client, options: CompileOptions) -> None:
    """Eight threads compile, copy and launch at once without a mismatch."""

    def work(index: int) -> bool:
        shape = (index % 4 + 1, 8)
        value = np.full(shape, index, np.float32)
        executable = client.compile(modules.binary("add", shape, name=f"thread.{index}"), options)
        for _ in range(5):
            (result,) = executable.execute(put(client, value, value))
            if client.computes and not (client.to_host(result) == 2 * index).all():
                return False
        return executable.name == f"thread.{index}"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))


def test_error_classes() -> None:
    """Every error class is a PjrtError with its absl code, and the builtin that a user would catch."""
    builtin = {InvalidArgument: ValueError, OutOfRange: IndexError, Unimplemented: NotImplementedError}
    builtin[ResourceExhausted] = MemoryError
    for kind, base in builtin.items():
        assert issubclass(kind, base)
        assert issubclass(kind, PjrtError)
    assert ResourceExhausted("x", op="y").op == "y"
    assert ResourceExhausted.code == "RESOURCE_EXHAUSTED"


@pytest.mark.parametrize("effort", Effort)
def test_efforts(computing: Client, effort: Effort) -> None:
    """Every effort gives the same sum."""
    executable = computing.compile(modules.binary("add"), CompileOptions(effort=effort))
    np.testing.assert_array_equal(computing.to_host(executable.execute(put(computing, ONES, ONES))[0]), 2 * ONES)


def test_options_are_keys() -> None:
    """The canonical text differs exactly with what decides compilation."""
    base = CompileOptions()
    assert base.canonical() == CompileOptions().canonical()
    for change in ({"effort": Effort.O2}, {"excess_precision": True}, {"overrides": (("a", "1"),)}):
        assert dataclasses.replace(base, **change).canonical() != base.canonical()
