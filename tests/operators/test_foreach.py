"""Lists of tensors and optimizers: one launch a list, in place, no recompilation when a hyperparameter changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_same

from emutpu.backend.kernels import op_counts
from emutpu.backend.runtime import runtime

SHAPES = [(3, 4), (5,), ()]


def _lists(count: int, *, positive: bool = False, dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    made = [[torch.randn(s).to(dtype) for s in SHAPES] for _ in range(count)]
    return [[t.abs() + 0.5 for t in ts] for ts in made] if positive else made


def _moved(value: Any) -> Any:
    return [t.to("tpu") for t in value] if isinstance(value, list) and isinstance(value[0], torch.Tensor) else value


def _launches() -> int:
    return sum(op_counts().values())


_THREE = [0.5, 1.5, -2.0]
UNARY = "sqrt reciprocal neg abs exp rsqrt sign log sigmoid round"
CASES = [
    ("_foreach_add", (2,), {}),
    ("_foreach_add", ("list",), {"alpha": 0.5}),
    ("_foreach_add", (_THREE,), {}),
    ("_foreach_sub", ("list",), {}),
    ("_foreach_mul", (0.5,), {}),
    ("_foreach_mul", ("list",), {}),
    ("_foreach_mul", ([1.5, 1.5, 1.5],), {}),
    ("_foreach_div", (3,), {}),
    ("_foreach_div", ("list",), {}),
    ("_foreach_div", (_THREE,), {}),
    ("_foreach_maximum", ("list",), {}),
    ("_foreach_minimum", (0.75,), {}),
    ("_foreach_clamp_min", (0.75,), {}),
    ("_foreach_clamp_max", (_THREE,), {}),
    ("_foreach_pow", (2,), {}),
    ("_foreach_pow", ("list",), {}),
    ("_foreach_addcmul", ("list", "list"), {"value": 0.5}),
    ("_foreach_addcmul", ("list", "list", _THREE), {}),
    ("_foreach_addcdiv", ("list", "list"), {}),
    ("_foreach_addcdiv", ("list", "list", _THREE), {}),
    ("_foreach_lerp", ("list", 0.25), {}),
    ("_foreach_lerp", ("list", "list"), {}),
    ("_foreach_lerp", ("list", [0.25, 0.5, 0.75]), {}),
    *((f"_foreach_{name}", (), {}) for name in UNARY.split()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "extra", "options"), CASES, ids=str)
def test_list_ops(name: str, extra: tuple[Any, ...], options: dict[str, Any], dtype: torch.dtype) -> None:
    """Functional and in-place forms equal CPU, each in one launch."""
    lists = _lists(1 + sum(e == "list" for e in extra), positive=True, dtype=dtype)
    rest = iter(lists[1:])
    arguments = [lists[0], *(next(rest) if e == "list" else e for e in extra)]
    moved = [_moved(a) for a in arguments]
    expected = getattr(torch, name)(*arguments, **options)
    before = _launches()
    actual = getattr(torch, name)(*moved, **options)
    getattr(torch, name + "_")(*moved, **options)
    assert _launches() == before + 2
    assert_same(list(actual), list(expected), what=name)
    assert_same(moved[0], list(expected), what=name + "_")


@pytest.mark.parametrize("order", [0, 1, 2, 3.0, float("inf")])
def test_norms(order: float) -> None:
    """Norms of every list element in one launch."""
    (tensors,) = _lists(1)
    before = _launches()
    actual = torch._foreach_norm(_moved(tensors), order)
    assert _launches() == before + 1
    assert_same(list(actual), list(torch._foreach_norm(tensors, order)), what="norm")


def test_copy_and_zero() -> None:
    """Copies take sources from the device and from the host, with conversion; zeroing needs no old value."""
    targets, sources = _lists(2)
    moved = _moved(targets)
    torch._foreach_copy_(moved, [s.double().to(torch.bfloat16).to("tpu") for s in sources])
    assert_same(moved, [s.to(torch.bfloat16).float() for s in sources], what="copy")
    torch._foreach_copy_(moved, sources)
    assert_same(moved, sources, what="copy from the host")
    torch._foreach_zero_(moved)
    assert_same(moved, [torch.zeros_like(s) for s in sources], what="zero")


def test_views_of_one_storage() -> None:
    """Slices of one buffer in a written list all arrive in it (gradients as bucket views)."""
    bucket = torch.arange(12.0)
    device = bucket.to("tpu")
    for flat in (bucket, device):
        views = [flat[0:4].view(2, 2), flat[4:6], flat[8:12:2]]
        torch._foreach_mul_(views, 3.0)
        torch._foreach_add_(views, [v.clone() for v in views])
    assert_same(device, bucket, what="bucket")


def test_clip_grad_norm() -> None:
    """Clipping over bucket views equals CPU."""

    def clipped(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        bucket = torch.linspace(-3, 3, 10).to(device)
        parameters = [torch.nn.Parameter(torch.zeros(n, device=device)) for n in (4, 6)]
        parameters[0].grad, parameters[1].grad = bucket[:4], bucket[4:]
        return torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True), bucket

    assert_same(clipped("tpu"), clipped("cpu"), what="clip_grad_norm_")


# ------------------------------------------------------------------------------------------------ optimizers

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd_plain": (torch.optim.SGD, {"lr": 0.1}),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01}),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
}
_VARIANTS: dict[str, dict[str, Any]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "capturable": {"foreach": True, "capturable": True},
}
_COMBINATIONS = [
    (name, variant)
    for name in _OPTIMIZERS
    for variant in _VARIANTS
    if variant != "capturable" or name.startswith("adam")
]


def _trained(name: str, device: str, options: dict[str, Any], misses: list[int] | None = None) -> list[torch.Tensor]:
    kind, defaults = _OPTIMIZERS[name]
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(s).to(device)) for s in SHAPES]
    optimizer = kind(parameters, **defaults, **options)
    for step in range(5):
        if misses is not None and step >= 2:
            misses.append(runtime().cache.misses)
        for p in parameters:
            p.grad = torch.randn(p.shape).to(device)
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
    if misses is not None:
        misses.append(runtime().cache.misses)
    return [p.detach() for p in parameters]


@pytest.mark.parametrize(("name", "variant"), _COMBINATIONS)
def test_optimizer(name: str, variant: str) -> None:
    """Five steps equal CPU's for-loop; once the state exists nothing compiles, whatever the learning rate does."""
    misses: list[int] = []
    actual = _trained(name, "tpu", _VARIANTS[variant], misses)
    assert_same(actual, _trained(name, "cpu", {"foreach": False}), what=f"{name} {variant}")
    if (
        torch.tpu.eager_mode is not torch.tpu.EagerMode.DEFER_AND_FUSE
    ):  # there the repeated-op rule cuts, and compiles, later
        assert misses[0] == misses[-1]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_found_inf_leaves_everything(name: str) -> None:
    """A step that found an infinity changes no parameter and no state; grad_scale divides the gradients."""
    kind, defaults = _OPTIMIZERS[name]
    results = []
    for device, options in (("cpu", {"fused": True}), ("tpu", {"fused": True})):
        torch.manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(s).to(device)) for s in SHAPES]
        optimizer = kind(parameters, **defaults, **options)
        history = []
        for infinite in (0.0, 1.0, 0.0):
            for p in parameters:
                p.grad = torch.randn(p.shape).to(device) * 8
            optimizer.grad_scale = torch.tensor(8.0, device=device)
            optimizer.found_inf = torch.tensor(infinite, device=device)
            optimizer.step()
            history += [p.detach().clone() for p in parameters]
            history += [v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        results.append(history)
    assert_same(results[1], results[0], what=name)


def test_tensor_learning_rate() -> None:
    """A learning rate on the device is read there."""

    def trained(device: str) -> torch.Tensor:
        p = torch.nn.Parameter(torch.ones(3, device=device))
        optimizer = torch.optim.AdamW([p], lr=torch.tensor(0.1, device=device), fused=True)
        p.grad = torch.arange(3.0).to(device)
        optimizer.step()
        return p.detach()

    assert_same(trained("tpu"), trained("cpu"), what="tensor lr")
