"""The worker of ``emutpu ops --sweep``: PyTorch's op database on the device against the CPU, an op a line.

Run as ``python -m emutpu.cli._sweep SAMPLES``: it reads names, as JSON, from standard input and answers each with one line of
JSON, ``{"name": …, "items": [{"kind", "dtype", "outcome", "message"}]}``. A process of its own, so that an op that takes
the process down is a finding about that op.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = ["ERROR", "MISMATCH", "OK", "UNSUPPORTED", "database", "examine"]

OK, MISMATCH, UNSUPPORTED, ERROR = "ok", "mismatch", "unsupported", "error"
DEVICE = "tpu"

# Relative and absolute, against the CPU with float32 matmuls at 'highest'.
TOLERANCES = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (1e-4, 2e-5),
    torch.complex64: (1e-4, 2e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (2e-3, 2e-3),
}
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool)
_SECTIONS = "tensor_split"
_FREE = frozenset(
    {"linalg.eigh", "linalg.svd", "svd"}
)  # signs and phases of vectors are free: compared as for gradients
_EMPTY = ("empty", "resize")  # what such ops return is not initialised


class _Mismatch(Exception):
    """The device's result differs from the CPU's."""


class _NotOnCpu(Exception):
    """The CPU itself refuses the sample."""


class _Watch(TorchDispatchMode):
    """Notices whether anything that runs inside draws random numbers, or leaves memory as it was."""

    undetermined: bool = False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # PyTorch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags or any(word in str(func) for word in _EMPTY):
            self.undetermined = True
        return func(*args, **(kwargs or {}))


def database() -> dict[str, Any]:
    """PyTorch's OpInfo entries by name, variants as ``name.variant``. Raises ImportError without ``expecttest``."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name}.{op.variant_test_name}".removesuffix("."): op for op in op_db}


def examine(name: str, op: Any, limit: int) -> list[dict[str, str]]:
    """Forward, in-place, out= and backward of one entry over its first ``limit`` samples: one item a kind."""
    dtype = next((d for d in DTYPES if d in op.supported_dtypes("cpu")), None)
    if dtype is None:
        return []
    kinds: dict[str, Callable[[Any], None]] = {"forward": lambda sample: _forward(op, sample)}
    if op.inplace_variant is not None:
        kinds["inplace"] = lambda sample: _inplace(op, sample)
    if op.supports_out:
        kinds["out"] = lambda sample: _out(op, sample)
    if op.supports_autograd and (dtype.is_floating_point or dtype.is_complex):
        kinds["backward"] = lambda sample: _backward(op, sample)
    items = []
    for kind, check in kinds.items():
        outcome, message = _outcome(check, op, dtype, kind == "backward", limit)
        if outcome is not None:
            items.append(
                {"kind": kind, "dtype": str(dtype).removeprefix("torch."), "outcome": outcome, "message": message}
            )
    return items


def _outcome(
    check: Callable[[Any], None], op: Any, dtype: torch.dtype, requires_grad: bool, limit: int
) -> tuple[str | None, str]:
    """The worst of the samples; None when there is no sample."""
    outcome = None
    try:
        for sample in _samples(op, dtype, requires_grad, limit):
            try:
                check(sample)
            except _NotOnCpu:
                continue
            outcome = OK
    except _Mismatch as error:
        return MISMATCH, _first_line(error)
    except NotImplementedError as error:
        return UNSUPPORTED, _first_line(error)
    except RuntimeError as error:
        # PyTorch's own refusal of any device that it does not name.
        refused = "device type, got" in str(error)
        return (UNSUPPORTED if refused else ERROR), f"RuntimeError: {_first_line(error)}"
    except Exception as error:  # noqa: BLE001  # whatever an op raises is the finding
        return ERROR, f"{type(error).__name__}: {_first_line(error)}"
    return outcome, ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _samples(op: Any, dtype: torch.dtype, requires_grad: bool, limit: int) -> Iterator[Any]:
    torch.manual_seed(0)
    for count, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=requires_grad)):
        if count == limit:
            return
        yield sample


