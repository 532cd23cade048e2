"""Launches of fused modules on the CPU client take turns on XLA's streams; what they read and give up is in order anyway."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from emutpu import _jaxlib
from emutpu.backend.pjrt import Client, CompileOptions, Effort, InvalidArgument
from emutpu.simulator import make_client

_KIND = "tensor<512x512xf32>"
_NATIVE = (("emutpu_native_highest", "true"),)
_PRODUCTS = f"""module @products {{ func.func public @main(%a: {_KIND}) -> {_KIND} {{
    %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : ({_KIND}, {_KIND}) -> {_KIND}
    %1 = stablehlo.dot_general %0, %a, contracting_dims = [1] x [0], precision = [HIGHEST, HIGHEST] : ({_KIND}, {_KIND}) -> {_KIND}
    return %1 : {_KIND} }} }}"""
_WRITE = f"""module @write {{ func.func public @main(%a: {_KIND} {{jax.buffer_donor = true}}) -> {_KIND} {{
    %0 = stablehlo.add %a, %a : {_KIND}
    return %0 : {_KIND} }} }}"""


def _compiled(client: Client, text: str, effort: Effort = Effort.O2) -> Any:
    return client.compile(text.encode(), CompileOptions(effort=effort, overrides=_NATIVE))


@pytest.fixture
def client() -> Client:
    """Of its own, so that turns begin anew."""
    return make_client("cpu")


@pytest.mark.parametrize(
    ("effort", "fused"), [(Effort.O0, False), (Effort.O1, False), (Effort.O2, True), (Effort.O3, True)]
)
def test_fused_modules_take_turns(effort: Effort, fused: bool, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six launches of a fused module are on five streams, two neighbours never on one; single ops stay on the caller's."""
    chosen: list[int] = []
    monkeypatch.setattr(_jaxlib, "select_stream", chosen.append)
    monkeypatch.setattr(_jaxlib, "selected_stream", lambda: 0)
    executable = _compiled(client, _PRODUCTS, effort)
    value = client.from_host(np.eye(512, dtype=np.float32))
    for _ in range(6):
        executable.launch([value])
    streams = [stream for stream in chosen if stream]
    assert (len(streams), len(set(streams))) == ((6, 5) if fused else (0, 0))
    assert all(a != b for a, b in itertools.pairwise(streams))
    assert chosen[1::2] == [0] * len(streams)


@pytest.mark.skipif(not hasattr(_jaxlib._jax, "set_execution_stream_id"), reason="this jaxlib has no streams")
def test_the_callers_stream_is_its_own(client: Client) -> None:
    """After a launch, and after one that raises, the thread's other work with JAX is where it was."""
    executable = _compiled(client, _PRODUCTS)
    _jaxlib.select_stream(77)
    try:
        executable.launch([client.from_host(np.eye(512, dtype=np.float32))])
        assert _jaxlib.selected_stream() == 77
        with pytest.raises(InvalidArgument, match=r"supplied 0 (arguments|buffers)"):
            executable.launch([])
        assert _jaxlib.selected_stream() == 77
    finally:
        _jaxlib.select_stream(0)


def test_a_donated_buffer_is_read_first(client: Client) -> None:
    """What is launched before a donation on another stream reads the old value, what comes after it the new one."""
    products, write = _compiled(client, _PRODUCTS), _compiled(client, _WRITE)
    random = np.random.default_rng(0)
    start = (random.integers(-2, 3, (512, 512))).astype(np.float32)
    exact = np.linalg.matrix_power(start.astype(np.float64), 3)
    value = client.from_host(start)
    for turn in range(6):
        before = [products.launch([value])[0] for _ in range(3)]
        (written,) = write.launch([value])
        after = products.launch([written])[0]
        assert value.is_deleted()
        value = written
        for result in before:
            np.testing.assert_array_equal(client.to_host(result), exact * 8.0**turn)
        np.testing.assert_array_equal(client.to_host(after), exact * 8.0 ** (turn + 1))


def test_many_chains_keep_their_order(client: Client) -> None:
    """Eight chains of forty launches, interleaved, each of which writes over what the one before it gave."""
    write = _compiled(client, _WRITE)
    chains = [client.from_host(np.full((512, 512), 2.0**-k, np.float32)) for k in range(8)]
    for _ in range(40):
        chains = [write.launch([value])[0] for value in chains]
    for k, value in enumerate(chains):
        np.testing.assert_array_equal(client.to_host(value), np.full((512, 512), 2.0 ** (40 - k), np.float32))
