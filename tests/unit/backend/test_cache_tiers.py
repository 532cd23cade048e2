"""Tiers 2 and 3 with real executables: loads, forgeries, fuzzed files, processes, remote roots and broken stores."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emutpu import _jaxlib
from emutpu.backend.cache import COMPILED, CompileCache
from emutpu.backend.cache_entry import pack
from emutpu.backend.cache_remote import RemoteStore, is_url
from emutpu.backend.cache_setup import TierSettings, make_tiers, secret_of
from emutpu.backend.cache_store import DirectoryStore
from emutpu.backend.cache_tiers import Tier, Tiers
from emutpu.backend.keys import Key, Versions
from emutpu.backend.pjrt import Client, CompileOptions, Effort, InvalidArgument
from emutpu.simulator import _cpu_features, make_client
from tests.pjrt_contract import modules

ROOT = Path(__file__).resolve().parents[3]
BINARY = "0123456789abcdef"
SECRET = b"a secret of the tests"
OPTIONS = CompileOptions()
KEY = Key.of("add", "4", "O1", Versions())


@pytest.fixture(scope="module")
def client() -> Client:
    """The client that computes."""
    return make_client("cpu")


def settings(tmp_path: Path, **changes: Any) -> TierSettings:
    """Tier 2 beneath ``tmp_path``, as if that were shared memory."""
    given: dict[str, Any] = {"tier2": "tests", "shared_memory": tmp_path} | changes
    return TierSettings(**given)


def cache_of(client: Client, tier_settings: TierSettings, binary: str = BINARY) -> CompileCache:
    """A process's cache on those tiers."""
    return CompileCache(lambda: make_tiers(tier_settings, client, lambda: binary))


def counts(cache: CompileCache, tier: int = 2) -> Any:
    """The counters of one tier."""
    return next(row for row in cache.tier_statistics() if row.tier == tier)


def compiling(client: Client, op: str = "add") -> Callable[[], Any]:
    """What a miss calls."""
    return lambda: client.compile(modules.binary(op), OPTIONS)


def never() -> Any:
    """What must not be called."""
    pytest.fail("compiled")


def value(client: Client, executable: Any) -> list[float]:
    """What the executable gives for 2 and 3."""
    pair = [client.from_host(np.full(4, number, np.float32)) for number in (2, 3)]
    return client.to_host(executable.execute(pair)[0]).tolist()


def entries(tmp_path: Path) -> list[Path]:
    """The entry files beneath a folder."""
    return sorted(tmp_path.rglob("*.bin"))


# ------------------------------------------------------------------------------------------------ loads


@pytest.mark.parametrize("name", ["cpu", "interpreter", "dry_run"])
def test_a_second_process_loads(tmp_path: Path, name: str) -> None:
    """What one cache compiled another loads, with every client, and it computes the same."""
    made = make_client(name)
    first, second = (cache_of(made, settings(tmp_path)) for _ in range(2))
    got = first.request(KEY, compiling(made), OPTIONS)
    again = second.request(KEY, never, OPTIONS)
    assert (got.tier, again.tier, second.request(KEY, never, OPTIONS).tier) == (COMPILED, 2, 1)
    assert again.seconds > 0
    assert (counts(first).misses, counts(first).writes) == (1, 1)
    assert (counts(second).hits, counts(second).misses, second.misses, second.loads) == (1, 0, 0, 1)
    assert (tmp_path / "torch_tpu_cache" / "tests" / BINARY / f"{KEY}.bin").stat().st_mode & 0o777 == 0o600
    if made.computes:
        assert value(made, again.executable) == value(made, got.executable) == [5] * 4


def test_tiers_are_consulted_in_order(tmp_path: Path, client: Client) -> None:
    """Tier 3 fills tier 2, and tier 2 is asked first."""
    both = settings(tmp_path, tier3=str(tmp_path / "persistent"))
    cache_of(client, both).get(KEY, compiling(client), OPTIONS)
    assert len(entries(tmp_path)) == 2
    near = next(path for path in entries(tmp_path) if "torch_tpu_cache" in path.parts)
    near.unlink()
    second, third = cache_of(client, both), cache_of(client, both)
    assert second.request(KEY, never, OPTIONS).tier == 3
    assert near.exists()
    assert third.request(KEY, never, OPTIONS).tier == 2
    assert (counts(second, 3).hits, counts(second, 2).misses, counts(third, 3).hits) == (1, 1, 0)


