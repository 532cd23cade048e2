"""Exceptions that a backward is left by reach the caller, and the process goes on."""

from __future__ import annotations

from typing import Any, Self

import pytest
import torch
from torch.utils import _pytree as pytree


class _Boom(Exception):
    pass


def _raise(*_: Any) -> None:
    raise _Boom("of the user's")


def _leaf() -> torch.Tensor:
    return torch.ones(3, device="tpu", requires_grad=True)


def _tensor_hook() -> torch.Tensor:
    result = _leaf() * 2
    result.register_hook(_raise)
    return result


def _node_hook() -> torch.Tensor:
    result = _leaf() * 2
    assert result.grad_fn is not None
    result.grad_fn.register_hook(_raise)
    return result


def _node_prehook() -> torch.Tensor:
    result = _leaf() * 2
    assert result.grad_fn is not None
    result.grad_fn.register_prehook(_raise)
    return result


def _accumulation_hook() -> torch.Tensor:
    leaf = _leaf()
    leaf.register_post_accumulate_grad_hook(_raise)
    return leaf * 2


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> None:
        _raise()


class _Subclass(torch.Tensor):
    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "backward" in str(func):
            _raise()
        args, kwargs = pytree.tree_map_only(_Subclass, lambda x: x.inner, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, _Subclass, func(*args, **kwargs))


def _subclass() -> torch.Tensor:
    return torch.nn.functional.gelu(_Subclass(torch.ones(3, device="tpu")).requires_grad_())


_PROGRAMS = {
    "tensor hook": _tensor_hook,
    "node hook": _node_hook,
    "node prehook": _node_prehook,
    "accumulation hook": _accumulation_hook,
    "function": lambda: _Function.apply(_leaf()),
    "subclass": _subclass,
}


@pytest.mark.parametrize("program", _PROGRAMS.values(), ids=list(_PROGRAMS))
def test_an_exception_leaves_a_backward(program: Any) -> None:
    """It is the user's own, with the line that raised it, and the next backward works."""
    with pytest.raises(_Boom, match="of the user's") as found:
        program().sum().backward()
    assert found.traceback[-1].name == "_raise"
    leaf = _leaf()
    (leaf * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3.0, 3.0, 3.0]


def test_gradients_are_asked_for_by_torch_autograd_grad() -> None:
    """``torch.autograd.grad`` raises the same."""
    leaf = _leaf()
    result = leaf * 2
    result.register_hook(_raise)
    with pytest.raises(_Boom, match="of the user's"):
        torch.autograd.grad(result.sum(), leaf)


def test_a_backward_within_a_backward() -> None:
    """An exception two backwards deep reaches the caller of the outer one."""

    @torch.enable_grad()
    def inner(gradient: torch.Tensor) -> None:
        _tensor_hook().sum().backward()

    result = _leaf() * 2
    result.register_hook(inner)
    with pytest.raises(_Boom, match="of the user's"):
        result.sum().backward()
