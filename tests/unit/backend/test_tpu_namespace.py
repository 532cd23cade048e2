"""``torch.tpu``: names, stages, texts, modes, streams, random state, cache controls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from emutpu._tpu import _stages
from emutpu.backend.options import LOCAL, EagerMode, Precision
from emutpu.backend.runtime import runtime

STRICT = {
    "current_device": "current_device_index",
    "current_stream": "current_stream",
    "device": "device_index",
    "device_count": "device_count",
    "get_rng_state": "random.get_rng_state",
    "initial_seed": "random.initial_seed",
    "is_available": "is_available",
    "set_device": "set_device_index",
    "set_stream": "set_stream",
    "synchronize": "synchronize",
}
TORCHTPU = {
    "EagerMode",
    "Event",
    "Precision",
    "Stream",
    "allow_excess_precision",
    "compiler",
    "current_device",
    "current_stream",
    "default_generators",
    "default_stream",
    "device",
    "device_count",
    "device_of",
    "distributed",
    "eager_mode",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_device_properties",
    "get_rng_state",
    "initial_seed",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "ops",
    "optimizers",
    "pallas",
    "precision",
    "profiler",
    "set_device",
    "set_eager_mode",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
    "topology_aware_mesh",
}
LATER = {"distributed", "ops", "optimizers", "pallas", "profiler", "topology_aware_mesh"}
Passes = Callable[..., str]


def as_framework(name: str, *arguments: Any) -> Any:
    """Call ``torch.tpu.<name>`` as a module of PyTorch does."""
    scope = {"__name__": "torch.somewhere", "call": getattr(torch.tpu, name), "arguments": arguments}
    return eval("call(*arguments)", scope)


# ------------------------------------------------------------------------------------------------ names and stages


def test_names_are_torchtpus() -> None:
    """``dir`` and ``__all__`` list TorchTPU's names, without those that this version lacks."""
    assert set(dir(torch.tpu)) == set(torch.tpu.__all__) == TORCHTPU - LATER
    assert dir(torch.tpu.compiler)[-1:] == ["custom_compiler_options"]


@pytest.mark.parametrize("name", ["memory_allocated", "empty_cache", "mem_get_info", "amp", "random", "nonsense"])
def test_unknown_names(name: str) -> None:
    """An AttributeError in TorchTPU's words."""
    with pytest.raises(AttributeError, match=f"^module 'torch.tpu' has no attribute '{name}'$"):
        getattr(torch.tpu, name)


@pytest.mark.parametrize("name", sorted(LATER))
def test_names_that_come_later(name: str) -> None:
    """What TorchTPU has and emutpu lacks is no attribute either, and the text says whose lack it is."""
    assert not hasattr(torch.tpu, name)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': this version of emutpu does not emulate"):
        getattr(torch.tpu, name)


@pytest.mark.parametrize(("name", "prefer"), STRICT.items())
def test_internal_functions(name: str, prefer: str) -> None:
    """Internal functions raise in a user's module, with the advice; inside PyTorch they work."""
    shown = "_DeviceContext" if name == "device" else name
    function = getattr(torch.tpu, name)
    with pytest.raises(RuntimeError) as caught:
        function()
    assert str(caught.value) == (
        f"{shown} is internal to TorchTPU and can only be called by the PyTorch framework (torch and torch_tpu). "
        f"Use torch.accelerator.{prefer} instead."
    )
    assert (function.__tt_api_stage__, function.__tt_api_prefer__) == ("Internal", f"torch.accelerator.{prefer}")


def test_internal_functions_inside_pytorch() -> None:
    """What a module of PyTorch gets from them."""
    assert [as_framework(n) for n in ("current_device", "device_count", "is_available")] == [0, 1, True]
    assert as_framework("get_rng_state").shape == (16,)
    as_framework("set_device", "tpu:0")
    with as_framework("device", 0):
        as_framework("synchronize")


def test_legacy_device_functions_warn(passes: Passes) -> None:
    """TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS turns the error into one warning per name."""
    passes(
        """
        import torch, warnings
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            assert [torch.tpu.device_count() for _ in range(3)] == [1, 1, 1]
            torch.tpu.synchronize()
        texts = [str(w.message) for w in seen]
        assert texts[0] == (
            "<TorchTpu/ApiStage/InternalApi/> device_count is internal to TorchTPU and may change or be removed without "
            "notice. Use torch.accelerator.device_count instead."
        ), texts
        assert len(texts) == 2 and "synchronize" in texts[1], texts
        """,
        TORCH_TPU_ALLOW_LEGACY_DEVICE_APIS="1",
    )