def test_cache_only_loads_but_does_not_compile(tmp_path: Path, client: Client) -> None:
    """A load is no compilation; without the cache no tier is read or written."""
    cache_of(client, settings(tmp_path)).get(KEY, compiling(client), OPTIONS)
    cache = cache_of(client, settings(tmp_path))
    cache.set_only(True)
    assert cache.request(KEY, never, OPTIONS).tier == 2
    other = Key.of("mul", "4", "O1", Versions())
    with pytest.raises(RuntimeError, match=f"compilation is needed for key: {other}"):
        cache.get(other, never, OPTIONS)
    cache.set_only(False)
    cache.set_allow(False)
    assert cache.request(other, compiling(client, "multiply"), OPTIONS).tier == COMPILED
    assert len(entries(tmp_path)) == 1


def test_a_failed_compilation_leaves_nothing(tmp_path: Path, client: Client) -> None:
    """The error reaches the caller, the lock is free, and the next attempt is a new one."""
    cache = cache_of(client, settings(tmp_path))

    def failing() -> Any:
        raise ValueError("a defect of the program")

    with pytest.raises(ValueError, match="a defect of the program"):
        cache.get(KEY, failing, OPTIONS)
    assert entries(tmp_path) == []
    assert cache.request(KEY, compiling(client), OPTIONS).tier == COMPILED


def test_another_client_has_its_own_entries(tmp_path: Path, client: Client) -> None:
    """Replacing the client forgets its tiers; an entry of another environment is not found."""
    cache = cache_of(client, settings(tmp_path))
    cache.get(KEY, compiling(client), OPTIONS)
    cache.forget_client(lambda: make_tiers(settings(tmp_path), client, lambda: "f" * 16))
    assert cache.request(KEY, compiling(client), OPTIONS).tier == COMPILED
    assert {path.parent.name for path in entries(tmp_path)} == {BINARY, "f" * 16}


