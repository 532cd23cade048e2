"""Telling PyTorch about the device.

Two steps, so that ``import torch`` stays quick: :func:`activate` renames PrivateUse1 and registers what needs no jax
(factories, views, the fallback); the first op that needs more loads the lowerings and registers all of them.
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch

from emutpu import _facts as facts
from emutpu.backend.metadata import KERNELS
from emutpu.backend.runtime import runtime
from emutpu.backend.unwinding import notice

__all__ = ["activate", "kernel", "load", "loaded", "registered"]

DEVICE_NAME = "tpu"
_KEY = "PrivateUse1"


# out= overloads whose functional form, or whose name, is another.
_OUT_OF = {
    "_native_batch_norm_legit.out": "_native_batch_norm_legit",
    "adaptive_avg_pool2d.out": "_adaptive_avg_pool2d",
    "adaptive_avg_pool3d.out": "_adaptive_avg_pool3d",
    "adaptive_avg_pool3d_backward.grad_input": "_adaptive_avg_pool3d_backward",
    "conj_physical.out": "_conj_physical",
}


class _Registrations:
    """The libraries that hold our kernels, and whether the lowerings are among them."""

    library: torch.library.Library | None = None
    any: torch.library.Library | None = None
    collectives: torch.library.Library | None = None
    loaded = False


_lock = threading.RLock()
_registered: dict[str, Any] = {}
_inner: dict[str, Any] = {}  # rows that the dispatcher does not see


def activate(module: types.ModuleType) -> None:
    """Rename PrivateUse1 to ``tpu``, install ``module`` as ``torch.tpu`` and register the kernels that move no data."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    from emutpu.backend import absent_ranks, autocast, lazy_bits, patches
    from emutpu.backend.compile.install import install_when_imported
    from emutpu.backend.fallback import fallback, sparse_fallback
    from emutpu.backend.pinned import KERNELS as PINNED

    _setup_privateuseone_for_python_backend(
        DEVICE_NAME, backend_module=module, hook=_Hooks(), device_guard=_DeviceGuard()
    )
    library = _Registrations.library = torch.library.Library("aten", "IMPL")
    every = _Registrations.any = torch.library.Library("_", "IMPL")
    for name, function in KERNELS.items():
        library.impl(name, untraced(function), _KEY)
    for name, function in PINNED.items():
        library.impl(name, untraced(function), "CPU")
    every.fallback(untraced(fallback), _KEY)
    # The first that a sparse tensor can need; the others are refused once the lowerings are loaded.
    empty = torch.ops.aten.empty.memory_format
    for key in _SPARSE_KEYS:
        library.impl("empty.memory_format", untraced(functools.partial(sparse_fallback, empty)), key)
    # Without it every op that autocast has no rule for fails.
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for key in ("Conjugate", "Negative"):
        for name in lazy_bits.COPIES:
            library.impl(name, torch.library.fallthrough_kernel, key)
        with warnings.catch_warnings():
            # PyTorch's own registration, "leave the bit to the backend", is replaced on purpose.
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for name, function in lazy_bits.kernels(key).items():
                library.impl(name, untraced(function), key, with_keyset=True)
    for name, function in autocast.kernels().items():
        library.impl(name, untraced(function), "AutocastPrivateUse1")
    patches.apply()
    collectives = _Registrations.collectives = torch.library.Library("c10d", "IMPL")
    for name, function in absent_ranks.kernels().items():
        collectives.impl(name, untraced(function), _KEY)
    _count_steps()
    install_when_imported()


def _count_steps() -> None:
    """Steps of optimizers are the steps of a report. Only the first optimizer that steps is counted."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    counted: list[int] = []

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not runtime().initialized:
            return
        if not counted:
            counted.append(id(optimizer))
        if counted[0] == id(optimizer):
            runtime().meter.step()

    register_optimizer_step_post_hook(stepped)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of a kernel and all that it calls.

    C++ calls kernels while Dynamo watches the frames of a function that it is compiling piece by piece: it would try to
    compile the kernels, too.
    """
    frames = torch._C._dynamo.eval_frame
    code = getattr(function, "__code__", None)
    if code is not None:
        action: Any = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(code, frames._FrameExecStrategy(action, action))
    return function


_SPARSE_KEYS = ("SparsePrivateUse1", "SparseCsrPrivateUse1")
_DEVICE_TYPE = torch._C._autograd.DeviceType.PrivateUse1


class _DeviceGuard(torch._C._acc.DeviceGuard):
    """C++ asks several times an op, and while it unwinds."""

    def type_(self) -> torch._C._autograd.DeviceType:  # type: ignore[override]  # what C++ expects, unlike the stub
        notice()
        return _DEVICE_TYPE


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


def loaded() -> bool:
    """True once the lowerings are registered."""
    return _Registrations.loaded


def registered() -> dict[str, Any]:
    """Every overload with a kernel of ours: name → kernel (generated kernels, and plain functions)."""
    return dict(_registered) | dict(KERNELS)


def kernel(name: str) -> Any:
    """The generated kernel of an overload, for other kernels to call without another dispatch."""
    load()
    return _inner.get(name) or _registered[name]