@pytest.mark.parametrize(
    ("name", "use", "text"),
    [
        (
            "EagerMode",
            lambda: torch.tpu.EagerMode,
            "'EagerMode' is experimental and subject to change: TPU eager execution",
        ),
        ("is_initialized", torch.tpu.is_initialized, "is_initialized is experimental and subject to change: "),
        ("eager_mode", lambda: torch.tpu.eager_mode, "'eager_mode' is experimental and subject to change: "),
        ("default_generators", lambda: torch.tpu.default_generators, "'default_generators' is experimental"),
    ],
)
def test_experimental_names_warn_once(
    monkeypatch: pytest.MonkeyPatch, name: str, use: Callable[[], object], text: str
) -> None:
    """One UserWarning at the first use by a user, at the user's line; none from inside PyTorch."""
    monkeypatch.setattr(_stages, "_announced", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        assert seen == []
        use()
        use()
    (warning,) = seen
    assert (warning.category, warning.filename) == (UserWarning, __file__)
    assert str(warning.message).startswith(f"<TorchTpu/ApiStage/ExperimentalApi/> {text}")


# ------------------------------------------------------------------------------------------------ device


def test_device_facts() -> None:
    """Name and memory are the emulated chip's."""
    properties = torch.tpu.get_device_properties()
    assert torch.tpu.get_device_name("tpu:0") == properties.name == "TPU v5e"
    assert (properties.total_memory, properties.multi_processor_count) == (16 * 2**30, 1)
    with pytest.raises(ValueError, match="Expected a tpu device, but got: cpu"):
        torch.tpu.get_device_name("cpu")


def test_chip_decides_the_facts(passes: Passes) -> None:
    """EMUTPU_CHIP=v7: its product name and the memory of one of its two devices."""
    passes(
        """
        import torch
        p = torch.tpu.get_device_properties()
        assert (p.name, p.total_memory) == ("TPU v7", 96 * 2**30), p
        assert torch.accelerator.get_memory_info()[1] == 96 * 2**30
        assert torch.accelerator.device_count() == 1
        """,
        EMUTPU_CHIP="v7",
    )


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("tpux", ValueError, "Invalid device string tpux"),
        ("cpu", ValueError, "Invalid device type cpu"),
        (3, ValueError, "Cannot set TPU device to index 3, current process is bound to device index 0. "),
        ("tpu:2", ValueError, "Cannot set TPU device to index 2"),
        (1.5, TypeError, "Got unrecognized device type, "),
    ],
)
def test_set_device_only_checks(device: Any, error: type[Exception], text: str) -> None:
    """``set_device`` never switches."""
    with pytest.raises(error) as caught:
        as_framework("set_device", device)
    assert str(caught.value).startswith(text)


def test_device_of() -> None:
    """Index 0 for what lies on the device, -1 for anything else."""
    x = torch.ones(1, device="tpu")
    assert [torch.tpu.device_of(o).idx for o in (x, x.untyped_storage(), torch.ones(1), "x")] == [0, 0, -1, -1]


# ------------------------------------------------------------------------------------------------ random state


def test_random_state() -> None:
    """16 bytes; equal states draw equal numbers; the errors are TorchTPU's."""
    (generator,) = torch.tpu.default_generators
    assert torch.tpu.default_generators[0] is generator
    torch.manual_seed(7)
    assert as_framework("initial_seed") == 7
    state = as_framework("get_rng_state")
    assert (state.device.type, state.dtype, state.shape) == ("cpu", torch.uint8, (16,))
    generator.set_offset(5)
    torch.tpu.set_rng_state(state)
    assert generator.get_offset() == 0
    with pytest.raises(ValueError, match="expected device type 'tpu' for RNG state access, got 'cpu'"):
        torch.tpu.set_rng_state(state, "cpu")
    with pytest.raises(ValueError, match="expected local device index 0, got 3: accessing RNG state of a non-current"):
        torch.tpu.set_rng_state(state, 3)
    with pytest.raises(TypeError, match="got unrecognized device type: "):
        torch.tpu.set_rng_state(state, 1.5)


def test_generators() -> None:
    """A generator of the device has a state of its own, also for graph-safe use; CPU draws are not touched."""
    generator = torch.Generator("tpu").manual_seed(3)
    assert (generator.device.type, generator.initial_seed(), isinstance(generator, torch.Generator)) == ("tpu", 3, True)
    copied = generator.clone_state()
    generator.set_offset(9)
    assert (copied.get_offset(), generator.graphsafe_get_state().get_offset()) == (0, 9)
    copied.graphsafe_set_state(generator.graphsafe_get_state())
    assert copied.get_offset() == 9
    assert torch.Generator("cpu").device.type == "cpu"
    with torch.random.fork_rng(device_type="tpu"):
        torch.manual_seed(1)
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    torch.Generator("tpu").manual_seed(0)
    assert torch.equal(first, torch.rand(3))