def big_module(ops: int) -> bytes:
    """A chain of about ``ops`` operations of a few kinds."""
    kind = modules.tensor((64, 64))
    lines, last = [], "%a0"
    for number in range(ops // 4):
        lines += [
            f"%d{number} = stablehlo.dot_general {last}, %a1, contracting_dims = [1] x [0] : ({kind}, {kind}) -> {kind}",
            f"%t{number} = stablehlo.tanh %d{number} : {kind}",
            f"%s{number} = stablehlo.add %t{number}, %a1 : {kind}",
            f"%e{number} = stablehlo.exponential %s{number} : {kind}",
        ]
        last = f"%e{number}"
    return modules.function([kind, kind], [kind], "\n".join(lines) + f"\nret {last}", "region")


@pytest.mark.parametrize("ops", [104, 400])
def test_loading_takes_half_of_compiling(tmp_path: Path, client: Client, ops: int) -> None:
    """For modules over 100 ops, key to executable: the medians' ratio is at most one half."""
    module, options = big_module(ops), CompileOptions(Effort.O2)
    ratios = []
    for attempt in range(3):
        tiers = settings(tmp_path, tier2=f"ratio{attempt}")
        compiled = cache_of(client, tiers).request(KEY, lambda: client.compile(module, options), options)
        loaded = cache_of(client, tiers).request(KEY, never, options)
        assert (compiled.tier, loaded.tier) == (COMPILED, 2)
        ratios.append(loaded.seconds / compiled.seconds)
    assert sorted(ratios)[1] <= 0.5, ratios


# ------------------------------------------------------------------------------------------------ bad entries


def reseal(path: Path, payload: bytes) -> None:
    """Put another payload in an entry, as somebody who knows the format and has no secret would."""
    path.write_bytes(pack(path.stem, path.parent.name, payload, 1.0))


def reblob(blob: bytes, code: Callable[[bytes], bytes] = lambda code: code, **changes: Any) -> bytes:
    """The client's envelope with another header or code, under a checksum that holds."""
    (size,) = struct.unpack_from("<I", blob, 40)
    header = json.loads(blob[44 : 44 + size]) | changes
    text = json.dumps({name: field for name, field in header.items() if field is not ...}).encode()
    body = struct.pack("<I", len(text)) + text + code(blob[44 + size :])
    return blob[:8] + hashlib.sha256(body).digest() + body


FORGERIES: dict[str, Callable[[bytes], bytes]] = {
    "another fingerprint": lambda blob: reblob(blob, fingerprint="jax 99"),
    "CPU features of another host": lambda blob: reblob(blob, features=["sse2", "avx1024"]),
    "features left out, code of another host": lambda blob: reblob(
        blob, lambda code: code.replace(b"+avx2,", b"+avx9,"), features=[]
    ),
    "no features": lambda blob: reblob(blob, features=...),
    "no interface": lambda blob: reblob(blob, arguments=...),
    "a wrong interface": lambda blob: reblob(blob, results=[[4, "float32"]]),
    "an unknown dtype": lambda blob: reblob(blob, results=[[[4], "float3"]]),
    "a header that is a list": lambda blob: blob[:8] + hashlib.sha256(b"\2\0\0\0[]").digest() + b"\2\0\0\0[]",
    "an empty body": lambda blob: blob[:8] + hashlib.sha256(b"").digest(),
    "nothing": lambda blob: b"",
    "text": lambda blob: b"import os",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_forged_payloads(tmp_path: Path, client: Client, forgery: str) -> None:
    """What the client cannot vouch for is counted, set aside and compiled again, before native code is reached."""
    first = cache_of(client, settings(tmp_path))
    blob = first.get(KEY, compiling(client), OPTIONS).serialize()
    (path,) = entries(tmp_path)
    reseal(path, FORGERIES[forgery](blob))
    cache = cache_of(client, settings(tmp_path))
    got = cache.request(KEY, compiling(client), OPTIONS)
    assert got.tier == COMPILED
    assert value(client, got.executable) == [5] * 4
    assert (counts(cache).rejected, counts(cache).hits, counts(cache).writes) == (1, 0, 1)
    assert len(list(tmp_path.rglob("*.bad"))) == 1
    assert cache_of(client, settings(tmp_path)).request(KEY, never, OPTIONS).tier == 2


def test_instructions_of_another_cpu(client: Client) -> None:
    """Code is loaded with fewer features than this host has, and refused with one more, whoever says so."""
    blob = client.compile(modules.binary("add"), OPTIONS).serialize()
    assert client.deserialize(reblob(blob, features=["sse2"]), OPTIONS).name == "aten.add.Tensor"
    with pytest.raises(InvalidArgument, match=r"CPU features that this host lacks: avx1024, zz"):
        client.deserialize(reblob(blob, features=["zz", "avx1024", "sse2"]), OPTIONS)


def test_features_that_do_not_occur_in_the_code() -> None:
    """A feature with few encodings is needed only where one of them is in the code; unselectable ones never are."""
    nothing = frozenset[str]
    missing = {name for name in ("sse4a", "gfni") if name not in _cpu_features.of_kernel()}
    assert _cpu_features.lacking({"sha", "clzero", "prefer-no-gather", *missing}, b"\x90" * 64, nothing) == set()
    for name, code in {
        "sse4a": b"\x66\x0f\x79\xc1",
        "gfni": b"\x62\xf3\xfd\x48\xce\xc0\x00",
    }.items():
        assert _cpu_features._ENCODINGS[name].search(b"\x90\x90" + code)
        assert not _cpu_features._ENCODINGS[name].search(b"\x90" * 32)
    assert _cpu_features.lacking({"avx1024"}, b"", nothing) == {"avx1024"}
    assert _cpu_features.lacking({"avx1024"}, b"", lambda: ["avx1024"]) == set()


def mutated(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """Another file than ``data``: flipped, cut, grown, zeroed, spliced, shuffled or replaced."""
    at = dice.randrange(len(data))
    length = dice.randrange(1, 64)
    return dice.choice(
        [
            lambda: data[:at] + bytes([data[at] ^ (1 << dice.randrange(8))]) + data[at + 1 :],
            lambda: data[:at],
            lambda: data[:at] + dice.randbytes(length) + data[at:],
            lambda: data[:at] + bytes(length) + data[at + length :],
            lambda: data[:at] + other[at:],
            lambda: data[:at] + data[at + length :],
            lambda: data + dice.randbytes(length),
            lambda: dice.randbytes(at),
            lambda: other,
            lambda: bytes(len(data)),
        ]
    )()


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_fuzzed_files(tmp_path: Path, client: Client, count: int) -> None:
    """Of 1,000 mutated files none is loaded: each is counted, set aside, compiled again, and the result is right."""
    first = cache_of(client, settings(tmp_path))
    right = first.get(KEY, compiling(client), OPTIONS)
    other_key = Key.of("multiply", "4", "O1", Versions())
    first.get(other_key, compiling(client, "multiply"), OPTIONS)
    files = {path.stem: path for path in entries(tmp_path)}
    path, other = files[str(KEY)], files[str(other_key)].read_bytes()
    data = path.read_bytes()
    unsigned = slice(56, 88)  # the signature's place: meaningless in tier 2
    dice = random.Random(4)
    cache = cache_of(client, settings(tmp_path))
    rejected = 0
    for number in range(count):
        bad = mutated(data, other, dice)
        if bad[: unsigned.start] + bad[unsigned.stop :] == data[: unsigned.start] + data[unsigned.stop :]:
            continue
        path.write_bytes(bad)
        cache.clear()
        got = cache.request(KEY, lambda: right, OPTIONS)
        rejected += 1
        assert got.executable is right, number
        assert counts(cache).rejected == rejected, number
    assert rejected > 0.9 * count
    assert value(client, cache.get(KEY, never, OPTIONS)) == [5] * 4
    assert len(list(tmp_path.rglob("*.bad"))) == 16


# ------------------------------------------------------------------------------------------------ processes

PROCESS = """
    import sys, time
    from pathlib import Path
    from emutpu.backend.cache import CompileCache
    from emutpu.backend.cache_setup import TierSettings, make_tiers
    from emutpu.backend.keys import Key, Versions
    from emutpu.backend.pjrt import CompileOptions
    from emutpu.simulator import make_client
    from tests.pjrt_contract import modules
    import numpy as np

    root, keys = Path(sys.argv[1]), int(sys.argv[2])
    client, options = make_client("cpu"), CompileOptions()
    cache = CompileCache(lambda: make_tiers(TierSettings(tier2="tests", shared_memory=root), client, lambda: "0" * 16))
    (root / f"ready-{sys.argv[3]}").touch()
    while not (root / "go").exists():
        time.sleep(0.002)
    compiled = []
    for number in range(keys):
        size = number + 1
        key = Key.of("add", str(size), "O1", Versions())
        got = cache.request(key, lambda: client.compile(modules.binary("add", (size,)), options), options)
        if got.tier == 0:
            compiled.append(number)
        ones = [client.from_host(np.ones(size, np.float32)) for _ in range(2)]
        assert client.to_host(got.executable.execute(ones)[0]).tolist() == [2] * size
    print(*compiled)
"""


@pytest.mark.parametrize(
    ("processes", "keys"), [(8, 12), pytest.param(8, 200, marks=pytest.mark.nightly)], ids=["8", "8-nightly"]
)
def test_processes_compile_each_key_once(tmp_path: Path, processes: int, keys: int) -> None:
    """Eight processes that start together want the same keys in the same order: each key is compiled by one of them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", textwrap.dedent(PROCESS), str(tmp_path), str(keys)]
    children = [
        subprocess.Popen(
            [*command, str(number)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for number in range(processes)
    ]
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("ready-*"))) < processes and time.monotonic() < deadline:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    compiled: list[int] = []
    for child in children:
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        compiled += map(int, out.split())
    assert sorted(compiled) == list(range(keys))


TARGET = """
    import os, sys
    from pathlib import Path
    from emutpu import _jaxlib
    from emutpu.backend.cache import CompileCache
    from emutpu.backend.cache_setup import TierSettings, make_tiers
    from emutpu.backend.keys import Key, Versions
    from emutpu.backend.pjrt import CompileOptions
    from emutpu.simulator import make_client
    from emutpu.simulator._cpu_features import beyond_level
    from tests.pjrt_contract import modules

    if sys.argv[3] == "jax":
        import jax
        jax.jit(lambda x: x + 1)(1.0)
    client, options = make_client("cpu", cpu_target=sys.argv[2]), CompileOptions()
    assert "XLA_FLAGS" not in os.environ
    tiers = TierSettings(tier2="disabled", tier3=sys.argv[1])
    cache = CompileCache(lambda: make_tiers(tiers, client, lambda: "0" * 16))
    got = cache.request(Key.of("dot", "", "", Versions()), lambda: client.compile(modules.dot(64, 64, 64), options), options)
    features = _jaxlib.host_features()
    print(got.tier, sorted(beyond_level(features, sys.argv[2])), "sse4.2" in features, client.fingerprint())
"""


def with_target(tmp_path: Path, target: str, before: str = "nothing") -> subprocess.CompletedProcess[str]:
    """A process that compiles for a baseline, and what it says about it."""
    environment = {name: text for name, text in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-c", textwrap.dedent(TARGET), str(tmp_path / "fleet"), target, before]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


_PLAIN = ",".join(
    f"+{name}" for name in ("aes", "avx", "avx2", "bmi", "cmov", "cx8", "f16c", "fma", "fxsr", "mmx", "sse", "sse2")
)


@pytest.mark.parametrize(
    ("rest", "has_avx10"),
    [
        ("+avx10.1,+avx512bf16,+avx512f,-avx10.2,-avx512vp2intersect", True),
        ("+avx10.1,-avx10.2,-avx512bf16,-avx512f,-avx512vp2intersect", False),
        ("+avx10.1,+avx512f,-avx10.2,-avx512bf16,-avx512vp2intersect", False),
        ("-avx10.1,-avx512f,-avx512vl,-sse4a,-xop", False),
    ],
    ids=["all of AVX-512", "limited to AVX2", "limited to AVX512", "not there"],
)
def test_features_are_read_as_llvm_reads_them(rest: str, has_avx10: bool) -> None:
    """AVX10 is off where a later name turns off what it comprises, as XLA's limit does on a host that has it."""
    found = _jaxlib.code_features(f"\0{_PLAIN},{rest}\0".encode())
    assert ("avx10.1" in found) is has_avx10
    assert ("avx512f" in found) is ("+avx512f" in rest)
    assert {"avx2", "fma", "sse2"} < found
    assert not found & {"avx10.2", "avx512vp2intersect", "sse4a"}


@pytest.mark.parametrize("target", ["x86-64-v2", "x86-64-v3", "x86-64-v4"])
def test_cpu_target(tmp_path: Path, target: str) -> None:
    """A baseline limits the code, leaves the environment alone, and names its entries instead of this CPU."""
    if "avx2" not in _cpu_features.of_kernel():
        pytest.skip("the baselines are x86's, and this host cannot show the difference")
    for tier in (COMPILED, 3):
        done = with_target(tmp_path, target)
        assert done.stdout.startswith(f"{tier} [] True "), done.stderr
        assert f"cpu baseline {target} " in done.stdout


def test_cpu_target_after_jax(tmp_path: Path) -> None:
    """Once XLA has read its flags a baseline cannot be had: an error that says what to do, never code for this CPU."""
    if "avx" not in _cpu_features.of_kernel():
        pytest.skip("the baselines are x86's, and this host cannot show the difference")
    done = with_target(tmp_path, "x86-64-v2", "jax")
    assert done.returncode == 1
    assert "XLA does not compile for the baseline x86-64-v2" in done.stderr
    assert "use the device before jax" in done.stderr
    assert not (tmp_path / "fleet").exists()


# ------------------------------------------------------------------------------------------------ settings


def test_which_tiers_there_are(tmp_path: Path, client: Client) -> None:
    """TorchTPU's rule: a name, ``disabled``, or where unset ``default`` with several processes or a tier 3."""
    names = {
        (None, None, 1): None,
        (None, None, 2): "default",
        (None, "root", 1): "default",
        ("mine", None, 1): "mine",
        ("disabled", "root", 8): None,
    }
    for (tier2, tier3, world), name in names.items():
        assert TierSettings(tier2=tier2, tier3=tier3, world_size=world).tier2_name == name
    assert make_tiers(TierSettings(), client, never) is None
    fallback = settings(tmp_path, shared_memory=tmp_path / "absent", fallback=tmp_path / "files")
    cache_of(client, fallback).get(KEY, compiling(client), OPTIONS)
    assert entries(tmp_path) == [tmp_path / "files" / "torch_tpu_cache" / "tests" / BINARY / f"{KEY}.bin"]
    assert [is_url(root) for root in ("/a", "s3://b/c", "file:///a", "memory://x", "C:x")] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_a_tier_that_cannot_be_used(tmp_path: Path, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """A root that others may write is left out, once and with the remedy; the program runs."""
    open_root = tmp_path / "open"
    open_root.mkdir()
    open_root.chmod(0o777)
    cache = cache_of(client, settings(tmp_path, tier2="disabled", tier3=str(open_root)))
    for _ in range(2):
        assert value(client, cache.get(KEY, compiling(client), OPTIONS)) == [5] * 4
        cache.clear()
    assert [text for text in caplog.messages if f"chmod 700 {open_root}" in text] == caplog.messages[:1]
    assert cache.tier_statistics() == ()
    assert list(open_root.iterdir()) == []


def test_a_remote_root_without_a_secret(tmp_path: Path, client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """It is refused, also for reading: whoever can write there would run code here."""
    for read_only in (False, True):
        remote = settings(tmp_path, tier2="disabled", tier3="memory://unsigned", read_only=read_only)
        assert make_tiers(remote, client, lambda: BINARY) is None
    assert caplog.text.count("set EMUTPU_CACHE_KEY") == 2


def test_secrets(tmp_path: Path) -> None:
    """A secret is the text itself or the content of a file that nobody else can read; short ones are refused."""
    path = tmp_path / "secret"
    path.write_text("from a file, with care\n")
    path.chmod(0o600)
    assert secret_of(f"@{path}") == b"from a file, with care"
    assert secret_of("sixteen bytes ok") == b"sixteen bytes ok"
    path.chmod(0o644)
    for bad, reason in (("short", "too short"), (f"@{path}", "chmod 600"), ("@/nowhere/at/all", "cannot be read")):
        with pytest.raises(ValueError, match=reason):
            secret_of(bad)
    assert "sixteen" not in repr(TierSettings(secret=b"sixteen bytes ok"))


# ------------------------------------------------------------------------------------------------ remote roots


def remote(url: str, tmp_path: Path, **changes: Any) -> TierSettings:
    """Only a signed tier 3 behind a URL; a load has all the time it needs."""
    given: dict[str, Any] = {"tier2": "disabled", "tier3": url, "secret": SECRET, "backup": False} | changes
    return settings(tmp_path, **given)


def round_trip(client: Client, where: TierSettings) -> CompileCache:
    """One process fills the root, another loads from it."""
    first = cache_of(client, where)
    assert first.request(KEY, compiling(client), OPTIONS).tier == COMPILED
    assert first.lower is not None
    first.lower.flush(30)
    assert counts(first, 3).writes == 1
    second = cache_of(client, where)
    assert second.request(KEY, never, OPTIONS).tier == 3
    assert value(client, second.get(KEY, never, OPTIONS)) == [5] * 4
    return second


def test_memory_root(tmp_path: Path, client: Client) -> None:
    """Any file system of fsspec will do; with another secret, or none, an entry is rejected and set aside."""
    where = remote(f"memory://{tmp_path}", tmp_path)
    round_trip(client, where)
    other = cache_of(client, remote(f"memory://{tmp_path}", tmp_path, secret=b"another secret!!"))
    assert other.request(KEY, compiling(client), OPTIONS).tier == COMPILED
    assert (counts(other, 3).rejected, counts(other, 3).failed) == (1, 0)
    store = RemoteStore(f"memory://{tmp_path}", BINARY)
    assert sum(file["name"].endswith(".bad") for file in store.listing()) == 1


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of a local S3-compatible server on loopback."""
    moto = pytest.importorskip("moto.server", reason="moto is in the extra 'dev'")
    pytest.importorskip("s3fs", reason="s3fs is in the extra 'dev'")
    import fsspec

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    for name, text in {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, text)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    files.mkdir("emutpu-tests")
    yield "s3://emutpu-tests/cache"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.stop()


def test_s3_root(tmp_path: Path, client: Client, s3: str) -> None:
    """The same against a server that speaks S3, with a forged object and a server that goes away."""
    where = remote(s3, tmp_path)
    round_trip(client, where)
    store = RemoteStore(s3, BINARY)
    done = threading.Event()
    store.write(str(KEY), pack(str(KEY), BINARY, b"forged", 1.0), lambda error: done.set())
    assert done.wait(30)
    cache = cache_of(client, where)
    assert cache.request(KEY, compiling(client), OPTIONS).tier == COMPILED
    assert (counts(cache, 3).rejected, counts(cache, 3).failed) == (1, 0)


class Broken:
    """A file system that fails, or takes its time."""

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            time.sleep(self.pause)
            raise ConnectionError("nobody there")

        return call


def broken(client: Client, files: Broken, *, backup: bool) -> CompileCache:
    """A cache whose tier 3 is ``files``."""
    store = RemoteStore("memory://broken", BINARY)
    store._files = files
    return CompileCache(lambda: Tiers(client, BINARY, None, Tier(3, store, SECRET), backup=backup))


def test_a_store_that_fails(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, counted, and after three failures in a row left alone; every request is served."""
    files = Broken()
    cache = broken(client, files, backup=False)
    for _ in range(10):
        cache.clear()
        assert cache.request(KEY, compiling(client), OPTIONS).tier == COMPILED
    assert cache.lower is not None
    cache.lower.flush(5)
    assert 3 <= counts(cache, 3).failed <= files.calls <= 6
    assert sum("cannot be read" in text or "cannot be written" in text for text in caplog.messages) == 1


def test_a_store_that_is_slow(client: Client) -> None:
    """With the backup compilation a slow root costs its head start and no more, also at the end of the process."""
    cache = broken(client, Broken(pause=30.0), backup=True)
    started = time.monotonic()
    assert cache.request(KEY, compiling(client), OPTIONS).tier == COMPILED
    cache.shutdown(seconds=0.2)
    assert time.monotonic() - started < 20


def test_a_local_store_that_fails(tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that can be neither read nor written nor locked costs the cache, not the program."""
    cache = cache_of(client, settings(tmp_path))

    def fail(self: Any, *arguments: Any) -> Any:
        raise OSError(5, "Input/output error")

    for name in ("read", "write", "lock", "quarantine"):
        monkeypatch.setattr(DirectoryStore, name, fail)
    assert value(client, cache.get(KEY, compiling(client), OPTIONS)) == [5] * 4
    assert counts(cache).failed >= 2


def test_read_only_tiers(tmp_path: Path, client: Client) -> None:
    """A read-only process loads what is there and leaves no trace."""
    cache_of(client, settings(tmp_path)).get(KEY, compiling(client), OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    reader = cache_of(client, settings(tmp_path, read_only=True))
    assert reader.request(KEY, never, OPTIONS).tier == 2
    other = Key.of("multiply", "4", "O1", Versions())
    assert reader.request(other, compiling(client, "multiply"), OPTIONS).tier == COMPILED
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (counts(reader).misses, counts(reader).writes) == (1, 0)


# ------------------------------------------------------------------------------------------------ whole programs


def test_programs_share_executables(passes: Callable[..., str], tmp_path: Path) -> None:
    """A second run of a program compiles nothing; its numbers are the same."""
    text = """
        import torch
        from emutpu.backend.runtime import runtime
        torch.manual_seed(0)
        layer = torch.nn.Linear(8, 4).to("tpu")
        loss = layer(torch.ones(2, 8, device="tpu")).square().sum()
        loss.backward()
        found = runtime().statistics().compiles
        print(float(loss), float(layer.weight.grad.sum()), found.misses, [t.tier for t in found.tiers])
    """
    root = {
        "TORCH_TPU_TIER3_COMPILATION_CACHE_ROOT": str(tmp_path / "cache"),
        "TORCH_TPU_TIER2_COMPILATION_CACHE": "disabled",
    }
    run = functools.partial(passes, text, **root)
    first, second = run().split(), run().split()
    assert first[:2] == second[:2]
    assert int(first[2]) > 5
    assert second[2:] == ["0", "[1,", "3]"]
