"""Compare an op on the emulated device with CPU PyTorch, over PyTorch's own sample inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = "tpu"
_BY_NAME: dict[str, OpInfo] = {
    f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''}": op for op in op_db
}

# Relative and absolute tolerance against CPU at 'highest', by result dtype: last-bit differences of XLA's
# transcendentals and of summation order, never more.
TOLERANCES = {
    torch.float64: (1e-7, 1e-7),
    torch.float32: (2e-5, 2e-5),
    torch.complex64: (2e-5, 2e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}


def opinfo(name: str) -> OpInfo:
    """The OpInfo entry by name (``nn.functional.gelu``; variants as ``name.variant``)."""
    return _BY_NAME[name]


@contextlib.contextmanager
def highest() -> Iterator[None]:
    """Six-pass matmuls on the device, so that CPU at 'highest' is the oracle."""
    with torch.tpu.precision(torch.tpu.Precision.HIGHEST):
        yield


def to_device(value: Any) -> Any:
    """Tensors to the device, leaves stay leaves; everything else unchanged."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch.device(DEVICE) if isinstance(leaf, torch.device) else leaf
        moved = leaf.detach().to(DEVICE)
        assert moved.shape == leaf.shape
        return moved.requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def assert_same(actual: Any, expected: Any, *, what: str, tolerance: tuple[float, float] | None = None) -> None:
    """Same structure, device, dtype, shape, and values within the dtype's tolerance."""
    got, want = tree_flatten(actual)[0], tree_flatten(expected)[0]
    assert len(got) == len(want), f"{what}: {len(got)} results, expected {len(want)}"
    for a, e in zip(got, want, strict=True):
        if not isinstance(e, torch.Tensor):
            assert a == e, f"{what}: {a} != {e}"
            continue
        assert a.device.type == DEVICE, f"{what}: result on {a.device}"
        rtol, atol = tolerance or TOLERANCES.get(e.dtype, (0.0, 0.0))
        torch.testing.assert_close(
            a.detach().cpu(), e.detach(), rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}"
        )


def samples(op: OpInfo, dtype: torch.dtype, *, requires_grad: bool, limit: int) -> list[SampleInput]:
    """The first ``limit`` CPU sample inputs, seeded."""
    torch.manual_seed(0)
    found = []
    for sample in op.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        found.append(sample)
        if len(found) == limit:
            break
    assert found, f"the op database has no sample of {op.name} for {dtype}"
    return found


def _arguments(sample: SampleInput) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return sample.input, sample.args, sample.kwargs


def check_forward(
    name: str, dtype: torch.dtype, *, limit: int = 4, tolerance: tuple[float, float] | None = None
) -> None:
    """Every sample gives what CPU gives."""
    op = opinfo(name)
    with highest():
        for index, sample in enumerate(samples(op, dtype, requires_grad=False, limit=limit)):
            x, args, kwargs = _arguments(sample)
            expected = op(x, *args, **kwargs)
            actual = op(*_call(x, args), **to_device(kwargs))
            assert_same(actual, expected, what=f"{name} {dtype} sample {index}", tolerance=tolerance)


def check_backward(name: str, *, limit: int = 3, tolerance: tuple[float, float] | None = None) -> None:
    """Gradients of every differentiable input, float32, for a fixed random cotangent."""
    op = opinfo(name)
    with highest():
        for index, sample in enumerate(samples(op, torch.float32, requires_grad=True, limit=limit)):
            x, args, kwargs = _arguments(sample)
            device_args, device_kwargs = _call(x, args), to_device(kwargs)
            expected = _gradients(op(x, *args, **kwargs), (x, args, kwargs))
            actual = _gradients(op(*device_args, **device_kwargs), (device_args, device_kwargs))
            assert len(actual) == len(expected)
            for a, e in zip(actual, expected, strict=True):
                assert_same(a, e, what=f"gradient of {name} sample {index}", tolerance=tolerance)


def check_inplace(
    name: str, dtype: torch.dtype, *, limit: int = 4, tolerance: tuple[float, float] | None = None
) -> None:
    """The in-place variant, on the tensor itself and through a non-contiguous view."""
    op = opinfo(name)
    variant = op.inplace_variant
    assert variant is not None, f"{name} has no in-place variant"
    compared = 0
    with highest():
        for index, sample in enumerate(samples(op, dtype, requires_grad=False, limit=limit)):
            x, args, kwargs = _arguments(sample)
            expected = x.clone()
            try:
                variant(expected, *args, **kwargs)
            except RuntimeError:
                continue  # broadcasting or promotion that the in-place variant refuses
            compared += 1
            actual = to_device(x)
            variant(actual, *to_device(args), **to_device(kwargs))
            assert_same(actual, expected, what=f"{name}_ {dtype} sample {index}", tolerance=tolerance)
            if x.dim() >= 1 and x.numel():
                wide = torch.stack([x, x], -1).to(DEVICE)
                variant(wide[..., 0], *to_device(args), **to_device(kwargs))
                assert_same(wide[..., 0], expected, what=f"{name}_ view {dtype} sample {index}", tolerance=tolerance)
                assert_same(wide[..., 1], x, what=f"{name}_ neighbour {dtype} sample {index}")
    assert compared, f"no sample of {name} for {dtype} can be written in place"


def _call(x: Any, args: Sequence[Any]) -> tuple[Any, ...]:
    return (to_device(x), *to_device(tuple(args)))


def _gradients(result: Any, inputs: Any) -> list[torch.Tensor | None]:
    results = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in tree_flatten(inputs)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    if not results:
        return []
    generator = torch.Generator().manual_seed(0)
    cotangents = [torch.randn(r.shape, generator=generator, dtype=r.dtype).to(r.device) for r in results]
    return list(torch.autograd.grad(results, leaves, cotangents, allow_unused=True))
