"""Which backend is chosen, which options are accepted."""

from __future__ import annotations

import pytest
import torch

from emutpu.backend.compile.settings import parse
from emutpu.backend.runtime import runtime


def test_device_inputs_take_the_device_backend(launches) -> None:
    """Without a backend: a function with a tpu argument runs as a region."""
    f = torch.compile(lambda x: x.sin() + 1)
    x = torch.ones(3, device="tpu")
    launches()
    assert torch.allclose(f(x).cpu(), torch.ones(3).sin() + 1)
    assert launches() == 1


def test_cpu_inputs_keep_the_cpus_backend(launches, monkeypatch) -> None:
    """A CPU function goes to the CPU's backend, for modules, too; nothing is launched."""
    seen = []
    monkeypatch.setattr("emutpu.backend.compile.dynamo.cpu_backend", lambda: "aot_eager")
    real = torch._dynamo.backends.registry._COMPILER_FNS["aot_eager"]
    monkeypatch.setitem(
        torch._dynamo.backends.registry._COMPILER_FNS, "aot_eager", lambda *a, **k: seen.append(1) or real(*a, **k)
    )
    assert torch.compile(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    linear = torch.nn.Linear(2, 2)
    assert torch.allclose(torch.compile(linear)(torch.ones(1, 2)), linear(torch.ones(1, 2)))
    assert len(seen) == 2
    assert launches() == 0


def test_modules_are_chosen_by_their_parameters(launches) -> None:
    """A module on the device, and one that is moved between compile and call."""
    linear = torch.nn.Linear(2, 2)
    expected = linear(torch.ones(1, 2))
    later = torch.compile(linear)
    linear.to("tpu")
    x = torch.ones(1, 2, device="tpu")
    launches()
    for compiled in (later, torch.compile(linear)):
        torch.testing.assert_close(compiled(x).cpu(), expected)
    assert launches() == 2
    assert list(later.state_dict()) == ["_orig_mod.weight", "_orig_mod.bias"]


def test_decorators_and_module_compile(launches) -> None:
    """``@torch.compile``, ``@torch.compile(fullgraph=True)`` and ``module.compile()``."""

    @torch.compile
    def f(x):
        return x + 1

    @torch.compile(fullgraph=True)
    def g(x):
        return f(x) * 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 2))

        def forward(self, x):
            return x @ self.weight + 1

    module = Model().to("tpu")
    module.compile()
    x = torch.ones(1, 2, device="tpu")
    launches()
    assert g(x).tolist() == [[4, 4]]
    assert launches() == 1
    assert module(x).tolist() == [[3, 3]]
    assert launches() == 1


def test_kernels_are_not_traced(launches) -> None:
    """Where Dynamo skips a frame and looks into what it calls, it does not find our kernels."""
    module = torch.nn.Linear(2, 2).to("tpu")
    module.compile()  # a frame of PyTorch's own, which Dynamo skips
    module(torch.ones(1, 2, device="tpu"))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert not torch._dynamo.utils.counters["graph_break"]


def test_cpu_graphs_of_the_device_backend_run() -> None:
    """``backend="tpu"`` given for CPU tensors works, on the CPU."""
    assert torch.compile(lambda x: x + 1, backend="tpu")(torch.ones(2)).tolist() == [2, 2]


def test_inductor_is_refused_with_the_one_clear_error() -> None:
    """``backend="inductor"`` on the device names what to pass instead."""
    with pytest.raises(RuntimeError, match=r"Pass backend='tpu' or do not specify `backend`"):
        torch.compile(lambda x: x + 1, backend="inductor")(torch.ones(2, device="tpu"))


def test_dynamic_shapes_are_refused() -> None:
    """``dynamic=True`` is NotImplementedError when it is asked for."""
    with pytest.raises(NotImplementedError, match=r"TPU backend does not support torch.compile\(..., dynamic=True"):
        torch.compile(lambda x: x + 1, backend="tpu", dynamic=True)
    with pytest.raises(NotImplementedError, match="does not support"):
        torch.compile(lambda x: x + 1, dynamic=True)(torch.ones(2, device="tpu"))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"num_dynamic_buckets": 9}, ValueError, "`num_dynamic_buckets` must be an integer between 1 and 8, got 9"),
        ({"bucket_size": 0}, ValueError, "`bucket_size` must be a positive integer, got 0"),
        ({"debug_callback": 3}, TypeError, "'debug_callback' must be callable"),
        ({"foo": 1}, TypeError, r"Unexpected keyword arguments: \{'foo': 1\}"),
    ],
)
def test_options_are_checked(options, error, text) -> None:
    """TorchTPU's names and errors, when ``torch.compile`` is called."""
    with pytest.raises(error, match=text):
        torch.compile(lambda x: x, backend="tpu", options=options)


def test_modes() -> None:
    """The default mode is taken, Inductor's are refused."""
    assert torch.compile(lambda x: x + 1, backend="tpu", mode="default")(torch.ones(1, device="tpu")).item() == 2
    with pytest.raises(TypeError, match=r"Unexpected keyword arguments: \{'mode': 'max-autotune'\}"):
        torch.compile(lambda x: x, backend="tpu", mode="max-autotune")


def test_accepted_options() -> None:
    """All of TorchTPU's options parse."""
    settings = parse({"num_dynamic_buckets": 2, "bucket_size": 64, "custom_module_name": "mine", "serializable": False})
    assert (settings.buckets, settings.bucket_size, settings.name, settings.serializable) == (2, 64, "mine", False)


def test_clearing_the_cache_compiles_again(compiles) -> None:
    """``_clear_cache`` and a replaced client drop what compiled graphs hold."""
    f = torch.compile(lambda x: x * 2, backend="tpu")
    x = torch.ones(2, device="tpu")
    f(x)
    runtime().forget_executables()
    compiles()
    assert f(x).tolist() == [2, 2]
    assert compiles() == 1