def load() -> None:
    """Register every lowering, its derived in-place and out= overloads, and the hand-written kernels. Once."""
    with _lock:
        if _Registrations.loaded:
            return
        from emutpu.backend import data_dependent, direct, quirks
        from emutpu.backend.kernels import out_kernel
        from emutpu.backend.lowering import LOWERINGS

        assert _Registrations.library is not None, "activate() first"
        _refuse_sparse()
        configuration = runtime().configuration
        beyond = configuration is not None and configuration.beyond
        lacking = frozenset() if beyond else frozenset(facts.read("torchtpu_missing_overloads.txt"))
        for row in LOWERINGS.values():
            if beyond or not row.beyond:
                _register_row(row, lacking)
        for name, functional in _OUT_OF.items():
            _register(name, out_kernel(overload(functional), overload(name)), overload(name))
        for name, function in direct.KERNELS.items():
            if beyond or name not in data_dependent.BEYOND:
                _register(name, function, function)
                if name in data_dependent.KERNELS:
                    _register_out(name)
        for name, function in (direct.COMPOSITES | quirks.composites()).items():
            watched = quirks.guarded(name, function)
            for key in (_KEY, f"Autograd{_KEY}"):
                _Registrations.library.impl(name, untraced(watched), key)
        _Registrations.loaded = True


def _refuse_sparse() -> None:
    """Every op on sparse tensors says that there are none: 3 ms a key, so not with ``import torch``."""
    from emutpu.backend.fallback import sparse_fallback

    assert _Registrations.any is not None
    for key in _SPARSE_KEYS:
        _Registrations.any.fallback(untraced(sparse_fallback), key)


def _register(name: str, function: Callable[..., Any], described: Any) -> None:
    if name in _registered:
        raise AssertionError(f"two kernels for aten::{name}")
    if _is_composite(name):
        raise AssertionError(f"aten::{name} decomposes: a kernel without an autograd formula would lose its gradients")
    from emutpu.backend.quirks import guarded

    assert _Registrations.library is not None
    _Registrations.library.impl(name, untraced(guarded(name, function)), _KEY)
    _registered[name] = described


def _register_row(row: Any, lacking: frozenset[str]) -> None:
    """A row and what is derived from it, but for the ``lacking`` overloads, which the device has not."""
    from emutpu.backend.kernels import Kernel, out_kernel

    op = overload(row.name)
    written = str(op._schema).removeprefix("aten::")
    if written != row.schema:
        raise AssertionError(
            f"the schema beside the lowering of {row.name} is not PyTorch's:\n  {row.schema}\n  {written}"
        )
    made = Kernel(op, row)
    if not row.dispatched:
        _inner[row.name] = made
        return
    wrapped = row.around or _plain
    _register(row.name, wrapped(made), made)
    if made.signature.inplace:
        return
    for derived in _derived(op):
        name = overload_name(derived)
        if name in lacking:
            continue
        if any(a.is_out for a in derived._schema.arguments):
            _register(name, out_kernel(op, derived), derived)
        else:
            inplace = Kernel(derived, row)
            _register(name, wrapped(inplace), inplace)


def _register_out(name: str) -> None:
    """The out= overloads of a functional kernel written by hand."""
    from emutpu.backend.kernels import out_kernel

    op = overload(name)
    for derived in _derived(op):
        if any(a.is_out for a in derived._schema.arguments):
            _register(overload_name(derived), out_kernel(op, derived), derived)


def _plain(made: Any) -> Callable[..., Any]:
    function: Callable[..., Any] = made.function
    return function


def overload(name: str) -> torch._ops.OpOverload[..., Any]:
    """``aten`` overload by ``base.overload`` name. Raises AttributeError for a name PyTorch does not know."""
    base, _, variant = name.partition(".")
    found: torch._ops.OpOverload[..., Any] = getattr(getattr(torch.ops.aten, base), variant or "default")
    return found


def overload_name(op: torch._ops.OpOverload[..., Any]) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def _derived(op: torch._ops.OpOverload[..., Any]) -> list[torch._ops.OpOverload[..., Any]]:
    """The in-place and out= overloads that take the same arguments."""
    base, _, variant = overload_name(op).partition(".")
    wanted = _arguments(op)
    found = []
    try:
        inplace = getattr(getattr(torch.ops.aten, base + "_"), variant or "default")
    except AttributeError:
        inplace = None
    if inplace is not None and _arguments(inplace) == wanted and inplace._schema.arguments[0].alias_info is not None:
        found.append(inplace)
    packet = getattr(torch.ops.aten, base)
    for other in packet.overloads():
        candidate = getattr(packet, other)
        writes_out = candidate is not op and any(a.is_out for a in candidate._schema.arguments)
        same_results = len(candidate._schema.returns) == len(op._schema.returns)
        if writes_out and same_results and _arguments(candidate) == wanted:
            found.append(candidate)
    return [f for f in found if overload_name(f) not in _explicit() and not _is_composite(overload_name(f))]


def _is_composite(name: str) -> bool:
    """True for overloads that only decompose, above autograd, into ops that have gradient formulas of their own."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return has_kernel(f"aten::{name}", "CompositeImplicitAutograd") and not has_kernel(f"aten::{name}", "Autograd")


def _explicit() -> frozenset[str]:
    """Overloads with a row or kernel of their own: nothing is derived over them."""
    from emutpu.backend import direct
    from emutpu.backend.lowering import LOWERINGS

    return frozenset(LOWERINGS) | frozenset(direct.KERNELS) | frozenset(KERNELS)


def _arguments(op: torch._ops.OpOverload[..., Any]) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out and not _factory(a)]


def _factory(argument: Any) -> bool:
    named = argument.name in ("dtype", "layout", "device", "pin_memory", "memory_format")
    return named and argument.kwarg_only and argument.has_default_value()
