"""Fused optimizer steps: every parameter of a group in one module, hyperparameters as device inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from emutpu.backend.dtypes import opmath
from emutpu.backend.hlo import Value
from emutpu.backend.lowering._registry import Context, Emit, lowering

__all__: list[str] = []

Update = Callable[["_Step", dict[str, Value]], dict[str, Value]]


class _Step:
    """One parameter's step: hyperparameters in the precision that is computed in, and the flags."""

    def __init__(self, cx: Context, given: dict[str, Any], compute: torch.dtype) -> None:
        self.cx = cx
        self.given = given
        self.compute = compute

    def __getitem__(self, name: str) -> Value:
        return self.cx.scalar(self.given[name], self.compute).reshape(())

    def complement(self, name: str) -> Value:
        """``1 - value``, subtracted before it is rounded to the computation's precision."""
        value: Value = self.given[name]
        wide = value if value.dtype.is_floating_point else value.convert(torch.float64)
        return (1 - wide).convert(self.compute).reshape(())

    def correction(self, name: str, step: Value) -> Value:
        """``1 - value ** step`` without cancellation."""
        log = (-self.complement(name)).unary("stablehlo.log_plus_one")
        return -(step * log).unary("stablehlo.exponential_minus_one")

    def flag(self, name: str) -> bool:
        return bool(self.given.get(name))


def _optimizer(update: Update, states: str, read: str = "") -> Emit:
    """Emit a fused step. ``states`` are the lists written beside the parameters and gradients, ``read`` those only read."""
    written, lists = ["self", "grads", *states.split()], ["self", "grads", *states.split(), *read.split()]

    def emit(cx: Context, *arguments: Any) -> list[Value]:
        given = dict(zip(cx.arguments, arguments, strict=True))
        found = given["found_inf"]
        skipped = None if found is None else found.reshape(()).eq(1)
        results: dict[str, list[Value]] = {name: [] for name in written}
        for index, parameter in enumerate(given["self"]):
            compute = opmath(parameter.dtype)
            old = {name: given[name][index] for name in lists if index < len(given[name])}
            wide = {name: value.convert(compute) for name, value in old.items()}
            step = _Step(cx, given, compute)
            if given["grad_scale"] is not None:
                wide["grads"] = wide["grads"] / step["grad_scale"]
            new = {"grads": wide["grads"], **update(step, wide)}
            for name in written:
                if name not in old:
                    continue
                value = new.get(name, old[name]).convert(old[name].dtype).broadcast(old[name].shape)
                results[name].append(value if skipped is None else cx.builder.select(skipped, old[name], value))
        return [value for name in written for value in results[name]]

    return emit


def _gradient(step: _Step, values: dict[str, Value]) -> Value:
    return -values["grads"] if step.flag("maximize") else values["grads"]


def _sgd(step: _Step, values: dict[str, Value]) -> dict[str, Value]:
    parameter = values["self"]
    direction = _gradient(step, values) + step["weight_decay"] * parameter
    new = {}
    momentum = values.get("momentum_buffer_list")
    if momentum is not None:
        if step.flag("is_first_step"):
            momentum = direction
        else:
            momentum = step["momentum"] * momentum + step.complement("dampening") * direction
        new["momentum_buffer_list"] = momentum
        direction = direction + step["momentum"] * momentum if step.flag("nesterov") else momentum
    return new | {"self": parameter - step["lr"] * direction}


def _adam(decoupled: bool) -> Update:
    def update(step: _Step, values: dict[str, Value]) -> dict[str, Value]:
        parameter, gradient = values["self"], _gradient(step, values)
        if decoupled:
            parameter = parameter - step["lr"] * step["weight_decay"] * parameter
        else:
            gradient = gradient + step["weight_decay"] * parameter
        count = values["state_steps"].reshape(())
        mean = values["exp_avgs"] + step.complement("beta1") * (gradient - values["exp_avgs"])
        square = step["beta2"] * values["exp_avg_sqs"] + step.complement("beta2") * gradient * gradient
        new = {"exp_avgs": mean, "exp_avg_sqs": square}
        if step.flag("amsgrad"):
            square = new["max_exp_avg_sqs"] = values["max_exp_avg_sqs"].maximum(square)
        root = square.sqrt() / step.correction("beta2", count).sqrt() + step["eps"]
        size = step["lr"] / step.correction("beta1", count)
        return new | {"self": parameter - size * mean / root}

    return update


def _adagrad(step: _Step, values: dict[str, Value]) -> dict[str, Value]:
    parameter = values["self"]
    gradient = _gradient(step, values) + step["weight_decay"] * parameter
    total = values["state_sums"] + gradient * gradient
    rate = step["lr"] / (1 + (values["state_steps"].reshape(()) - 1) * step["lr_decay"])
    return {"self": parameter - rate * gradient / (total.sqrt() + step["eps"]), "state_sums": total}


def _no_meta(**arguments: Any) -> None:
    """PyTorch has no meta kernel for these, and nothing is returned."""


_SCALING = "Tensor? grad_scale=None, Tensor? found_inf=None) -> ()"
for _overload, _rate in (("", "float"), (".tensor_lr", "Tensor")):
    for _name, _decoupled in (("adam", False), ("adamw", True)):
        lowering(
            f"_fused_{_name}_{_overload}(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
            f"Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor[] state_steps, *, {_rate} lr, float beta1, "
            f"float beta2, float weight_decay, float eps, bool amsgrad, bool maximize, {_SCALING}",
            dynamic="lr beta1 beta2 weight_decay eps" if not _overload else "beta1 beta2 weight_decay eps",
            meta=_no_meta,
        )(_optimizer(_adam(_decoupled), "exp_avgs exp_avg_sqs max_exp_avg_sqs", "state_steps"))
    lowering(
        f"_fused_sgd_{_overload}(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffer_list, *, "
        f"float weight_decay, float momentum, {_rate} lr, float dampening, bool nesterov, bool maximize, "
        f"bool is_first_step, {_SCALING}",
        dynamic="weight_decay momentum dampening" + (" lr" if not _overload else ""),
        meta=_no_meta,
    )(_optimizer(_sgd, "momentum_buffer_list"))
    _steps = "Tensor(d!)[]" if not _overload else "Tensor[]"
    lowering(
        f"_fused_adagrad_{_overload}(Tensor(a!)[] self, Tensor(b!)[] grads, Tensor(c!)[] state_sums, {_steps} state_steps, "
        f"*, {_rate} lr, float lr_decay, float weight_decay, float eps, bool maximize, {_SCALING}",
        dynamic="lr_decay weight_decay eps" + (" lr" if not _overload else ""),
        meta=_no_meta,
    )(
        _optimizer(_adagrad, "state_sums state_steps")
        if not _overload
        else _optimizer(_adagrad, "state_sums", "state_steps")
    )
