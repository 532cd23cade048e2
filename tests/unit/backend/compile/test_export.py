"""Exported modules: run by plain JAX they give what PyTorch gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emutpu import _jaxlib
from emutpu.backend.compile.export import exported_to_mlir, fx_to_mlir


def run_with_jax(text: str, arguments):
    """Compile MLIR text with JAX's own CPU client and run it; nothing of emutpu's client takes part."""
    backend = _jaxlib.cpu_backend()
    device = backend.local_devices()[0]
    module = _jaxlib.ir.Module.parse(text, _jaxlib.context())
    loaded = _jaxlib.compile_module(
        backend, module, _jaxlib.device_list([device]), _jaxlib.compile_options([device.id])
    )
    with _jaxlib.wide_types():
        import jax

        arrays = [jax.device_put(a, device) for a in arguments]
    return [np.asarray(array) for array in loaded.execute(arrays)]


class Model(torch.nn.Module):
    """Parameters, a buffer that is written, a constant, a factory, and a view as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.norm(self.linear(x)) * torch.tensor([1.0, 2.0, 3.0], device=x.device) + torch.arange(
            3, device=x.device
        )
        return y.relu(), y.t()


def _arguments(exported, module, inputs):
    named = dict(exported.named_parameters()) | dict(exported.named_buffers()) | dict(exported.tensor_constants)
    rest = iter(inputs)
    return [
        (next(rest) if a.kind == "input" else named[a.name]).detach().clone().cpu().numpy() for a in module.arguments
    ]


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_an_exported_program_runs_under_plain_jax(device) -> None:
    """Text and portable artifact give PyTorch's values and the updated buffers, whatever device it was traced on."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 4)
    exported = torch.export.export(model.to(device), (x.to(device),))
    module = exported_to_mlir(exported)
    arguments = _arguments(exported, module, [x])
    model.to("cpu")
    expected = [t.detach().numpy() for t in model(x)]
    assert [a.kind for a in module.arguments].count("input") == 1
    assert {a.name for a in module.arguments if a.kind == "parameter"} == {n for n, _ in model.named_parameters()}
    for text in (
        module.serialize_text(),
        _jaxlib.from_portable_artifact(module.serialize_portable_artifact()),
    ):
        results = run_with_jax(text, arguments)
        assert len(results) == len(module.results)
        for actual, wanted in zip(results[-2:], expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-2, atol=2e-2)  # one bf16 pass on the device, f32 here
        mean = dict(zip(module.results, results, strict=True))
        assert any(np.allclose(v, model.norm.running_mean.numpy(), atol=1e-2) for v in mean.values() if v.shape == (3,))


def test_text_has_the_users_lines() -> None:
    """With debug info each op names the file and line that issued it; without there is none."""
    exported = torch.export.export(Model(), (torch.randn(5, 4),))
    module = exported_to_mlir(exported)
    line = Model.forward.__code__.co_firstlineno + 1
    assert f'test_export.py":{line}:' in module.serialize_text(enable_debug_info=True)
    assert "test_export.py" not in module.serialize_text()
    assert module.serialize_bytecode().startswith(b"ML\xefR")


def test_fx_graphs() -> None:
    """A functional FX graph with values gives the same module as text and bytecode."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x, y):
        return (x @ y).sum(0), y

    x, y = torch.randn(2, 3), torch.randn(3, 4)
    module = fx_to_mlir(make_fx(f, tracing_mode="fake")(x, y))
    total, same = run_with_jax(module.serialize_text(), [x.numpy(), y.numpy()])
    np.testing.assert_allclose(total, (x @ y).sum(0).numpy(), rtol=1e-5)
    assert np.array_equal(same, y.numpy())
    assert _jaxlib.module_text(module.serialize_bytecode()) == module.serialize_text()


def test_random_states_are_arguments() -> None:
    """A module that draws takes seed and offset, and draws what eager mode draws from them."""

    class Noise(torch.nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

    module = exported_to_mlir(torch.export.export(Noise(), (torch.zeros(8),)))
    assert module.arguments[-1].kind == "random_state"
    (drawn,) = run_with_jax(module.serialize_text(), [np.zeros(8, np.float32), np.array([7, 0, 0], np.uint64)])
    torch.manual_seed(7)
    assert np.array_equal(drawn, torch.rand(8, device="tpu").cpu().numpy())


def test_symbolic_sizes_are_refused() -> None:
    """A dynamic dimension is NotImplementedError, with the remedy."""
    exported = torch.export.export(
        torch.nn.Linear(2, 2), (torch.randn(3, 2),), dynamic_shapes=({0: torch.export.Dim("n", min=2, max=9)},)
    )
    with pytest.raises(NotImplementedError, match="dynamic"):
        exported_to_mlir(exported)


def test_branches_on_values() -> None:
    """What must read a value on the host is NotImplementedError with the line and the remedy."""

    class Branching(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cond(x.sum() > 0, lambda v: v.sin(), lambda v: v.cos(), (x,))

    with pytest.raises(NotImplementedError, match=r"cond reads values .*test_export\.py.*torch\.where"):
        exported_to_mlir(torch.export.export(Branching(), (torch.ones(3),)))