# ------------------------------------------------------------------------------------------------ modes


def test_eager_modes() -> None:
    """Nestable, per thread, over the process-wide mode; the compiler's own mode is refused in one clear error."""
    assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER
    blocking = EagerMode.DEFER_NEVER_AND_LAUNCH_BLOCKING
    with torch.tpu.set_eager_mode(blocking):
        with torch.tpu.set_eager_mode(EagerMode.DEFER_NEVER):
            assert torch.tpu.eager_mode is EagerMode.DEFER_NEVER
        assert torch.tpu.eager_mode is blocking
        assert (torch.ones(2, device="tpu") + 1).tolist() == [2, 2]
    torch.tpu.eager_mode = blocking
    try:
        assert LOCAL.state.options.mode is blocking
    finally:
        torch.tpu.eager_mode = EagerMode.DEFER_NEVER
    with (
        pytest.raises(NotImplementedError, match="_INTERNAL_COMPILE_FX_GRAPH is the compiler's own"),
        torch.tpu.set_eager_mode(EagerMode._INTERNAL_COMPILE_FX_GRAPH),
    ):
        pass
    with pytest.raises(TypeError, match=r"_set_eager_mode\(\): incompatible function arguments"):
        torch.tpu.eager_mode = 1


def test_precision() -> None:
    """Nests, takes no strings; the global setters speak of the device and leave the CPU at 'highest'."""
    with torch.tpu.precision(Precision.HIGH):
        with torch.tpu.precision(Precision.HIGHEST):
            assert LOCAL.state.options.precision is Precision.HIGHEST
        assert LOCAL.state.options.precision is Precision.HIGH
        assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(ValueError, match=r"'PrecisionConfig.HIGHEST', got 'high'"), torch.tpu.precision("high"):
        pass
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    before = a @ b
    for word, precision in (("highest", "HIGHEST"), ("high", "HIGH"), ("medium", "DEFAULT")):
        torch.set_float32_matmul_precision(word)
        assert torch.get_float32_matmul_precision() == word
        assert LOCAL.state.options.precision is Precision[precision]
        assert torch.equal(a @ b, before)
        assert torch._C._get_float32_matmul_precision() == "highest"
    with pytest.raises(ValueError, match="expected to be one of 'highest', 'high', or 'medium', got 'foo'"):
        torch.set_float32_matmul_precision("foo")


def test_excess_precision() -> None:
    """A process-wide bool that is part of the compile options."""
    assert torch.tpu.allow_excess_precision is False
    torch.tpu.allow_excess_precision = True
    try:
        assert LOCAL.state.options.compile_options.excess_precision
    finally:
        torch.tpu.allow_excess_precision = False
    with pytest.raises(TypeError):
        torch.tpu.allow_excess_precision = "yes"


def test_compiler_options() -> None:
    """Nested options merge, the inner wins; effort levels and empty names are checked."""
    options = torch.tpu.compiler.custom_compiler_options
    with options({"a": "1", "b": "1"}), options({"b": "2", "xla_optimization_level": "O3"}):
        compile_options = LOCAL.state.options.compile_options
        assert dict(compile_options.overrides) == {"a": "1", "b": "2"}
        assert compile_options.effort.name == "O3"
    assert LOCAL.state.options.overrides == ()
    with (
        pytest.raises(ValueError, match="unknown XLA compiler effort level: O9"),
        options({"xla_optimization_level": "O9"}),
    ):
        pass
    with pytest.raises(ValueError, match="XLA compiler option name must not be empty"), options({"": "1"}):
        pass


def test_options_of_the_tpu_compiler() -> None:
    """What only the TPU compiler has is part of the key and disturbs nothing; a misspelt name raises with the right one."""
    options = torch.tpu.compiler.custom_compiler_options
    x = torch.ones(5, 7, device="tpu")
    before = runtime().cache.misses
    (x * 3).cpu()
    with options({"xla_tpu_scoped_vmem_limit_kib": "1024", "xla_enable_async_all_gather": "true"}):
        assert torch.equal((x * 3).cpu(), torch.full((5, 7), 3.0))
    assert runtime().cache.misses == before + 2
    with (
        options({"xla_tpu_scoped_vmem_limit": "1024"}),
        pytest.raises(
            ValueError, match=r"mul\(\): .*no option 'xla_tpu_scoped_vmem_limit': did you mean xla_tpu_scoped_vmem"
        ),
    ):
        x * 3
    with options({"no_such_option": "1"}), pytest.raises(ValueError, match=r"mul\(\): .*no_such_option"):
        x * 3


# ------------------------------------------------------------------------------------------------ streams and events


