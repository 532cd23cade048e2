"""``torch.compile`` as TorchTPU 0.2.0 replaces it: the backend is chosen at the first call, and shapes are static."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from emutpu.backend.compile.settings import parse
from emutpu.backend.runtime import runtime
from emutpu.backend.storage import DEVICE

__all__ = ["INDUCTOR_REFUSED", "compile_function", "uses_inductor_on_device"]

INDUCTOR_REFUSED = (
    "torch.compile(..., backend='inductor') on TPU is experimental and does not yet have full TPU support; compilation is "
    "likely to fail with cryptic errors, e.g. https://github.com/google-pytorch/torch_tpu/issues/4300. Pass backend='tpu' "
    "or do not specify `backend` in torch.compile to use TorchTPU, which does have full TPU support. If you do want to run "
    "Inductor on TPU, you can bypass this error by passing options={'tpu_backend': 'pallas'}."
)
DEVICE_BACKEND = "tpu"
_DYNAMIC_REFUSED = (
    "TPU backend does not support torch.compile(..., dynamic=True, ...). Please run torch.compile() with dynamic=None or "
    "default dynamism i.e. torch.compile(model) and try again."
)
# Options of torch.compile itself, which no backend sees.
_OUTER = frozenset({"guard_filter_fn", "use_aoti"})

Compile = Callable[..., Any]


def compile_function(original: Compile) -> Compile:
    """``torch.compile`` around the original one. Errors of the backend's options are raised here, not at the first call."""

    @functools.wraps(original)
    def compile_(model: Any = None, **settings: Any) -> Any:
        if model is None:
            return lambda decorated: compile_(decorated, **settings)
        backend = settings.get("backend")
        if settings.get("disable") or torch.compiler.is_exporting():
            return original(model, **settings)
        if backend is None and _default_is_inductor():
            settings.pop("backend", None)
            return _choose(original, model, settings)
        if backend == DEVICE_BACKEND:
            return original(model, **_checked(settings))
        return original(model, **settings)

    return compile_


def _default_is_inductor() -> bool:
    from torch._dynamo.backends.registry import get_default_backend

    return bool(get_default_backend() == "inductor")


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for the backend ``"tpu"``: static shapes, unless varying ones are to be bounded. Raises what it refuses."""
    if settings.get("dynamic"):
        raise NotImplementedError(_DYNAMIC_REFUSED)
    mode = settings.get("mode")
    options = {name: value for name, value in (settings.get("options") or {}).items() if name not in _OUTER}
    parse(options, **({"mode": mode} if mode not in (None, "default") else {}))
    configuration = runtime().configuration
    if configuration is not None and configuration.assume_bounded and settings.get("dynamic") is None:
        return dict(settings) | {"backend": DEVICE_BACKEND, "dynamic": None}
    return dict(settings) | {"backend": DEVICE_BACKEND, "dynamic": False}


def _choose(original: Compile, model: Any, settings: dict[str, Any]) -> Any:
    if isinstance(model, torch.nn.Module):
        return _choose_for_module(original, model, settings)
    chosen: list[Any] = []

    @functools.wraps(model)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if not chosen:
            chosen.append(original(model, **_decided(settings, _holds_device(model, args, kwargs))))
        return chosen[0](*args, **kwargs)

    # Dynamo, when it traces a caller, goes on with the function itself.
    compiled._torchdynamo_inline = model  # type: ignore[attr-defined]  # Dynamo's own attribute
    compiled._torchdynamo_orig_callable = model  # type: ignore[attr-defined]  # Dynamo's own attribute
    return compiled


def _choose_for_module(original: Compile, model: torch.nn.Module, settings: dict[str, Any]) -> Any:
    if _module_on_device(model):
        return original(model, **_decided(settings, True))
    made = original(model, backend="eager")

    def first(*args: Any, **kwargs: Any) -> Any:
        other = original(model, **_decided(settings, _holds_device(model, args, kwargs)))
        made.dynamo_ctx = other.dynamo_ctx
        made._initialize()
        return made.forward(*args, **kwargs)

    made.forward = first
    return made


def _decided(settings: dict[str, Any], device: bool) -> dict[str, Any]:
    if device:
        return _checked(settings)
    from emutpu.backend.compile.dynamo import cpu_backend

    backend = cpu_backend()
    if backend != "inductor":  # which would refuse Inductor's modes and options
        return {n: v for n, v in settings.items() if n not in ("mode", "options")} | {"backend": backend}
    return settings | {"backend": backend}


def _holds_device(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an argument, a parameter of a module that the function uses, or the default device is the device's."""
    if torch.get_default_device().type == DEVICE_BACKEND:
        return True
    from torch.utils import _pytree as pytree

    leaves = [*pytree.tree_leaves((args, kwargs)), *_used(model)]
    return any(_on_device(leaf) for leaf in leaves)


def _on_device(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == DEVICE.type
    if isinstance(value, torch.optim.Optimizer):
        return any(_on_device(parameter) for group in value.param_groups for parameter in group["params"])
    return isinstance(value, torch.nn.Module) and _module_on_device(value)


def _module_on_device(module: torch.nn.Module) -> bool:
    return any(t.device.type == DEVICE.type for t in (*module.parameters(), *module.buffers()))


def _used(model: Any) -> Iterator[object]:
    """What a function is bound to (with its attributes), closes over, and names of its module's globals."""
    if isinstance(model, torch.nn.Module):
        yield model
    owner = getattr(model, "__self__", None)
    if owner is not None:
        yield owner
        yield from getattr(owner, "__dict__", {}).values()
    if isinstance(model, types.MethodType):
        model = model.__func__
    model = getattr(model, "__wrapped__", model)
    if not isinstance(model, types.FunctionType):
        return
    for cell in model.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for name in model.__code__.co_names:
        yield model.__globals__.get(name)


def uses_inductor_on_device(config: Mapping[str, Any], module: Any, inputs: Any) -> bool:
    """Whether Inductor was asked, without its own TPU code generator, to compile a graph that uses the device."""
    from emutpu.backend.compile.dynamo import uses_device

    return config.get("tpu_backend") != "pallas" and uses_device(module, inputs)