def _on_device(value: Any) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.device) or (isinstance(leaf, str) and leaf == "cpu"):
            return torch.device(DEVICE)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.detach().to(DEVICE).requires_grad_(leaf.requires_grad)

    return tree_map(move, value)


def _on_cpu(compute: Callable[[], Any]) -> tuple[Any, bool]:
    """The CPU's result, and whether its values are determined by the arguments."""
    with _Watch() as watch:
        try:
            return compute(), not watch.undetermined
        except Exception as error:  # any: what the CPU refuses, in whatever way, is no finding about the device
            raise _NotOnCpu from error


def _call(op: Any, sample: Any, **more: Any) -> Any:
    return op(sample.input, *sample.args, **sample.kwargs, **more)


def _moved(op: Any, sample: Any) -> Any:
    from torch.testing._internal.opinfo.core import SampleInput

    # PyTorch's contract: sections that are a tensor stay on the CPU.
    args = sample.args if op.name == _SECTIONS else _on_device(sample.args)
    kwargs = _on_device(sample.kwargs)
    return SampleInput(
        _on_device(sample.input),
        args=tuple(args),
        kwargs=kwargs,
        output_process_fn_grad=sample.output_process_fn_grad,
    )


def _where(sample: Any) -> contextlib.AbstractContextManager[Any]:
    """Ops without a tensor among their arguments make one where they are told to."""
    leaves = tree_flatten((sample.input, sample.args, sample.kwargs))[0]
    return contextlib.nullcontext() if any(isinstance(t, torch.Tensor) for t in leaves) else torch.device(DEVICE)


def _forward(op: Any, sample: Any) -> None:
    expected, determined = _on_cpu(lambda: _call(op, sample))
    with _where(sample):
        actual = _call(op, _moved(op, sample))
    _compare(_determined(op, sample, actual), _determined(op, sample, expected), values=determined)


def _determined(op: Any, sample: Any, result: Any) -> Any:
    return sample.output_process_fn_grad(result) if op.name in _FREE else result


def _inplace(op: Any, sample: Any) -> None:
    def compute() -> Any:
        target = sample.input.clone()
        op.inplace_variant(target, *sample.args, **sample.kwargs)
        if target.shape != sample.input.shape:
            raise _NotOnCpu("some CPU kernels grow their target instead of refusing a broadcast")
        return target

    expected, determined = _on_cpu(compute)
    moved = _moved(op, sample)
    op.inplace_variant(moved.input, *moved.args, **moved.kwargs)
    _compare(moved.input, expected, values=determined)


def _out(op: Any, sample: Any) -> None:
    def compute() -> Any:
        into = tree_map(torch.empty_like, _call(op, sample))
        return _call(op, sample, out=into), into

    # ``out`` is made with an op that leaves memory as it was: whether the values are determined, the first call says.
    _, determined = _on_cpu(lambda: _call(op, sample))
    (_, expected), _ = _on_cpu(compute)
    into = tree_map(lambda t: torch.empty_like(t, device=DEVICE), expected)
    with _where(sample):
        _call(op, _moved(op, sample), out=into)
    _compare(_determined(op, sample, into), _determined(op, sample, expected), values=determined)


def _backward(op: Any, sample: Any) -> None:
    _, determined = _on_cpu(lambda: _call(op, sample))
    expected, _ = _on_cpu(lambda: _gradients(op, sample))
    actual = _gradients(op, _moved(op, sample))
    try:
        _compare(actual, expected, values=determined)
    except _Mismatch:
        if not _as_good(actual, expected, lambda: _gradients(op, _in_float64(sample))):
            raise


_WORSE = 8.0