def test_the_generic_classes() -> None:
    """``torch.Event`` and ``torch.Stream`` make the device's for "tpu", and what C++ makes is an instance of them."""
    event, end = torch.Event("tpu", enable_timing=True), torch.Event(device="tpu:0", enable_timing=True)
    stream = torch.Stream(device="tpu")
    event.record(stream)
    event.synchronize()
    assert 0 <= event.elapsed_time(stream.record_event(end)) < 60_000
    assert isinstance(event, torch.tpu.Event.__wrapped__)
    assert isinstance(event, torch.Event)
    assert isinstance(stream, torch.Stream)
    assert issubclass(type(event), torch.Event)
    assert not isinstance(stream, torch.Event)
    with pytest.raises(ValueError, match="index 3, current process is bound to device index 0"):
        torch.Event(device="tpu:3")
    with pytest.raises(RuntimeError, match=r"(?i)cuda|not compiled|backend"):
        torch.Event(device="cuda").record()

    class Own(torch.Event):
        """A user's subclass keeps PyTorch's constructor."""

    assert isinstance(Own(device="tpu"), torch.Event)


def test_streams() -> None:
    """Current and default stream, context manager, pinning words, and what is not implemented."""
    stream = torch.tpu.Stream()
    assert isinstance(stream, torch.Stream)
    assert repr(stream) == "<torch.tpu.TpuStream>"
    assert (torch.tpu.default_stream().stream_id, stream.device.type) == (0, "tpu")
    assert torch.accelerator.current_stream() is torch.tpu.default_stream()
    with torch.tpu.stream(stream), torch.tpu.stream(None):
        assert torch.accelerator.current_stream() is stream
    with stream:
        assert torch.accelerator.current_stream() is stream
    assert torch.accelerator.current_stream().stream_id == 0
    assert torch.tpu.Stream(pinned="sc").is_sparse
    assert torch.tpu.Stream(pinned="dense").is_dense
    with pytest.raises(ValueError, match="Unknown device pinning mode: zz"):
        torch.tpu.Stream(pinned="zz")
    for unfinished in (stream.query, stream.priority_range):
        with pytest.raises(NotImplementedError):
            unfinished()
    stream.synchronize()


def test_events() -> None:
    """Recording, modelled times in milliseconds, and the errors."""
    start, end, untimed = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True), torch.tpu.Event()
    assert isinstance(start, torch.Event)
    assert repr(start) == "<torch.tpu.TpuEvent>"
    assert untimed.query()
    assert start.record() is start
    torch.ones(8, device="tpu") + 1
    assert torch.tpu.default_stream().record_event(end) is end
    assert 0 < start.elapsed_time(end) < 60_000
    end.wait()
    end.synchronize()
    with pytest.raises(ValueError, match=r"Both events must be created with argument .enable_timing=True"):
        start.elapsed_time(untimed.record())
    with pytest.raises(TypeError, match=r"expected torch.Stream, but got int"):
        start.record(3)
    with pytest.raises(NotImplementedError, match=r"Streams and Events are not fully implemented in TorchTPU"):
        start.ipc_handle()


# ------------------------------------------------------------------------------------------------ cache controls


def test_cache_controls() -> None:
    """Requests, hits and misses count launches; cache-only raises on a miss; without the cache every launch compiles."""
    tpu: Any = torch.tpu
    x = torch.ones(11, 3, device="tpu")
    x + 1
    requests, hits, misses = tpu._get_cache_requests(), tpu._get_cache_hits(), tpu._get_cache_misses()
    x + 1
    assert (tpu._get_cache_requests(), tpu._get_cache_hits(), tpu._get_cache_misses()) == (
        requests + 1,
        hits + 1,
        misses,
    )
    tpu._set_cache_only(True)
    try:
        assert (x + 1).tolist() == [[2, 2, 2]] * 11
        with pytest.raises(
            RuntimeError, match="no more compilation should happen; yet compilation is needed for key: "
        ):
            torch.ones(5, 7, 3, device="tpu")
    finally:
        tpu._set_cache_only(False)
    tpu._set_allow_cache(False)
    try:
        before = tpu._get_cache_misses(), tpu._get_cache_requests()
        for _ in range(3):
            x + 1
        assert (tpu._get_cache_misses(), tpu._get_cache_requests()) == (before[0] + 3, before[1] + 3)
    finally:
        tpu._set_allow_cache(True)
    stats = tpu._get_cache_stats()
    assert stats.num_cache_reqs == stats.num_cache_hits + stats.num_compilations
    x + 1
    assert tpu._get_cache_stats().per_entry_stats
    tpu._clear_cache()
    assert tpu._get_cache_stats().per_entry_stats == {}