def _as_good(actual: Any, expected: Any, compute: Callable[[], Any]) -> bool:
    """A second opinion for badly conditioned samples: whether the device strays from float64 about as far as the CPU does.

    "About" is 8 times as far, by the largest error of a tensor.
    """
    try:
        exact, _ = _on_cpu(compute)
    except _NotOnCpu:
        return False
    for a, e, x in zip(actual, expected, exact, strict=True):
        if not isinstance(a, torch.Tensor) or not a.numel() or a.shape != e.shape:
            continue
        strays, allowed = ((v.detach().cpu().to(x.dtype) - x).abs().max() for v in (a, e))
        if not bool(strays <= _WORSE * allowed):
            return False
    return True


def _in_float64(sample: Any) -> Any:
    from torch.testing._internal.opinfo.core import SampleInput

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype != torch.float32:
            return leaf
        return leaf.detach().double().requires_grad_(leaf.requires_grad)

    args, kwargs = tree_map(widen, (tuple(sample.args), sample.kwargs))
    return SampleInput(
        widen(sample.input), args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad
    )


def _gradients(op: Any, sample: Any) -> list[torch.Tensor | None]:
    results = _differentiable(_call(op, sample), sample)
    leaves = [t for t in tree_flatten((sample.input, sample.args, sample.kwargs))[0] if _needs_gradient(t)]
    if not results or not leaves:
        return []
    generator = torch.Generator().manual_seed(0)
    # Drawn in one precision, so that a float64 run has the same.
    cotangents = [_draw(r, generator) for r in results]
    return list(torch.autograd.grad(results, leaves, cotangents, allow_unused=True))


def _draw(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    dtype = torch.complex64 if like.is_complex() else torch.float32
    return torch.randn(like.shape, generator=generator, dtype=dtype).to(like.device, like.dtype)


def _differentiable(result: Any, sample: Any) -> list[torch.Tensor]:
    """The results to differentiate: what the entry says does not depend on a free choice of sign or phase."""
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    return [t for t in tree_flatten(result)[0] if _needs_gradient(t)]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _compare(actual: Any, expected: Any, *, values: bool) -> None:
    """Same structure, device, dtype, shape and, with ``values``, numbers. Raises _Mismatch."""
    got, want = tree_flatten(actual)[0], tree_flatten(expected)[0]
    if len(got) != len(want):
        raise _Mismatch(f"{len(got)} results, the CPU gives {len(want)}")
    for a, e in zip(got, want, strict=True):
        if not isinstance(e, torch.Tensor):
            if values and not _same_number(a, e):
                raise _Mismatch(f"{a}, the CPU gives {e}")
            continue
        if a.device.type != DEVICE:
            raise _Mismatch(f"the result is on {a.device}")
        _compare_tensors(a, e, values)


def _same_number(a: Any, e: Any) -> bool:
    return bool(a == e) or (isinstance(a, float) and isinstance(e, float) and math.isnan(a) and math.isnan(e))


def _compare_tensors(a: torch.Tensor, e: torch.Tensor, values: bool) -> None:
    if a.dtype != e.dtype or a.shape != e.shape:
        raise _Mismatch(f"{a.dtype} {list(a.shape)}, the CPU gives {e.dtype} {list(e.shape)}")
    if not values:
        a.detach().cpu()
        return
    rtol, atol = TOLERANCES.get(e.dtype, (0.0, 0.0))
    try:
        torch.testing.assert_close(a.detach().cpu(), e.detach(), rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        raise _Mismatch(" ".join(str(error).split())) from error


def main(arguments: Sequence[str]) -> int:
    """Answer until standard input ends."""
    warnings.simplefilter("ignore")
    limit = int(arguments[0])
    ops = database()
    answers = sys.stdout
    sys.stdout = sys.stderr  # what an op prints is not an answer
    tpu: Any = torch.get_device_module(DEVICE)
    with tpu.precision(tpu.Precision.HIGHEST):
        for line in sys.stdin:
            name = json.loads(line)
            answers.write(json.dumps({"name": name, "items": examine(name, ops[name], limit)}) + "\n")
            answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
